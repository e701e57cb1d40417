"""The clients of fsspec and pyarrow: each answers the requests of `forebay.remote.filesystems` for one filesystem.

A request is a method. It takes a URL and returns the items of its answer:

- ``stat(url)``: one item, the fields of the `ObjectInfo` followed by whether a range costs one request, wherever it lies
- ``read(url, span)``: the bytes of ``span`` (of length -1: to the end); fewer where the object ends, never more
- ``list(url)``: an `ObjectInfo` for each object whose URL begins with ``url``, in order of name
- ``write(url, source, exclusive, on_sent)``: writes a file (its path) or bytes, and answers as ``stat`` does. ``exclusive``: raises
  FileExistsError if the object exists. May create directories.
- ``delete(url)``: no item. Raises FileNotFoundError if there is no such object.

Errors of the filesystem pass as they are. Callable from several threads. Clients handle neither forks nor retries."""

from __future__ import annotations

import datetime
import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from inspect import signature
from typing import Any

from forebay._kernel import host
from forebay._logs import logger
from forebay._model import Buffer, ObjectInfo, Span
from forebay.errors import ConfigError, RemoteError, RemoteProtocolError, Unsupported
from forebay.remote.urls import absolute_path, redacted

log = logger("forebay.remote.filesystems.clients")

BLOCK = 1 << 20
CHUNK, MAX_CHUNKS = 8 << 20, 5_000  # of multipart uploads
OnSent = Callable[[int], None]
"""Called with the number of bytes sent so far."""

ETAGS = ("ETag", "etag", "blob_id", "sha")
TIMES = ("LastModified", "last_modified", "mtime", "updated", "modified", "created")


class FsspecClient:
    """``fs``: the filesystem; None: that of each URL, created with ``options``."""

    def __init__(self, fs: Any, options: Mapping[str, Any] | None = None) -> None:
        self._fs = fs
        self._options = dict(options or {})

    def stat(self, url: str) -> Iterable[tuple[Any, ...]]:
        fs, path = self._split(url)
        fs.invalidate_cache(path)  # a cached listing may be of any age
        info = fs.info(path)
        if info.get("type") == "directory":
            raise IsADirectoryError(path)
        if info.get("type") == "other":  # a pipe, a socket, a device; a link to a file is one of the "file"s, or a "link"
            raise RemoteError("it is not a regular file", url=url)
        return [(*fsspec_info(url, info), bool(fs.async_impl))]

    def read(self, url: str, span: Span) -> Iterator[Buffer]:
        fs, path = self._split(url)
        if span.length >= 0 and fs.async_impl:
            data = fs.cat_file(path, start=span.start, end=span.end)
            if len(data) > span.length:  # fsspec's http returns the whole file where the server ignores Range
                raise RemoteProtocolError(f"{len(data):,} bytes arrived, but {span.length:,} were requested", url=url)
            yield data
            return
        with fs.open(path, "rb") as file:
            if span.start:
                file.seek(span.start)
            left = span.length
            while left and (block := file.read(BLOCK if left < 0 else min(BLOCK, left))):
                left -= len(block) if left > 0 else 0
                yield block

    def list(self, url: str) -> Iterator[ObjectInfo]:
        _, scheme, rest = url.partition("://")
        if scheme and "/" not in rest:
            url += "/"  # a bucket: the buckets themselves need not be listed
        fs, prefix = self._split(url)
        prefix = prefix.rstrip("/") + "/" * url.endswith("/")
        folder = self._split(url[: url.rindex("/") + 1])[1]
        fs.invalidate_cache()

        def below(directory: str) -> list[Any]:
            return list(fs.find(directory, withdirs=True, detail=True).values())

        for info in found_with_prefix(lambda: fs.ls(folder, detail=True), prefix, below, lambda: fs.isdir(folder)):
            at = url + info["name"][len(prefix) :]
            yield ObjectInfo(at, 0) if info["type"] == "directory" else fsspec_info(at, info)

    def write(self, url: str, source: str | bytes, exclusive: bool, on_sent: OnSent) -> Iterable[tuple[Any, ...]]:
        from fsspec.callbacks import Callback

        fs, path = self._split(url)
        mode = {"mode": "create"} if exclusive else {}
        if exclusive and not can_create(fs, "pipe_file" if isinstance(source, bytes) else "put_file"):
            raise Unsupported(f"{type(fs).__name__} has no way to write only where nothing is yet", url=url)

        def put() -> None:
            if isinstance(source, bytes):
                fs.pipe_file(path, source, **mode)
                on_sent(len(source))
            else:
                progress = Callback(hooks={"sent": lambda size, value, **_: on_sent(value)})
                fs.put_file(source, path, callback=progress, **mode, **memory_limits(fs, os.path.getsize(source)))

        with_its_folder(put, lambda: fs.makedirs(fs._parent(path), exist_ok=True))
        return self.stat(url)

    def delete(self, url: str) -> Iterable[Any]:
        fs, path = self._split(url)
        fs.rm_file(path)
        return ()

    def _split(self, url: str) -> tuple[Any, str]:
        if self._fs is not None:
            return self._fs, self._fs._strip_protocol(url)
        import fsspec.core

        fs, path = fsspec.core.url_to_fs(url, **self._options)
        return fs, path


