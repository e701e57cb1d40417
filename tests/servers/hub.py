"""A hub as Hugging Face's: its API, its files, and the host to which it redirects for large ones. The real client reads from it."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

LARGE = 10_000
"""Bytes from which a file is stored apart from git, and so served by the other host."""


class Asked(NamedTuple):
    """A request. ``host``: ``hub`` or ``cdn``; ``token``: of its Authorization header, "" without one; ``sent``: bytes of the body."""

    host: str
    method: str
    path: str
    token: str
    sent: int


@dataclass
class Repository:
    """``commits``: files of each commit. ``refs``: the commits of branches. ``needs``: a token that may read it; ``gated``: whether what it
    lacks is that its terms were accepted."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    needs: str = ""
    gated: bool = False


@dataclass
class Hub:
    """``url``: the address of the hub, ``cdn``: of the other host. ``page``: how many items a page of a listing has, ``next_on``: where
    the next one lies. ``moved``: the new
    pages of renamed repositories. ``damage``: the other host sends other bytes; ``liar``: the hub answers for another commit."""

    url: str = ""
    cdn: str = ""
    page: int = 1000
    next_on: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    moved: dict[str, str] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    damage: bool = False
    liar: bool = False

    def commit(self, page: str, files: Mapping[str, bytes], branch: str = "main") -> str:
        """Add a commit of these files to a branch of a repository (``owner/name``, or ``datasets/owner/name``); return its hash."""
        repository = self.repositories.setdefault(page, Repository())
        sha = hashlib.sha1(repr((page, branch, sorted(files.items()), len(repository.commits))).encode()).hexdigest()
        repository.commits[sha] = dict(files)
        repository.refs[branch] = sha
        return sha

    def requests(self, host: str = "", method: str = "") -> list[str]:
        """The paths that were asked for, without queries."""
        chosen = (a for a in self.asked if host in ("", a.host) and method in ("", a.method))
        return [unquote(a.path.partition("?")[0]) for a in chosen]

    @property
    def sent(self) -> int:
        """Bytes of files that were sent."""
        return sum(a.sent for a in self.asked if not a.path.startswith("/api/"))


def oid(body: bytes) -> str:
    """The hash of a file in git."""
    return hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub
    host = ""

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._serve()

    def do_GET(self) -> None:
        self._serve()

    def _serve(self) -> None:
        raise NotImplementedError

    def _send(self, status: int, headers: Mapping[str, str], body: bytes = b"") -> None:
        sent = body if self.command != "HEAD" else b""
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        self.hub.asked.append(Asked(self.host, self.command, self.path, token, len(sent)))
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(sent)

    def _send_file(self, body: bytes, headers: Mapping[str, str]) -> None:
        asked = self.headers.get("Range", "")
        if not asked:
            self._send(200, {"Accept-Ranges": "bytes", **headers}, body)
            return
        first, _, last = asked.removeprefix("bytes=").partition("-")
        start, end = int(first), min(int(last or len(body)), len(body) - 1)
        if start >= len(body):
            self._send(416, {"Content-Range": f"bytes */{len(body)}", **headers})
        else:
            self._send(206, {"Content-Range": f"bytes {start}-{end}/{len(body)}", **headers}, body[start : end + 1])


class _OtherHost(_Handler):
    host = "cdn"

    def _serve(self) -> None:
        digest = urlsplit(self.path).path.strip("/")
        bodies = (body for each in self.hub.repositories.values() for files in each.commits.values() for body in files.values())
        body = next((body for body in bodies if hashlib.sha256(body).hexdigest() == digest), None)
        conditions = {"If-Match", "If-Range", "If-None-Match"} & set(self.headers)
        if body is None or "Signature" not in self.path or self.headers.get("Authorization") or conditions:
            self._send(403, {}, b"the signature does not fit")
        else:
            body = bytes(len(body)) if self.hub.damage else body
            self._send_file(body, {"ETag": f'"{hashlib.md5(body).hexdigest()}-1"'})


