"""What a URL says: the key it is kept under, the suffix of its file, the local path it means. Nothing here asks the network."""

from __future__ import annotations

import os
import re
from urllib.parse import quote, unquote_to_bytes

import xxhash

from forebay.errors import ConfigError

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_CHAIN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*::.*://")
_SUFFIX = re.compile(r"\.[A-Za-z0-9]{1,15}\Z")
_HASHED = re.compile(r"q=[0-9a-f]{32}\Z")
_COMPRESSED = {".gz", ".bz2", ".xz", ".zst", ".lz4", ".br", ".z"}
_PORTS = {"http": ":80", "https": ":443"}

# Parameters that sign a URL: other values of them name the same object.
_SIGNING = ("x-amz-", "x-goog-")
_KEYED = {"awsaccesskeyid", "googleaccessid", "key-pair-id", "signature"}
_WITH_KEY = _KEYED | {"expires", "policy"}
_AZURE = {"sv", "sig", "se", "st", "sr", "sp", "spr", "sip", "si", "ss", "srt", "sdd", "ses", "saoid", "suoid", "scid"}
_AZURE |= {"skoid", "sktid", "skt", "ske", "sks", "skv"}


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

    Scheme and host in lower case; default port, fragment, user info and signatures dropped; any other query replaced by its
    hash; all other bytes as they are. A path becomes an absolute ``file://`` URL. In schemes other than HTTP, ``#`` and the
    case of what stands for the host may tell objects apart, and stay."""
    text = os.fspath(url)
    path = local_path(text)
    if path is not None:
        return "file://" + quote(os.fsencode(path))
    kind = scheme(text)
    rest = text[len(kind) + 3 :]
    if kind in _PORTS:
        rest = rest.partition("#")[0]
    rest, _, query = rest.partition("?")
    host, slash, name = rest.partition("/")
    return f"{kind}://{_host(kind, host)}{slash}{name}{_query(query)}"


def _host(kind: str, host: str) -> str:
    user, at, host = host.rpartition("@")
    if kind in _PORTS:
        return host.lower().removesuffix(_PORTS[kind])
    if kind == "s3" or not at:
        return host
    # `abfs://container@account` and `github://org:repo@sha` say there which object is meant; a password may be there too
    return f"{_hash(user) if ':' in user else user}@{host}"


def _query(query: str) -> str:
    if _HASHED.match(query):
        return f"?{query}"
    pairs = [pair for pair in query.split("&") if pair]
    names = {_name(pair) for pair in pairs}
    drop: set[str] = set()
    if names & _KEYED:
        drop |= _WITH_KEY
    if "sig" in names:
        drop |= _AZURE
    kept = [pair for pair in pairs if not _name(pair).startswith(_SIGNING) and _name(pair) not in drop]
    return f"?q={_hash('&'.join(kept))}" if kept else ""


def _name(pair: str) -> str:
    return pair.partition("=")[0].lower()


def _hash(text: str) -> str:
    return xxhash.xxh3_128_hexdigest(text.encode("utf-8", "surrogateescape"))


def key_on(kind: str, path: str, identity: str) -> str:
    """The key of a path on a filesystem object. ``kind``: the scheme of its URLs; ``identity``: what tells it from others."""
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
        raise ConfigError(f"{text!r} names a file of the host {host!r}: only local files can be opened; write file:///path", url=text)
    return os.path.abspath(b"/" + unquote_to_bytes(path)).decode("utf-8", "surrogateescape")
