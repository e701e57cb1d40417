"""Filesystems whose clients a fork breaks: `InHelper` asks them in a helper process, where `main` runs.

The helper serves calls that arrive on its control socket. With each call comes a socket of its own (SCM_RIGHTS), on which a thread of the
helper reads the request and sends the answer. A caller that gives up closes that socket. The helper ends when the control socket is closed
at the other end, or when its parent process is gone. Forked children hold the control socket too, but do not keep it alive. It writes to
sockets only.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import pickle
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

from forebay import errors
from forebay._kernel import host, interrupts, locks
from forebay._kernel.threads import DaemonThread
from forebay._logs import logger
from forebay._model import Buffer
from forebay.remote.base import RESTORE, UNREACHABLE, AttemptFailed, Call, Trouble, is_of_archive
from forebay.remote.filesystems.clients import BLOCK, ArrowClient, FsspecClient, OnSent, client_of
from forebay.remote.urls import is_url, redacted, scheme

log = logger("forebay.remote.filesystems.helper")

HEADER = struct.Struct("!cQ")
ITEM, DATA, SENT, ERROR, END = b"I", b"D", b"S", b"E", b"."
"""The messages of an answer: fields as JSON, bytes of the object, the number of bytes sent so far, and how the answer ends."""

SLOWEST = 100_000
"""Bytes a second. The helper sends nothing of a range before it has all of it, so a range may take that much longer than
``read_timeout``."""
MAX_TEXT = 10_000
"""Characters of an error's text that are searched for secrets."""
_BY_CURL = re.compile(r"(?:curlCode: |CURL error \[)([67])\b")
"""How pyarrow's S3 and GCS say that a host has no address (6), or that no connection came about (7)."""
CONFLICT = "it is there already: nothing was written"
_COMMAND = "from forebay.remote.filesystems.helper import main; main()"  # with -m, Python would warn of a module that its package imports


# -- errors ------------------------------------------------------------------------------------------------------------


def failed_by(error: Exception, url: str = "") -> AttemptFailed | errors.MissingExtra:
    """What an error of a filesystem at ``url`` means for the call; its text without secrets."""
    reason = f"{type(error).__name__}: {redacted(str(error)[:MAX_TEXT])}"[:500]
    cause, what = error.__cause__, f"{scheme(url)}://" if is_url(url) else "this filesystem"
    status = status_of(error) or status_of(cause)
    if isinstance(error, FileNotFoundError) and isinstance(cause, Exception) and _is_other_failure(cause):
        return failed_by(cause, url)
    if not isinstance(error, (AttemptFailed, errors.RemoteError)) and any(map(is_of_archive, _texts_of(error, cause))):
        return AttemptFailed(RESTORE, errors.Archived, retryable=False, status=status)
    match error:
        case AttemptFailed():
            return error
        case IsADirectoryError():
            return AttemptFailed("it is a directory", errors.NotFound, retryable=False)
        case FileNotFoundError() | NotADirectoryError():
            return AttemptFailed("there is no such object", errors.NotFound, retryable=False)
        case FileExistsError():
            return AttemptFailed(CONFLICT, errors.Conflict, retryable=False)
        case PermissionError():
            return AttemptFailed(f"access is denied ({reason})", errors.AccessDenied, retryable=False)
        case TimeoutError():
            return AttemptFailed(f"nothing came for too long ({reason})", errors.RemoteTimeout)
        case errors.RemoteError():
            return AttemptFailed(redacted(str(error)[:MAX_TEXT]), type(error), retryable=False)
        case ImportError(name="fsspec"):
            return errors.MissingExtra.of(what, "fsspec")
        case ImportError():
            return errors.MissingExtra(f"{what} needs a package of its own beside the extra 'fsspec' ({reason})", extra="fsspec")
        case ValueError() | TypeError() | AttributeError() | LookupError() | NotImplementedError():
            return AttemptFailed(reason, errors.RemoteError, retryable=False)
    if "status 411" in reason:  # from Ceph, at the beginning of an upload in parts
        reason = "the server wants lengths that pyarrow does not send: write to it by an s3:// URL"
        return AttemptFailed(reason, errors.Unsupported, retryable=False)
    if status in (401, 403) or "Credential" in type(error).__name__:
        return AttemptFailed(f"access is denied ({reason})", errors.AccessDenied, retryable=False, status=status)
    if status == 412:  # s3fs raises an OSError with EINVAL for it
        return AttemptFailed(CONFLICT, errors.Conflict, retryable=False, status=status)
    if status in (404, 410):
        return AttemptFailed("there is no such object", errors.NotFound, retryable=False, status=status)
    trouble = _trouble_of(error) if status is None else None
    return AttemptFailed(reason, retryable=status is None or status in (408, 429) or status >= 500, status=status, trouble=trouble)


