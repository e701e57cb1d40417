"""Question and answer: credentials, signatures, redirects, and what a status means."""

from __future__ import annotations

import netrc
import os
import re
from collections.abc import Callable, Container, Mapping
from typing import TypeAlias
from urllib.parse import unquote, urljoin, urlsplit

from forebay import errors
from forebay._logs import escaped, logger
from forebay.remote.base import Call, RemoteOptions, Trouble
from forebay.remote.http.answers import Answer, retry_after
from forebay.remote.http.connections import PORTS, Connections, Endpoint, basic

log = logger("forebay.remote")

Sign: TypeAlias = Callable[[str, str, Mapping[str, str]], tuple[str, Mapping[str, str]]]
"""(method, URL, headers) -> where to send it and with which headers. Called for every request, and for where a redirect leads;
may turn a URL of another scheme into an HTTP one."""

Judge: TypeAlias = Callable[[str, int, Mapping[str, str], bytes], Exception | None]
"""(URL, status, headers, beginning of the body) of a refusal -> the error to raise (`Trouble`: try again); None: as HTTP has it."""

OWN = {"User-Agent": "forebay", "Accept-Encoding": "identity"}
REDIRECTS = frozenset({301, 302, 303, 307, 308})
MAX_HOPS = 10
_URL = re.compile(r"(\w+)://([^/?#]*)([^#]*)")
TRY_AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504, 507, 509, 520, 521, 522, 523, 524, 529})


class Exchange:
    """Sends requests over kept connections. Any thread; usable after a fork."""

    def __init__(self, options: RemoteOptions, sign: Sign | None = None, judge: Judge | None = None, *, raw: bool = False) -> None:
        self.options = options
        self.pool = Connections(options)
        self._sign, self._judge, self._raw = sign, judge, raw
        self._known: dict[tuple[Endpoint, str, bool, bool], dict[str, str]] = {}

    def ask(
        self, call: Call, method: str, url: str, headers: Mapping[str, str], *, ok: Container[int] = (200,), body: bytes | None = None
    ) -> Answer:
        """The answer, if its status is in ``ok``. Follows redirects; takes the user's credentials to no other scheme, host or port.
        Raises `RemoteError`, or `Trouble` where another attempt may go well."""
        moved = call.moved.get(url) if method == "GET" else None
        if moved is not None:
            try:
                return self._follow(call, method, url, moved, headers, ok, body)
            except (errors.AccessDenied, errors.NotFound):  # such as a signature that is too old by now
                call.moved.pop(url, None)
        return self._follow(call, method, url, url, headers, ok, body)

    def _follow(
        self, call: Call, method: str, url: str, target: str, headers: Mapping[str, str], ok: Container[int], body: bytes | None
    ) -> Answer:
        """Ask ``target``, on behalf of ``url``, and wherever that redirects to."""
        home, own = None, ""
        for hop in range(MAX_HOPS):
            where, signed = (target, headers) if self._sign is None else self._sign(method, target, headers)
            place, user, name = _split(call, where)
            if home is None:
                home, own, _ = (place, user, "") if self._sign or target is url else _split(call, url)
            at_home = place == home  # the same scheme, host and port
            standing = self._standing(place, user or (own if at_home else ""), home)
            answer = self._send(call, method, place, name, {**standing, **signed}, body)
            if answer.status in ok:
                if hop and self._sign is None:
                    call.moved[url] = where
                return answer
            with answer:
                if answer.status not in REDIRECTS or "Location" not in answer.headers:
                    raise self._refusal(call, url, answer)
                answer.drain()
            target = _joined(call, where, answer.headers["Location"])
            if answer.status == 303 and method != "HEAD":
                method, body = "GET", None
        raise errors.RemoteProtocolError(f"{call.url}: redirected more than {MAX_HOPS} times", url=call.url)

    def _send(self, call: Call, method: str, place: Endpoint, target: str, headers: Mapping[str, str], body: bytes | None) -> Answer:
        if place.scheme == "http" and self.pool.proxy(place) is not None:
            target = f"http://{place.name}{target}"
        call.count(requests=1)
        return Answer(self.pool.ask(call, place, method, target, headers, body), self.pool, call, raw=self._raw)

    def _standing(self, place: Endpoint, user: str, home: Endpoint) -> dict[str, str]:
        """What goes with every request: our headers and the user's; to another place than the first only what netrc has for that one."""
        may = place == home or _may_have_its_own(place, home)
        key = (place, user, place == home, may)
        found = self._known.get(key)
        if found is None:
            if len(self._known) > 1000:
                self._known.clear()
            found = self._known[key] = self._find_standing(place, user, place == home, may)
        return found

    def _find_standing(self, place: Endpoint, user: str, at_home: bool, may: bool) -> dict[str, str]:
        mine = dict(self.options.headers) if at_home else {}
        names = {name.lower() for name in mine}
        own = OWN if self._sign else {"Host": place.told, **OWN}  # the host is a part of what is signed
        found = {name: value for name, value in own.items() if name.lower() not in names}
        if self._sign is None and "authorization" not in names:
            found |= self._credentials(place, user, at_home, may)
        return found | mine

    def _credentials(self, place: Endpoint, user: str, at_home: bool, may: bool) -> dict[str, str]:
        if at_home and self.options.token:
            return {"Authorization": f"Bearer {self.options.token}"}
        if user:
            name, _, password = user.partition(":")
            return {"Authorization": basic(unquote(name), unquote(password))}
        known = _netrc(place.host) if self.options.netrc and may else None
        return {"Authorization": basic(*known)} if known else {}

    def _refusal(self, call: Call, url: str, answer: Answer) -> Exception:
        body = answer.drain()
        if answer.status == 401:
            self._known.clear()  # by the next call the user may have written a netrc
        judged = self._judge(url, answer.status, answer.headers, body) if self._judge else None
        return judged or meaning(call.url, answer.status, answer.reason, answer.headers)