def check_kind(kind: str) -> None:
    """Raises `ConfigError` for an unknown scheme. Without fsspec, nothing is checked: its first use raises `MissingExtra`."""
    try:
        import fsspec
    except ImportError:
        return
    if kind not in fsspec.available_protocols():
        raise ConfigError(f"{kind}:// URLs are not known, neither here (http, https, s3, hf, file) nor to fsspec: check the spelling")


def found_with_prefix(
    listed: Callable[[], Iterable[Any]], prefix: str, below: Callable[[str], Iterable[Any]], exists: Callable[[], bool]
) -> Iterator[Any]:  # fmt: skip
    """The files and the empty directories whose name begins with ``prefix``, in order of name: of the entries in ``listed()``, and of the
    directories among them. The name of a directory is given a slash at its end. ``below``: everything in a directory. ``exists``: whether
    a prefix without entries is a directory: some filesystems list what does not exist."""
    try:
        entries = list(listed())
    except (FileNotFoundError, NotADirectoryError):
        return
    if not entries and prefix.endswith("/") and exists():
        yield {"name": prefix, "type": "directory"}
    for entry in sorted(entries, key=_place):
        if not entry["name"].startswith(prefix):
            continue
        found = [entry, *below(entry["name"])] if entry["type"] == "directory" else [entry]
        above = {each["name"].rstrip("/").rpartition("/")[0] for each in found}
        for each in sorted(found, key=_place):
            if each["type"] == "file":
                yield each
            elif each["type"] == "directory" and (name := each["name"].rstrip("/")) not in above:
                yield {"name": name + "/", "type": "directory"}


def _place(entry: Any) -> str:
    """By which entries are sorted: a directory as the files in it are."""
    return str(entry["name"]) + ("/" if entry["type"] == "directory" else "")


def fsspec_info(url: str, info: Mapping[str, Any]) -> ObjectInfo:
    size = info.get("size")
    etag = next((str(info[name]) for name in ETAGS if info.get(name)), None)
    modified = next((at for name in TIMES if (at := seconds(info.get(name))) is not None), None)
    return object_info(url, None if size is None else int(size), etag, modified)


def object_info(url: str, size: int | None, etag: str | None, modified: float | None) -> ObjectInfo:
    if size is not None and not (isinstance(size, int) and 0 <= size < 1 << 63):
        raise RemoteProtocolError(f"it is listed with {size!r} bytes", url=url)
    if etag is None and modified is not None:
        return ObjectInfo(url, size, f"{round(modified * 1_000_000)}-{size}", False, modified)
    return ObjectInfo(url, size, etag, etag is not None and not etag.startswith("W/"), modified)


