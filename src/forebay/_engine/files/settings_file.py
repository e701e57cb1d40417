"""The settings of a root, in a file beside the catalog, so that they survive a lost or damaged catalog.

A small file, replaced as a whole. It is read when a catalog starts empty, and written when the settings change: as long as there is a
catalog, the catalog is authoritative. Its content is validated: whatever is invalid is left out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import xxhash

from forebay._engine.files.layout import Root
from forebay._kernel import host
from forebay._logs import logger
from forebay._model import Policy
from forebay.errors import ConfigError

log = logger("forebay.settings")

_LARGEST = 4 << 20
_MOST_SPACES = 10_000
_END = 1 << 62
NAMES = ("budget", "min_free", "max_entries", "max_rate", "max_connections")
"""The limits of a root, apart from those of its spaces."""


class SpaceLimits(NamedTuple):
    """The limits that users set for one space."""

    name: str
    kind: str
    policy: str
    quota: int | None = None
    max_count: int | None = None


class Kept(NamedTuple):
    """The limits that users set for a root, sizes in bytes; None: nothing was set. ``max_rate`` (bytes a second), ``max_connections``: 0 is
    no limit. ``spaces``: those whose limits were set."""

    budget: int | None = None
    min_free: int | None = None
    max_entries: int | None = None
    spaces: tuple[SpaceLimits, ...] = ()
    max_rate: int | None = None
    max_connections: int | None = None


def read(root: Root) -> Kept | None:
    """The content of the file; None if it is missing, damaged, or another root's."""
    try:
        body = json.loads(_content(root))
        checksum = body.pop("checksum")
        if checksum != _checksum(body) or body["root"] != f"{root.id:016x}":
            raise ValueError("its checksum or its root is another one")
        limits = {name: body[name] for name in NAMES if _is_number(body.get(name))}
        spaces = _sane(body["spaces"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        log.info("%s cannot be used: %s", root.settings, error)
        return None
    return Kept(**limits, spaces=spaces)


def says(root: Root, kept: Kept) -> bool:
    """Whether the file contains ``kept``."""
    return read(root) == kept._replace(spaces=_sane([space._asdict() for space in kept.spaces]))


def write(root: Root, kept: Kept) -> None:
    """Write ``kept`` to the file. Caller: holds the writer lock. A disk error is not raised: the next open writes it again."""
    spaces = _sane([space._asdict() for space in kept.spaces])
    body = {"root": f"{root.id:016x}", **kept._asdict(), "spaces": [space._asdict() for space in spaces]}
    text = json.dumps({**body, "checksum": _checksum(body)}, indent=1) + "\n"
    try:
        root.replace(root.settings, text.encode())
    except OSError as error:
        log.info("%s cannot be written: %s", root.settings, error)


def _content(root: Root) -> bytes:
    data = host.read_small(root.settings, _LARGEST)
    if data is None:
        raise ValueError("it is not a plain file, or too large")
    return data


def _checksum(body: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(body, sort_keys=True).encode())


def _is_number(value: object) -> bool:
    return type(value) is int and 0 <= value < _END


def _sane(spaces: Sequence[Any]) -> tuple[SpaceLimits, ...]:
    return tuple(space for one in spaces[:_MOST_SPACES] if (space := _space(one)) is not None)


def _space(row: Any) -> SpaceLimits | None:
    """One space, where it is sane."""
    name, kind, policy = (row.get(field) for field in ("name", "kind", "policy"))
    if not (isinstance(name, str) and isinstance(kind, str) and isinstance(policy, str) and name.isprintable() and name and kind):
        return None
    try:
        parsed = str(Policy.parse(policy))
    except ConfigError:
        return None
    quota, most = (value if _is_number(value := row.get(field)) else None for field in ("quota", "max_count"))
    return SpaceLimits(name, kind, parsed, quota, most)
