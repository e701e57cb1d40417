"""What a space does when its bytes do not fit."""

from __future__ import annotations

import enum

from forebay.errors import ConfigError


class Policy(enum.StrEnum):
    """What a space does when its bytes do not fit."""

    LRU = "lru"
    """Evict its least recently used entries."""
    FREEZE = "freeze"
    """Evict none of its own, admit nothing more."""
    WAIT = "wait"
    """Evict what nobody holds, least recently used first; wait while all is held."""

    @property
    def evicts_own(self) -> bool:
        """Whether a new entry may take the place of an older one of the same space."""
        return self is not Policy.FREEZE

    @classmethod
    def parse(cls, name: str) -> Policy:
        """The policy that is called ``name``. Raises `ConfigError`."""
        try:
            return cls(name.lower())
        except ValueError as error:
            raise ConfigError(f"there is no policy {name!r}: use one of {', '.join(cls)}", value=name) from error
