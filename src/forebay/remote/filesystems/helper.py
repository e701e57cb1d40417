"""The process that talks to filesystems whose clients a fork breaks: `main` runs in it, `channel` and `Process` are how it is used.

The helper serves calls that arrive on its control socket. With each call comes a socket of its own (SCM_RIGHTS), on which a thread of the
helper reads the request and sends the answer. A caller that gives up closes that socket. The helper ends when the control socket is closed
at the other end, or when its parent process is gone: forked children, which hold the control socket too, do not keep it alive. It writes to
sockets only.
"""

from __future__ import annotations

import json
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from forebay import errors
from forebay._kernel import host
from forebay._logs import logger
from forebay._model import Buffer, Span
from forebay.remote.base import AttemptFailed, Call
from forebay.remote.filesystems.clients import BLOCK, Client, client_of
from forebay.remote.urls import is_url, redacted, scheme

log = logger("forebay.remote.filesystems.helper")

HEADER = struct.Struct("!cQ")
REQUEST, ITEM, DATA, ERROR, END = b"Q", b"I", b"D", b"E", b"."

MAX_TEXT = 10_000
"""Characters of an error's text that are searched for secrets."""
CONFLICT = "it is there already: nothing was written"
_COMMAND = "from forebay.remote.filesystems.helper import main; main()"  # with -m, Python would warn of a module that its package imports


def send(channel: socket.socket, kind: bytes, payload: Buffer = b"") -> None:
    channel.sendall(HEADER.pack(kind, len(payload)))
    if len(payload):  # the receiver of an empty message may close the channel after the header
        channel.sendall(payload)


def receive(channel: socket.socket) -> tuple[bytes, bytearray]:
    """Kind and payload of the next message. Raises EOFError if the other end closed the channel."""
    kind, length = HEADER.unpack(_receive(channel, HEADER.size))
    return kind, _receive(channel, length)


def _receive(channel: socket.socket, length: int) -> bytearray:
    payload = bytearray(length)
    view = memoryview(payload)
    while len(view):
        count = channel.recv_into(view)
        if not count:
            raise EOFError("the channel was closed")
        view = view[count:]
    return payload


# -- errors ------------------------------------------------------------------------------------------------------------


def failed_by(error: Exception, url: str = "") -> AttemptFailed | errors.MissingExtra:
    """What an error of a filesystem at ``url`` means for the call; its text without secrets."""
    reason = f"{type(error).__name__}: {redacted(str(error)[:MAX_TEXT])}"[:500]
    cause, what = error.__cause__, f"{scheme(url)}://" if is_url(url) else "this filesystem"
    status = status_of(error) or status_of(cause)
    if isinstance(error, FileNotFoundError) and isinstance(cause, Exception) and status_of(cause) not in (None, 404, 410):
        return failed_by(cause, url)  # fsspec's http raises it for whatever a server answers
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
    return AttemptFailed(reason, retryable=status is None or status in (408, 429) or status >= 500, status=status)


