"""``hf://[datasets/|spaces/]owner/name[@revision]/path``: files of the Hugging Face Hub, by the data plane of `forebay.remote.http`.

A revision is resolved to its commit by one request to the hub's API, and all other requests name the commit: bytes of two commits never
mix, and the version of a file whose URL names a commit is never asked for again. Bytes come from wherever the hub redirects to; the token
goes to the hub alone.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any
from urllib.parse import urljoin, urlsplit

from forebay import errors
from forebay._model import Content, ObjectInfo, Remote, Sink, Span, Started, Transfer
from forebay.remote.base import Call, RemoteOptions, max_age_here, shared_time_limit
from forebay.remote.http import HttpRemote, SmallResponse, changed
from forebay.remote.http.requests import MAX_SIZE, REDIRECTS, endpoint_of, is_same_validator
from forebay.remote.http.transfers import with_header
from forebay.remote.hub.names import KINDS, HubName, token_from
from forebay.remote.urls import PUBLIC_HUB, canonical, hub_endpoint, scheme

PATH = ":path"
"""Name under which the path of a request to the hub's API stands among its headers until it is sent."""
LONGEST_AGE = 60.0
"""Maximum seconds for which a process uses the commit of a branch without asking the hub again."""
MAX_KNOWN = 50_000
MAX_PAGES = 10_000
MAX_HOPS = 5

_CONDITIONS = frozenset({"if-match", "if-none-match", "if-range", "if-modified-since"})
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_NEXT = re.compile(r'<([^<>]+)>\s*;\s*rel="?next"?')
_LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"

_turns: dict[tuple[str, str, str, str], threading.Lock] = {}  # held while a revision is asked for: other threads wait for the answer

os.register_at_fork(after_in_child=_turns.clear)


