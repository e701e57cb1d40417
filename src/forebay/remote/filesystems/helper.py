"""The process that speaks to filesystems whose clients a fork breaks: `python -m forebay.remote.filesystems.helper FD PID`.

It serves calls that arrive on the socket FD: with each call comes a socket of its own (SCM_RIGHTS), on which the request is read and the
answer is sent, by a thread of its own. Who gives a call up closes that socket. The process ends when FD is closed at the other end, or when
process PID is gone: others that hold FD (forked children) do not keep it alive. It writes to sockets only.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import select
import signal
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from typing import Any, cast

from forebay import errors
from forebay._logs import logger
from forebay._model import Buffer, Span
from forebay.remote.base import Trouble
from forebay.remote.filesystems.clients import BLOCK, Client, client_of
from forebay.remote.redaction import redacted
from forebay.remote.urls import is_url, scheme

log = logger("forebay.remote.filesystems.helper")

HEADER = struct.Struct("!cQ")
REQUEST, ITEM, DATA, ERROR, END = b"Q", b"I", b"D", b"E", b"."

LONGEST = 10_000
"""Letters of an error's text that are looked at."""
CONFLICT = "it is there already: nothing was written"


def send(channel: socket.socket, kind: bytes, payload: Buffer = b"") -> None:
    channel.sendall(HEADER.pack(kind, len(payload)))
    if len(payload):  # whoever has the header of an empty one may have closed the channel already
        channel.sendall(payload)


def receive(channel: socket.socket) -> tuple[bytes, bytearray]:
    """Kind and payload of the next message. EOFError where the other end closed the channel."""
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


def meaning(error: Exception, url: str = "") -> Trouble | errors.MissingExtra:
    """What a filesystem raised at ``url``, as what it means for the call; its text without secrets."""
    why = f"{type(error).__name__}: {redacted(str(error)[:LONGEST])}"[:500]
    cause = error.__cause__
    status = status_of(error) or status_of(cause)
    if isinstance(error, FileNotFoundError) and isinstance(cause, Exception) and status_of(cause) not in (None, 404, 410):
        return meaning(cause, url)  # fsspec's http tells so of whatever a server answers
    match error:
        case Trouble():
            return error
        case IsADirectoryError():
            return Trouble("it is a directory", errors.NotFound, again=False)
        case FileNotFoundError() | NotADirectoryError():
            return Trouble("there is no such object", errors.NotFound, again=False)
        case FileExistsError():
            return Trouble(CONFLICT, errors.Conflict, again=False)
        case PermissionError():
            return Trouble(f"access is denied ({why})", errors.AccessDenied, again=False)
        case TimeoutError():
            return Trouble(f"nothing came for too long ({why})", errors.RemoteTimeout)
        case errors.RemoteError():
            return Trouble(redacted(str(error)[:LONGEST]), type(error), again=False)
        case ImportError(name="fsspec"):
            return errors.MissingExtra.of("this URL", "fsspec")
        case ImportError():
            what = f"{scheme(url)}://" if is_url(url) else "this filesystem"
            return errors.MissingExtra(f"{what} needs a package of its own beside the extra 'fsspec' ({why})", extra="fsspec")
        case ValueError() | TypeError() | AttributeError() | LookupError() | NotImplementedError():
            return Trouble(why, errors.RemoteError, again=False)
    if "status 411" in why:  # Ceph, to the beginning of an upload in parts
        return Trouble("the server wants lengths that pyarrow does not send: write to it by an s3:// URL", errors.Unsupported, again=False)
    if status in (401, 403) or "Credential" in type(error).__name__:
        return Trouble(f"access is denied ({why})", errors.AccessDenied, again=False, status=status)
    if status == 412:  # s3fs has no better word for it than EINVAL
        return Trouble(CONFLICT, errors.Conflict, again=False, status=status)
    if status in (404, 410):
        return Trouble("there is no such object", errors.NotFound, again=False, status=status)
    return Trouble(why, again=status is None or status in (408, 429) or status >= 500, status=status)


def status_of(error: BaseException | None) -> int | None:
    """Of an HTTP answer, where there was one: as aiohttp and gcsfs tell it, or botocore."""
    told = getattr(error, "response", None)
    if isinstance(told, dict):
        return cast("int | None", told.get("ResponseMetadata", {}).get("HTTPStatusCode"))
    return next((status for name in ("status", "code") if isinstance(status := getattr(error, name, None), int)), None)


def to_wire(error: Trouble | errors.MissingExtra) -> bytes:
    if isinstance(error, Trouble):
        return json.dumps(errors.to_wire(error.error(error.why, status=error.status)) | {"again": error.again}).encode()
    return json.dumps(errors.to_wire(error)).encode()


def from_wire(wire: bytes | bytearray) -> Trouble | errors.MissingExtra:
    """Raises `EOFError` for what `to_wire` did not write."""
    described = json.loads(wire)
    match errors.from_wire(described):
        case errors.MissingExtra() as error:
            return error
        case errors.RemoteError() as error:
            return Trouble(str(error), type(error), again=described["again"], status=error.status)
    raise EOFError(f"the helper process sent {described['kind']!r} where an error of a remote was expected")


class Server:
    """Answers calls, each in a thread of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _clients
        self._clients: dict[bytes, Client] = {}

    def run(self, control: socket.socket, parent: int) -> None:
        """Serves until the other end of ``control`` is closed or the process ``parent`` is gone."""
        poll = select.poll()
        poll.register(control, select.POLLIN)
        try:
            # not PR_SET_PDEATHSIG: that signal comes when the *thread* ends that started us
            poll.register(os.pidfd_open(parent), select.POLLIN)
        except OSError as error:  # gone already, or a kernel without it: then the end of `control` tells
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
        answer = self._call(channel, filesystem, verb, *args)
        while True:
            try:
                kind, payload = next(answer, (END, b""))
            except Exception as error:  # noqa: BLE001 (told to who called, whatever it is)
                kind, payload = ERROR, to_wire(meaning(error, str(args[0])))
            send(channel, kind, payload)
            if kind in (ERROR, END):
                return

    def _client(self, filesystem: bytes) -> Client:
        with self._lock:
            if filesystem not in self._clients:
                self._clients[filesystem] = client_of(*pickle.loads(filesystem))  # from the process that started us
            return self._clients[filesystem]

    def _call(self, channel: socket.socket, filesystem: bytes, verb: str, url: str, *args: Any) -> Iterator[tuple[bytes, Buffer]]:
        client = self._client(filesystem)
        match verb:
            case "stat":
                yield ITEM, json.dumps(dataclasses.astuple(client.stat(url))).encode()
            case "list":
                for info in client.list(url):
                    yield ITEM, json.dumps(dataclasses.astuple(info)).encode()
            case "read":
                for block in client.read(url, Span(*args)):
                    yield from ((DATA, block[at : at + BLOCK]) for at in range(0, len(block), BLOCK))
            case "parallel":
                yield ITEM, json.dumps([client.parallel(url)]).encode()
            case "write":
                path, exclusive, body = args
                client.write(url, path or body, exclusive, lambda done: send(channel, ITEM, json.dumps([done]).encode()))
                yield ITEM, json.dumps(dataclasses.astuple(client.stat(url))).encode()
            case "delete":
                client.delete(url)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # our parent tells us when a call is given up
    Server().run(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
    os._exit(0)  # threads may be deep inside a client; nothing is left to be saved
