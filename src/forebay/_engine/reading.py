"""Maps the bytes of entries, verifies them before their first use, and sets damaged entries aside."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

from forebay import errors
from forebay._engine.catalog import entries
from forebay._engine.catalog.connection import Catalog
from forebay._engine.files import blobs
from forebay._engine.files.layout import DiskFull, faults
from forebay._engine.files.root import Root
from forebay._engine.index import counters
from forebay._engine.index.counters import Counters
from forebay._engine.index.memo import COPIED, Memo, Remembered
from forebay._engine.index.records import EntryIndex
from forebay._engine.leases import Lease, Leases
from forebay._kernel import events, interrupts
from forebay._kernel.below import LinkInTheWay
from forebay._logs import logger
from forebay._model import Buffer, Entry

log = logger("forebay.reading")

_MANY = 1_000_000


class Reading:
    """Reads entries of one root. Callable from any thread, and in a forked child."""

    def __init__(
        self, root: Root, catalog: Catalog, index: EntryIndex, leases: Leases, memo: Memo, counts: Counters
    ) -> None:  # fmt: skip
        self._root, self._catalog, self._index = root, catalog, index
        self._leases, self._memo, self._counts = leases, memo, counts
        self._unsealed: dict[int, int] = {}  # by id: the time of a file that has no seal, and was checked
        self._keeps_no_seals = False  # the file system, as a first try showed
        self._trees: dict[int, int] = {}  # by id: the fingerprint of a tree that was checked

    def view(self, space: str, space_id: int, key: str) -> Remembered | None:
        """The bytes of a key; None if there is no entry."""
        self._memo.let_go()
        for _ in range(2):
            remembered = self._memo.get(space, key)
            if remembered is not None:
                return remembered
            with faults(key):
                entry = self._leases.current(space_id, key)
                if entry is None or entry.kind in ("tree", "pack", "session"):
                    return None
                data = self._bytes_of(entry)
                if data is not None:
                    self._index.note(entry, data if entry.kind == "value" else None)
                    return self._memo.add(space, key, entry, data)
            # P1 reads the row / P2 evicts or replaces it / P1 opens: gone. Look again, once.
        return None

    def lease(self, space_id: int, key: str) -> Lease | None:
        """A lease on the file or tree of a key; None if there is no entry, or only a small value or a session, which has no file."""
        with faults(key):
            lease = self._leases.take(space_id, key)
            if lease is None:
                return None
            if lease.entry.kind in ("value", "session") or not self.is_sound(lease):
                lease.close()
                return None
        return lease

    def is_sound(self, lease: Lease) -> bool:
        """Whether a leased file, or each file of a leased tree, is what was stored, and a leased pack exists; else it is set aside."""
        look = {"blob": self._file_is_sound, "tree": self._tree_is_sound, "pack": self._pack_is_there}.get(lease.entry.kind)
        with faults(lease.entry.key):
            return look is None or look(lease)

    def take(self, space_id: int, key: str) -> Lease | None:
        """A lease on the bytes of a key, of a small value too, for `bytes_leased`; None if there are none."""
        with faults(key):
            lease = self._leases.take(space_id, key)
            if lease is not None and lease.entry.kind not in ("blob", "value"):
                lease.close()
                return None
            return lease

    def bytes_leased(self, lease: Lease) -> memoryview | None:
        """The bytes of a leased entry, not remembered, since they are used once; small ones are copied, others mapped. None where they are
        damaged or gone."""
        with faults(lease.entry.key):
            return self._bytes_of(lease.entry, copies=lease.entry.size <= COPIED)

    def view_leased(self, space: str, key: str, lease: Lease) -> Remembered | None:
        """The bytes of a leased entry, remembered; None where they are damaged or gone."""
        data = self._bytes_of(lease.entry)
        return self._memo.add(space, key, lease.entry, data) if data is not None else None

    def is_intact(self, entry: Entry, data: memoryview) -> bool:
        """Whether these are the bytes that were stored, whatever was checked before; else the entry is set aside."""
        if blobs.checksum_of(data) == entry.checksum:
            return True
        with faults(entry.key):
            self.set_aside(entry, f"{entry.name}: its bytes are not what was stored")
        return False

    def _bytes_of(self, entry: Entry, *, copies: bool = False) -> memoryview | None:
        """The verified bytes of an entry; None if it was evicted meanwhile, or is damaged, in which case it is set aside."""
        if entry.kind == "value":
            payload = entries.payload(self._catalog, entry.id)
            return memoryview(payload) if payload is not None and self._is_sound(entry, payload) else None
        try:
            data, status = blobs.map_blob(self._root, entry, copies=copies)
            return data if self._is_sound(entry, data, status) else None
        except FileNotFoundError:
            self._missing(entry)
        except errors.Damaged as error:
            self.set_aside(entry, str(error))
        return None

    def _missing(self, entry: Entry) -> None:
        """Set aside an entry whose file is gone, unless it was evicted meanwhile."""
        if entries.by_id(self._catalog, entry.id) and self._index.id_of(entry.slot) == entry.id:
            self.set_aside(entry, f"{entry.name}: its file is gone")

    def _file_is_sound(self, lease: Lease) -> bool:
        entry = lease.entry
        try:
            status = self._root.files.lstat(lease.path)
        except FileNotFoundError:
            self._missing(entry)
            return False
        if status.st_size != entry.size:
            self.set_aside(entry, f"{entry.name}: it has {status.st_size} bytes, {entry.size} were stored")
            return False
        return self._needs_no_look(entry, status) or self._bytes_of(entry) is not None

    def _pack_is_there(self, lease: Lease) -> bool:
        """Whether a pack has its directory; its samples are checked one by one when they are read."""
        if self._root.files.is_directory(lease.path):
            return True
        self._missing(lease.entry)
        return False

    def _tree_is_sound(self, lease: Lease) -> bool:
        """Whether a tree holds what was published, and nothing else. The first check of a process reads its files; later ones compare sizes
        and times. A damaged tree is set aside, with those of its files whose bytes changed: they are links to the entries' own files."""
        tree = lease.entry
        try:
            files = blobs.look(self._root, lease.path)
        except (FileNotFoundError, LinkInTheWay):
            self.set_aside(tree, f"{tree.name}: it is gone")
            return False
        if tree.boot == self._root.epoch and self._trees.get(tree.id) == _fingerprint(files):
            return True
        changed = self._changed_in(lease.path, tree, files)
        if changed:
            others = f", and {len(changed) - 1:,} more" if changed[1:] else ""
            self.set_aside(tree, f"{tree.name}: {changed[0]!r} in it was changed, added or removed{others}")
            return False
        self.note_tree(lease, files)
        return True

    def is_extended(self, tree: Lease, wrong: Sequence[str], others: Sequence[tuple[str, Entry]]) -> bool:
        """Whether no name in a tree that was extended is ``wrong``, and the ``others``, which were there, are sound; else it is set
        aside."""
        wrong = [*wrong, *(name for name, one in interrupts.paced(others) if not self._member_is_sound(f"{tree.path}/{name}", one))]
        if wrong:
            self.set_aside(tree.entry, f"{tree.entry.name}: {wrong[0]!r} in it was changed or added")
        return not wrong

    def _changed_in(self, path: str, tree: Entry, files: dict[str, tuple[int, int, int]]) -> list[str]:
        """The names in a tree that are not what was published."""
        members = dict(entries.members(self._catalog, tree.id))
        names = [*members, *(blobs.folders_of(tree.meta) or [])]
        expected = members.keys() | {name[: at + 1] for name in interrupts.paced(names) for at, part in enumerate(name) if part == "/"}
        changed = files.keys() - expected if blobs.grows(tree.meta) else files.keys() ^ expected
        every = interrupts.paced(members.items())
        changed |= {name for name, member in every if name in files and not self._member_is_sound(f"{path}/{name}", member)}
        return sorted(changed)

    def _member_is_sound(self, path: str, member: Entry) -> bool:
        """Whether a file of a tree is what was stored. Small files are read: mapping each would cost more than the rest of the check."""
        try:
            fd = self._root.files.open(path)
        except (OSError, ValueError):
            return False
        try:
            status = os.fstat(fd)
            if status.st_size == member.size:
                if self._needs_no_look(member, status):
                    return True
                if blobs.checksum_of(os.read(fd, member.size) if member.size <= COPIED else fd) == member.checksum:
                    self._note_checked(member, status, fd)
                    return True
            self._set_aside_member(member, status)
            return False
        finally:
            os.close(fd)

    def _set_aside_member(self, member: Entry, status: os.stat_result) -> None:
        """Set aside the entry of a changed file of a tree, unless the file in the tree is another one by now. The caller logs it."""
        try:
            own = self._root.files.lstat(self._root.blob_name(member.id, member.suffix))
        except (FileNotFoundError, LinkInTheWay):
            return
        if (own.st_dev, own.st_ino) == (status.st_dev, status.st_ino):
            self._supersede(member)

    def _needs_no_look(self, entry: Entry, status: os.stat_result | None) -> bool:
        """Whether a file was published or checked in this epoch, by any process, and not written to since. ``status``: None for a small
        value, which is compared whenever it is read: that takes a microsecond."""
        if status is None or entry.boot != self._root.epoch:
            return False
        return blobs.is_sealed(status, entry.checksum) or self._unsealed.get(entry.id) == status.st_mtime_ns

    def _is_sound(self, entry: Entry, data: Buffer, status: os.stat_result | None = None) -> bool:
        if self._needs_no_look(entry, status):
            return True
        if blobs.checksum_of(data) != entry.checksum:
            self.set_aside(entry, f"{entry.name}: its bytes are not what was stored")
            return False
        self._note_checked(entry, status)
        return True

    def _note_checked(self, entry: Entry, status: os.stat_result | None, fd: int | None = None) -> None:
        self.note_sound(entry)
        if status is None or blobs.is_sealed(status, entry.checksum):
            return
        # Written by a version that knew no seals, or somebody set its time; a group's files have other owners.
        self._remember(self._unsealed, entry.id, status.st_mtime_ns)
        if self._root.read_only or self._keeps_no_seals or status.st_uid != os.geteuid():
            return
        try:
            self._seal_again(entry, status, fd)
        except OSError as error:  # it may not be written to, or nothing more can be opened: the bytes are sound all the same
            log.debug("%s: its time cannot be set: %s", entry.name, str(error))

    def _seal_again(self, entry: Entry, status: os.stat_result, fd: int | None) -> None:
        own = blobs.open_blob(self._root, entry.id, entry.suffix) if fd is None else fd
        try:
            now = os.fstat(own)
            if now.st_ino == status.st_ino and now.st_mtime_ns == status.st_mtime_ns:
                blobs.seal(own, entry.checksum)
                now = os.fstat(own)
                self._keeps_no_seals = not blobs.is_sealed(now, entry.checksum)  # else each hit would write, and other processes read again
                self._remember(self._unsealed, entry.id, now.st_mtime_ns)
        finally:
            if fd is None:
                os.close(own)

    def note_sound(self, entry: Entry) -> None:
        """Note that an entry need not be checked again in this epoch."""
        if entry.boot != self._root.epoch and not self._root.read_only:
            with contextlib.suppress(errors.WriterBusy, errors.ReadOnly, DiskFull), self._catalog.write(0) as txn:  # else by the next
                entries.set_boot(txn, entry.id, self._root.epoch)

    def note_tree(self, lease: Lease, files: dict[str, tuple[int, int, int]] | None = None) -> None:
        """Note that a tree is sound as it is: later checks of this process compare sizes and times."""
        self.note_sound(lease.entry)
        self._remember(self._trees, lease.entry.id, _fingerprint(files if files is not None else blobs.look(self._root, lease.path)))

    @staticmethod
    def _remember(noted: dict[int, int], id: int, value: int) -> None:
        if len(noted) >= _MANY:
            noted.clear()
        noted[id] = value

    def set_aside(self, entry: Entry, why: str) -> None:
        """Stop serving a damaged entry: it leaves the index now, and the disk with its last lease."""
        self._counts.add(counters.DAMAGED)
        log.warning("%s: it is set aside, and fetched again when needed", why)
        events.emit("fault", self._root.path, entry.key, error=why)
        self._supersede(entry)

    def _supersede(self, entry: Entry) -> None:
        if self._root.read_only:
            return
        with self._catalog.write() as txn:
            if entries.by_id(txn, entry.id) is not None:
                entries.supersede(txn, entry)
                self._index.clear(entry.slot, entry.id)
            txn.leftovers = True


def _fingerprint(files: dict[str, tuple[int, int, int]]) -> int:
    return hash(frozenset(files.items()))