def seconds(when: object) -> float | None:
    """Seconds since 1970, from any form that filesystems use."""
    if isinstance(when, str):
        try:
            when = datetime.datetime.fromisoformat(when)
        except ValueError:
            return None
    if isinstance(when, datetime.datetime):
        return (when if when.tzinfo else when.replace(tzinfo=datetime.UTC)).timestamp()
    return float(when) if isinstance(when, (int, float)) and not isinstance(when, bool) else None


class ArrowClient:
    """A pyarrow filesystem. URLs are its paths, or begin with a scheme, which is ignored."""

    def __init__(self, fs: Any) -> None:
        self._fs = fs
        self._has_etags = str(fs.type_name) in ("s3", "gcs", "abfs")
        self._in_python = str(fs.type_name).startswith("py::")

    def stat(self, url: str) -> Iterable[tuple[Any, ...]]:
        from pyarrow.fs import FileType

        path, etag = arrow_path(url), None
        info = self._fs.get_file_info(path)
        if info.type == FileType.NotFound:
            raise FileNotFoundError(path)
        if info.type == FileType.Directory:
            raise IsADirectoryError(path)
        if info.type == FileType.Unknown:
            raise RemoteError("it is not a regular file", url=url)
        if self._has_etags:
            with self._fs.open_input_file(path) as file:
                etag = (file.metadata() or {}).get("ETag")
        return [(*arrow_info(url, info, str(etag, "ascii", "replace") if etag else None), True)]

    def read(self, url: str, span: Span) -> Iterator[Buffer]:
        with self._fs.open_input_file(arrow_path(url)) as file:
            length = file.size() - span.start if span.length < 0 else span.length
            if span.start or not self._in_python:
                yield file.read_at(length, span.start)
            else:
                yield memoryview(file.read_buffer(length)).cast("B")  # the bytes that the filesystem returned; `read_at` copies them

    def list(self, url: str) -> Iterator[ObjectInfo]:
        from pyarrow.fs import FileSelector, FileType

        prefix = arrow_path(url)
        names = {FileType.File: "file", FileType.Directory: "directory"}

        def entries(folder: str, recursive: bool) -> Iterable[Any]:
            infos = self._fs.get_file_info(FileSelector(folder, recursive=recursive))
            return [{"name": info.path, "type": names.get(info.type, "other"), "info": info} for info in infos]

        folder = prefix.rpartition("/")[0]

        def exists() -> bool:
            return bool(self._fs.get_file_info(folder).type == FileType.Directory)

        for entry in found_with_prefix(lambda: entries(folder, False), prefix, lambda directory: entries(directory, True), exists):
            at = url + entry["name"][len(prefix) :]
            info = ObjectInfo(at, 0) if entry["type"] == "directory" else arrow_info(at, entry["info"], None)
            yield info._replace(validator=None) if self._has_etags else info

    def write(self, url: str, source: str | bytes, exclusive: bool, on_sent: OnSent) -> Iterable[tuple[Any, ...]]:
        if exclusive:
            raise Unsupported("pyarrow has no way to write only where nothing is yet", url=url)
        path = arrow_path(url)
        with_its_folder(lambda: self._put(path, source, on_sent), lambda: self._fs.create_dir(path.rpartition("/")[0], recursive=True))
        return self.stat(url)

    def _put(self, path: str, source: str | bytes, on_sent: OnSent) -> None:
        done = 0
        with io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb", opener=host.open_fd) as file:
            out = self._fs.open_output_stream(path)
            try:
                while block := file.read(BLOCK):
                    out.write(block)
                    done += len(block)
                    on_sent(done)
                out.close()
            except BaseException:
                try:
                    out.close()  # an open stream that is dropped ends as if it were complete
                    self._fs.delete_file(path)
                except Exception as error:  # noqa: BLE001 (the error of the write is raised, whatever this one is)
                    log.debug("%s: an incomplete object is still there: %s", path, type(error).__name__)
                raise

    def delete(self, url: str) -> Iterable[Any]:
        self._fs.delete_file(arrow_path(url))
        return ()