class HubRemote:
    """A `Remote` for the Hugging Face Hub, and for what answers as it does (``HF_ENDPOINT``). Callable from any thread and after a fork.

    The token is that of the options, else that of the logged-in user, unless ``options.anonymous``; it is read again for each request.
    ``endpoint``: the address of the hub, "" for the public hub; None: the one that the environment names now."""

    def __init__(self, options: RemoteOptions | None = None, endpoint: str | None = None) -> None:
        self.options = options or RemoteOptions()
        self._endpoint = hub_endpoint() if endpoint is None else endpoint or PUBLIC_HUB
        self._http = HttpRemote(self.options, self._sign, self._explain, self._amend)
        self._commits: dict[tuple[str, str, str], tuple[str, float]] = {}
        """Revision -> commit, and when the hub was asked for it, by the monotonic clock."""
        self._known: dict[str, ObjectInfo] = {}  # by URL with a commit: such a file never changes

    # -- objects -----------------------------------------------------------------------------------------------------

    def stat(self, url: str, *, known: str | None = None) -> ObjectInfo | None:
        """See `Remote.stat`. Sends no request for a ``known`` file whose URL names a commit."""
        if known is not None and _file_of(url).is_pinned:
            return None
        with Call(url, self.options if known is None else self.options.for_check()) as call:
            call.is_optional = known is not None
            info = self._described(url, call)
        return None if known is not None and is_same_validator(info.validator, known) else info._replace(url=url)

    def fetch(self, url: str, sink: Sink, *, listed: ObjectInfo | None = None) -> Transfer:
        """See `Remote.fetch`."""
        with shared_time_limit():
            with Call(url, self.options) as call:
                info = self._described(url, call)
            transfer = self._http.fetch(info.url, sink, describe=partial(_as_described, info._replace(url=url)))
        transfer.requests += call.transfer.requests
        return transfer

    def start(self, url: str, on_ready: Callable[[], None]) -> Started | None:
        """See `StartingRemote.start`."""
        name = _file_of(url)
        commit = name.revision if name.is_pinned else self._fresh_commit(name)
        info = self._known.get(name.at(commit).url) if commit is not None else None
        return None if info is None else self._http.start(info.url, on_ready, partial(_as_described, info._replace(url=url)))

    def read(
        self, url: str, span: Span, *, validator: str | None = None, info: ObjectInfo | None = None, exact: bool = False
    ) -> bytes:  # fmt: skip
        """See `Remote.read`."""
        expected = validator if info is None else info.validator
        with shared_time_limit():
            with Call(url, self.options) as call:
                current = self._described(url, call)
            if expected is not None and not is_same_validator(current.validator, expected):
                raise changed(canonical(url))
            return self._http.read(current.url, span, info=current, exact=exact)

    def list(self, url: str) -> Iterator[ObjectInfo]:
        """See `Remote.list`. All pages are requested before the first object is returned, since the hub has another order."""
        name = HubName.of(url)
        with Call(url, self.options) as call:
            pinned = name.at(self._commit(name, url, call))
        head = url[: len(url) - len(name.path)]
        head += "" if head.endswith("/") else "/"
        found: list[tuple[str, ObjectInfo]] = []
        for item in self._tree(pinned, url):
            path, info = _listed(pinned, url, item)
            if info is not None and path.startswith(name.path):
                self._remember(info)
                found.append((path, info._replace(url=head + path)))
        found.sort(key=lambda each: each[0])
        return (info for _, info in found)

    def write(
        self, url: str, source: Content, *, if_none_match: str | None = None, if_match: str | None = None,
        on_sent: Callable[[int], None] | None = None, resume: bool = False,
    ) -> ObjectInfo:  # fmt: skip
        """See `Remote.write`. Each write is a commit, made by huggingface_hub through fsspec."""
        self._writer.write(url, source, if_none_match=if_none_match, if_match=if_match, on_sent=on_sent, resume=resume)
        self._commits.clear()
        with Call(url, self.options) as call:
            return self._described(url, call)._replace(url=url)

    def delete(self, url: str) -> None:
        """See `Remote.delete`."""
        self._writer.delete(url)
        self._commits.clear()

    @property
    def _writer(self) -> Remote:
        from forebay.remote.filesystems import FilesystemRemote

        return FilesystemRemote(None, self.options, storage_options={"token": self._token() or False, "endpoint": self._endpoint})

    # -- revisions and descriptions ----------------------------------------------------------------------------------

    def _fresh_commit(self, name: HubName) -> str | None:
        """The commit of a revision, if the hub was asked recently enough."""
        commit, at = self._commits.get((name.kind, name.repo, name.revision), (None, 0.0))
        return commit if time.monotonic() - at <= min(max_age_here(), LONGEST_AGE) else None

    def _commit(self, name: HubName, url: str, call: Call) -> str:
        if name.is_pinned:
            return name.revision
        key = name.kind, name.repo, name.revision
        with _turns.setdefault((self._endpoint, *key), threading.Lock()):
            commit = self._fresh_commit(name)
            if commit is None:
                at = time.monotonic()
                answer = _json_in(url, self._http.request("GET", url, {PATH: name.commit_query}, call=call))
                commit = answer.get("sha") if isinstance(answer, dict) else None
                if not (isinstance(commit, str) and name.at(commit).is_pinned):
                    raise _invalid(url, "a commit")
                self._commits[key] = commit, at
        return commit

    def _described(self, url: str, call: Call) -> ObjectInfo:
        """The object as the hub describes it, under its URL with a commit: the headers of the hub's own answer say what the file is, those
        of the host to which it redirects need not."""
        name = _file_of(url)
        name = name.at(self._commit(name, url, call))
        if (known := self._known.get(name.url)) is not None:
            return known
        path = name.file
        for _ in range(MAX_HOPS):
            response = self._http.request("HEAD", name.url, {PATH: path}, ok=(200, *REDIRECTS), call=call)
            headers, target = response.headers, urljoin(f"{self._endpoint}/{path}", response.headers.get("Location", ""))
            if response.status == 200 or "X-Linked-Etag" in headers or not _is_on(target, self._endpoint):
                info = _info_of(name, headers, is_whole=response.status == 200)
                self._remember(info)
                return info
            path = target  # a repository that was renamed
        raise errors.RemoteProtocolError(f"{name.url}: redirected more than {MAX_HOPS} times", url=name.url)

    def _remember(self, info: ObjectInfo) -> None:
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        self._known[info.url] = info

    def _tree(self, name: HubName, url: str) -> Iterator[Any]:
        """The items of all pages of a listing; none where there is no such folder."""
        path, seen = name.tree_query(name.path.rpartition("/")[0]), set[str]()
        while path and path not in seen and len(seen) < MAX_PAGES:
            seen.add(path)
            try:
                response = self._http.request("GET", url, {PATH: path})
            except errors.NotFound as error:
                if getattr(error, "code", "") == "EntryNotFound":
                    return
                raise
            items = _json_in(url, response)
            if not isinstance(items, list):
                raise _invalid(url, "a listing")
            yield from items
            link = _NEXT.search(response.headers.get("Link", ""))
            path = urljoin(f"{self._endpoint}/", link[1]) if link else ""
            if path and not _is_on(path, self._endpoint):  # it would get the user's headers
                raise errors.RemoteProtocolError(f"{canonical(url)}: its listing continues on another host", url=canonical(url))
        if path:
            raise errors.RemoteProtocolError(f"{canonical(url)}: its listing repeats itself and never ends", url=canonical(url))

    # -- what makes the hub of HTTP ------------------------------------------------------------------------------------

    def _sign(self, method: str, url: str, headers: Mapping[str, str]) -> tuple[str, Mapping[str, str]]:
        """The HTTP URL and the headers of a request for ``url``: an ``hf://`` URL, or one that the hub redirects to. A file of a commit
        has one version, and the ETags of other hosts are not the hub's: so there are no conditions."""
        endpoint = self._endpoint
        own = {name: value for name, value in headers.items() if name.lower() not in _CONDITIONS}
        path = own.pop(PATH, None)
        if scheme(url) == "hf":
            url = urljoin(f"{endpoint}/", HubName.of(url).file) if path is None else urljoin(f"{endpoint}/", path)
        token = self._token() if _is_on(url, endpoint) else None
        return url, own | {"Authorization": f"Bearer {token}"} if token else own

    def _token(self) -> str | None:
        if self.options.anonymous or any(name.lower() == "authorization" for name in self.options.headers):
            return None
        return self.options.token or token_from()

    def _amend(self, url: str, headers: Mapping[str, str]) -> Mapping[str, str]:
        """Replace the ETag of another host by the one that the hub has for a file."""
        info = self._known.get(url)
        if info is None or info.validator is None:
            return headers
        return with_header(headers, "ETag", info.validator)

    def _explain(self, url: str, status: int, headers: Mapping[str, str], body: bytes) -> Exception | None:
        """The error that a refusal of the hub means; None for one of another host."""
        code, text = headers.get("X-Error-Code", ""), headers.get("X-Error-Message", "")
        name, shown = HubName.of(url), canonical(url)
        facts: dict[str, Any] = {"url": shown, "status": status, "code": code}
        page = f"{self._endpoint}/{name.page}"
        what = f"{KINDS.get(name.kind, 'model')} {name.repo}"
        if code == "GatedRepo":
            whose = "the user of this token" if self._token() else "nobody"
            todo = f"accept the terms at {page}, then {_LOG_IN}"
            return errors.AccessDenied(f"{shown}: the {what} is gated, and {whose} has access: {todo}", **facts)
        if code == "RevisionNotFound":
            return errors.NotFound(f"{shown}: the {what} has no revision {name.revision!r}: see {page}/tree/main", **facts)
        if code == "EntryNotFound":
            return errors.NotFound(f"{shown}: the {what} has no such file at {name.revision!r}", **facts)
        if status == 401 and "invalid credentials" in text.lower():
            return errors.AccessDenied(f"{shown}: the hub does not know this token: {_LOG_IN}", **facts)
        if code == "RepoNotFound" or (status == 401 and not code):
            todo = "this token may not see it" if self._token() else f"it is private: {_LOG_IN}"
            return errors.NotFound(f"{shown}: the hub has no {what}, or {todo}", **facts)
        if status == 403 and text:
            return errors.AccessDenied(f"{shown}: the hub denies access to the {what}: check what this token may read", **facts)
        return None


