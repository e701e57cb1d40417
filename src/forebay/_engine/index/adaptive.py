"""Spaces that choose their policy by what is used: for each of them a mapped file, which all processes of the node share.

``shared/policy-N``   of the space N: a page of header, the words of its `ghosts`, then the entries on probation, and those dismissed

All of it is a hint, as the index of keys is. Any process stores to the ghosts without a lock. Trials and dismissed entries are rings that
are changed under the writer lock only; what they say of an entry is believed while its record says the same. So what is torn, lost,
stale or another program's misleads the choice of victims for a while, and nothing else. The file may be deleted at any time.

**Ghosts** tell which of two policies would keep more: two caches of keys only, tried on a sample of the keys that are used, by
*miniature simulation* (Waldspurger, Saemundsson, Ahmad, Park, ATC 2017): a cache of 1/n of the size that sees the keys whose hash is in
1/n of all hashes has about the hit ratio of the whole one. One ghost evicts the least recently used key. The other inserts bimodally
(Qureshi, Jaleel, Patt, Steely, Emer, ISCA 2007): all but one in `LOTTERY` new keys are on *trial*, and are evicted before all others until
they are used again. Trials may fill `TRIAL_SHARE` of the cache, oldest first, as in 2Q: so what has become popular finds its way in.

No clock, no file and no lock is in here. The state lies in words that any process may store to at any time, and that a killed process may
leave half stored: whatever they hold, no call raises, and some thousand uses later the ghosts are right again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import xxhash

from forebay._engine.files.layout import PAGE, ROW, Root
from forebay._engine.files.shared_table import FREE, HEADER, SharedTable
from forebay._engine.index.records import EntryIndex
from forebay._kernel import host
from forebay._logs import logger
from forebay._model import Policy
from forebay.errors import CacheFault

MOST, LEAST = 512, 128
"""Keys in a ghost: with more of them the sample is halved; with fewer in a full one it is doubled."""
LOTTERY = 64
TRIAL_SHARE = 128
MARGIN = 20
"""The policy changes when the other one leads by a 20th of the hits, or of the misses, whichever are fewer, and by `NOISE` hits."""
NOISE = 4
MEMORY, OF_LATE = 1024, 128
"""Hits are halved after so many uses of the sample; those of late after fewer."""

UNDECIDED, BIMODAL, LRU = range(3)
"""Which policy leads. `UNDECIDED`: neither ghost has led yet; then it is bimodal insertion once a cache of some size is full."""
_OF_LRU, _OF_BIMODAL = range(2)
_HEADER = 32
_SHIFT, _CAPACITY, _LEADER, _SEEN, _USES, _GHOSTS_INSERTED, _GHOST_TRIALS, _EVICTED = range(8)
_HITS, _GHOST_BYTES, _COUNT = 8, 10, 12  # of each ghost
_LATE, _RECOVERS = 16, 20  # of late: uses, hits of each ghost, hits of the cache itself
_KNOWN = 21  # `_NEW_DATA`, less the uses of keys that were never seen since the last use of one that was
_RECORDS = 4 * MOST
_PROBES = 16
_LENGTH = _RECORDS + _PROBES
_HASH, _SIZE = _HEADER, _HEADER + _LENGTH
_AGES = _HEADER + 2 * _LENGTH, _HEADER + 3 * _LENGTH
"""An age is `_YOUNGEST` less the time of the last use; of a key on probation, `_TRIAL` less that of its insertion; 0: not in the ghost. So
the largest is the coldest, and words that were never stored are right."""
WORDS = _HEADER + 4 * _LENGTH
_YOUNGEST, _TRIAL = 1 << 63, (1 << 64) - 1
_LARGEST, _MOST_SHIFT = 1 << 60, 40
_UNLIMITED = 1 << 62
_RECOUNT = 512
_STRIPES = 4
_DECIDE = 16
_ENOUGH = 64
"""Keys in a ghost below which it is followed only once it leads."""
_NEW_DATA = 8
"""After so many uses of keys that no record is left of, a program reads data that are new: what is kept is not what it comes back to."""


class Standing(NamedTuple):
    """How two policies do: ``hits`` of each among the last ``uses`` of the sample, older ones counted less. ``share``: one key in so many
    is in the sample."""

    bimodal: bool
    hits: tuple[int, int]
    uses: int
    share: int

    @property
    def leader(self) -> str:
        """The name of the policy that leads."""
        return "bimodal" if self.bimodal else "lru"


class Ghosts:
    """Both ghosts of one cache. ``words``: `WORDS` of 64 bits, all 0 at first. Callable from any thread, and by many processes for the same
    words: of calls at the same time one may be lost."""

    def __init__(self, words: memoryview) -> None:
        self._words = words
        self._uses = 0  # when `learn` was last called

    def is_sampled(self, hash: int) -> bool:
        """Whether the ghosts see a key with this hash of 64 bits."""
        shift = self._words[_SHIFT]
        return shift > _MOST_SHIFT or not hash >> 64 - shift

    @property
    def bimodal(self) -> bool:
        """Whether bimodal insertion leads, the data are not all new, and the cache need not recover. It leads as soon as a cache of some
        size is full: a scan through a hot set would else have replaced it by the time that the ghosts differ."""
        words = self._words
        leads = words[_LEADER] == BIMODAL or (words[_LEADER] == UNDECIDED and self.capacity and words[_COUNT] >= _ENOUGH)
        return bool(leads and words[_KNOWN] and not words[_RECOVERS])

    @property
    def capacity(self) -> int:
        """The size of the whole cache in bytes; 0: it was not full yet."""
        capacity = self._words[_CAPACITY]
        return int(capacity) if capacity <= _LARGEST else 0

    def learn(self, capacity: int, now: int) -> None:
        """The whole cache is full, and holds ``capacity`` bytes. Called now and then: ghosts with too few keys get a larger sample,
        whatever their words say of the sample that they have."""
        words = self._words
        words[_CAPACITY] = capacity
        uses, self._uses = self._uses, words[_USES]
        if words[_SHIFT] and (words[_USES] == uses or not LEAST <= words[_COUNT] <= MOST):
            self._recount(now)
            if words[_COUNT] < LEAST:
                words[_SHIFT] = min(words[_SHIFT], _MOST_SHIFT) - 1

    def is_full(self, size: int) -> bool:
        """Whether a cache of ``size`` bytes has no sixteenth of its capacity left."""
        return 0 < self.capacity < size + size // 15

    def standing(self) -> Standing:
        words = self._words
        return Standing(self.bimodal, (words[_HITS], words[_HITS + 1]), words[_USES], 1 << min(words[_SHIFT], _MOST_SHIFT))

    def use(self, hash: int, size: int, now: int, *, is_hit: bool) -> None:
        """Let both ghosts see that a key of ``size`` bytes is used at ``now`` (nanoseconds, below 2^63), if it is in the sample.
        ``is_hit``: whether the cache itself had it."""
        words = self._words
        shift = words[_SHIFT]
        if shift > _MOST_SHIFT:
            self._clear()
            shift = 0
        if hash >> 64 - shift or not hash:
            return
        at = self._record_of(hash, min(size, _LARGEST))
        capacity = self.capacity >> shift or _UNLIMITED
        is_short = False
        for ghost, ages in enumerate(_AGES):
            age = words[ages + at]
            if age:
                words[_HITS + ghost] = words[_HITS + ghost] + 1 & _TRIAL
                words[_LATE + 1 + ghost] = words[_LATE + 1 + ghost] + 1 & _TRIAL
                if age > _YOUNGEST:
                    words[_GHOST_TRIALS] = max(words[_GHOST_TRIALS] - words[_SIZE + at], 0)
                words[ages + at] = _YOUNGEST - now
            else:
                is_short |= self._insert(ghost, at, size, capacity, now)
        self._resize(is_short, now)
        words[_LATE + 3] = words[_LATE + 3] + is_hit & _TRIAL
        seen = words[_SEEN] = words[_SEEN] + 1 & 0xFFFF
        words[_USES], words[_LATE] = words[_USES] + 1 & _TRIAL, words[_LATE] + 1 & _TRIAL
        if not seen % _DECIDE:
            self._decide()
        if seen >= MEMORY:
            words[_SEEN], words[_USES] = 0, words[_USES] // 2
            words[_HITS], words[_HITS + 1] = words[_HITS] // 2, words[_HITS + 1] // 2
            if not self.bimodal and words[_HITS + _OF_BIMODAL] < words[_HITS + _OF_LRU] - words[_HITS + _OF_LRU] // MARGIN:
                self._begin_again()

    def _decide(self) -> None:
        """Change the policy if the other one leads. And let the cache recover by LRU where that ghost has kept more of late than the cache
        itself: what was lost before bimodal insertion led, such as a part of a hot set that was scanned through, would come back by trials
        only."""
        words = self._words
        hits, uses = words[_HITS : _HITS + 2].tolist(), words[_USES]
        if max(*hits, uses) > 4 * MEMORY or max(hits) > uses + _DECIDE:  # damaged
            words[_HITS] = words[_HITS + 1] = words[_USES] = 0
            return
        leader = _OF_BIMODAL if self.bimodal else _OF_LRU
        own = hits[leader]
        if hits[1 - leader] - own > max(min(own, uses - own), 0) / MARGIN + NOISE:
            words[_LEADER] = LRU if leader == _OF_BIMODAL else BIMODAL
            if leader == _OF_BIMODAL:
                self._begin_again()
        uses, lru, bimodal, real = words[_LATE : _LATE + 4].tolist()
        if max(lru, bimodal, real) > uses + _DECIDE or uses > 4 * OF_LATE or bimodal - lru > lru / MARGIN + NOISE:
            words[_RECOVERS] = 0
        elif lru - real > lru / 10 + NOISE:
            words[_RECOVERS] = 1
        elif lru - real <= NOISE / 2:
            words[_RECOVERS] = 0
        if uses >= 2 * OF_LATE:
            for at in range(_LATE, _LATE + 4):
                words[at] //= 2

    def _begin_again(self) -> None:
        """Let the ghost of bimodal insertion, which trails, go on from what that of LRU has, as the cache would. Else it would keep for
        long what nobody uses any more, such as the data set of an earlier job, and never show what it is worth for the next one."""
        words = self._words
        words[_AGES[_OF_BIMODAL] : _AGES[_OF_BIMODAL] + _LENGTH] = words[_AGES[_OF_LRU] : _AGES[_OF_LRU] + _LENGTH]
        for pair in (_HITS, _GHOST_BYTES, _COUNT):
            words[pair + _OF_BIMODAL] = words[pair + _OF_LRU]
        words[_LATE + 1 + _OF_BIMODAL] = words[_LATE + 1 + _OF_LRU]
        words[_GHOST_TRIALS] = 0

    # -- records ---------------------------------------------------------------------------------------------------

    def _record_of(self, hash: int, size: int) -> int:
        """The record of a key, which takes the place of the one used longest ago if there is none."""
        words, first = self._words, hash % _RECORDS
        hashes = words[_HASH + first : _HASH + first + _PROBES].tolist()
        if hash in hashes:
            words[_KNOWN] = _NEW_DATA
            at: int = first + hashes.index(hash)
            if words[_SIZE + at] != size:
                self._set_size(at, size)
            return at
        words[_KNOWN] = max(min(words[_KNOWN], _NEW_DATA) - 1, 0)
        ages = [words[start + first : start + first + _PROBES].tolist() for start in _AGES]
        # Of the two ages the smaller, since a key is in use as long as it is in one ghost.
        coldest = [_TRIAL if not (one or other) else min(one or _TRIAL, other or _TRIAL) for one, other in zip(*ages, strict=True)]
        at = first + coldest.index(max(coldest))
        for ghost in (_OF_LRU, _OF_BIMODAL):
            self._drop(ghost, at)
        words[_HASH + at], words[_SIZE + at] = hash, size
        return at

    def _set_size(self, at: int, size: int) -> None:
        """The object of a key has another size now. A ghost that it makes too large evicts at its next insertion."""
        words = self._words
        more = size - words[_SIZE + at]
        words[_SIZE + at] = size
        for ghost, ages in enumerate(_AGES):
            if words[ages + at]:
                words[_GHOST_BYTES + ghost] = max(words[_GHOST_BYTES + ghost] + more, 0) & _TRIAL
        if words[_AGES[_OF_BIMODAL] + at] > _YOUNGEST:
            words[_GHOST_TRIALS] = max(words[_GHOST_TRIALS] + more, 0) & _TRIAL

    def _insert(self, ghost: int, at: int, size: int, capacity: int, now: int) -> bool:
        """Insert a key, if it is not larger than the ghost. Returns whether that was short of space."""
        words, ages, is_short = self._words, _AGES[ghost], size > capacity
        if is_short:
            return True
        for _ in range(2 * _LENGTH):
            if words[_GHOST_BYTES + ghost] + size <= capacity:
                break
            is_short = True
            self._evict(ghost, capacity, now)
        age = _YOUNGEST - now
        if ghost == _OF_BIMODAL:
            is_full = words[_GHOST_BYTES + ghost] + size > capacity - capacity // 16
            if is_full and words[_GHOSTS_INSERTED] % LOTTERY and words[_KNOWN]:
                age = _TRIAL - now
                words[_GHOST_TRIALS] = words[_GHOST_TRIALS] + size & _TRIAL
            words[_GHOSTS_INSERTED] = words[_GHOSTS_INSERTED] + 1 & _TRIAL
        words[ages + at] = age
        words[_GHOST_BYTES + ghost] = words[_GHOST_BYTES + ghost] + size & _TRIAL
        words[_COUNT + ghost] = words[_COUNT + ghost] + 1 & _TRIAL
        return is_short

    def _evict(self, ghost: int, capacity: int, now: int) -> None:
        words, start = self._words, _AGES[ghost]
        words[_EVICTED] = words[_EVICTED] + 1 & 0xFFFF
        if not words[_EVICTED] % _RECOUNT:
            self._recount(now)
        overdue = ghost == _OF_BIMODAL and words[_GHOST_TRIALS] > capacity // TRIAL_SHARE
        # Records lie where their hashes lead, so a part of them is an even sample: what it has as the coldest is cold enough.
        for first, step in ((0, 1),) if overdue else ((words[_EVICTED] % _STRIPES, _STRIPES), (0, 1)):
            ages: list[int] = words[start + first : start + _LENGTH : step].tolist()
            coldest = max(ages)
            if coldest > _YOUNGEST and not overdue:
                coldest = max(filter(_YOUNGEST.__ge__, ages)) or (coldest if step == 1 else 0)
            if coldest:
                self._drop(ghost, first + step * ages.index(coldest))
                return
        words[_GHOST_BYTES + ghost] = words[_COUNT + ghost] = 0

    def _drop(self, ghost: int, at: int) -> None:
        words = self._words
        age, size = words[_AGES[ghost] + at], words[_SIZE + at]
        if not age:
            return
        words[_AGES[ghost] + at] = 0
        words[_GHOST_BYTES + ghost] = max(words[_GHOST_BYTES + ghost] - size, 0)
        words[_COUNT + ghost] = max(words[_COUNT + ghost] - 1, 0)
        if age > _YOUNGEST and ghost == _OF_BIMODAL:
            words[_GHOST_TRIALS] = max(words[_GHOST_TRIALS] - size, 0)

    def _resize(self, is_short: bool, now: int) -> None:
        """Halve the sample if the ghosts have too many keys, double it if full ones have too few."""
        words = self._words
        if max(words[_COUNT], words[_COUNT + 1]) > MOST:
            words[_SHIFT] = min(words[_SHIFT] + 1, _MOST_SHIFT)
            self._recount(now)
        elif is_short and words[_SHIFT] and words[_COUNT] < LEAST:
            words[_SHIFT] = min(words[_SHIFT], _MOST_SHIFT) - 1

    def _recount(self, now: int) -> None:
        """Drop what is not in the sample, or was never stored so; and count the rest, since processes lose each other's counts."""
        words = self._words
        hashes, sizes = (words[start : start + _LENGTH].tolist() for start in (_HASH, _SIZE))
        for start in _AGES:
            for at, age in enumerate(words[start : start + _LENGTH].tolist()):
                if age and (age < _YOUNGEST - now or sizes[at] > _LARGEST or not self.is_sampled(hashes[at])):
                    words[start + at] = 0
        for ghost, start in enumerate(_AGES):
            ages = words[start : start + _LENGTH].tolist()
            words[_GHOST_BYTES + ghost] = min(sum(size for size, age in zip(sizes, ages, strict=True) if age), _TRIAL)
            words[_COUNT + ghost] = sum(map(bool, ages))
            trials = sum(size for size, age in zip(sizes, ages, strict=True) if age > _YOUNGEST)
            words[_GHOST_TRIALS] = min(trials, _TRIAL)  # of the last ghost

    def _clear(self) -> None:
        for at in range(WORDS):
            self._words[at] = 0