def meaning(url: str, status: int, reason: str, headers: Mapping[str, str]) -> Exception:
    """What a refusing status means. ``url``: without secrets."""
    said = f"the remote answers {status} {escaped(reason[:100])}".rstrip()
    if status in TRY_AGAIN:
        return Trouble(said, retry_after=retry_after(headers), status=status)
    if status in (401, 403):
        todo = "give credentials (netrc, token, headers)" if status == 401 else "check that these credentials may read it"
        return errors.AccessDenied(f"{url}: {said}: {todo}", url=url, status=status)
    if status in (404, 410):
        return errors.NotFound(f"{url}: {said}", url=url, status=status)
    if status < 400 or status in (412, 416):
        return errors.RemoteProtocolError(f"{url}: {said}, which does not fit the question", url=url, status=status)
    return errors.RemoteError(f"{url}: {said}", url=url, status=status)


def _may_have_its_own(place: Endpoint, home: Endpoint) -> bool:
    """Whether a place that a redirect leads to may be told what netrc has for its host. netrc names hosts only: so not another port or
    scheme of the host that was asked, and nothing goes in clear that a request in clear did not lead to."""
    usual = place.port in (home.port, PORTS[place.scheme])
    return place.host != home.host and usual and (place.scheme == "https" or home.scheme == "http")


def _split(call: Call, url: str) -> tuple[Endpoint, str, str]:
    """(whom to ask, user info, for what)"""
    found = _URL.match(url)
    try:
        scheme, netloc, target = found.groups() if found else ("", "", "")
        place = Endpoint.of(scheme.lower(), netloc)
    except ValueError:  # its text may hold what stands in the URL
        raise errors.ConfigError(f"{call.url} names no host: https://host/path is wanted", url=call.url) from None
    return place, netloc.rpartition("@")[0], target if target.startswith("/") else f"/{target}"


def _joined(call: Call, url: str, location: str) -> str:
    try:
        found = urljoin(url, location)
        Endpoint.of(*urlsplit(found)[:2])
    except ValueError:
        raise errors.RemoteProtocolError(f"{call.url} redirects to what is no HTTP URL", url=call.url) from None
    return found


def _netrc(host: str) -> tuple[str, str] | None:
    path = os.environ.get("NETRC") or os.path.expanduser("~/.netrc")
    try:
        found = netrc.netrc(path).authenticators(host)
    except FileNotFoundError:
        return None
    except (OSError, netrc.NetrcParseError, UnicodeDecodeError) as error:  # the text of a parse error may hold a password
        log.warning("%s cannot be used: %s", path, type(error).__name__)
        return None
    return (found[0], found[2] or "") if found and found[0] else None
