"""The cookies of one call: those that a login sets open what it redirects to. They end with the call."""

from __future__ import annotations

import re
import threading
import urllib.request
from collections.abc import Mapping, Sequence
from email.message import Message
from http.cookiejar import CookieJar, DefaultCookiePolicy

MAX_COOKIES, MAX_COOKIE = 50, 4 << 10  # as browsers keep for a host; characters of one
_SENDABLE = re.compile(r"[\t\x20-\x7e\xa0-\xff]*")


class _Answer:
    def __init__(self, lines: Sequence[str]) -> None:
        self._message = Message()
        for line in lines:
            self._message["Set-Cookie"] = line

    def info(self) -> Message:
        return self._message


class Cookies:
    """As browsers keep them: each for its host or domain, its path, and its lifetime. Callable from any thread."""

    def __init__(self) -> None:
        self._policy = DefaultCookiePolicy(strict_domain=True)
        self._jar = CookieJar(self._policy)
        self._lock = threading.Lock()  # the jar's own does not cover `make_cookies`, which removes what has expired

    def keep(self, url: str, lines: Sequence[str]) -> None:
        """Keep what a response to ``url`` (without a user) sets by these values of ``Set-Cookie``. What came encrypted is never sent in
        clear, whatever the server says."""
        lines = [line for line in lines if len(line) <= MAX_COOKIE and _SENDABLE.fullmatch(line)]
        request = urllib.request.Request(url)
        with self._lock:
            for cookie in self._jar.make_cookies(_Answer(lines), request):  # type: ignore[arg-type]
                if self._policy.set_ok(cookie, request) and len(self._jar) < MAX_COOKIES:
                    cookie.secure = cookie.secure or url.startswith("https:")
                    self._jar.set_cookie(cookie)

    def added_to(self, headers: Mapping[str, str], url: str) -> Mapping[str, str]:
        """The headers of a request for ``url`` with its cookies, which replace the user's own of the same name."""
        request = urllib.request.Request(url)
        with self._lock:
            self._jar.add_cookie_header(request)
        kept = request.get_header("Cookie")
        if not kept:
            return headers
        name = next((each for each in headers if each.lower() == "cookie"), "Cookie")
        pairs = [pair.strip() for pair in headers.get(name, "").split(";") if pair.strip()]
        names = {pair.partition("=")[0].strip() for pair in kept.split(";")}
        return {**headers, name: "; ".join([*(pair for pair in pairs if pair.partition("=")[0].strip() not in names), kept])}
