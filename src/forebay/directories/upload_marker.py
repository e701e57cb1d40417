"""What an upload writes down beside the files: which belong to the directory, and whether all of them are there."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self

from forebay import errors
from forebay._model import Buffer, BufferSink, ObjectInfo, Span

FORMAT = 1
LARGEST = 256 << 20
"""Bytes of a mark: more than a million files take. Who serves a directory may be anybody, and says how long its mark is."""
_ETAG = 80
"""Bytes by which the line of a file may grow until its directory is complete."""


class MarkedFile(NamedTuple):
    """One file. ``digest``: its checksum in hex. ``etag``: once the directory is complete, the remote's validator of the file. Before: that
    of an object which the file is to replace; None where nothing is to be replaced, "" where the remote tells nothing of the object."""

    size: int
    digest: str
    etag: str | None


@dataclass(frozen=True)
class UploadMarker:
    """The content of a directory's `.forebay.json`."""

    complete: bool
    files: Mapping[str, MarkedFile]

    @cached_property
    def encoded(self) -> bytes:
        files = {name: {"size": file.size, "xxh3": file.digest, "etag": file.etag} for name, file in sorted(self.files.items())}
        return json.dumps({"forebay": FORMAT, "complete": self.complete, "files": files}).encode()

    def check_size(self, where: str) -> None:
        """Raises `ConfigError` where readers would refuse it."""
        if len(self.encoded) + _ETAG * len(self.files) > LARGEST:
            many = f"{where} would have more than {LARGEST:,} bytes"
            message = f"{many}: pack the {len(self.files):,} files into tar files, or upload them as several directories"
            raise errors.ConfigError(message, name="directory", value=where)

    @classmethod
    def parse(cls, where: str, data: Buffer) -> Self:
        """What `encoded` made. Raises `RemoteProtocolError` for anything else."""
        try:
            told = json.loads(bytes(data))
            format, complete = int(told["forebay"]), bool(told["complete"])
            files = {str(name): MarkedFile(int(file["size"]), str(file["xxh3"]), file["etag"]) for name, file in told["files"].items()}
            if not all(0 <= file.size < 1 << 63 for file in files.values()):
                raise ValueError("a size that no file has")
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            message = f"{where} is damaged ({str(error)[:200]!r}): remove this object, then upload the directory again"
            raise errors.RemoteProtocolError(message, url=where) from error
        if format != FORMAT:
            message = f"{where} was written by a newer Forebay (format {format}): use that one, or remove this object"
            raise errors.RemoteProtocolError(message, url=where)
        return cls(complete, files)


class MarkSink(BufferSink):
    """Takes a mark into memory. Raises `RemoteProtocolError` for more bytes than one may have."""

    def __init__(self, where: str, most: Callable[[], int] | None = None) -> None:
        super().__init__(lambda: LARGEST if most is None else min(LARGEST, most()))
        self._where = where

    def begin(self, info: ObjectInfo) -> tuple[Span, ...]:
        """See `Sink.begin`."""
        self._check(info.size or 0)
        return super().begin(info)

    def write(self, offset: int, data: Buffer) -> None:
        """See `Sink.write`."""
        self._check(offset + memoryview(data).nbytes)
        super().write(offset, data)

    def _check(self, size: int) -> None:
        if size > LARGEST:
            message = f"{self._where}: an answer of more than {LARGEST:,} bytes where a small one is due"
            raise errors.RemoteProtocolError(message, url=self._where)
