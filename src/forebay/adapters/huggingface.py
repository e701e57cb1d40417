"""Hugging Face: functions with the names and the keywords of huggingface_hub's, whose files the whole node shares. They do not need that
package."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

from forebay import errors, remote
from forebay._engine.leases import Lease
from forebay._kernel.interrupts import guarded
from forebay.cache import Cache, fetcher_of
from forebay.checkpoint import default_cache
from forebay.directories import trees
from forebay.directories.location import locate
from forebay.directories.manifests import Patterns
from forebay.fetch import Fetcher
from forebay.fetch.request import FetchOptions
from forebay.remote.base import replaced
from forebay.remote.hub.names import KINDS, MAIN, is_offline, token_from
from forebay.remote.urls import hub_endpoint

__all__ = ["Snapshot", "hf_hub_download", "snapshot_download"]

_FOLDERS: dict[str | None, str] = {None: "", "model": "", **{kind: f"{folder}/" for folder, kind in KINDS.items()}}
_REFUSED = {
    "local_dir": "copy the files with Cache.copy_directory(url, local_dir)",
    "cache_dir": "name the directory of the cache: cache=forebay.Cache(cache_dir)",
    "proxies": "set HTTPS_PROXY and NO_PROXY",
}
_IGNORED = frozenset(
    {"etag_timeout", "library_name", "library_version", "local_dir_use_symlinks", "resume_download", "tqdm_class", "user_agent"}
    | {"max_workers"}
)  # fmt: skip

_held: dict[int, Lease] = {}
"""The leases behind the paths of this process, by the identity of the lease."""


class Snapshot(str):
    """The path of files of the hub: they stay, unchanged, until the process ends, or until `close`, or the end of a ``with`` block.

    A ``str`` like any other, so a pickle of it is the path alone. After a fork, the files stay until both processes have let them go."""

    _lease: Lease

    @classmethod
    def of(cls, lease: Lease, name: str = "") -> Self:
        """The path of a leased directory, or of a file in it."""
        path = cls(os.path.join(lease.path, name) if name else lease.path)
        path._lease = _held[id(lease)] = lease
        return path

    def close(self) -> None:
        """Let the files go. A second call does nothing."""
        _held.pop(id(self._lease), None)
        self._lease.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (str(self),)


@guarded
def snapshot_download(
    repo_id: str, *, repo_type: str | None = None, revision: str | None = None, allow_patterns: str | Iterable[str] | None = None,
    ignore_patterns: str | Iterable[str] | None = None, token: str | bool | None = None, local_files_only: bool = False,
    force_download: bool = False, headers: Mapping[str, str] | None = None, endpoint: str | None = None,
    cache: Cache | None = None, **others: Any,
) -> Snapshot:  # fmt: skip
    """The files of a repository, or those that the patterns select, as a directory: one process of the node fetches it, each file once.

    ``revision``: a branch, tag or commit. ``token``: instead of the user's own; True: the user must have one; False: send none.
    ``local_files_only`` (or ``HF_HUB_OFFLINE``): ask nothing. ``force_download``: ask the hub now whether the branch has moved.
    ``headers``: of requests to the hub. ``cache``: default: the default cache of this process.

    Of huggingface_hub's other keywords, ``max_workers``, ``tqdm_class``, ``etag_timeout`` and those about its own downloads change
    nothing. ``local_dir``, ``cache_dir``, ``proxies`` and an ``endpoint`` other than ``HF_ENDPOINT`` raise `ConfigError`.

    Raises `NotFound` where the repository, the revision or a file is missing, `AccessDenied` for a gated one, `Offline`, and the other
    errors of `Cache.directory`. Callable from any thread and after a fork."""
    _check(endpoint, others)
    select = allow_patterns, ignore_patterns
    url = _url_of(repo_id, repo_type, revision)
    return Snapshot.of(_lease(cache or default_cache(), url, select, token, headers, local_files_only, force_download))


@guarded
def hf_hub_download(
    repo_id: str, filename: str, *, subfolder: str | None = None, repo_type: str | None = None, revision: str | None = None,
    token: str | bool | None = None, local_files_only: bool = False, force_download: bool = False,
    headers: Mapping[str, str] | None = None, endpoint: str | None = None, cache: Cache | None = None, **others: Any,
) -> Snapshot:  # fmt: skip
    """The path of one file of a repository, under its own name. See `snapshot_download`."""
    _check(endpoint, others)
    name = "/".join(map(remote.as_text, (subfolder, filename) if subfolder else (filename,)))
    select, url = (glob.escape(name), None), _url_of(repo_id, repo_type, revision)
    return Snapshot.of(_lease(cache or default_cache(), url, select, token, headers, local_files_only, force_download), name)


def _check(endpoint: str | None, others: Mapping[str, Any]) -> None:
    """Raises `ConfigError` for keywords that must not be ignored, TypeError for unknown ones."""
    for name, value in others.items():
        if name in _REFUSED and value is not None:
            raise errors.ConfigError(f"{name} is not supported: {_REFUSED[name]}", name=name, value=str(value))
        if name not in _REFUSED and name not in _IGNORED:
            raise TypeError(f"an unexpected keyword argument {name!r}")
    if endpoint is not None and endpoint.rstrip("/") != hub_endpoint():
        raise errors.ConfigError(f"endpoint={endpoint!r} is not supported: set HF_ENDPOINT", name="endpoint", value=endpoint)


def _url_of(repo_id: str, repo_type: str | None, revision: str | None) -> str:
    repo_id, revision = remote.as_text(repo_id), remote.as_text(revision or MAIN)
    if repo_type not in _FOLDERS:
        raise errors.ConfigError(f"repo_type={repo_type!r}: use 'model', 'dataset' or 'space'", name="repo_type", value=repo_type)
    if not re.fullmatch(r"(?:\w[\w.-]*/)?\w[\w.-]*", repo_id, re.ASCII) or ".." in repo_id:
        raise errors.ConfigError(f"{repo_id!r} is not a repository: expected owner/name", name="repo_id", value=repo_id)
    return f"hf://{_FOLDERS[repo_type]}{repo_id}@{quote(revision, safe='')}"


def _lease(
    cache: Cache, url: str, part: tuple[Patterns, Patterns], token: str | bool | None, headers: Mapping[str, str] | None,
    local_only: bool, refresh: bool,
) -> Lease:  # fmt: skip
    fetcher = fetcher_of(cache)
    options = _options(fetcher, token, headers)
    location = locate(fetcher, url, None, *part, options=options if headers else None)
    location = replace(location, remote=remote.resolve(url, options, location.realm))
    asked = FetchOptions.of(fetcher, refresh=refresh, offline=local_only or is_offline() or None)
    return trees.beside(location, trees.lease(location, asked), f"{location.key.rpartition('@')[0]}/", asked)


def _options(fetcher: Fetcher, token: str | bool | None, headers: Mapping[str, str] | None) -> remote.RemoteOptions:
    options = fetcher.options
    if token is True and not (options.token or token_from()):
        message = "token=True, but there is none: log in with `hf auth login`, or set HF_TOKEN"
        raise errors.ConfigError(message, name="token", value="True")
    if token is False:
        options = replace(options, token=None, anonymous=True)
    elif isinstance(token, str):
        options = replace(options, token=token, anonymous=None)
    return options if headers is None else replace(options, headers=replaced(options.headers, headers))
