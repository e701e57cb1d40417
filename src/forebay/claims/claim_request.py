"""What is asked of the registry, and what it gives."""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from forebay.claims import processes, records
from forebay.claims.members import Members
from forebay.claims.records import Beside, ClaimedStream, Record


class Outside(Protocol):
    """What a claim is to have outside of its directory. Called under the registry's lock."""

    def free(self, prefix: int) -> bool:
        """Whether a claim may have this number. Raises `ClaimConflict` where a directory is taken by what is no claim."""
        ...

    def names(self, prefix: int) -> Sequence[str]:
        """Absolute paths of the files that go with the claim. The first is the landmark, which comes with it too."""
        ...

    def content(self, prefix: int) -> bytes:
        """What the landmark holds."""
        ...


class ClaimRequest(NamedTuple):
    """``key``: the name or number of the claim in its ``job``, which is known by ``how``, and to people as ``name``. ``equal_only``: that a
    directory lies inside of another is no conflict. ``patience``: seconds for which a conflict is hoped to pass. ``spared``: claims, by
    the names of their directories, whose working directories this process gave up."""

    job: str
    how: str
    key: str
    streams: tuple[ClaimedStream, ...]
    world: dict[str, Any] | None = None
    rank: int | None = None
    worker: int | None = None
    equal_only: bool = False
    outside: Outside | None = None
    patience: float = 0.0
    name: str = ""
    spared: frozenset[str] = frozenset()

    @property
    def owner(self) -> str:
        """The job in words for people."""
        return records.owner(self.name or self.job)

    @property
    def tag(self) -> str:
        """Ends the name of the claim's directory: the same in all ranks, and in no other user's."""
        return hashlib.blake2b(f"{os.geteuid()}\0{self.job}\0{self.key}".encode(errors="surrogatepass"), digest_size=8).hexdigest()

    def record(self, prefix: int) -> Record:
        """What the claim tells of itself, with this number."""
        beside = None
        if self.outside is not None and prefix >= 0:
            landmark, *paths = self.outside.names(prefix)
            beside = Beside(tuple(paths), landmark)
        return Record(
            prefix, self.name or self.job, self.how, self.key, os.geteuid(), socket.gethostname(), os.getpid(), processes.pid_space(),
            processes.own_start(), processes.mount_space(), time.time(), records.own_command(), self.streams, self.world, beside,
        )  # fmt: skip


class Held(NamedTuple):
    """A claim that this process has."""

    record: Record
    members: Members
