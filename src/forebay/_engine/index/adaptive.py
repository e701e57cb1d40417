"""Spaces that choose their policy by what is used: for each of them a mapped file, which all processes of the node share.

``shared/policy-N``   of the space N: a page of header, the words of its `ghosts`, then the entries that are on trial, and those dismissed

All of it is a hint, as the index of keys is. Any process stores to the ghosts without a lock. Trials and dismissed entries are rings that
are changed under the writer lock only; what they say of an entry is believed while its record says the same. So what is torn, lost,
stale or another program's misleads the choice of victims for a while, and nothing else. The file may be deleted at any time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import xxhash

from forebay._engine.files.layout import PAGE, ROW, Root
from forebay._engine.files.table import FREE, HEADER, SharedTable
from forebay._engine.index import ghosts
from forebay._engine.index.ghosts import Ghosts, Standing
from forebay._engine.index.records import EntryIndex
from forebay._kernel import host
from forebay._logs import logger
from forebay._model import Policy
from forebay.errors import CacheFault

log = logger("forebay.index")

_FIRST, _NEXT, _BYTES, _INSERTED = range(FREE, FREE + 4)  # of the trials: words of the header
_DISMISSED = FREE + 4  # of the dismissed entries: the first of three such words
_TRIALS = 512  # of a ring
_WORDS = 4  # of a trial
_RING = HEADER + ghosts.WORDS
_BELIEVED = 1 << 62
_TRIES = 64
_NOTED_EVERY = 100_000_000
_OPEN_AGAIN = 5.0
"""Seconds until a file that could not be used is tried again."""


class Trial(NamedTuple):
    """An entry that goes before others while it is not used: its last use, or its insertion, was at ``used``."""

    slot: int
    id: int
    used: int
    charge: int


class _Ring:
    """Entries in the order in which they were put here. Called under the writer lock."""

    def __init__(self, words: memoryview, head: int, base: int) -> None:
        """``head``: where its three words are: the numbers of the first entry, and of the next one, and the bytes of all."""
        self._words, self._first, self._next, self._bytes, self._base = words, head, head + 1, head + 2, base

    @property
    def bytes(self) -> int:
        return int(self._words[self._bytes])

    def put(self, trial: Trial) -> None:
        """Add an entry, in the place of the oldest one if there is no other."""
        words = self._words
        first, next = self._ends()
        if next - first == _TRIALS:
            self.pop()
        at = self._base + next % _TRIALS * _WORDS
        words[at], words[at + 1], words[at + 2], words[at + 3] = trial
        words[self._bytes] += trial.charge
        host.set_word(words, self._next, next + 1)  # last: until then it is not there

    def pop(self) -> Trial | None:
        """Take out the oldest entry."""
        words = self._words
        first, next = self._ends()
        if first == next:
            words[self._bytes] = 0  # a process was killed before it had counted
            return None
        at = self._base + first % _TRIALS * _WORDS
        trial = Trial(*words[at : at + _WORDS].tolist())
        host.set_word(words, self._first, first + 1)
        words[self._bytes] = max(words[self._bytes] - trial.charge, 0)
        return trial

    def entries(self) -> list[Trial]:
        """All entries, oldest first: without the writer lock only about as they are."""
        first, next = self._ends()
        places = (self._base + number % _TRIALS * _WORDS for number in range(first, next))
        return [Trial(*self._words[at : at + _WORDS].tolist()) for at in places]

    def room(self) -> int:
        """For how many entries there is a place."""
        first, next = self._ends()
        return _TRIALS - (next - first)

    def _ends(self) -> tuple[int, int]:
        """The numbers of the first entry, and of the next one."""
        words = self._words
        first, next = words[self._first], words[self._next]
        if not 0 <= next - first <= _TRIALS or next >= _BELIEVED or words[self._bytes] >= _BELIEVED:  # damaged
            first = next = 0
            if not words.readonly:
                words[self._first] = words[self._next] = words[self._bytes] = 0
        return first, next


class Sample:
    """A key whose uses its space wants to know of."""

    __index__ = ("_charge", "_ghosts", "_hash")

    def __init__(self, ghosts: Ghosts, hash: int, charge: int) -> None:
        self._ghosts, self._hash, self._charge = ghosts, hash, charge

    def use(self, now: int) -> int | None:
        """The key was hit at ``now``. Returns when the next hit is to be noted, if any is: those of a loop that reads few entries again and
        again would cost more than they tell."""
        if not self._ghosts.is_sampled(self._hash):
            return None
        self._ghosts.use(self._hash, self._charge, now, is_hit=True)
        return now + _NOTED_EVERY


class AdaptiveSpace:
    """One space. `use` is callable from any thread; what concerns trials is called under the writer lock."""

    def __init__(self, words: memoryview, index: EntryIndex) -> None:
        self._words, self._index = words, index
        self.ghosts = Ghosts(words[HEADER : HEADER + ghosts.WORDS])
        self._trials = _Ring(words, _FIRST, _RING)
        self._dismissed = _Ring(words, _DISMISSED, _RING + _WORDS * _TRIALS)
        self._offered: list[tuple[_Ring, Trial]] = []  # by `overdue`, and perhaps evicted since

    def use(self, key: str, charge: int, now: int, *, is_hit: bool) -> None:
        """A key, for which the budget counts ``charge`` bytes, was hit at ``now``, or inserted."""
        hash = hash_of(key)
        if self.ghosts.is_sampled(hash):
            self.ghosts.use(hash, charge, now, is_hit=is_hit)

    # -- trials ----------------------------------------------------------------------------------------------------

    def wants_trial(self, used: int) -> bool:
        """Whether an entry that is inserted now goes on trial. ``used``: bytes of the space."""
        words = self._words
        words[_INSERTED] = words[_INSERTED] + 1 & 0xFFFF
        return bool(words[_INSERTED] % ghosts.LOTTERY) and self.ghosts.is_full(used)

    def put_on_trial(self, trial: Trial) -> None:
        """Let an entry be evicted before those that are not on trial, unless it is used first."""
        self._trials.put(trial)

    def dismiss(self, trials: Sequence[Trial]) -> int:
        """Let entries be evicted before all others, unless they are used first: no program that says what it reads wants them soon. Returns
        how many there was a place for."""
        room = self._dismissed.room()
        for trial in trials[:room]:
            self._dismissed.put(trial)
        return min(len(trials), room)

    def begin_search(self) -> None:
        """A search for victims begins: what an earlier one was offered and did not take is where it was before."""
        offered, self._offered = self._offered, []
        for ring, trial in offered:
            if self._is_on_trial(trial):
                ring.put(trial)

    def overdue(self, count: int) -> list[Trial]:
        """Up to ``count`` entries that go first: those dismissed; then, while bimodal insertion leads, those whose trial is over, oldest
        first: all trials together fill more than their share of the space. Each is offered once in a search."""
        some: list[Trial] = []
        for ring in (self._dismissed, self._trials):
            while len(some) < count and len(self._offered) < _TRIES and (ring is self._dismissed or self._is_a_trial_over()):
                trial = ring.pop()
                if trial is None:
                    break
                if self._is_on_trial(trial):
                    some.append(trial)
                    self._offered.append((ring, trial))
        return some

    def first_to_go(self) -> list[int]:
        """The ids of the entries that `overdue` would offer now. Callable without the writer lock."""
        tried = self._trials.entries() if self.ghosts.bimodal else []
        left, limit = sum(trial.charge for trial in tried), self.ghosts.capacity // ghosts.TRIAL_SHARE
        over: list[Trial] = []
        for trial in tried:
            if left <= limit:
                break
            over.append(trial)
            left -= trial.charge
        return [trial.id for trial in (*self._dismissed.entries(), *over) if self._is_on_trial(trial)]

    def _is_a_trial_over(self) -> bool:
        return self.ghosts.bimodal and self._trials.bytes > self.ghosts.capacity // ghosts.TRIAL_SHARE

    def _is_on_trial(self, trial: Trial) -> bool:
        try:
            words, base = self._index.record(trial.slot)
        except (CacheFault, OSError, IndexError, ValueError):
            return False
        return bool(trial.id and words[base] == trial.id and words[base + 1] == trial.used)


class AdaptiveSpaces:
    """The adaptive spaces of one root, as far as this process knows them. Callable from any thread and, mappings being inherited, after a
    fork. Nothing here is ever missed: a call that meets a fault of the disk does without."""

    def __init__(self, policy_of: Callable[[str], Policy]) -> None:
        """``policy_of``: returns the policy of the space of a name, as it is in force."""
        self._policy_of = policy_of
        self._root: Root | None = None
        self._index: EntryIndex | None = None
        self._known: set[str] = set()  # the spaces that `know` was told of
        self._ids: dict[str, int] = {}
        self._spaces: dict[int, AdaptiveSpace] = {}
        self._tried: dict[int, float] = {}
        self._learn_at = 0.0

    def restart(self, root: Root, index: EntryIndex) -> None:
        """Forget everything; go on with another index."""
        self._root, self._index, self._learn_at = root, index, 0.0
        self._ids, self._spaces, self._tried, self._known = {}, {}, {}, set()

    def know(self, id: int, name: str) -> None:
        """Note the id of a space, and whether it is adaptive."""
        self._known.add(name)
        if self._policy_of(name).adapts:
            self._ids[name] = id
        elif self._ids.pop(name, None) is not None:
            self._spaces.pop(id, None)

    def of(self, id: int) -> AdaptiveSpace | None:
        """The space with this id, if it is adaptive, and its file can be used."""
        space = self._spaces.get(id)
        return space if space is not None or id not in self._ids.values() else self._map(id)

    def every(self) -> Iterator[tuple[int, AdaptiveSpace]]:
        for id in list(self._ids.values()):
            space = self.of(id)
            if space is not None:
                yield id, space

    def hit(self, name: str, id: int, key: str, charge: int, now: int) -> None:
        """A key of the space with this name and id was hit; see `AdaptiveSpace.use`."""
        if name not in self._known:
            self.know(id, name)
        space = self.of(known) if (known := self._ids.get(name)) is not None else None
        if space is not None and not self._is_read_only:
            space.use(key, charge, now, is_hit=True)

    def sample(self, name: str, key: str, charge: int) -> Sample | None:
        """What is to be told of hits of a key in the space of this name; None: nothing."""
        id = self._ids.get(name)
        space = self.of(id) if id is not None else None
        if space is None or self._is_read_only:
            return None
        hash = hash_of(key)
        return Sample(space.ghosts, hash, charge) if space.ghosts.is_sampled(hash) else None

    def standing(self, id: int) -> Standing | None:
        """How the policies of a space do; None where that is not known."""
        space = self._spaces.get(id) or self._open(id)
        return space.ghosts.standing() if space is not None else None

    def first_to_go(self, id: int) -> list[int]:
        """See `AdaptiveSpace.first_to_go`."""
        space = self._spaces.get(id) or self._open(id)
        return space.first_to_go() if space is not None else []

    def is_to_learn(self) -> bool:
        """Whether it is a second since the limits of the spaces were last asked for, by a process that evicts."""
        if time.monotonic() < self._learn_at:
            return False
        self._learn_at = time.monotonic() + 1
        return True

    # -- the files -------------------------------------------------------------------------------------------------

    @property
    def _is_read_only(self) -> bool:
        return self._root is None or self._root.read_only

    def _map(self, id: int) -> AdaptiveSpace | None:
        if time.monotonic() < self._tried.get(id, 0.0):
            return None
        self._tried[id] = time.monotonic() + _OPEN_AGAIN
        try:
            space = self._open(id, create=not self._is_read_only)
        except (CacheFault, OSError) as error:
            log.debug("the policy of the space %d is lru: %s", id, str(error))
            return None
        if space is not None:
            space = self._spaces.setdefault(id, space)
        return space

    def _open(self, id: int, *, create: bool = False) -> AdaptiveSpace | None:
        root, index = self._root, self._index
        if root is None or index is None:
            return None
        table = SharedTable(root, root.shared_dir / f"policy-{id}", b"FBPOLI01", ghosts.WORDS + 2 * _WORDS * _TRIALS)
        words = table.create() if create else table.words()
        return AdaptiveSpace(words, index) if words is not None else None


def hash_of(key: str) -> int:
    return xxhash.xxh3_64_intdigest(key.encode("utf-8", "surrogatepass"))


def charge_of(size: int, *, is_file: bool) -> int:
    """About what the budget counts for an entry."""
    return -(-size // PAGE) * PAGE if is_file else size + ROW