def arrow_info(url: str, info: Any, etag: str | None) -> ObjectInfo:
    return object_info(url, info.size, etag, None if info.mtime_ns is None else info.mtime_ns / 1_000_000_000)


def with_its_folder(put: Callable[[], None], create_folder: Callable[[], None]) -> None:
    """``put()``, after ``create_folder()`` only if the folder is missing: object stores have none, and are not asked to create one."""
    try:
        put()
    except FileNotFoundError:
        create_folder()
        put()


def can_create(fs: Any, verb: str) -> bool:
    """Whether ``verb`` of an fsspec filesystem can write only where nothing is yet, in one step: fsspec's inherited methods check, then
    write."""
    method = _method_of(fs, verb)
    return not method.__module__.startswith(("fsspec.spec", "fsspec.asyn")) and "mode" in signature(method).parameters


def memory_limits(fs: Any, size: int) -> dict[str, int]:
    """Arguments with which `put_file` of an fsspec filesystem keeps less of a file in memory: by default, s3fs uses 500 MB."""
    limits = {"chunksize": max(CHUNK, -(-size // (MAX_CHUNKS * CHUNK)) * CHUNK), "max_concurrency": 4}
    return {name: value for name, value in limits.items() if name in signature(_method_of(fs, "put_file")).parameters}


def _method_of(fs: Any, verb: str) -> Any:
    """The method that does the work, behind wrappers, which pass their arguments on."""
    inner = getattr(fs, "fs", None)
    if inner is not None and hasattr(inner, "_strip_protocol"):
        return _method_of(inner, verb)
    return getattr(type(fs), f"_{verb}" if fs.async_impl else verb)


def arrow_path(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    return rest if separator and scheme.replace("+", "").isalnum() else url


def _absolute_arrow_path(url: str) -> str:
    path = arrow_path(url)
    return path if path.startswith("/") else absolute_path(path)


def arrow_from_uri(url: str) -> tuple[Any, str] | None:
    """The pyarrow filesystem of a URL, and the path on it; None if pyarrow is not installed, or has no such filesystem."""
    try:
        from pyarrow.fs import FileSystem
    except ImportError:
        return None
    kind, _, rest = url.partition("://")
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if kind.lower() == "s3" and endpoint and "?" not in rest:  # pyarrow would ask Amazon in which region the bucket lies
        from pyarrow.fs import S3FileSystem

        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
        return S3FileSystem(endpoint_override=endpoint, region=region), rest
    try:
        return FileSystem.from_uri(url)  # type: ignore[no-any-return]
    except (ValueError, NotImplementedError, OSError) as error:
        log.debug("pyarrow has no filesystem for it: %s", redacted(str(error)))
        return None


def client_of(fs: Any) -> FsspecClient | ArrowClient:
    """The client of ``fs``, a filesystem of fsspec or pyarrow, or the options with which fsspec creates that of each URL."""
    if isinstance(fs, dict):
        return FsspecClient(None, fs)
    inner = _of_fsspec(fs)
    return ArrowClient(fs) if inner is None else FsspecClient(inner)


def own_path_on(fs: Any) -> Callable[[str], str]:
    """What turns a path on ``fs``, with or without a scheme, into the one that its client uses."""
    inner = _of_fsspec(fs)
    if inner is None:
        return _absolute_arrow_path if str(fs.type_name) == "local" else arrow_path
    return inner._strip_protocol  # type: ignore[no-any-return]


def _of_fsspec(fs: Any) -> Any:
    """The filesystem of fsspec that ``fs`` is, or that it wraps for pyarrow; None for those of pyarrow."""
    return next((each for each in (fs, getattr(getattr(fs, "handler", None), "fs", None)) if hasattr(each, "_strip_protocol")), None)
