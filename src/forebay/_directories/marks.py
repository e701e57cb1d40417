"""What an upload writes down beside the files: which belong to the directory, and whether all of them are there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self

from forebay import errors
from forebay._model import Buffer

FORMAT = 1


class Noted(NamedTuple):
    """One file. ``digest``: its checksum in hex. ``etag``: once the directory is complete, the remote's validator of the file. Before: that
    of an object which the file is to replace; None where nothing is to be replaced, "" where the remote tells nothing of the object."""

    size: int
    digest: str
    etag: str | None


@dataclass(frozen=True)
class Mark:
    """The content of a directory's `.forebay.json`."""

    complete: bool
    files: Mapping[str, Noted]

    @cached_property
    def encoded(self) -> bytes:
        files = {name: {"size": file.size, "xxh3": file.digest, "etag": file.etag} for name, file in sorted(self.files.items())}
        return json.dumps({"forebay": FORMAT, "complete": self.complete, "files": files}).encode()

    @classmethod
    def parse(cls, where: str, data: Buffer) -> Self:
        """What `encoded` made. Raises `RemoteProtocolError` for anything else."""
        try:
            told = json.loads(bytes(data))
            format, complete = int(told["forebay"]), bool(told["complete"])
            files = {str(name): Noted(int(file["size"]), str(file["xxh3"]), file["etag"]) for name, file in told["files"].items()}
            if not all(0 <= file.size < 1 << 63 for file in files.values()):
                raise ValueError("a size that no file has")
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            message = f"{where} is damaged ({str(error)[:200]!r}): remove this object, then upload the directory again"
            raise errors.RemoteProtocolError(message, url=where) from error
        if format != FORMAT:
            message = f"{where} was written by a newer Forebay (format {format}): use that one, or remove this object"
            raise errors.RemoteProtocolError(message, url=where)
        return cls(complete, files)
