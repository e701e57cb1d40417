"""Everything that fsspec or pyarrow can read: their URLs (``gs://``, ``az://``, ``memory://``...) and their filesystem objects.

After a fork, their clients hang, or silently mix bytes. So only filesystems without connections are used in this process. All others run in
a helper process (`forebay.remote.filesystems.helper`): each process has its own, and starts it at the first call.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from forebay._kernel import interrupts
from forebay._logs import logger
from forebay._model import Content, ObjectInfo, Sink, Span, Transfer
from forebay.errors import ConfigError, NotFound, RemoteChanged, RemoteError, RemoteProtocolError, SourceChanged, Unsupported
from forebay.remote.base import AttemptFailed, Call, RemoteOptions, cut_spans, run_parts
from forebay.remote.filesystems import helper
from forebay.remote.filesystems.clients import BLOCK, OnSent, client_of, own_path_on
from forebay.remote.urls import MASK, UrlNaming, absolute_path, as_text, canonical, is_url, redacted, scheme, without_marks

log = logger("forebay.remote.filesystems")

MAX_CHANGES = 2  # a fetch fails if the object changes more often

IN_PROCESS = frozenset({"file", "local", "memory", "mock", "data"})  # no connections, so forks do no harm; `memory` exists per process
LOCAL = frozenset({"file", "local"})
WRAPPERS = frozenset({"zip", "tar", "libarchive", "dir"})  # the wrapped filesystem decides


class InProcess:
    """A filesystem whose client runs in this process. ``bound``: it cannot be used in a forked child.

    ``has_connections``: whether it may use the network, so that the limits of the node apply."""

    def __init__(self, filesystem: Any, *, bound: bool = False) -> None:
        self._client = client_of(filesystem)
        self.has_connections = bound
        self._pid = os.getpid() if bound else None

    def ask(self, call: Call, verb: str, url: str, *args: Any, size: int = 0, on_sent: OnSent | None = None) -> Iterator[Any]:
        """The items of the answer of its client, see `forebay.remote.filesystems.clients`. A buffer is valid until the next one is
        requested. ``size``: how many bytes the client may read or send before its answer begins. ``on_sent``: for ``write``. Raises
        `AttemptFailed` for every error of the filesystem."""
        if self._pid not in (None, os.getpid()):
            reason = "its filesystem was created before a fork, and cannot be pickled: create it after the fork"
            raise AttemptFailed(reason, RemoteError, retryable=False)
        try:
            answer = partial(getattr(self._client, verb), url, *args, *([] if on_sent is None else [on_sent]))
            if self._pid is None:
                yield from answer()
            else:  # it may wait for the network
                yield from interrupts.items_of_program(interrupts.of_program(answer)())
        except Exception as error:
            raise helper.failed_by(error) from error


class FilesystemRemote:
    """Objects of a filesystem. Callable from several threads, and after a fork.

    ``filesystem``: of fsspec or pyarrow; URLs are then its paths, with or without a scheme. None: fsspec's filesystem of each URL, created
    with ``storage_options``. A filesystem that cannot be pickled is used in this process, and raises `RemoteError` in a forked child.
    """

    def __init__(
        self, filesystem: Any = None, options: RemoteOptions | None = None, *, storage_options: Mapping[str, Any] | None = None
    ) -> None:
        self._options = options or RemoteOptions()
        self.kind = self.identity = ""
        """The scheme of its URLs; what distinguishes the filesystem with its settings (endpoint, credentials) from others, in all processes
        if it can be pickled."""
        self._fixed: InProcess | helper.InHelper | None = None
        if filesystem is None:
            settings = dict(storage_options or {})
            self._by_url = InProcess(settings), helper.InHelper(pickled(settings))
            return
        self.kind = next(iter(protocols_of(filesystem)), "")
        if not self.kind:
            shown = redacted(repr(filesystem))
            raise ConfigError(f"filesystem={shown} is no filesystem of fsspec or pyarrow", name="filesystem", value=shown)
        self._own_path = own_path_on(filesystem)
        is_here = is_in_process(filesystem)
        try:
            content = pickled(filesystem)
        except Exception as error:  # noqa: BLE001 (whatever the filesystem's own pickling raises)
            kind = type(filesystem)
            self.identity = f"{kind.__qualname__} {os.getpid()} {id(filesystem)}"
            self._fixed = InProcess(filesystem, bound=not is_here)
            if not is_here:
                log.warning("%s cannot be pickled (%s): it can be used in this process, not in forks of it", kind.__name__, str(error))
        else:
            self.identity = hashlib.blake2b(content, digest_size=32).hexdigest()
            self._fixed = InProcess(filesystem) if is_here else helper.InHelper(content)

    def _access(self, url: str) -> InProcess | helper.InHelper:
        if self._fixed is not None:
            return self._fixed
        schemes = {link.partition("://")[0] for link in url.split("::")}
        in_process, in_helper = self._by_url
        return in_process if schemes <= IN_PROCESS | WRAPPERS else in_helper

    def _call(self, url: str, options: RemoteOptions | None = None) -> Call:
        shown = url if "://" in url else re.sub(r"[^\w+.-]", "", self.kind) + "://" + url
        return Call(shown, options or self._options)

    def key(self, path: str, naming: UrlNaming | None) -> str:
        """The key of one of the filesystem's paths, which contains its settings as a hash only. ``naming`` None: a text to be shown."""
        try:
            name = self._own_path(path)
        except Exception as error:
            shown, why = redacted(path), redacted(str(error))
            raise ConfigError(f"{shown} is no path of this filesystem ({self.kind}): {why}", name="path", value=shown) from error
        if path.endswith("/") and not name.endswith("/"):
            name += "/"  # what lies below a directory, not what begins with its name
        if is_http := is_url(name) and scheme(name) in ("http", "https"):
            name = canonical(name, naming)  # other schemes have no secrets in their paths
        hashed = MASK if naming is None else naming.hashed(f"{self.identity} {naming.realm(self.kind)}")
        whole = name if is_http and self.kind == "http" else f"{self.kind}://{name}"
        return f"{whole if naming is None else without_marks(whole)}#{hashed}"

    def absolute(self, path: str) -> str:
        """See `forebay.remote.absolute_on`. Caller: has made the key of the path."""
        return self._own_path(path) if self.kind in LOCAL else path

    def is_near(self, url: str) -> bool:
        """See `NearRemote.is_near`."""
        return not self._access(url).has_connections

    def stat(self, url: str, *, known: str | None = None) -> ObjectInfo | None:
        """See `Remote.stat`. The validator is the filesystem's ETag, else it consists of time and size."""
        with self._call(url, self._options if known is None else self._options.for_check()) as call:
            call.is_optional = known is not None
            info, _ = self._stat(call, url)
        return None if known is not None and info.validator == known else info

    def _stat(self, call: Call, url: str) -> tuple[ObjectInfo, bool]:
        """The object, and whether a range of it costs one request, wherever it lies."""
        ((*info, parallel),) = call.retry(lambda: list(self._ask(call, "stat", url)))
        return ObjectInfo(*info), parallel

    def _ask(self, call: Call, verb: str, url: str, *args: Any, size: int = 0, on_sent: OnSent | None = None) -> Iterator[Any]:
        """One attempt, see `InProcess.ask`. Counts the request and the bytes that it reads, and stays within the limits of the node. The
        connections of the client are not visible, so each ``stat`` and each ``read`` counts as one."""
        call.count(requests=1)
        access = self._access(url)
        is_limited = access.has_connections and verb in ("stat", "read")
        with call.connection(helper.host_of(call.url)) if is_limited else nullcontext():
            for item in access.ask(call, verb, url, *args, size=size, on_sent=on_sent):
                if verb == "read":
                    call.check()
                    call.count(received=len(item))
                    if is_limited:
                        call.throttle(len(item))
                yield item

    def fetch(self, url: str, sink: Sink, *, listed: ObjectInfo | None = None) -> Transfer:
        """See `Remote.fetch`. All bytes are of one version: the validator is compared before and after."""
        call, trusted = self._call(url), None
        # A larger object needs `stat`, which reports whether its validator is strong and whether its ranges can be read in parallel. If the
        # listing of a small object is out of date, only few bytes are fetched in vain.
        if listed is not None and listed.validator is not None and listed.size is not None:
            trusted = listed if listed.size <= min(BLOCK, self._options.part) else None
        for _ in range(1 + MAX_CHANGES + (trusted is not None)):
            try:
                with call:
                    return self._fetch(call, url, sink, trusted)
            except _Changed:
                call, trusted = call.restarted(), None
        raise RemoteChanged(f"{call.url}: it changed again and again while it was read", url=call.url)

    def _fetch(self, call: Call, url: str, sink: Sink, listed: ObjectInfo | None) -> Transfer:
        info, parallel = self._stat(call, url) if listed is None else (listed, False)
        if info.size is None:

            def attempt() -> None:
                sink.begin(info)
                at = 0
                for block in self._ask(call, "read", url, Span(0, -1), size=BLOCK):
                    sink.write(at, block)
                    at += len(block)

            call.retry(attempt)
        else:
            spans = sink.begin(info)
            call.transfer.resumed += info.size - sum(span.length for span in spans)
            # where reading a range costs as much as reading all bytes before it, each span is one stream
            part = self._options.part if parallel else max(info.size, 1)
            count = sum(-(-span.length // part) for span in spans)
            tasks = (lambda piece=piece: self._fetch_range(call, url, piece, sink) for piece in cut_spans(spans, part))
            run_parts(tasks, min(self._options.streams, count) - 1 if parallel else 0, call)
        if self._stat(call, url)[0].validator != info.validator:
            raise _Changed
        call.transfer.info = info
        return call.transfer

    def _fetch_range(self, call: Call, url: str, span: Span, sink: Sink) -> None:
        """Each attempt continues where the last one ended."""
        at = span.start

        def attempt() -> None:
            nonlocal at
            for block in self._ask(call, "read", url, Span(at, span.end - at), size=span.end - at):
                sink.write(at, block)
                at += len(block)
            if at < span.end:
                raise _Changed

        call.retry(attempt)

    def read(
        self, url: str, span: Span, *, validator: str | None = None, info: ObjectInfo | None = None, exact: bool = False
    ) -> bytes:  # fmt: skip
        """See `Remote.read`."""
        validator = validator if info is None else info.validator
        with self._call(url) as call:
            data = call.retry(lambda: b"".join(map(bytes, self._ask(call, "read", url, span, size=span.length))))
            if validator is not None and self._stat(call, url)[0].validator != validator:
                raise RemoteChanged(f"{call.url}: it is not the version {validator} any more", url=call.url)
            return data

    def list(self, url: str) -> Iterator[ObjectInfo]:
        """See `Remote.list`."""
        with self._call(url) as call:
            try:
                yield from (ObjectInfo(*info) for info in self._ask(call, "list", url))
            except AttemptFailed as failed:
                raise call.error_of(failed, 1) from failed.__cause__

    def write(
        self, url: str, source: Content, *, if_none_match: str | None = None, if_match: str | None = None, on_sent: OnSent | None = None,
        resume: bool = False,
    ) -> ObjectInfo:  # fmt: skip
        """See `Remote.write`. Creates directories. Most filesystems support no conditions; some fsspec ones support ``if_none_match``.

        The object appears whole or not at all where the filesystem ensures that: local ones and SFTP show a file while it is written."""
        with self._call(url) as call:
            if if_match is not None:
                raise Unsupported(f"{call.url}: filesystems cannot write only over one version", url=call.url)
            content = absolute_path(as_text(source)) if isinstance(source, (str, os.PathLike)) else bytes(source)
            size = _size(content)
            raised: BaseException | None = None  # by on_sent: raised unchanged, even if the filesystem wraps it

            def report(done: int) -> None:
                nonlocal raised
                try:
                    if on_sent is not None:
                        on_sent(done)
                except BaseException as error:
                    raised = error
                    raise

            def attempt() -> ObjectInfo:
                try:
                    ((*info, _),) = self._ask(call, "write", url, content, if_none_match is not None, size=size, on_sent=report)
                except AttemptFailed as failed:
                    raise raised or failed from failed.__cause__
                return ObjectInfo(*info)

            info = call.retry(attempt)
            if _size(content) != size:
                raise SourceChanged.of(content)
            if info.size != size:
                raise RemoteProtocolError(f"{call.url}: {info.size} bytes are there, but {size:,} were sent", url=call.url)
            report(size)
            return info

    def delete(self, url: str) -> None:
        """See `Remote.delete`."""
        with self._call(url) as call:
            try:
                call.retry(lambda: list(self._ask(call, "delete", url)))
            except NotFound as error:
                log.debug("nothing to remove: %s", error)


def _size(source: str | bytes) -> int:
    return len(source) if isinstance(source, bytes) else os.stat(source).st_size


class _Changed(Exception):
    """The object changed during the fetch."""


def pickled(value: object) -> bytes:
    """By cloudpickle if it is installed: it includes what is defined in ``__main__``."""
    try:
        from cloudpickle import dumps
    except ImportError:
        from pickle import dumps
    return bytes(dumps(value))


def absolute_on(filesystem: Any, path: str) -> str:
    """See `forebay.remote.absolute_on`."""
    return own_path_on(filesystem)(path) if next(iter(protocols_of(filesystem)), "") in LOCAL else path


def is_in_process(filesystem: Any) -> bool:
    """Whether a filesystem has no connections that a fork would break."""
    for name in ("base_fs", "fs", "handler"):  # the attributes with which wrappers of pyarrow and fsspec refer to what they wrap
        if (inner := getattr(filesystem, name, None)) is not None:
            return is_in_process(inner)
    return not IN_PROCESS.isdisjoint(protocols_of(filesystem))


def protocols_of(filesystem: Any) -> Sequence[str]:
    """The schemes of its URLs: ``("file", "local")``, ``("s3",)``."""
    inner = getattr(filesystem, "handler", None)
    names: Any = getattr(getattr(inner, "fs", filesystem), "protocol", None) or getattr(filesystem, "type_name", "")
    return (names.removeprefix("py::"),) if isinstance(names, str) else tuple(names)  # pyarrow's prefix for those written in Python