class _HubHandler(_Handler):
    host = "hub"

    def _serve(self) -> None:
        path = urlsplit(self.path).path
        page = path.removeprefix("/api/models").removeprefix("/api").lstrip("/")
        for old, new in self.hub.moved.items():
            if page.startswith(f"{old}/"):
                self._send(307, {"Location": self.path.replace(old, new, 1)})
                return
        parts = page.split("/")
        many = 3 if parts[0] in ("datasets", "spaces") else 2
        if len(parts) > many and parts[many - 1] in ("revision", "tree", "resolve"):  # one of the first models, which have no owner
            many -= 1
        page, verb, rest = "/".join(parts[:many]), *(parts[many : many + 1] or [""]), parts[many + 1 :]
        repository = self.hub.repositories.get(page)
        if not self._may_read(repository) or repository is None:
            return
        revision = unquote(rest[0]) if rest else "main"
        commit = repository.refs.get(revision, revision)
        if commit not in repository.commits:
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return
        files, name = repository.commits[commit], unquote("/".join(rest[1:]))
        if verb == "resolve":
            self._resolve(commit, files, name)
        elif verb == "tree":
            self._tree(files, name)
        else:
            siblings = [{"rfilename": each} for each in files]
            one = {"id": page, "sha": commit, "siblings": siblings, "private": False, "tags": [], "downloads": 0, "likes": 0}
            self._json(one if "expand=sha" not in self.path else {"id": page, "sha": commit})

    def _may_read(self, repository: Repository | None) -> bool:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if repository is None or (repository.needs and not repository.gated and token != repository.needs):
            known = {each.needs for each in self.hub.repositories.values()} | {""}
            if token in known:
                self._refuse(404 if token else 401, "RepoNotFound", "Repository not found")
            else:
                self._refuse(401, "", "Invalid credentials in Authorization header")
        elif repository.gated and token != repository.needs and "/resolve/" in self.path:  # the API lists gated ones for all
            self._refuse(403 if token else 401, "GatedRepo", "Access to it is restricted")
        else:
            return True
        return False

    def _refuse(self, status: int, code: str, message: str) -> None:
        headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self._send(status, headers, json.dumps({"error": message}).encode())

    def _json(self, value: object, headers: Mapping[str, str] | None = None) -> None:
        self._send(200, {"Content-Type": "application/json", **(headers or {})}, json.dumps(value).encode())

    def _resolve(self, commit: str, files: dict[str, bytes], name: str) -> None:
        body = files.get(name)
        headers = {"X-Repo-Commit": "0" * 40 if self.hub.liar else commit}
        if body is None:
            self._refuse(404, "EntryNotFound", "Entry not found")
        elif len(body) < LARGE:
            self._send_file(body, {**headers, "ETag": f'"{oid(body)}"'})
        else:
            digest = hashlib.sha256(body).hexdigest()
            location = f"{self.hub.cdn}/{digest}?Expires=9&Signature=s&Key-Pair-Id=k"
            linked = {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(body))}
            self._send(302, {**headers, **linked, "Location": location})

    def _tree(self, files: dict[str, bytes], folder: str) -> None:
        above = f"{folder}/" if folder else ""
        names = sorted((name for name in files if name.startswith(above)), key=lambda name: (-len(name), name))  # not in order of name
        if not names:
            self._refuse(404, "EntryNotFound", f"{folder} does not exist on main")
            return
        query = parse_qs(urlsplit(self.path).query)
        start = int(query.get("cursor", ["0"])[0])
        items = [self._item(name, files[name]) for name in names[start : start + self.hub.page]]
        if not start:
            folders = {above + name.removeprefix(above).partition("/")[0] for name in names if "/" in name.removeprefix(above)}
            items = [{"type": "directory", "oid": "0" * 40, "size": 0, "path": each} for each in sorted(folders)] + items
        end = start + self.hub.page
        link = f'<{self.hub.next_on or self.hub.url}{urlsplit(self.path).path}?recursive=True&cursor={end}>; rel="next"'
        self._json(items, {"Link": link} if end < len(names) else {})

    @staticmethod
    def _item(name: str, body: bytes) -> dict[str, object]:
        item: dict[str, object] = {"type": "file", "oid": oid(body), "size": len(body), "path": name}
        if len(body) >= LARGE:
            item["lfs"] = {"oid": hashlib.sha256(body).hexdigest(), "size": len(body), "pointerSize": 133}
            item["oid"] = "1" * 40  # that of the text that stands for it in git
        return item


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # the client had enough
            super().handle_error(request, client_address)  # type: ignore[arg-type]


@contextmanager
def hub() -> Iterator[Hub]:
    """A running hub, without a repository."""
    made = Hub()
    servers = []
    for kind in (_HubHandler, _OtherHost):
        server = _Server(("127.0.0.1", 0), type(kind.__name__, (kind,), {"hub": made}))
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True, name="hub").start()
    made.url, made.cdn = (f"http://127.0.0.1:{server.server_address[1]}" for server in servers)
    try:
        yield made
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
