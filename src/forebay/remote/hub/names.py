"""What an ``hf://`` URL names, the hub that serves it, and the user's token for that hub."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Self
from urllib.parse import quote, unquote

from forebay import errors
from forebay._logs import logger
from forebay.remote.urls import canonical

log = logger("forebay.remote.hub")

MAIN = "main"
KINDS = {"datasets": "dataset", "spaces": "space"}
"""The first part of the URLs of a kind of repository; those of models have none."""

_COMMIT = re.compile(r"[0-9a-f]{40}\Z")
_SPECIAL = re.compile(r"refs/(?:convert/\w+|pr/[0-9]+)(?=/|\Z)")  # revisions whose names have slashes
_TRUE = frozenset({"1", "ON", "YES", "TRUE"})


class HubName(NamedTuple):
    """The parts of an ``hf://`` URL: ``hf://[datasets/|spaces/]owner/name[@revision]/path``.

    ``kind``: ``datasets``, ``spaces`` or "" (models). ``repo``: ``owner/name``, or the name alone of one of the first models."""

    kind: str
    repo: str
    revision: str
    path: str

    @classmethod
    def of(cls, url: str) -> Self:
        """Raises `ConfigError` if the URL names no repository."""
        rest = url.partition("://")[2]
        kind = next((kind for kind in KINDS if rest.startswith(f"{kind}/")), "")
        rest = rest.removeprefix(f"{kind}/") if kind else rest.removeprefix("models/")
        before, at, after = rest.partition("@")
        if at and before.count("/") <= 1:
            special = _SPECIAL.match(after)
            revision, _, path = (special[0], "", after[special.end() :].lstrip("/")) if special else after.partition("/")
            repo = before
        else:
            owner, _, below = rest.partition("/")
            name, _, path = below.partition("/")
            repo, revision = f"{owner}/{name}", MAIN
        if not all(repo.split("/")) or not revision:
            raise errors.ConfigError(f"{canonical(url)} names no repository: write hf://owner/name/path, or hf://datasets/owner/name/path")
        return cls(kind, repo, unquote(revision), path)

    @property
    def is_pinned(self) -> bool:
        """Whether the revision is a commit, whose files never change."""
        return _COMMIT.match(self.revision) is not None

    def at(self, commit: str) -> Self:
        """The same path at a commit."""
        return self._replace(revision=commit)

    @property
    def url(self) -> str:
        """The URL with its revision."""
        return f"hf://{f'{self.kind}/' if self.kind else ''}{self.repo}@{quote(self.revision, safe='')}/{self.path}"

    @property
    def page(self) -> str:
        """The repository's own page below the address of the hub."""
        return f"{self.kind}/{self.repo}" if self.kind else self.repo

    @property
    def file(self) -> str:
        """Where the bytes are, below the address of the hub."""
        path = quote(self.path.encode("utf-8", "surrogateescape"), safe="/~")
        return f"{self.page}/resolve/{quote(self.revision, safe='')}/{path}"

    @property
    def commit_query(self) -> str:
        """Where the hub's API says which commit the revision is."""
        return f"{self._api}/revision/{quote(self.revision, safe='')}?expand=sha"

    def tree_query(self, folder: str) -> str:
        """Where the hub's API lists all files below a folder."""
        path = f"/{quote(folder.encode('utf-8', 'surrogateescape'), safe='')}" if folder else ""
        return f"{self._api}/tree/{quote(self.revision, safe='')}{path}?recursive=true&expand=false"

    @property
    def _api(self) -> str:
        return f"api/{self.kind or 'models'}/{self.repo}"


def token_from(environ: Mapping[str, str] = os.environ) -> str | None:
    """The token of the user who is logged in: ``HF_TOKEN``, else the content of ``HF_TOKEN_PATH``, or of ``token`` in ``HF_HOME``."""
    if environ.get("HF_HUB_DISABLE_IMPLICIT_TOKEN", "").upper() in _TRUE:
        return None
    given = (environ.get("HF_TOKEN") or environ.get("HUGGING_FACE_HUB_TOKEN") or "").strip()
    if given:
        return given
    caches = environ.get("XDG_CACHE_HOME") or "~/.cache"
    path = environ.get("HF_TOKEN_PATH") or os.path.join(environ.get("HF_HOME") or f"{caches}/huggingface", "token")
    try:
        return Path(os.path.expanduser(os.path.expandvars(path))).read_text().strip() or None
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        log.warning("the token in %s cannot be used: %s", path, type(error).__name__)
        return None


def is_offline(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the environment forbids requests to the hub: ``HF_HUB_OFFLINE``."""
    return environ.get("HF_HUB_OFFLINE", "").upper() in _TRUE