def status_of(error: BaseException | None) -> int | None:
    """The status of the HTTP response that caused an error, if there was one: as aiohttp, gcsfs and botocore report it."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        return cast("int | None", response.get("ResponseMetadata", {}).get("HTTPStatusCode"))
    return next((status for name in ("status", "code") if isinstance(status := getattr(error, name, None), int)), None)


def to_wire(error: AttemptFailed | errors.MissingExtra) -> bytes:
    if isinstance(error, AttemptFailed):
        return json.dumps(errors.to_wire(error.error(error.reason, status=error.status)) | {"retryable": error.retryable}).encode()
    return json.dumps(errors.to_wire(error)).encode()


def from_wire(wire: bytes | bytearray) -> AttemptFailed | errors.MissingExtra:
    """Raises `EOFError` for what `to_wire` did not write."""
    described = json.loads(wire)
    match errors.from_wire(described):
        case errors.MissingExtra() as error:
            return error
        case errors.RemoteError() as error:
            return AttemptFailed(str(error), type(error), retryable=described["retryable"], status=error.status)
    raise EOFError(f"the helper process sent {described['kind']!r} where an error of a remote was expected")


# -- in the helper process ---------------------------------------------------------------------------------------------


class Server:
    """Serves calls, each in a thread of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _clients
        self._clients: dict[bytes, Client] = {}

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
                threading.Thread(target=self._serve, args=(socket.socket(fileno=channel),), daemon=True).start()

    def _serve(self, channel: socket.socket) -> None:
        with channel:
            try:
                self._answer(channel)
            except (BrokenPipeError, ConnectionResetError, EOFError) as error:
                log.debug("a call was given up: %s", error)

    def _answer(self, channel: socket.socket) -> None:
        verb, *args = json.loads(receive(channel)[1])
        filesystem = bytes(receive(channel)[1])
        if verb == "write":
            args.append(bytes(receive(channel)[1]))
        messages = self._call(channel, filesystem, verb, *args)
        while True:
            try:
                kind, payload = next(messages, (END, b""))
            except Exception as error:  # noqa: BLE001 (reported to the caller, whatever it is)
                kind, payload = ERROR, to_wire(failed_by(error, str(args[0])))
            send(channel, kind, payload)
            if kind in (ERROR, END):
                return

    def _client(self, filesystem: bytes) -> Client:
        with self._lock:
            if filesystem not in self._clients:
                self._clients[filesystem] = client_of(*pickle.loads(filesystem))  # from the process that started this one
            return self._clients[filesystem]

    def _call(self, channel: socket.socket, filesystem: bytes, verb: str, url: str, *args: Any) -> Iterator[tuple[bytes, Buffer]]:
        client = self._client(filesystem)
        match verb:
            case "stat":
                yield ITEM, json.dumps(client.stat(url)).encode()
            case "list":
                for info in client.list(url):
                    yield ITEM, json.dumps(info).encode()
            case "read":
                for block in client.read(url, Span(*args)):
                    yield from ((DATA, block[at : at + BLOCK]) for at in range(0, len(block), BLOCK))
            case "parallel":
                yield ITEM, json.dumps([client.parallel(url)]).encode()
            case "write":
                path, exclusive, body = args
                client.write(url, path or body, exclusive, lambda done: send(channel, ITEM, json.dumps([done]).encode()))
                yield ITEM, json.dumps(client.stat(url)).encode()
            case "delete":
                client.delete(url)


def main() -> None:
    """The helper process. Its arguments: the file descriptor of the control socket, and the process id of its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent reports which calls are given up
    Server().run(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
    os._exit(0)  # threads may be inside a client; nothing is left to be saved


# -- in the process that uses it ---------------------------------------------------------------------------------------


@contextmanager
def helper_errors() -> Iterator[None]:
    """Translate what a channel raises to `AttemptFailed`."""
    try:
        yield
    except TimeoutError as error:
        raise AttemptFailed("nothing came for too long", errors.RemoteTimeout) from error
    except EOFError as error:
        raise AttemptFailed("its helper process went away") from error
    except OSError as error:
        raise AttemptFailed(f"its helper process cannot be used: {error.strerror}") from error


@contextmanager
def channel(call: Call) -> Iterator[socket.socket]:
    """A new channel to the helper of this process. When it is closed, the helper gives up the call."""
    with helper_errors():
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
            shut_down()  # a forked child may hold it too: then the helper would not notice the close


class Process:
    """One helper process. It ends with this object, or with the process that started it."""

    def __init__(self) -> None:
        self.control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _COMMAND, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
                process_group=0,  # Ctrl-C is for this process, which reports to the helper what is given up
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )  # fmt: skip
        self.pid = self._process.pid
        self._end = weakref.finalize(self, _end, self.control, self._process)

    def channel(self) -> socket.socket:
        """Raises OSError if the process is gone."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self.control, [b"c"], [theirs.fileno()])
            except OSError:
                ours.close()
                raise
        return ours

    def leave_to_parent(self) -> None:
        """In a forked child: the helper belongs to the parent."""
        self._end.detach()
        self.control.close()
        self._process.returncode = 0  # otherwise its finalizer warns of a child that is still running


def _end(control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    control.close()
    process.kill()
    process.wait()


class _Helper:
    """The helper of this process: started at the first call, started again if it died, and never shared with a forked child."""

    def __init__(self) -> None:
        self._reset()
        host.at_fork(self)

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()  # guards _process
        self._process: Process | None = None

    def channel(self) -> socket.socket:
        if self._pid != os.getpid():  # forked by C code, which runs no fork hook
            self.after_fork_child()
        with self._lock:
            if self._process is not None:
                try:
                    return self._process.channel()
                except OSError as error:
                    log.warning("the helper process %d is gone (%s): starting another", self._process.pid, error)
            self._process = Process()
            return self._process.channel()

    def after_fork_child(self) -> None:
        if self._process is not None:
            self._process.leave_to_parent()
        self._reset()


_helper = _Helper()
