"""The parts of one root that change it."""

from __future__ import annotations

from forebay._engine.catalog import Catalog
from forebay._engine.files.root import Root
from forebay._engine.index.adaptive import AdaptiveSpaces
from forebay._engine.index.counters import Counters
from forebay._engine.index.memo import Memo
from forebay._engine.index.records import EntryIndex
from forebay._engine.locks.fill import Fill
from forebay._engine.locks.leases import Leases
from forebay._engine.locks.owners import Owners
from forebay._engine.packs.packing import Packing
from forebay._engine.space.budget import Budget
from forebay._engine.space.eviction import Eviction
from forebay._engine.space.ranking import Ranking
from forebay._engine.write.insert import Label
from forebay._engine.write.link import Linker
from forebay._engine.write.publish import Publisher
from forebay._kernel import waits


class Writers:
    """What waits for keys, evicts, publishes and packs in one root. The engine imports this module when a call first needs it: a process
    that only reads what is there starts without."""

    label = Label

    def __init__(
        self, root: Root, catalog: Catalog, index: EntryIndex, memo: Memo, counters: Counters, leases: Leases, owners: Owners,
        words: waits.Words, adaptive: AdaptiveSpaces,
    ) -> None:  # fmt: skip
        self.fill = Fill(root, catalog, owners, words, counters)
        self.eviction = Eviction(root, catalog, index, leases, words)
        self.ranking = Ranking(catalog, index, adaptive)
        self.budget = Budget(root, catalog, owners, self.eviction, self.ranking, words, counters, memo)
        self.publisher = Publisher(root, catalog, index, adaptive, owners, self.budget, self.eviction)
        self.linker = Linker(root, catalog, index, self.eviction, self.publisher)
        self.packing = Packing(root, catalog, leases, self.budget, self.publisher)

    def close(self) -> None:
        self.fill.close()
        self.budget.close()

    def before_fork(self) -> None:
        self.budget.before_fork()
        self.fill.before_fork()

    def after_fork_parent(self) -> None:
        self.fill.after_fork_parent()
        self.budget.after_fork_parent()

    def after_fork_child(self) -> None:
        for part in (self.budget, self.fill, self.ranking):
            part.after_fork_child()
