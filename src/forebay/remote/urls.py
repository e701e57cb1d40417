"""What a URL says: the key it is kept under, the suffix of its file, the local path it means. Nothing here asks the network."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from typing import NamedTuple, Self
from urllib.parse import quote, unquote_to_bytes

from forebay.errors import ConfigError

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_CHAIN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*::.*://")
_SUFFIX = re.compile(r"\.[A-Za-z0-9]{1,15}\Z")
_HASHED = re.compile(r"q=[0-9a-f]{32}\Z")
_HASHED_USER = re.compile(r"u=[0-9a-f]{32}\Z")
_COMPRESSED = {".gz", ".bz2", ".xz", ".zst", ".lz4", ".br", ".z"}
_PORTS = {"http": ":80", "https": ":443"}
_KNOWN = {*_PORTS, "s3"}


class _Signature(NamedTuple):
    """A way to sign HTTP URLs: names of parameters that are all there, of which one is, and that may be there. Other values of them name
    the same object. Only a whole set is one: ``sig`` alone means whatever a server likes."""

    all_of: frozenset[str]
    one_of: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()

    @classmethod
    def of(cls, all_of: str, one_of: str = "", optional: str = "") -> Self:
        return cls(frozenset(all_of.split()), frozenset(one_of.split()), frozenset(optional.split()))

    def taken(self, pairs: Sequence[tuple[str, str]]) -> frozenset[str]:
        """The names of the parameters that sign: none unless the set is whole, with each parameter once and none empty."""
        every = self.all_of | self.one_of | self.optional
        mine = [(name, value) for name, value in pairs if name in every]
        names = frozenset(name for name, _ in mine)
        whole = self.all_of <= names and (not self.one_of or not self.one_of.isdisjoint(names))
        return names if whole and len(names) == len(mine) and all(value for _, value in mine) else frozenset()


_AMZ = "X-Amz-Algorithm X-Amz-Credential X-Amz-Date X-Amz-Expires X-Amz-SignedHeaders X-Amz-Signature"
_SAS_MAY = "st spr sip sdd ses saoid suoid scid skoid sktid skt ske sks skv"
_SIGNATURES = (
    _Signature.of(_AMZ, optional="X-Amz-Security-Token X-Amz-Content-Sha256 X-Amz-S3session-Token"),
    _Signature.of(_AMZ.replace("Amz", "Goog")),
    _Signature.of("AWSAccessKeyId Signature Expires", optional="x-amz-security-token"),
    _Signature.of("GoogleAccessId Signature Expires"),
    _Signature.of("Signature Key-Pair-Id", one_of="Expires Policy", optional="Hash-Algorithm"),  # CloudFront, and so Hugging Face
    _Signature.of("sv sr sp se sig", optional=_SAS_MAY),  # Azure: of one service
    _Signature.of("sv sr si sig", optional=f"sp se {_SAS_MAY}"),  # of a stored policy
    _Signature.of("sv ss srt sp se sig", optional=_SAS_MAY),  # of an account
)


def scheme(url: str) -> str:
    """The scheme in lower case; ``file`` for a path. Raises `ConfigError` for a chain of fsspec's, such as ``simplecache::s3://b/a``."""
    found = _SCHEME.match(url)
    if found is None and _CHAIN.match(url):
        outer, inner = url.partition("::")[0], canonical(url.rpartition("::")[2])
        raise ConfigError(f"{inner} is wanted, without the {outer}:: before it: the cache is this one", url=inner)
    return found[1].lower() if found else "file"


def is_url(text: str) -> bool:
    """Whether it begins with a scheme."""
    return _SCHEME.match(text) is not None


def canonical(url: str | os.PathLike[str]) -> str:
    """The key of a URL: the same for all spellings of one object, and free of secrets. ``canonical(canonical(u)) == canonical(u)``.

    Scheme and host in lower case; default port, fragment and whole sets of signature parameters dropped; user info, and any other query,
    replaced by its hash; all other bytes as they are. A path becomes an absolute ``file://`` URL. In schemes other than HTTP, ``#``,
    whatever stands in the query, and the case of what stands for the host may tell objects apart, and stay. Raises `ConfigError`."""
    text = os.fspath(url)
    if not text.isascii():
        _check_text(text)
    path = local_path(text)
    if path is not None:
        return "file://" + quote(os.fsencode(path))
    kind = scheme(text)
    if "::" in text and kind not in _KNOWN:  # a chain of fsspec's: `zip://a.csv::s3://bucket/a.zip`
        first, *links = text.split("::")
        return "::".join([_one(kind, first), *(canonical(link) if _SCHEME.match(link) else link for link in links)])
    return _one(kind, text)


