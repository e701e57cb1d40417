"""URLs: the key of an entry, the suffix of its file, the local path that a URL names, and texts without secrets. No network, no file."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from forebay._model import exact_str
from forebay.errors import ConfigError

Url: TypeAlias = str | os.PathLike[str]
"""How a caller names an object: a URL, or a path."""

# Patterns are texts: `re` compiles each when it is first used, and keeps it.
_SCHEME = r"([A-Za-z][A-Za-z0-9+.-]*)://"
_CHAIN = r"[A-Za-z][A-Za-z0-9+.-]*::.*://"
_SUFFIXES = r"(?<=(?s:.))(?:\.[A-Za-z0-9]{1,15})?(\.[A-Za-z0-9]{1,15})\Z"  # up to two, after at least one character
_HASHED = r"q=[0-9a-f]{32}\Z"
_HASHED_USER = r"u=[0-9a-f]{16}@"
# What follows the key of an object in a key that Forebay makes from it: of blocks, of the index of a shard, of a filesystem object.
_MARK = r"#(?=~|block|version=|[0-9a-f]{32}\Z)"
_VERSION = r"\?versionId=([^?&#/]*)\Z"
# URLs that are their own keys, and absolute paths whose keys are ``file://`` and the path: most of what a training job reads, each epoch.
_PLAIN = r"(?:https?|s3)://[a-z0-9-][a-z0-9.-]*(?::(?!80/|443/)[0-9]+)?/[A-Za-z0-9_./=~%+,-]*|((?:/(?!\.\.?(?:/|\Z))[A-Za-z0-9_.-]+)+)"
PUBLIC_HUB = "https://huggingface.co"
_COMPRESSED = {".gz", ".bz2", ".xz", ".zst", ".lz4", ".br", ".z"}
_PORTS = {"http": ":80", "https": ":443"}
_KNOWN = {*_PORTS, "s3"}


_AMZ = "X-Amz-Algorithm X-Amz-Credential X-Amz-Date X-Amz-Expires X-Amz-SignedHeaders X-Amz-Signature"
_OSS = "x-oss-signature-version x-oss-signature"
_COS = "q-sign-algorithm q-ak q-sign-time q-key-time q-header-list q-url-param-list q-signature"
_MAY_BE_EMPTY = frozenset({"q-header-list", "q-url-param-list", "x-oss-additional-headers"})
_SAS_OPTIONAL = "st spr sip sdd ses saoid suoid scid skoid sktid skt ske sks skv"


@functools.cache
def _signatures() -> list[list[frozenset[str]]]:
    """For each way to sign HTTP URLs: the parameters that must be present, of which one must be, and which may be."""
    known = (
        (_AMZ, "", "X-Amz-Security-Token X-Amz-Content-Sha256 X-Amz-S3session-Token"),
        (_AMZ.replace("Amz", "Goog"), "", ""),
        ("AWSAccessKeyId Signature Expires", "", "x-amz-security-token"),
        ("GoogleAccessId Signature Expires", "", ""),
        ("Signature Key-Pair-Id", "Expires Policy", "Hash-Algorithm"),  # CloudFront, and so Hugging Face
        ("sv sr sp se sig", "", _SAS_OPTIONAL),  # Azure: for one service
        ("sv sr si sig", "", f"sp se {_SAS_OPTIONAL}"),  # for a stored policy
        ("sv ss srt sp se sig", "", _SAS_OPTIONAL),  # for an account
        ("OSSAccessKeyId Signature Expires", "", "security-token"),  # Alibaba Cloud OSS
        (f"{_OSS} x-oss-access-key-id x-oss-expires", "", "x-oss-additional-headers"),
        (f"{_OSS} x-oss-credential x-oss-date x-oss-expires", "", "x-oss-security-token x-oss-additional-headers"),
        (_COS, "", "x-cos-security-token"),  # Tencent Cloud COS
        ("AccessKeyId Signature Expires", "", "x-obs-security-token"),  # Huawei Cloud OBS
    )
    return [[frozenset(names.split()) for names in signature] for signature in known]


def _signing(pairs: Sequence[tuple[str, str]]) -> set[str]:
    """The names of the parameters that sign an HTTP URL. URLs that differ only in their values name the same object. Only a whole set is a
    signature, with each parameter once and none empty (but a list of names): ``sig`` alone may mean anything."""
    found = set[str]()
    for all_of, one_of, optional in _signatures():
        signing = [pair for pair in pairs if pair[0] in all_of or pair[0] in one_of or pair[0] in optional]
        names = {name for name, _ in signing}
        is_whole = all_of <= names and (not one_of or not one_of.isdisjoint(names))
        if is_whole and len(names) == len(signing) and all(value or name in _MAY_BE_EMPTY for name, value in signing):
            found |= names
    return found


class UrlRealm:
    """What decides, besides a URL, which bytes it leads to, and what of a URL does not. Here: nothing. See `forebay.remote.Realm`."""

    def __call__(self, kind: str) -> str:
        """The text whose hash is part of the keys of a scheme; "": none."""
        return ""

    def key_query(self, url: str, query: str) -> str:
        """What of the query of an HTTP URL is part of its key. ``url``: without the query and the user. Raises `ConfigError`."""
        return query


_USUAL = UrlRealm()


class UrlNaming(NamedTuple):
    """How one cache names URLs in its keys. ``secret``: that of its root; without it, nothing that was hashed can be found by guessing.
    ``realm``: what decides, besides the URL, which bytes it leads to."""

    secret: int = 0
    realm: UrlRealm = _USUAL

    def hashed(self, text: str, size: int = 16) -> str:
        """The hash that replaces a secret text in a key: ``size`` bytes as hexadecimal digits."""
        import hashlib

        return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=size, key=self.secret.to_bytes(8)).hexdigest()


def as_text(url: object) -> str:
    """A URL or path as an exact str. Raises `ConfigError` for what is neither."""
    text = exact_str(url)
    if text is None and isinstance(url, os.PathLike):
        text = exact_str(os.fspath(url))
    if text is not None:
        return text
    shown = redacted(repr(url))
    raise ConfigError(f"a URL or path is a str or an os.PathLike of one, not {shown}", name="url", value=shown)


def absolute(text: str) -> str:
    """A URL or an absolute path as it is; a relative path as the absolute one that it names now. Raises `ConfigError` as `scheme` does."""
    return text if text.startswith("/") or is_url(text) else local_path(text) or text


def scheme(url: str) -> str:
    """The scheme in lower case; ``file`` for a path. Raises `ConfigError` for a cache of fsspec's, such as ``simplecache::s3://b/a``."""
    kind, mark, _ = url.partition("://")
    if mark and kind in _KNOWN:
        return kind
    match = re.match(_SCHEME, url)
    if match is None and re.match(_CHAIN, url):
        outer, inner = url.partition("::")[0], canonical(url.rpartition("::")[2])
        raise ConfigError(f"write {inner}, without the {outer}:: before it: Forebay is the cache", url=inner)
    return match[1].lower() if match else "file"