def _is_other_failure(cause: Exception) -> bool:
    """Whether the cause of a FileNotFoundError is not that there is no such object: fsspec's http raises it for whatever a server answers,
    and for a server that gives no answer."""
    status = status_of(cause)
    if status is not None:
        return status not in (404, 410)
    is_of_connection = isinstance(cause, (TimeoutError, ConnectionError)) or type(cause).__module__.startswith("aiohttp.")
    return is_of_connection or _trouble_of(cause) is not None


def _trouble_of(error: BaseException | None) -> Trouble | None:
    """What an error of a connection, or what caused it, says about the host."""
    for _ in range(8):
        if error is None:
            break
        if isinstance(error, socket.gaierror):
            return Trouble.NO_NAME
        number = getattr(error, "errno", None)
        if number == errno.ECONNREFUSED or number in UNREACHABLE:
            return Trouble.REFUSED if number == errno.ECONNREFUSED else Trouble.NO_ROUTE
        if (match := _BY_CURL.search(str(error)[:MAX_TEXT])) is not None:
            return Trouble.REFUSED if match[1] == "7" else Trouble.NO_NAME
        error = error.__cause__ or error.__context__
    return None


def _texts_of(*several: BaseException | None) -> Iterator[str]:
    """The texts of errors, and the codes of the stores' answers: Azure's and botocore's errors have them as attributes."""
    for error in several:
        response = getattr(error, "response", None)
        code = response.get("Error", {}).get("Code") if isinstance(response, dict) else getattr(error, "error_code", "")
        yield f"{error} {code}"


