"""The counting remote as a pyarrow filesystem."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from pyarrow.fs import FileInfo, FileSelector, FileSystemHandler, FileType

from tests.servers.counting import Shelf, Writer


class Far(FileSystemHandler):  # type: ignore[misc]
    """One that is asked in the helper process."""

    def __init__(self, shelf: Shelf) -> None:
        self.shelf = shelf

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.shelf == self.shelf

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.shelf,)

    __hash__ = None  # type: ignore[assignment]

    def get_type_name(self) -> str:
        return "counting"

    def normalize_path(self, path: str) -> str:
        return path

    def _info(self, name: str, status: os.stat_result | None, *, listed: bool) -> FileInfo:
        if status is None:
            return FileInfo(name, FileType.File, size=5) if listed else FileInfo(name, FileType.NotFound)
        if self.shelf.path(name).is_dir():
            return FileInfo(name, FileType.Directory)
        return FileInfo(name, FileType.File, size=status.st_size, mtime_ns=status.st_mtime_ns)

    def get_file_info(self, paths: Sequence[str]) -> list[FileInfo]:
        return [self._info(path, self.shelf.stat(path), listed=False) for path in paths]

    def get_file_info_selector(self, selector: FileSelector) -> list[FileInfo]:
        try:
            found = list(self.shelf.list(selector.base_dir.rstrip("/"), deep=selector.recursive))
        except FileNotFoundError:
            if selector.allow_not_found:
                return []
            raise
        return [self._info(name, status, listed=True) for name, status in found]

    def open_input_file(self, path: str) -> Any:
        return pa.PythonFile(self.shelf.open(path), mode="r")

    open_input_stream = open_input_file

    def open_output_stream(self, path: str, metadata: Any) -> Any:
        return pa.PythonFile(Writer(lambda body: self.shelf.save(path, body)), mode="w")

    def open_append_stream(self, path: str, metadata: Any) -> Any:
        raise NotImplementedError

    def create_dir(self, path: str, recursive: bool) -> None:
        """Directories are there when something is in them."""

    def delete_file(self, path: str) -> None:
        self.shelf.delete(path)

    def delete_dir(self, path: str) -> None:
        raise NotImplementedError

    def delete_dir_contents(self, path: str, missing_dir_ok: bool = False) -> None:
        raise NotImplementedError

    def delete_root_dir_contents(self) -> None:
        raise NotImplementedError

    def move(self, src: str, dest: str) -> None:
        self.shelf.path(src).rename(self.shelf.path(dest))

    def copy_file(self, src: str, dest: str) -> None:
        self.shelf.put(dest, self.shelf.path(src).read_bytes())


class Near(Far):
    """One that has no connections, so that it is asked in this process."""

    protocol = "mock"