def hub_endpoint() -> str:
    """The address of the Hugging Face Hub, without a slash at its end: ``HF_ENDPOINT``, else that of the public hub."""
    return os.environ.get("HF_ENDPOINT", "").strip().rstrip("/") or PUBLIC_HUB


def is_url(text: str) -> bool:
    """Whether ``text`` begins with a scheme."""
    return re.match(_SCHEME, text) is not None


def canonical(url: str | os.PathLike[str], naming: UrlNaming | None = None) -> str:
    """A URL without secrets, the same for all its spellings: the key under which a cache of this ``naming`` stores the object, or, without
    a naming, a text to be shown. Idempotent, but for a hash that stands for a user, and for a name with a mark of Forebay's
    (`without_marks`): no text of a caller is a key that Forebay makes from another one.

    Scheme and host are in lower case; the default port, the fragment and whole sets of signature parameters are dropped. In a key one hash
    stands for the user and the realm (``u=...@`` before the host), another for what is left of the query (``?q=...``); in a text to be
    shown ``...`` does. All other bytes stay as they are. A path becomes an absolute ``file://`` URL. In schemes other than HTTP, ``#``,
    every part of the query, and the case of the host may distinguish objects, and are kept. Raises `ConfigError`."""
    text = as_text(url)
    plain = re.fullmatch(_PLAIN, text)
    if plain is not None:
        if plain[1] is not None:
            return f"file://{text}"
        if naming is None or not naming.realm(text[: text.index(":")]):
            return text
    if not text.isascii():
        try:
            text.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError as error:
            readable = text.encode("utf-8", "backslashreplace").decode().partition("?")[0]
            raise ConfigError(f"{readable} is no URL and no path: it contains half a character, at {error.start}") from None
    kind = scheme(text)
    if kind == "file":
        from urllib.parse import quote

        return "file://" + quote(os.fsencode(local_path(text) or ""))
    if "::" in text and kind not in _KNOWN:  # fsspec's: `zip://a.csv::s3://bucket/a.zip`
        first, *links = text.split("::")
        links = [canonical(link, naming) if re.match(_SCHEME, link) else link for link in links]
        text = "::".join([_single(kind, first, naming), *links])
    else:
        text = _single(kind, text, naming)
    return text if naming is None or "#" not in text else without_marks(text)