def status_of(error: BaseException | None) -> int | None:
    """The status of the HTTP response that caused an error, if there was one: as aiohttp, gcsfs and botocore report it."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        return cast("int | None", response.get("ResponseMetadata", {}).get("HTTPStatusCode"))
    return next((status for name in ("status", "code") if isinstance(status := getattr(error, name, None), int)), None)


def to_wire(error: AttemptFailed | errors.MissingExtra) -> bytes:
    if isinstance(error, AttemptFailed):
        return json.dumps(
            errors.to_wire(error.error(error.reason, status=error.status)) | {"retryable": error.retryable, "trouble": error.trouble}
        ).encode()
    return json.dumps(errors.to_wire(error)).encode()


def from_wire(wire: bytes) -> AttemptFailed | errors.MissingExtra:
    """Raises `EOFError` for what `to_wire` did not write."""
    described = json.loads(wire)
    match errors.from_wire(described):
        case errors.MissingExtra() as error:
            return error
        case errors.RemoteError() as error:
            trouble = described["trouble"]
            return AttemptFailed(
                str(error), type(error), retryable=described["retryable"], status=error.status,
                trouble=None if trouble is None else Trouble(trouble),
            )  # fmt: skip
    raise EOFError(f"the helper process sent {described['kind']!r} where an error of a remote was expected")


# -- in the helper process ---------------------------------------------------------------------------------------------


def send(channel: socket.socket, kind: bytes, payload: Buffer = b"") -> None:
    channel.sendall(HEADER.pack(kind, len(payload)))
    if len(payload):  # the receiver of an empty message may close the channel after the header
        channel.sendall(payload)


class Server:
    """Serves calls, each in a thread of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _clients
        self._clients: dict[bytes, FsspecClient | ArrowClient] = {}

    def run(self, control: socket.socket, parent: int) -> None:
        """Serve until the other end of ``control`` is closed, or the process ``parent`` is gone."""
        poll = select.poll()
        poll.register(control, select.POLLIN)
        try:
            # not PR_SET_PDEATHSIG: that signal is sent when the *thread* ends that started this process
            poll.register(os.pidfd_open(parent), select.POLLIN)
        except OSError as error:  # it is gone, or the kernel has no pidfds: then only the end of `control` remains
            log.debug("no pidfd of process %d: %s", parent, error)
        while os.getppid() == parent and control.fileno() in dict(poll.poll()):
            message, channels, _, _ = socket.recv_fds(control, 1, 1)
            if not message:
                return
            for channel in channels:
                serve = partial(self._serve, socket.socket(fileno=channel))
                if not DaemonThread(serve, name="forebay-helper").begin():
                    serve()

    def _serve(self, channel: socket.socket) -> None:
        with channel:
            try:
                with channel.makefile("rb") as file:
                    filesystem, verb, url, *args = pickle.load(file)  # from the process that started this one
                if verb == "write":
                    args.append(lambda done: send(channel, SENT, b"%d" % done))
                try:
                    for item in getattr(self._client(filesystem), verb)(url, *args):
                        if isinstance(item, tuple):
                            send(channel, ITEM, json.dumps(item).encode())
                        else:
                            for at in range(0, len(item), BLOCK):
                                send(channel, DATA, memoryview(item)[at : at + BLOCK])
                except Exception as error:  # noqa: BLE001 (reported to the caller, whatever it is)
                    send(channel, ERROR, to_wire(failed_by(error, url)))
                else:
                    send(channel, END)
            except (BrokenPipeError, ConnectionResetError, EOFError, pickle.UnpicklingError) as error:
                log.debug("a call was given up: %s", error)

    def _client(self, filesystem: bytes) -> FsspecClient | ArrowClient:
        with self._lock:
            if filesystem not in self._clients:
                self._clients[filesystem] = client_of(pickle.loads(filesystem))
            return self._clients[filesystem]


def main() -> None:
    """The helper process. Its arguments: the file descriptor of the control socket, and the process id of its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent reports which calls are given up
    Server().run(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
    os._exit(0)  # threads may be inside a client; nothing is left to be saved


# -- in the process that uses it ---------------------------------------------------------------------------------------


class InHelper:
    """A filesystem that is asked in the helper process. ``filesystem``: the pickled argument of `client_of`."""

    has_connections = True

    def __init__(self, filesystem: bytes) -> None:
        self._filesystem = filesystem
        self._name = hashlib.blake2s(filesystem, digest_size=8).hexdigest()  # its settings determine its hosts

    def ask(self, call: Call, verb: str, url: str, *args: Any, size: int = 0, on_sent: OnSent | None = None) -> Iterator[Any]:
        """See `forebay.remote.filesystems.InProcess.ask`. A host that responds at all answers ``stat`` and ``list`` soon, so these show
        whether it responds."""
        host = f"{host_of(call.url)} {self._name}" if verb in ("stat", "list") else ""
        if host:
            call.check_host(host)
        began, timeout = time.monotonic(), call.options.read_timeout + size / SLOWEST
        try:
            with channel(call) as sock, io.BufferedReader(raw := _Received(sock)) as file:
                sock.settimeout(min(timeout, call.check()))
                sock.sendall(pickle.dumps((self._filesystem, verb, url, *args)))
                while True:
                    raw.timeout = min(timeout, call.check())
                    kind, payload = receive(file)
                    if kind == ERROR:
                        raise from_wire(payload)
                    if host:
                        call.host_answered(host)
                        host = ""
                    if kind == END:
                        return
                    if kind != SENT:
                        yield payload if kind == DATA else json.loads(payload)
                    elif on_sent is not None:
                        call.check()
                        on_sent(int(payload))
        except errors.RemoteError:
            raise
        except (AttemptFailed, EOFError, OSError) as error:
            match error:
                case AttemptFailed():
                    failed = error
                case TimeoutError():
                    failed = AttemptFailed("nothing came for too long", errors.RemoteTimeout)
                case EOFError():
                    failed = AttemptFailed("its helper process went away")
                case _:
                    failed = AttemptFailed(f"its helper process cannot be used: {error.strerror}")
            if host and failed.error is errors.RemoteTimeout:
                call.host_failed(host, began, Trouble.SILENT)
            elif host and failed.trouble is not None:
                call.host_failed(host, began, failed.trouble)
            elif host and (failed.status is not None or failed.error is not errors.RemoteUnavailable):  # else it may have arisen anywhere
                call.host_answered(host)
            raise failed from (error.__cause__ if failed is error else error)


class _Received(io.RawIOBase):
    """What comes through a channel. Each wait for it takes at most ``timeout`` seconds, then raises TimeoutError."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self.timeout = sock, 0.0
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not any(self._poll.poll(1000 * turn) for turn in interrupts.turns(self.timeout)):
            raise TimeoutError
        return self._sock.recv_into(buffer)