log = logger("forebay.index")

_FIRST, _NEXT, _BYTES, _INSERTED = range(FREE, FREE + 4)  # of the trials: words of the header
_DISMISSED = FREE + 4  # of the dismissed entries: the first of three such words
_TRIALS = 512  # of a ring
_WORDS = 4  # of a trial
_RING = HEADER + WORDS
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

    __slots__ = ("_charge", "_ghosts", "_hash")

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
        self.ghosts = Ghosts(words[HEADER : HEADER + WORDS])
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
        """Whether an entry that is inserted now goes on probation. ``used``: bytes of the space."""
        words = self._words
        words[_INSERTED] = words[_INSERTED] + 1 & 0xFFFF
        return bool(words[_INSERTED] % LOTTERY) and self.ghosts.is_full(used)

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
        left, limit = sum(trial.charge for trial in tried), self.ghosts.capacity // TRIAL_SHARE
        over: list[Trial] = []
        for trial in tried:
            if left <= limit:
                break
            over.append(trial)
            left -= trial.charge
        return [trial.id for trial in (*self._dismissed.entries(), *over) if self._is_on_trial(trial)]

    def _is_a_trial_over(self) -> bool:
        return self.ghosts.bimodal and self._trials.bytes > self.ghosts.capacity // TRIAL_SHARE

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

    def knows(self, id: int, name: str) -> bool:
        """Whether `know` was called for a space of this name and, if it is adaptive, of this id."""
        return name in self._known and self._ids.get(name, id) == id

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
        table = SharedTable(root, root.shared_dir / f"policy-{id}", b"FBPOLI01", WORDS + 2 * _WORDS * _TRIALS)
        words = table.create() if create else table.words()
        return AdaptiveSpace(words, index) if words is not None else None


def hash_of(key: str) -> int:
    return xxhash.xxh3_64_intdigest(key.encode("utf-8", "surrogatepass"))


def charge_of(size: int, *, is_file: bool) -> int:
    """About what the budget counts for an entry."""
    return -(-size // PAGE) * PAGE if is_file else size + ROW