def without_marks(name: str) -> str:
    """A name with a ``~`` after each ``#`` that would begin a mark of Forebay's in a key. Different names stay different."""
    return re.sub(_MARK, "#~", name)


def _single(kind: str, text: str, naming: UrlNaming | None) -> str:
    """`canonical` of a URL that is no chain."""
    rest = text[len(kind) + 3 :]
    if kind in _KNOWN and "@" in text and re.match(_BROKEN, text):  # else a part of a password would be the path
        shown = masked(text)
        message = f"{shown} names no valid host: write {kind}://host/path, and in a password %2F for /, %23 for #, %3F for ?"
        raise ConfigError(message, name="url", value=shown)
    if kind in _PORTS:
        rest = rest.partition("#")[0]
    rest, mark, query = rest.partition("?")
    host, slash, name = rest.partition("/")
    left = _query(kind, host, f"{slash}{name}", query, naming) if query else mark  # a `?` at the end may name another object
    return f"{kind}://{_host(kind, host, naming)}{slash}{name}{left}"


def _host(kind: str, host: str, naming: UrlNaming | None) -> str:
    is_hash = re.match(_HASHED_USER, host) is not None
    user, at, host = host.rpartition("@")
    realm = naming.realm(kind) if naming is not None else ""
    if kind in _PORTS:
        host = host.lower().removesuffix(_PORTS[kind])
    if is_hash and (naming is None or (realm and user == f"u={naming.hashed(repr(('', realm)), 8)}")):
        return f"{user}@{host}"  # a key of this realm; that of another one is a user that the caller made up
    # Other users may get other bytes; a token may stand where the user does. In `abfs://container@account` it names the object; in
    # `github://org:repo@sha` too, but `ftp://user:password@host` looks the same.
    secret = user if is_hash or kind in _KNOWN or ":" in user else ""
    if not secret and kind not in _KNOWN:
        host = f"{user}{at}{host}"
    if not (secret or realm):
        return host
    return f"{MASK}@{host}" if naming is None else f"u={naming.hashed(repr((secret, realm)), 8)}@{host}"


def _query(kind: str, host: str, path: str, query: str, naming: UrlNaming | None) -> str:
    if re.match(_HASHED, query):
        return f"?{query}"
    pairs = query.split("&")
    if kind in _PORTS:  # only HTTP has signatures in queries
        named = [(name, value) for name, _, value in (pair.partition("=") for pair in pairs)]
        signing = _signing(named)
        pairs = [pair for pair, (name, _) in zip(pairs, named, strict=True) if name not in signing]
    rest = "&".join(pairs)
    if rest and naming is not None and kind in _PORTS:
        rest = naming.realm.key_query(f"{kind}://{_host(kind, host.rpartition('@')[2], None)}{path}", rest)
    if not rest:
        return ""
    return f"?{MASK}" if naming is None else f"?q={naming.hashed(rest)}"


def without_user(key: str) -> str:
    """A key as it would be if the object had been fetched without a user, from the usual servers, in no partition."""
    return re.sub(rf"://{_HASHED_USER}", "://", key, count=1)


def bare(url: str) -> str:
    """The URL without its query, such as a signature, for HTTP, where the query is not part of the name."""
    return url.partition("#")[0].partition("?")[0] if url.lower().startswith(("http://", "https://")) else url


def s3_version(name: str) -> tuple[str, str]:
    """What stands before the version of an ``s3://`` URL, or of its end, and the version; "" for the present one."""
    match = re.search(_VERSION, name)
    return (name, "") if match is None else (name[: match.start()], match[1])


def s3_name(name: str) -> str:
    """The name of an object as it stands at the end of an ``s3://`` URL: after one that looks like a version follows an empty version."""
    return name if s3_version(name)[0] == name else f"{name}?versionId="


def suffix_of_key(key: str) -> str:
    """The last suffix of the object's name in a key that `canonical` returned, together with the one before if it names a compression; ""
    if there is none that suits a file name. At most 16 characters of ``[A-Za-z0-9.]``."""
    name = key.partition("?")[0].partition("://")[2].partition("/")[2].rpartition("/")[2]
    match = re.search(_SUFFIXES, name)
    if match is None:
        return ""
    return match[0] if match[1].lower() in _COMPRESSED and len(match[0]) <= 16 else match[1]


def local_path(url: str | os.PathLike[str]) -> str | None:
    """The absolute path that a path or a ``file://`` URL names; None for other URLs. Raises `ConfigError` for a file of another host, and
    for a path that no file can have."""
    text = as_text(url)
    if scheme(text) != "file":
        return None
    from urllib.parse import unquote_to_bytes

    path = text
    if re.match(_SCHEME, text):
        host, _, quoted = text[len("file://") :].partition("/")
        if host.lower() not in ("", "localhost"):
            plain = f"file://{host.rpartition('@')[2]}/{quoted}"  # a password may stand before the host
            raise ConfigError(f"{plain!r} names a file of another host: only local files can be opened; write file:///path", url=plain)
        path = (b"/" + unquote_to_bytes(quoted)).decode("utf-8", "surrogateescape")
    if "\0" in path:
        raise ConfigError(f"{text!r} is no path: it contains a null byte", name="url", value=text)
    return absolute_path(path)