def host_of(url: str) -> str:
    """The host or bucket that a request goes to: of a chain, such as ``zip://a.csv::s3://bucket/a.zip``, that of the last link."""
    return "/".join(url.rpartition("::")[2].split("/")[:3])


def receive(file: io.BufferedIOBase) -> tuple[bytes, bytes]:
    """Kind and payload of the next message. Raises EOFError if the other end closed the channel."""
    kind, length = HEADER.unpack(_read(file, HEADER.size))
    return kind, _read(file, length)


def _read(file: io.BufferedIOBase, length: int) -> bytes:
    data = file.read(length)
    if len(data) < length:
        raise EOFError("the channel was closed")
    return data


@contextmanager
def channel(call: Call) -> Iterator[socket.socket]:
    """A new channel to the helper of this process. When it is closed, the helper gives up the call."""
    sock = _helper.channel()

    def shut_down() -> None:
        try:
            sock.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            log.debug("the helper closed its end before: %s", error)

    with sock:
        call.on_abort(shut_down)
        try:
            yield sock
        finally:
            call.not_on_abort(shut_down)
            shut_down()  # a forked child may hold it too: then the helper would not detect the close


class _Helper:
    """The helper of this process: started at the first call, started again if it died, and never shared with a forked child. It ends with
    the process that started it."""

    def __init__(self) -> None:
        self._reset()
        host.at_fork(self)

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()  # guards what follows
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket
        self._end: weakref.finalize[..., _Helper]

    def channel(self) -> socket.socket:
        """A socket whose other end the helper serves. Raises OSError."""
        if self._pid != os.getpid():  # forked by C code, which runs no fork hook
            self.after_fork_child()
        ours, theirs = _pair()
        try:
            with theirs, self._lock:
                if self._process is not None:
                    try:
                        socket.send_fds(self._control, [b"c"], [theirs.fileno()])
                        return ours
                    except OSError as error:
                        log.warning("the helper process %d is gone (%s): starting another", self._process.pid, error)
                        self._end()
                self._start()
                socket.send_fds(self._control, [b"c"], [theirs.fileno()])
        except BaseException:
            ours.close()
            raise
        return ours

    def _start(self) -> None:
        self._process = None
        self._control, theirs = _pair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _COMMAND, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=None if locks.file_of(2) is not None else subprocess.DEVNULL, pass_fds=[theirs.fileno()],
                process_group=0,  # Ctrl-C is for this process, which closes the channels of the calls that it gives up
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )  # fmt: skip
        self._end = weakref.finalize(self, _end, self._control, self._process)

    def after_fork_child(self) -> None:
        if self._process is not None:  # it belongs to the parent
            self._end.detach()
            self._control.close()
            self._process.returncode = 0  # otherwise its finalizer warns of a child that is still running
        self._reset()


def _pair() -> tuple[socket.socket, socket.socket]:
    """Connected sockets, neither of which has the number of a standard stream."""
    ours, theirs = (socket.socket(fileno=host.not_standard(each.detach())) for each in socket.socketpair())
    return ours, theirs


def _end(control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    control.close()
    process.kill()
    process.wait()


_helper = _Helper()
