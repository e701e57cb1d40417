"""From an entry to its bytes: mapped, verified before the first use, set aside where they are damaged."""

from __future__ import annotations

import logging
import os

from forebay import errors
from forebay._engine import blobs, counters
from forebay._engine.catalog import Catalog, entries
from forebay._engine.counters import Counters
from forebay._engine.faults import faults
from forebay._engine.leases import Lease, Leases
from forebay._engine.memo import Memo, Remembered
from forebay._engine.root import Root
from forebay._engine.slots import Slots
from forebay._kernel import host
from forebay._model import Entry

log = logging.getLogger("forebay.reading")

FIRST_USE = 1 << 20
"""Entries up to this size are verified at their first use in a process; all are at their first use after a reboot."""
_MANY = 1_000_000


class Reading:
    """Reads entries of one root. Callable from any thread, and in a forked child."""

    def __init__(self, root: Root, catalog: Catalog, slots: Slots, leases: Leases, memo: Memo, counts: Counters) -> None:
        self._root, self._catalog, self._slots = root, catalog, slots
        self._leases, self._memo, self._counts = leases, memo, counts
        self._verified: set[int] = set()

    def view(self, space: str, place: int, key: str) -> Remembered | None:
        """The bytes of a key; None where there is none. ``place``: the space's id."""
        self._memo.let_go(host.now_ns())
        for _ in range(2):
            found = self._memo.get(space, key)
            if found is not None:
                return found
            with faults(key):
                entry = self._leases.current(place, key)
                if entry is None or entry.kind in ("tree", "pack", "session"):
                    return None
                data = self._bytes_of(entry)
                if data is not None and self._is_sound(entry, data):
                    return self._memo.add(space, key, entry, data)
            # P1 reads the row / P2 evicts or replaces it / P1 opens: gone. Look again, once.
        return None

    def lease(self, place: int, key: str) -> Lease | None:
        """A lease on the file, or tree, of a key; None where there is none, or it is a small value, which has no file."""
        with faults(key):
            lease = self._leases.take(place, key)
            if lease is None:
                return None
            if lease.entry.kind == "value" or not self.is_sound(lease):
                lease.close()
                return None
        return lease

    def is_sound(self, lease: Lease) -> bool:
        """Whether a leased file, or each file of a leased tree, is what was stored; else it is set aside."""
        look = {"blob": self._file_is_sound, "tree": self._tree_is_sound}.get(lease.entry.kind)
        with faults(lease.entry.key):
            return look is None or look(lease)

    def take(self, place: int, key: str) -> Lease | None:
        """A lease on the bytes of a key, those of a small value too, for `bytes_leased`; None where there is none."""
        with faults(key):
            lease = self._leases.take(place, key)
            if lease is not None and lease.entry.kind not in ("blob", "value"):
                lease.close()
                return None
            return lease

    def bytes_leased(self, lease: Lease) -> memoryview | None:
        """The bytes of what is leased, mapped and not remembered: they are wanted once. None where they are damaged or gone."""
        with faults(lease.entry.key):
            data = self._bytes_of(lease.entry)
            return data if data is not None and self._is_sound(lease.entry, data) else None

    def view_leased(self, space: str, key: str, lease: Lease) -> Remembered | None:
        """The bytes of what is leased, which was seen to be sound; None where they cannot be mapped."""
        data = self._bytes_of(lease.entry)
        return self._memo.add(space, key, lease.entry, data) if data is not None else None

    def private(self, entry: Entry) -> memoryview | None:
        """The bytes of a file, mapped writable, with stores that nobody else sees; None for a small value, or where the file is gone."""
        if entry.kind != "blob":
            return None
        try:
            return blobs.map_blob(self._root, entry, private=True)
        except (OSError, errors.Damaged):  # evicted meanwhile; or as many mappings, or files, as a process may have
            return None

    def is_intact(self, entry: Entry, data: memoryview) -> bool:
        """Whether these are the bytes that were stored, whatever was looked at before; else the entry is set aside."""
        if blobs.checksum_of(data) == entry.checksum:
            return True
        with faults(entry.key):
            self.set_aside(entry, f"{entry.name}: its bytes are not what was stored")
        return False

    def _bytes_of(self, entry: Entry) -> memoryview | None:
        """None: evicted between the look and the opening, or cut short: then it is set aside."""
        if entry.kind == "value":
            data = entries.payload(self._catalog, entry.id)
            return memoryview(data) if data is not None else None
        try:
            return blobs.map_blob(self._root, entry)
        except FileNotFoundError:
            self._missing(entry)
        except errors.Damaged as error:
            self.set_aside(entry, str(error))
        return None

    def _missing(self, entry: Entry) -> None:
        """The file of a row is gone: evicted meanwhile, or somebody deleted it."""
        if entries.by_id(self._catalog, entry.id) and self._slots.id_of(entry.slot) == entry.id:
            self.set_aside(entry, f"{entry.name}: its file is gone")

    def _file_is_sound(self, lease: Lease) -> bool:
        entry = lease.entry
        try:
            size = os.stat(lease.path).st_size
        except FileNotFoundError:
            self._missing(entry)
            return False
        if size != entry.size:
            self.set_aside(entry, f"{entry.name}: {size} bytes stand where {entry.size} were stored")
            return False
        if self._needs_no_look(entry):
            return True
        data = self._bytes_of(entry)
        return data is not None and self._is_sound(entry, data)

    def _tree_is_sound(self, lease: Lease) -> bool:
        """Whether each file of a tree is what was stored; looked at once in a process. Else the tree is set aside, with what is damaged."""
        tree = lease.entry
        if tree.boot == host.boot_id() and tree.id in self._verified and os.path.isdir(lease.path):
            return True
        try:
            top = os.open(lease.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            self.set_aside(tree, f"{tree.name}: it is gone")
            return False
        try:
            for name, member in entries.members(self._catalog, tree.id):
                if not self._member_is_sound(top, name, member):
                    self.set_aside(tree, f"{tree.name}: {name} is gone or damaged")
                    return False
        finally:
            os.close(top)
        self.note_sound(tree)
        return True

    def _member_is_sound(self, top: int, name: str, member: Entry) -> bool:
        """``top``: the tree, open. Small files are read: to map each would cost more than the rest of the look."""
        try:
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=top)
        except OSError:
            return False  # the member's own entry may be sound: whoever asks for it looks there
        try:
            if os.fstat(fd).st_size != member.size:
                self.set_aside(member, f"{member.name}: its size is not what was stored")
                return False
            if self._needs_no_look(member):
                return True
            data = memoryview(os.read(fd, member.size)) if member.size <= FIRST_USE else self._bytes_of(member)
        finally:
            os.close(fd)
        return data is not None and self._is_sound(member, data)

    def _needs_no_look(self, entry: Entry) -> bool:
        return entry.boot == host.boot_id() and (entry.size > FIRST_USE or entry.id in self._verified)

    def _is_sound(self, entry: Entry, data: memoryview) -> bool:
        if self._needs_no_look(entry):
            return True
        if blobs.checksum_of(data) != entry.checksum:
            self.set_aside(entry, f"{entry.name}: its bytes are not what was stored")
            return False
        self.note_sound(entry)
        return True

    def note_sound(self, entry: Entry) -> None:
        """It need not be looked at again in this process."""
        if len(self._verified) >= _MANY:
            self._verified.clear()
        self._verified.add(entry.id)
        if entry.boot != host.boot_id() and not self._root.read_only:
            with self._catalog.write() as txn:
                entries.set_boot(txn, entry.id, host.boot_id())

    def set_aside(self, entry: Entry, why: str) -> None:
        """A damaged entry is served to nobody: it leaves the index now, and the disk with its last lease."""
        self._counts.add(counters.DAMAGED)
        log.warning("%s: it is set aside, and fetched again when wanted", why)
        if self._root.read_only:
            return
        with self._catalog.write() as txn:
            if entries.by_id(txn, entry.id) is not None:
                entries.supersede(txn, entry)
                self._slots.clear(entry.slot, entry.id)
            txn.leftovers = True