def absolute_path(path: str) -> str:
    """The absolute path that a path means now. Raises `ConfigError` for a relative one if the working directory was deleted."""
    try:
        return os.path.abspath(path)
    except OSError as error:
        message = f"{path!r} is relative, and the working directory cannot be used: {error.strerror}: give an absolute path"
        raise ConfigError(message, name="url", value=path) from error


# -- texts without secrets ---------------------------------------------------------------------------------------------

MASK = "..."
_HOST = r"(?:\[[^\s\]/?#@]*\]|[^\s:/?#@'\"<>\[\]]*)(?::[0-9]*)?(?=[\s/?#'\"<>,;(){}\[\]]|::|\Z)"
_BROKEN = rf"[A-Za-z0-9]+://(?![^/?#]*@)(?!{_HOST})"
"""The beginning of a URL whose authority is neither a host and a port, nor has a user before them."""
# The user of a URL: up to the last @ of the authority, or, if that is no host and port, of what follows without a blank. In other schemes
# than ours what stands alone before the host is no secret: `abfs://container@account`.
_ANY, _SOME = r"[^\s/?#]{0,1000}@", r"[^\s/?#:@]*:[^\s/?#]{0,1000}@"
_USER = rf"(?i)((?:https?|s3)://)(?:{_ANY}|(?!{_HOST})\S{{0,1000}}@)|([a-z][a-z0-9+.-]{{0,32}}://)(?:{_SOME}|(?!(?:[^\s:/?#@]*@)?{_HOST})\S{{0,1000}}@)"
_URL_IN_TEXT = r"[A-Za-z][A-Za-z0-9+.-]{0,32}://[^\s'\"<>]+"  # bounded, as a match is tried at each letter of a text
_PUNCTUATION = ":,.;!)]}"
_ENDS = r"(?:token|password|passwd|secret|signature|credential|(?:access|account|api|secret)[_-]?key(?:[_-]?id)?)"  # of names
_NAMES = rf"(?:{_ENDS}|(?:\b|%3F|%26)(?:sig|awsaccesskeyid|googleaccessid|key-pair-id|policy))"
_SECRET = rf"(?i)((?:{_NAMES}(?:\W?\s*[=:]|%3D)|\bbearer\b|\bbasic\b)\s*[\"']?)[^\s&'\",;)]+"


def redacted(text: str) -> str:
    """``text`` without its secrets: each URL as `canonical` shows it (``...`` for a user and a query, no signature), and ``...`` for the
    values of headers and settings that contain secrets. Raises nothing. Idempotent."""
    return re.sub(_SECRET, r"\1...", re.sub(_URL_IN_TEXT, _redacted_url, masked(text)))


def masked(text: str) -> str:
    """``text`` without the users and passwords of its URLs, also where a password was not encoded as a URL demands."""
    return re.sub(_USER, rf"\1\2{MASK}@", text)


def is_masked(text: str) -> bool:
    """Whether `canonical` has left a user or a query out of what it shows."""
    return f"://{MASK}@" in text or text.endswith(f"?{MASK}")


def shown(url: str | os.PathLike[str]) -> str:
    """A URL without its secrets; a path as it is."""
    text = as_text(url)
    try:
        return canonical(text) if is_url(text) else redacted(text) if "://" in text else text
    except ConfigError:
        return redacted(text)


def _redacted_url(match: re.Match[str]) -> str:
    url = match[0]
    plain = url.rstrip(_PUNCTUATION)
    if plain.endswith("?") and url.startswith(f"{plain}{MASK}"):
        plain += MASK  # the text was redacted before
    try:
        key = canonical(plain)
        return (_redacted_path(key) if key.startswith("file:") else key) + url[len(plain) :]
    except ConfigError:
        return f"{url.partition('://')[0]}:..."


def _redacted_path(key: str) -> str:
    """The key of a path, without the secrets of a URL that was taken for a path: a quote or a blank preceded it, or a slash was missing."""
    head, colon, rest = key.partition("%3A/")
    if not colon:
        return key
    path, mark, query = rest.partition("%3F")
    host, slash, name = path.partition("/")
    _, at, host = host.rpartition("%40")
    return f"{head}{colon}{at and '...%40'}{host}{slash}{name}{mark}{query and '...'}"
