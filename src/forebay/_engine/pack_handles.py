"""`Store.packs`: packs are created, looked up, opened and named here; open ones take the segments that they append to."""

from __future__ import annotations

from forebay import errors
from forebay._engine.engine import Engine, recover_and_retry
from forebay._engine.files.layout import faults
from forebay._engine.locks.lease import Lease
from forebay._engine.packs.pack import Pack
from forebay._engine.packs.packing import Appender
from forebay._engine.spaces import Spaces
from forebay._engine.write.publish import Label


class Packs:
    """The packs of one root. Callable from any thread, and in a forked child."""

    def __init__(self, engine: Engine, spaces: Spaces) -> None:
        self.engine, self._spaces = engine, spaces

    @recover_and_retry
    def make(
        self, space: str, key: str, length: int, *, life: str = "cached", fingerprint: str | None = None, meta: str = ""
    ) -> Pack:  # fmt: skip
        """An empty pack of ``length`` slots, open and leased; it replaces the pack of this name. Caller: holds the key."""
        self.engine.check_usable(writing=True)
        row = self._spaces.ensure(space, kind="packs")
        lease = self.engine.parts.writers.packing.create(
            Label(row.id, row.name, key, life=life, meta=meta), length, fingerprint=fingerprint
        )
        return self._open(lease, length)

    @recover_and_retry
    def find(self, space: str, key: str) -> Lease | None:
        """A lease on the pack of a name, for `open`; None if there is none."""
        with faults(key):
            return self.engine.parts.leases.take(self._spaces.lookup(space).id, key)

    @recover_and_retry
    def find_by_id(self, id: int) -> Lease | None:
        """A lease on a pack, whatever its name is by now; None if it is gone, or another pack has taken its name."""
        with faults(f"{id:x}"):
            return self.engine.parts.leases.take_id(id)

    def open(self, lease: Lease, length: int) -> Pack | None:
        """The leased pack, which owns the lease from now on; None where its files are gone or damaged: then it is set aside."""
        try:
            return self._open(lease, length)
        except (FileNotFoundError, errors.Damaged) as error:
            self.engine.parts.reading.set_aside(lease.entry, f"{lease.entry.name}: {error}")
            lease.close()
            return None

    def _open(self, lease: Lease, length: int) -> Pack:
        engine = self.engine
        engine.touch(lease.entry)
        space = self._spaces.lookup(lease.entry.space)
        try:
            return Pack(engine.root, self, engine.index.head, engine.counters, lease, length, space.id)
        except OSError as error:
            if isinstance(error, (FileNotFoundError, errors.Damaged)):
                raise
            raise errors.CacheFault(f"{lease.entry.name} cannot be opened: {error}", key=lease.entry.key) from error

    @recover_and_retry
    def name(self, pack: Pack, space: str, key: str, *, overwrite: bool) -> bool:
        """Give a pack that lived as long as it was held a name, under which it stays. False if the name is taken, unless ``overwrite``."""
        self.engine.check_usable(writing=True)
        row = self._spaces.ensure(space)
        return self.engine.parts.writers.publisher.name(pack.id, Label(row.id, row.name, key), overwrite=overwrite)

    @recover_and_retry
    def take_segment(self, pack: int, space: int, words: memoryview, need: int) -> Appender:
        """See `Packing.take`."""
        self.engine.check_usable(writing=True)
        return self.engine.parts.writers.packing.take(pack, space, words, need)

    @recover_and_retry
    def leave_segment(self, pack: int, words: memoryview, appender: Appender) -> None:
        """See `Packing.leave`."""
        self.engine.parts.writers.packing.leave(pack, words, appender)
