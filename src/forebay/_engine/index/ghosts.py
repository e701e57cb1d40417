"""Which of two policies would keep more: two caches of keys only, tried on a sample of the keys that are used.

*Miniature simulation* (Waldspurger, Saemundsson, Ahmad, Park, ATC 2017): a cache of 1/n of the size that sees the keys whose hash is in
1/n of all hashes has about the hit ratio of the whole one. One ghost evicts the least recently used key. The other inserts bimodally
(Qureshi, Jaleel, Patt, Steely, Emer, ISCA 2007): all but one in `LOTTERY` new keys are on *trial*, and are evicted before all others until
they are used again. Trials may fill `TRIAL_SHARE` of the cache, oldest first, as in 2Q: so what has become popular finds its way in.

No clock, no file and no lock is in here. The state lies in words that any process may store to at any time, and that a killed process may
leave half stored: whatever they hold, no call raises, and some thousand uses later the ghosts are right again."""

from __future__ import annotations

from typing import NamedTuple

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
_SHIFT, _CAPACITY, _LEADER, _SEEN, _USES, _INSERTED, _TRIALS, _EVICTED = range(8)
_HITS, _BYTES, _COUNT = 8, 10, 12  # of each ghost
_LATE, _RECOVERS = 16, 20  # of late: uses, hits of each ghost, hits of the cache itself
_KNOWN = 21  # `_NEW_DATA`, less the uses of keys that were never seen since the last use of one that was
_RECORDS = 4 * MOST
_PROBES = 16
_LENGTH = _RECORDS + _PROBES
_HASH, _SIZE = _HEADER, _HEADER + _LENGTH
_AGES = _HEADER + 2 * _LENGTH, _HEADER + 3 * _LENGTH
"""An age is `_YOUNGEST` less the time of the last use; of a key on trial, `_TRIAL` less the time of its insertion; 0: not in the ghost. So
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
                    words[_TRIALS] = max(words[_TRIALS] - words[_SIZE + at], 0)
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
        for pair in (_HITS, _BYTES, _COUNT):
            words[pair + _OF_BIMODAL] = words[pair + _OF_LRU]
        words[_LATE + 1 + _OF_BIMODAL] = words[_LATE + 1 + _OF_LRU]
        words[_TRIALS] = 0

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
                words[_BYTES + ghost] = max(words[_BYTES + ghost] + more, 0) & _TRIAL
        if words[_AGES[_OF_BIMODAL] + at] > _YOUNGEST:
            words[_TRIALS] = max(words[_TRIALS] + more, 0) & _TRIAL

    def _insert(self, ghost: int, at: int, size: int, capacity: int, now: int) -> bool:
        """Insert a key, if it is not larger than the ghost. Returns whether that was short of space."""
        words, ages, is_short = self._words, _AGES[ghost], size > capacity
        if is_short:
            return True
        for _ in range(2 * _LENGTH):
            if words[_BYTES + ghost] + size <= capacity:
                break
            is_short = True
            self._evict(ghost, capacity, now)
        age = _YOUNGEST - now
        if ghost == _OF_BIMODAL:
            is_full = words[_BYTES + ghost] + size > capacity - capacity // 16
            if is_full and words[_INSERTED] % LOTTERY and words[_KNOWN]:
                age = _TRIAL - now
                words[_TRIALS] = words[_TRIALS] + size & _TRIAL
            words[_INSERTED] = words[_INSERTED] + 1 & _TRIAL
        words[ages + at] = age
        words[_BYTES + ghost] = words[_BYTES + ghost] + size & _TRIAL
        words[_COUNT + ghost] = words[_COUNT + ghost] + 1 & _TRIAL
        return is_short

    def _evict(self, ghost: int, capacity: int, now: int) -> None:
        words, start = self._words, _AGES[ghost]
        words[_EVICTED] = words[_EVICTED] + 1 & 0xFFFF
        if not words[_EVICTED] % _RECOUNT:
            self._recount(now)
        overdue = ghost == _OF_BIMODAL and words[_TRIALS] > capacity // TRIAL_SHARE
        # Records lie where their hashes lead, so a part of them is an even sample: what it has as the coldest is cold enough.
        for first, step in ((0, 1),) if overdue else ((words[_EVICTED] % _STRIPES, _STRIPES), (0, 1)):
            ages: list[int] = words[start + first : start + _LENGTH : step].tolist()
            coldest = max(ages)
            if coldest > _YOUNGEST and not overdue:
                coldest = max(filter(_YOUNGEST.__ge__, ages)) or (coldest if step == 1 else 0)
            if coldest:
                self._drop(ghost, first + step * ages.index(coldest))
                return
        words[_BYTES + ghost] = words[_COUNT + ghost] = 0

    def _drop(self, ghost: int, at: int) -> None:
        words = self._words
        age, size = words[_AGES[ghost] + at], words[_SIZE + at]
        if not age:
            return
        words[_AGES[ghost] + at] = 0
        words[_BYTES + ghost] = max(words[_BYTES + ghost] - size, 0)
        words[_COUNT + ghost] = max(words[_COUNT + ghost] - 1, 0)
        if age > _YOUNGEST and ghost == _OF_BIMODAL:
            words[_TRIALS] = max(words[_TRIALS] - size, 0)

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
            words[_BYTES + ghost] = min(sum(size for size, age in zip(sizes, ages, strict=True) if age), _TRIAL)
            words[_COUNT + ghost] = sum(map(bool, ages))
            trials = sum(size for size, age in zip(sizes, ages, strict=True) if age > _YOUNGEST)
            words[_TRIALS] = min(trials, _TRIAL)  # of the last ghost

    def _clear(self) -> None:
        for at in range(WORDS):
            self._words[at] = 0
