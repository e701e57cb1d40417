"""PyTorch: tensors over cached bytes, datasets over URLs and tar shards, a dataset whose items are decoded once for all workers of the
node, and distributed checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forebay import errors
from forebay._kernel import mappings

try:
    import torch
except ModuleNotFoundError as error:
    raise errors.MissingExtra.of("forebay.adapters.torch", "torch") from error

from forebay.adapters.torch.datasets import CachedDataset, Lookahead, UrlDataset
from forebay.adapters.torch.shards import Shards
from forebay.codecs.arrays import numpy

if TYPE_CHECKING:
    from forebay.adapters.torch.checkpoints import CheckpointReader as CheckpointReader

__all__ = ["CachedDataset", "CheckpointReader", "Lookahead", "Shards", "UrlDataset", "tensor"]


def __getattr__(name: str) -> Any:
    if name != "CheckpointReader":
        raise AttributeError(f"module 'forebay.adapters.torch' has no attribute {name!r}")
    from forebay.adapters.torch.checkpoints import CheckpointReader  # its imports take a second, and most programs use no checkpoints

    globals()[name] = CheckpointReader
    return CheckpointReader


def tensor(buffer: Any, dtype: Any = None, *, count: int = -1, offset: int = 0) -> Any:
    """A writable tensor with the bytes of ``buffer``, such as `Cache.read` returns. Nothing else sees what is written to it.

    It uses a private mapping of the same file: a page is copied on first write. Buffers without such a file are copied whole: small values,
    samples of an array, entries evicted in between, and buffers from elsewhere. The mapping lives as long as the tensor and everything that
    shares its storage. A NumPy array, or an object that NumPy converts (an image), gives a tensor of its own type and shape, unless an
    option is given. The options are those of `torch.frombuffer`, whose own tensors over a read-only mapping kill the process when written
    to.

    ``dtype``: default: `torch.uint8`. ``count``: elements; -1: all. ``offset``: bytes to skip. Raises ValueError for what
    `torch.frombuffer` refuses, and TypeError for an object that is no buffer."""
    if isinstance(buffer, memoryview) or not hasattr(buffer, "__array_interface__"):
        array, view = None, memoryview(buffer)
    else:
        array = numpy().asarray(buffer, order="C")
        view = memoryview(array)
    own = _private(view)
    if array is not None and dtype is None and count == -1 and not offset:
        kind = torch.from_numpy(array.reshape(-1)[:0].copy()).dtype
        return (torch.frombuffer(own, dtype=kind) if own.nbytes else torch.empty(0, dtype=kind)).reshape(array.shape)
    if not own.nbytes and not offset and count <= 0:
        return torch.empty(0, dtype=dtype or torch.uint8)
    return torch.frombuffer(own, dtype=dtype or torch.uint8, count=count, offset=offset)


def _private(view: memoryview) -> memoryview:
    """A writable, private view of the same bytes."""
    flat, owner = view.cast("B") if view.c_contiguous and view.nbytes else memoryview(view.tobytes()), view.obj
    while not isinstance(owner, memoryview) and (base := getattr(owner, "base", None)) is not None:
        owner = base  # an array over an array over a view
    return mappings.private(flat, owner.obj if isinstance(owner, memoryview) else owner)