# -- answers of the hub ------------------------------------------------------------------------------------------------


def _file_of(url: str) -> HubName:
    """Raises `ConfigError` if the URL names no file."""
    name = HubName.of(url)
    if not name.path:
        raise errors.ConfigError(f"{canonical(url)} names no file: write hf://owner/name/path, or use Cache.directory")
    return name


def _as_described(by_hub: ObjectInfo, info: ObjectInfo) -> ObjectInfo:
    """The hub's description of an object that comes as ``info``. Raises `RemoteProtocolError` for another size."""
    if None not in (info.size, by_hub.size) and info.size != by_hub.size:
        url = canonical(by_hub.url)
        raise errors.RemoteProtocolError(f"{url}: {info.size:,} bytes come where the hub says {by_hub.size:,}", url=url)
    return by_hub._replace(size=info.size)


def _is_on(url: str, endpoint: str) -> bool:
    """Whether a URL is of this scheme, host and port."""
    try:
        one, other = (endpoint_of(*urlsplit(each)[:2]) for each in (url, endpoint))
    except ValueError:
        return False
    return one == other


def _info_of(name: HubName, headers: Mapping[str, str], *, is_whole: bool) -> ObjectInfo:
    """A file as the headers of the hub describe it. Raises `RemoteProtocolError` for another commit, or an invalid size."""
    commit = headers.get("X-Repo-Commit", name.revision)
    if commit != name.revision:
        raise errors.RemoteProtocolError(f"{name.url}: the hub answers for commit {commit[:40]!r}", url=name.url)
    tag = headers.get("X-Linked-Etag") or headers.get("ETag", "")
    size = headers.get("X-Linked-Size") or (headers.get("Content-Length") if is_whole else None)
    if size is not None and not (size.isdecimal() and int(size) <= MAX_SIZE):
        raise _invalid(name.url, "a size")
    return _info(name, None if size is None else int(size), tag.removeprefix("W/").strip('"'))


