"""Checkpoints of torch.distributed.checkpoint that are read through the cache."""

from __future__ import annotations

import io
import os
import pickle
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO, Literal

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from forebay import errors, remote
from forebay.adapters.torch.datasets import opened
from forebay.cache import Cache
from forebay.fetch.prefix import Prefix
from forebay.remote.urls import Url, as_text


class CheckpointReader(StorageReader):  # type: ignore[misc]  # PyTorch is optional: to mypy it is Any
    """Reads a checkpoint that `torch.distributed.checkpoint` saved with its ``FileSystemWriter``:
    ``dcp.load(state, storage_reader=CheckpointReader("s3://bucket/run/step-1000"))``.

    ``url``: the directory of the checkpoint. ``cache``: an open `Cache`, or the arguments to open one (default: the default root).
    ``fetch``: ``blocks`` fetches and keeps the parts of files that the plan of this rank needs, in blocks of ``block_size`` (see
    `Cache.open`); ``file`` whole files, those that the plan needs. What several ranks of the node need is fetched by one of them.

    Use one for each load. As with PyTorch's own reader, the file ``.metadata`` is a pickle: load only checkpoints that you trust. Raises
    `ConfigError`, and what `Cache.read` and `Cache.open` raise; `Unsupported` for a checkpoint that was saved with extensions."""

    def __init__(
        self, url: Url, *, cache: Cache | Mapping[str, Any] | None = None, fetch: Literal["blocks", "file"] = "blocks",
        block_size: int | str = "auto",
    ) -> None:  # fmt: skip
        super().__init__()
        if fetch not in ("blocks", "file"):
            raise errors.ConfigError(f"fetch={fetch!r}: use 'blocks' or 'file'", name="fetch", value=fetch)
        self._url, self._cache = as_text(url), opened(cache)
        self._block_size = block_size if fetch == "blocks" else None
        self._places: Mapping[Any, Any] = {}

    @property
    def checkpoint_id(self) -> str:
        """The directory."""
        return self._url

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this is a URL or a path."""
        return bool(as_text(checkpoint_id))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another load, of another directory if one is given."""
        self._places = {}
        if checkpoint_id:
            self._url = as_text(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the checkpoint contains, and where."""
        rank = kwargs.get("rank")
        name = ".metadata" if rank is None else f"__{rank}.metadata"
        metadata = pickle.loads(self._cache.read(self._url_of(name)))
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Note where the parts are."""
        self._places = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Load all items of the plan, file by file, from front to back. A part that several items need is read once."""
        by_file: dict[str, dict[tuple[int, int], list[ReadItem]]] = defaultdict(lambda: defaultdict(list))
        for item in plan.items:
            place = self._places[item.storage_index]
            if getattr(place, "transform_descriptors", None):
                message = f"{remote.shown(self._url)} was saved with extensions ({', '.join(place.transform_descriptors)})"
                raise errors.Unsupported(f"{message}: read it from Cache.directory(url) with PyTorch's FileSystemReader", url=self._url)
            by_file[place.relative_path][place.offset, place.length].append(item)
        for name, parts in sorted(by_file.items()):
            with self._cache.open(self._url_of(name), block_size=self._block_size) as file:
                for (offset, length), items in sorted(parts.items(), key=lambda part: part[0]):
                    _load(_part_of(file, offset, length), items, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _url_of(self, name: str) -> str:
        return Prefix(self._url).join(name)


def _part_of(file: BinaryIO, offset: int, length: int) -> bytes:
    file.seek(offset)
    data = file.read(length)
    if len(data) < length:
        raise errors.RemoteProtocolError(f"a file of the checkpoint ends {length - len(data):,} bytes too early: it is damaged", url="")
    return data


def _load(data: bytes, items: Iterable[ReadItem], planner: LoadPlanner) -> None:
    """Pass one stored part on to the items that need it."""
    tensor: torch.Tensor | None = None
    for item in items:
        if item.type == LoadItemType.BYTE_IO:
            planner.load_bytes(item, io.BytesIO(data))
            continue
        if tensor is None:
            tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        part = tensor
        for dimension, (start, size) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            part = part.narrow(dimension, start, size)
        target = planner.resolve_tensor(item).detach()
        target.copy_(part)
        planner.commit_tensor(item, target)