def _one(kind: str, text: str) -> str:
    rest = text[len(kind) + 3 :]
    if kind in _PORTS:
        rest = rest.partition("#")[0]
    rest, _, query = rest.partition("?")
    host, slash, name = rest.partition("/")
    return f"{kind}://{_host(kind, host)}{slash}{name}{_query(kind, query)}"


def _check_text(text: str) -> None:
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        shown = text.encode("utf-8", "backslashreplace").decode()
        raise ConfigError(f"{shown.partition('?')[0]} is no URL and no path: it holds half a character, at {error.start}") from None


def _host(kind: str, host: str) -> str:
    user, at, host = host.rpartition("@")
    if kind in _PORTS:
        host = host.lower().removesuffix(_PORTS[kind])
    if not user:
        return host if kind in _KNOWN else f"{at}{host}"
    if kind in _KNOWN:  # who asks may be given other bytes; a token may stand in the place of the user
        return f"{user if _HASHED_USER.match(user) else f'u={hashed(user)}'}@{host}"
    # `abfs://container@account` and `github://org:repo@sha` say there which object is meant; a password may be there too
    return f"{hashed(user) if ':' in user else user}@{host}"


def _query(kind: str, query: str) -> str:
    if _HASHED.match(query):
        return f"?{query}"
    pairs = query.split("&")
    if kind in _PORTS:  # what else has a query has no signatures in it
        named = [(name, value) for name, _, value in (pair.partition("=") for pair in pairs)]
        drop = frozenset[str]().union(*(signature.taken(named) for signature in _SIGNATURES))
        pairs = [pair for pair, (name, _) in zip(pairs, named, strict=True) if name not in drop]
    rest = "&".join(pairs)
    return f"?q={hashed(rest)}" if rest else ""


def hashed(secret: str | bytes) -> str:
    """What stands for a secret in a key: nobody can turn it around."""
    data = secret.encode("utf-8", "surrogateescape") if isinstance(secret, str) else secret
    return hashlib.blake2s(data, digest_size=16).hexdigest()


def key_on(kind: str, path: str, identity: str) -> str:
    """The key of a path on a filesystem object. ``kind``: the scheme of its URLs; ``identity``: what tells it from others."""
    if _SCHEME.match(path) and scheme(path) in _PORTS:
        path = canonical(path)  # the others have no secrets in their paths
    return f"{kind}://{(path.partition('://')[2] or path).lstrip('/')}#{identity}"


def suffix(url: str | os.PathLike[str]) -> str:
    """The last suffix of the object's name, with the one before where the last says how it is compressed; "" if there is none
    that suits a file name. At most 16 of ``[A-Za-z0-9.]``."""
    return suffix_of_key(canonical(url))


def suffix_of_key(key: str) -> str:
    """`suffix` of what `canonical` gave."""
    name = key.partition("?")[0].partition("://")[2].partition("/")[2].rpartition("/")[2]
    stem, last = _cut(name)
    if last.lower() not in _COMPRESSED:
        return last
    both = _cut(stem)[1] + last
    return both if len(both) <= 16 else last


def _cut(name: str) -> tuple[str, str]:
    found = _SUFFIX.search(name)
    return (name[: found.start()], found[0]) if found and found.start() else (name, "")


def local_path(url: str | os.PathLike[str]) -> str | None:
    """The absolute path that a path or a ``file://`` URL means; None for anything else. Raises `ConfigError` for another host's."""
    text = os.fspath(url)
    if scheme(text) != "file":
        return None
    if not _SCHEME.match(text):
        return os.path.abspath(text)
    host, _, path = text[len("file://") :].partition("/")
    if host.lower() not in ("", "localhost"):
        shown = f"file://{host.rpartition('@')[2]}/{path}"  # a password may stand before the host
        raise ConfigError(f"{shown!r} names a file of another host: only local files can be opened; write file:///path", url=shown)
    return os.path.abspath(b"/" + unquote_to_bytes(path)).decode("utf-8", "surrogateescape")