def _info(name: HubName, size: int | None, tag: str) -> ObjectInfo:
    """``tag``: of a large file its SHA-256, of any other one the hash that git has for it."""
    validator = f'"{tag}"' if tag else None
    return ObjectInfo(name.url, size, validator, strong=bool(tag), sha256=tag if _SHA256.match(tag) else None)


def _listed(name: HubName, url: str, item: Any) -> tuple[str, ObjectInfo | None]:
    """The path of an item of a listing, and its description: None for a folder. Raises `RemoteProtocolError`."""
    kind, path, size, oid = (item.get(each) if isinstance(item, dict) else None for each in ("type", "path", "size", "oid"))
    large = item.get("lfs") if isinstance(item, dict) else None
    if isinstance(large, dict):
        size, oid = large.get("size"), large.get("oid")
    if kind == "directory" and isinstance(path, str):
        return path, None
    if not (isinstance(path, str) and path and isinstance(oid, str) and type(size) is int and 0 <= size <= MAX_SIZE):
        raise _invalid(url, "an item of a listing")
    return path, _info(name._replace(path=path), size, oid.removeprefix("sha256:"))


def _json_in(url: str, response: SmallResponse) -> Any:
    try:
        return json.loads(response.body)
    except (ValueError, RecursionError) as error:
        raise _invalid(url, "JSON") from error


def _invalid(url: str, what: str) -> errors.RemoteProtocolError:
    shown = canonical(url)
    return errors.RemoteProtocolError(f"{shown}: the hub's answer is not {what}: check HF_ENDPOINT", url=shown)
