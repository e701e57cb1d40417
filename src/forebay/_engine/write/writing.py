"""One write: bytes that come from a remote, or are too many to be written while others wait.

reserve       a row counts the bytes                        a crash leaves a counted partial
stage         the file grows under tmp/                     a crash leaves a counted partial, resumed where it can be
publish       see the module `publish`                      a crash leaves the reservation, which names both places

A small object is collected in memory, and written in the transaction that publishes it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self

from forebay import errors
from forebay._engine.catalog import reservations
from forebay._engine.catalog.reservations import Reservation
from forebay._engine.catalog.transactions import Txn
from forebay._engine.files import blobs, stages
from forebay._engine.files.layout import faults
from forebay._engine.files.stages import MemoryStage, Stage
from forebay._engine.locks.lease import Lease
from forebay._engine.space.free_space import SpaceRequest
from forebay._engine.write.publish import INLINE, SMALL, Label, Pending, Published, Publisher
from forebay._model import Buffer, Entry, ObjectInfo, Partial, Sink, Span


class Writing:
    """One write: a `Sink` for a remote, then `publish`. Without that, the bytes are kept for a successor if it can resume them.

    Caller: holds the key's lock, unless nothing is to be resumed. ``reserved``: a reservation to use. ``on_progress`` is called with
    (done, total) bytes. ``timeout``: see `Budget.reserve`; ``at_once``: see `Stage.begin`. ``collect``: an object of at most so many bytes
    is kept in memory until it is published, together with others; but only a small one where a successor could resume a larger one."""

    def __init__(
        self, publisher: Publisher, label: Label, *, resume: bool = False, reserved: Reservation | None = None,
        on_progress: Callable[[int, int | None], None] | None = None, timeout: float = 0.0, collect: int = 0, at_once: bool = False,
    ) -> None:  # fmt: skip
        self._publisher, self.label, self._on_progress, self._timeout = publisher, label, on_progress, timeout
        self._collect, self._at_once = collect, at_once
        self._keyhash = label.keyhash
        self._reserved = reserved
        self._stage: Stage | None = None
        self._small: MemoryStage | None = None
        self._resumable = self.is_published = False
        self.info: ObjectInfo | None = None
        self.partial: Partial | None = None
        self.spills = False
        """See `SpaceRequest`."""
        self.inline = False
        """Whether tiny bytes become a value of the catalog, which has no file."""
        if resume:
            with faults(label.key):
                left = self._adopt()
            if left is not None:
                self._reserved, self._stage = left
                self.partial = self._stage.partial

    def _adopt(self) -> tuple[Reservation, Stage] | None:
        """Take over the partial of a fetch of this key whose process died or gave up; None if there is none."""
        catalog, root, owners, keyhash = self._publisher.catalog, self._publisher.root, self._publisher.owners, self._keyhash
        if not reservations.by_key(catalog, keyhash):
            return None
        me = owners.me()
        with catalog.write() as txn:
            owners.reap(txn)
            left = [r for r in reservations.by_key(txn, keyhash) if r.owner is None][:1]
            for reservation in left:
                reservations.set_owner(txn, reservation.id, me, owners.who)
        for reservation in left:
            try:
                stage = Stage.resume(root, keyhash, reservation.id)
                return reservation, stage or Stage.create(root, keyhash, reservation.id)
            except BaseException:
                self._give_up(reservation)  # else it counts as this process's for as long as the process lives
                raise
        return None

    def _give_up(self, reserved: Reservation) -> None:
        """Leave a partial for a successor. It stays counted, and is the first to be evicted when space is needed."""
        with self._publisher.catalog.write() as txn:
            reservations.set_owner(txn, reserved.id, None)

    # -- the sink --------------------------------------------------------------------------------------------------

    def begin(self, info: ObjectInfo) -> tuple[Span, ...]:
        """See `Sink.begin`."""
        self.info, self._small = info, None
        self._resumable = info.strong and info.validator is not None and (info.size or 0) > blobs.CHUNK
        with faults(self.label.key, info.size or 0):
            size, at_most = info.size, SMALL if self._resumable else max(SMALL, self._collect)
            if self._reserved is None and size is not None and size <= at_most:
                self._small = MemoryStage(size)
                return (Span(0, size),) if size else ()
            return self._begin_on_disk(info)

    def _begin_on_disk(self, info: ObjectInfo) -> tuple[Span, ...]:
        budget, label, size, self._small = self._publisher.budget, self.label, info.size or 0, None
        if self._reserved is None:
            request = SpaceRequest(label.space, label.key, self._keyhash, size, label.suffix, (label.key,), spills=self.spills)
            self._reserved = budget.reserve(request, timeout=self._timeout)
        elif self._reserved.size < size:
            self._reserved = budget.resize(self._reserved, size)
        if self._stage is None:
            self._stage = Stage.create(self._publisher.root, self._keyhash, self._reserved.id)
        missing = self._stage.begin(info.size, info.validator if info.strong else None, on_grow=self._grow, at_once=self._at_once)
        if self._reserved.size > size:  # after the stage let go of what was written: no byte is ever uncounted
            self._reserved = budget.resize(self._reserved, size)
        return missing

    def _grow(self, size: int) -> None:
        self._reserved = self._publisher.budget.resize(self.reserved, size)

    def write(self, offset: int, data: Buffer) -> None:
        """See `Sink.write`."""
        stage = self._small or self.stage
        with faults(self.label.key, len(data)):
            stage.write(offset, data)
        if self._on_progress is not None:
            self._on_progress(stage.done, stage.total)

    def move_to(self, sink: Sink) -> None:
        """Move all bytes, in order, to another sink, and give the space back: nothing will be kept. Raises `CacheFault`."""
        stage, at = self.stage, 0
        with faults(self.label.key):
            with open(self._publisher.root.files.open(stage.path), "rb") as file:
                while block := file.read(blobs.CHUNK):
                    sink.write(at, block)
                    at += len(block)
            if at < stage.done:
                raise errors.CacheFault(f"{stage.path}: {stage.done:,} bytes arrived, but {at:,} are there", path=str(stage.path))
            stage.discard()
            self._publisher.budget.cancel(self.reserved.id)
        self._stage = self._reserved = None

    def clone(self, fd: int) -> bool:
        """See `CloningSink.clone`."""
        if self._small is not None and self._small.total <= SMALL:
            return False
        with faults(self.label.key):
            if self._small is not None and self.info is not None:
                self._begin_on_disk(self.info)  # it may cost no bytes there
            return self.stage.clone(fd)

    @property
    def collected(self) -> MemoryStage | None:
        """The bytes, as long as they are in memory only."""
        return self._small

    @property
    def stage(self) -> Stage:
        assert self._stage is not None, "the write has not begun"
        return self._stage

    @property
    def reserved(self) -> Reservation:
        assert self._reserved is not None, "the write has not begun"
        return self._reserved

    def sha256(self) -> str:
        """The SHA-256 of the bytes, for a check before they are published."""
        import hashlib

        if self._small is not None:
            return hashlib.sha256(self._small.data).hexdigest()
        with open(self._publisher.root.files.open(self.stage.path), "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def set_meta(self, meta: str) -> None:
        """Set the small text that the entry will carry."""
        self.label = self.label._replace(meta=meta)

    # -- publishing ------------------------------------------------------------------------------------------------

    def pending(self, validator: str | None, *, leased: bool) -> Pending:
        """The complete and verified bytes, as what is to be published."""
        if self._small is not None:
            _, checksum = self._small.finish()
            if self.inline and self._small.total <= INLINE:
                return self._publisher.of_bytes(self.label, self._small.data, validator, leased=leased)
            return self._publisher.of_file(self.label, self._small.data, checksum, validator, leased=leased)
        size, checksum = self.stage.finish()
        return Pending(self.label, "blob", size, checksum, validator, place=self._place, leased=leased)

    def _place(self, txn: Txn, id: int) -> None:
        stage, root = self.stage, self._publisher.root
        blobs.publish(root, stage.path, id, self.label.suffix)
        txn.after_commit.append(lambda: stages.remove_map(root, stage.keyhash, id))

    def publish(self, *, validator: str | None = None) -> Entry:
        """Publish the bytes as an entry. Raises `NoSpace` or another `CacheFault`; then the previous entry stays."""
        return self._publish(validator, leased=False).entry

    def publish_leased(self, *, validator: str | None = None) -> Lease:
        """`publish`; returns a lease that exists before anybody can see the entry."""
        lease = self._publish(validator, leased=True).lease
        assert lease is not None
        return lease

    def _publish(self, validator: str | None, *, leased: bool) -> Published:
        with faults(self.label.key, (self.info and self.info.size) or 0):
            batch = [self.pending(validator, leased=leased)]
            (new,) = self._publisher.publish(batch, reserved=self._reserved, timeout=self._timeout, spills=self.spills)
        self.is_published = True
        return new

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self.is_published or self._reserved is None:
            return
        self._resumable &= not isinstance(value, errors.NoSpace | errors.ChecksumMismatch)  # no space for it now, or other bytes
        with faults(self.label.key):
            if self._stage is not None and self._resumable and self._stage.done:
                self._stage.close()
                self._give_up(self._reserved)
                return
            if self._stage is not None:
                self._stage.discard()
            self._publisher.budget.cancel(self._reserved.id)
