"""The counting remote as an fsspec filesystem."""

from __future__ import annotations

import os
from typing import Any

import fsspec

from tests.servers.counting import Shelf, Writer


class Far(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """One that is asked in the helper process."""

    protocol = "counting"
    cachable = False
    root_marker = ""

    def __init__(self, place: str, etags: bool = True, **more: Any) -> None:
        super().__init__(place, etags=etags, **more)
        self._shelf, self._etags = Shelf(place), etags

    def _described(self, name: str, status: os.stat_result | None) -> dict[str, Any]:
        if status is not None and os.path.isdir(self._shelf.path(name)):
            return {"name": name, "type": "directory", "size": 0}
        info: dict[str, Any] = {"name": name, "type": "file", "size": 5 if status is None else status.st_size}
        if status is not None:
            info["mtime"] = status.st_mtime
            if self._etags:
                info["ETag"] = f'"{status.st_mtime_ns:x}-{status.st_ino:x}"'
        return info

    def info(self, path: str, **more: Any) -> dict[str, Any]:
        name = self._strip_protocol(path)
        status = self._shelf.stat(name)
        if status is None:
            raise FileNotFoundError(name)
        return self._described(name, status)

    def ls(self, path: str, detail: bool = True, **more: Any) -> Any:
        found = [self._described(*each) for each in self._shelf.list(self._strip_protocol(path), deep=False)]
        return found if detail else [each["name"] for each in found]

    def find(self, path: str, maxdepth: int | None = None, withdirs: bool = False, detail: bool = False, **more: Any) -> Any:
        found = [self._described(*each) for each in self._shelf.list(self._strip_protocol(path), deep=True)]
        files = {each["name"]: each for each in found if withdirs or each["type"] == "file"}
        return files if detail else sorted(files)

    def _open(self, path: str, mode: str = "rb", **more: Any) -> Any:
        if mode == "rb":
            return self._shelf.open(path)
        return Writer(lambda body: self._shelf.save(path, body))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **more: Any) -> None:
        name = self._strip_protocol(path)
        if mode == "create" and self._shelf.path(name).exists():
            raise FileExistsError(name)
        self._shelf.save(name, bytes(value))

    def _rm(self, path: str) -> None:
        self._shelf.delete(path)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Directories are there when something is in them."""

    mkdir = makedirs


class Near(Far):
    """One that has no connections, so that it is asked in this process."""

    protocol = "mock"
