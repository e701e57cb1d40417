"""A space with the policy ``auto`` keeps what its uses are served by best: with real processes and entries of mixed sizes."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest

from forebay._engine.files.shared_table import SharedTable
from forebay._engine.index import adaptive
from forebay._engine.index.adaptive import BIMODAL, LRU, AdaptiveSpace, hash_of
from forebay._engine.store import Store
from forebay._kernel import host
from forebay.errors import NoSpace
from tests.harness import KiB, MiB, bytes_of, opened
from tests.processes import fork, in_child
from tests.traces import best_of_permutation, drifting, permutations, recent, scanned, zipf

T = TypeVar("T")
COUNT = 1000
FOREVER = 1 << 63
SIZES = random.Random(7).choices(range(500, 24_000), k=COUNT)
"""Most of them are small values, the others are files."""


@pytest.fixture
def store(quick_path: Path) -> Iterator[Store]:
    with opened(quick_path / "root", 256 * MiB) as store:
        yield store
        assert store.check() == []


def filled(store: Store, name: str, policy: str, quota: int) -> Store:
    store.spaces.ensure(name, policy=policy, quota=quota)
    return store


def use(store: Store, name: str, key: int, size: int) -> bool:
    """Read a key as a program does, else put it; returns whether it was there."""
    text = str(key)
    if store.first_touch(name, text, FOREVER) is not None:
        return True
    item = store.view(name, text)
    if item is not None:
        store.touch(item.entry)
        return True
    store.put(name, text, b"x" * size)
    return False


def hits(store: Store, name: str, keys: Iterable[int], sizes: Sequence[int] = SIZES) -> int:
    return sum(use(store, name, key, sizes[key % len(sizes)]) for key in keys)


def space_of(store: Store, name: str = "auto") -> AdaptiveSpace:
    space = store.engine.adaptive.of(store.spaces.number(name))
    assert space is not None
    return space


def leader(store: Store, name: str = "auto") -> str:
    standing = store.seeing.usage().standings[name]
    return "none" if standing is None else standing.leader


# -- what it keeps -----------------------------------------------------------------------------------------------------


@pytest.mark.rotates
@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_epochs_over_more_than_fits_hit_what_fits(store: Store, share: float) -> None:
    """Each epoch is read by two processes that are new, as the workers of a data loader are."""
    sizes = random.Random(8).choices(range(500, 20_000), k=1600)
    quota = int(share * sum(sizes))
    filled(store, "auto", "auto", quota)

    def worker(keys: Sequence[int]) -> Callable[[], int]:
        def work() -> int:
            with opened(store.root.path) as mine:
                return hits(mine, "auto", keys, sizes)

        return work

    for epoch in permutations(len(sizes), 3):
        children = [fork(worker(epoch[first::2])) for first in (0, 1)]
        count = sum(child.result() for child in children)
        for child in children:
            child.close()
    assert count >= 0.9 * best_of_permutation(sizes, quota)
    assert leader(store) == "bimodal"
    assert store.spaces.used("auto")[0] <= quota


@pytest.mark.rotates
def test_lru_keeps_a_part_of_it_only(store: Store) -> None:
    quota = sum(SIZES) // 2
    filled(store, "lru", "lru", quota)
    for epoch in permutations(COUNT, 3):
        count = hits(store, "lru", epoch)
    assert count < 0.8 * best_of_permutation(SIZES, quota)
    assert store.seeing.usage().standings == {}


@pytest.mark.rotates
@pytest.mark.parametrize(
    ("keys", "fitting"),
    [(zipf(COUNT, 5000, 0.8), 0.05), (zipf(COUNT, 5000, 1.1), 0.2), (recent(5000, 100), 0.1), (drifting(5000, 200), 0.2)],
    ids=["zipf 0.8", "zipf 1.1", "recent", "drifting"],
)
def test_other_uses_hit_as_often_as_by_lru(store: Store, keys: list[int], fitting: float) -> None:
    for name in ("auto", "lru"):
        filled(store, name, name, int(fitting * sum(SIZES)))
    found = {name: hits(store, name, keys) for name in ("auto", "lru")}
    assert found["auto"] >= 0.98 * found["lru"]


@pytest.mark.rotates
def test_scans_through_a_hot_set_cost_no_more_than_by_lru(store: Store) -> None:
    uses = list(scanned(200, 1500, 1000, rounds=2))
    found = {}
    for name in ("auto", "lru"):
        filled(store, name, name, int(1.2 * sum(SIZES[:200])))
        found[name] = sum(use(store, name, key, SIZES[key % COUNT]) and is_hot for key, is_hot in uses)
    assert found["auto"] >= 0.98 * found["lru"]


@pytest.mark.rotates
def test_data_that_are_new_and_fit_are_kept_from_their_first_epoch_on(store: Store) -> None:
    filled(store, "auto", "auto", sum(SIZES))
    for epoch in permutations(2 * COUNT, 2):
        hits(store, "auto", epoch)
    later = [[2 * COUNT + key for key in epoch] for epoch in permutations(800, 2)]
    assert [hits(store, "auto", epoch) >= 0.93 * 800 for epoch in later] == [False, True]


def test_a_scan_between_the_uses_of_a_hot_set_costs_two_percent_of_its_hits_at_most(store: Store) -> None:
    sizes = [4000] * 700  # with a row, a little more than a page each
    filled(store, "auto", "auto", int(1.2 * 300 * 4000))
    uses = list(scanned(300, 3000, 400, rounds=1))
    hits(store, "auto", [key for key, _ in uses[:3000]], sizes)
    assert sum(use(store, "auto", key, 4000) and is_hot for key, is_hot in uses[3000:]) >= 0.98 * 400


@pytest.mark.rotates
def test_a_prefetchers_space_chooses_its_victims_in_the_same_order(store: Store) -> None:
    quota = sum(SIZES) // 2
    filled(store, "auto", "wait", quota)
    for epoch in permutations(COUNT, 3):
        count = hits(store, "auto", epoch)
    assert count >= 0.9 * best_of_permutation(SIZES, quota)


@pytest.mark.rotates
def test_the_budget_of_the_root_is_shared_with_other_spaces(store: Store) -> None:
    """The adaptive space has no quota: what it may hold is what the others leave."""
    sizes = [32 * KiB] * 500
    store.put("values", "mine", b"v" * (8 * MiB))
    with store.engine.parts.catalog.write() as txn:
        txn.run("UPDATE meta SET value = ? WHERE name = 'budget'", store.seeing.usage().used + 8 * MiB)
    filled(store, "auto", "auto", 1 << 40)
    for epoch in permutations(500, 4):
        count = 0
        for first in range(0, 500, 20):
            assert bytes_of(store, "mine", "values") is not None
            assert store.first_touch("values", "mine", FOREVER) is not None or store.take("values", "mine") is not None
            count += hits(store, "auto", epoch[first : first + 20], sizes)
    assert count >= 0.9 * 8 * MiB // (32 * KiB)


# -- who is on trial ---------------------------------------------------------------------------------------------------


@pytest.fixture
def trying(store: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A full space of 64 files of 20 KB, of which new ones are on trial: each takes the place of the one before."""
    monkeypatch.setattr(adaptive, "_NEW_DATA", 1 << 30)  # else one new key behind the other would end the trials
    filled(store, "auto", "auto", 64 * 20_000)
    for number in range(66):
        store.put("auto", f"old{number}", b"o" * 20_000)
    words = space_of(store).ghosts._words
    words[2], words[21] = BIMODAL, 1 << 30
    return store


def names(store: Store) -> set[str]:
    return set(store.seeing.keys("auto"))


def test_what_is_new_goes_before_what_was_there(trying: Store) -> None:
    before = names(trying)
    for number in range(20):
        trying.put("auto", f"new{number}", b"n" * 20_000)
    assert len(before - names(trying)) <= 2
    assert "new19" in names(trying)


def test_what_was_used_again_is_no_longer_on_trial(trying: Store) -> None:
    trying.put("auto", "popular", b"p" * 20_000)
    assert trying.first_touch("auto", "popular", FOREVER) is not None
    for number in range(20):
        trying.put("auto", f"new{number}", b"n" * 20_000)
    assert "popular" in names(trying)


def test_what_is_leased_stays_and_goes_once_it_is_released(trying: Store) -> None:
    """As the items of a prefetcher do, which hold their lease until they are read."""
    trying.put("auto", "held", b"h" * 20_000)
    lease = trying.engine.parts.reading.take(trying.spaces.number("auto"), "held")  # touches nothing, as the lease of a publication
    assert lease is not None
    for number in range(5):
        trying.put("auto", f"new{number}", b"n" * 20_000)
    assert "held" in names(trying)
    lease.close()
    for number in range(5):
        trying.put("auto", f"newer{number}", b"n" * 20_000)
    assert "held" not in names(trying)


def test_what_is_pinned_or_fetched_ahead_is_not_on_trial(trying: Store) -> None:
    trying.put("auto", "pinned", b"p" * 20_000, life="pinned")
    with trying.writing("auto", "ahead", ahead=True) as writing:
        from forebay._model import ObjectInfo

        writing.begin(ObjectInfo("", 20_000))
        writing.write(0, b"a" * 20_000)
        writing.publish()
    trying.put_many("auto", [("block", b"b" * 20_000)], ahead=True)
    for number in range(20):
        trying.put("auto", f"new{number}", b"n" * 20_000)
    assert {"pinned", "ahead", "block"} <= names(trying)


def test_another_process_evicts_what_is_on_trial_first(trying: Store) -> None:
    before = names(trying)
    for number in range(3):
        trying.put("auto", f"new{number}", b"n" * 20_000)
    lost = before - names(trying)

    def put() -> None:
        with opened(trying.root.path) as mine:
            for number in range(10):
                mine.put("auto", f"other{number}", b"n" * 20_000)

    in_child(put)
    assert len(before - names(trying)) <= len(lost) + 1


def test_nothing_is_on_trial_while_lru_leads(trying: Store) -> None:
    space_of(trying).ghosts._words[2] = LRU
    oldest = "old2"
    assert oldest in names(trying)
    for number in range(20):
        trying.put("auto", f"new{number}", b"n" * 20_000)
    assert oldest not in names(trying)
    assert {f"new{number}" for number in range(20)} <= names(trying)


def test_a_space_whose_policy_is_lru_now_has_no_trials(trying: Store) -> None:
    trying.spaces.ensure("auto", policy="lru")
    for number in range(20):
        trying.put("auto", f"new{number}", b"n" * 20_000)
    assert {f"new{number}" for number in range(20)} <= names(trying)


def test_what_cannot_be_evicted_is_offered_once_in_a_search(trying: Store) -> None:
    leases = []
    for number in range(10):
        trying.put("auto", f"held{number}", b"h" * 20_000)
        leases.append(trying.engine.parts.reading.take(trying.spaces.number("auto"), f"held{number}"))
    for name in names(trying) - {f"held{number}" for number in range(10)}:
        lease = trying.engine.parts.reading.take(trying.spaces.number("auto"), name)
        leases.append(lease)
    with pytest.raises(NoSpace):
        trying.put("auto", "more", b"m" * 20_000)
    for lease in leases:
        assert lease is not None
        lease.close()
    trying.put("auto", "more", b"m" * 20_000)


# -- the file ----------------------------------------------------------------------------------------------------------


def policy_file(store: Store) -> Path:
    return store.root.shared_dir / f"policy-{store.spaces.number('auto')}"


def by_a_young_process(path: Path, work: Callable[[Store], T]) -> T:
    """What a process gets that has inherited no mapping."""

    def young() -> T:
        Store._opened = {}
        with opened(path) as mine:
            return work(mine)

    found: T = in_child(young)
    return found


def replace(path: Path, data: bytes) -> None:
    """Put another file in the place of one that is mapped."""
    path.unlink()
    path.write_bytes(data)


def make_empty(path: Path) -> None:
    replace(path, b"")


def make_short(path: Path) -> None:
    replace(path, path.read_bytes()[:5000])


def make_noise(path: Path) -> None:
    data = path.read_bytes()
    replace(path, data[:16] + random.Random(1).randbytes(len(data) - 16))


def make_foreign(path: Path) -> None:
    replace(path, bytes(path.stat().st_size))


def make_another_roots(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[8] ^= 1
    replace(path, data)


def make_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def make_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/passwd")


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.rotates
@pytest.mark.parametrize(
    "damage",
    [Path.unlink, make_empty, make_short, make_noise, make_foreign, make_another_roots, make_directory, make_link, make_pipe],
    ids=lambda damage: damage.__name__,
)
def test_whatever_became_of_the_file_the_next_process_goes_on(store: Store, damage: Callable[[Path], None]) -> None:
    filled(store, "auto", "auto", sum(SIZES[:50]))
    hits(store, "auto", range(100))
    path = policy_file(store)
    damage(path)
    by_a_young_process(store.root.path, lambda mine: hits(mine, "auto", range(100)))
    assert path.is_file()
    hits(store, "auto", range(100))  # with the file that it has mapped, whatever became of its name
    assert Path("/etc/passwd").read_bytes()


@pytest.mark.rotates
def test_words_of_noise_mislead_for_a_while_only(store: Store) -> None:
    quota = sum(SIZES) // 2
    filled(store, "auto", "auto", quota)
    hits(store, "auto", range(10))
    make_noise(policy_file(store))

    def epochs(mine: Store) -> int:
        return [hits(mine, "auto", epoch) for epoch in permutations(COUNT, 5)][-1]

    assert by_a_young_process(store.root.path, epochs) >= 0.9 * best_of_permutation(SIZES, quota)


def test_what_noise_puts_on_trial_is_passed_by(trying: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise AssertionError("the records are taken for broken")

    monkeypatch.setattr(trying.engine.parts, "rebuild_shared", refuse)
    space, rng = space_of(trying), random.Random(5)
    words, ring = space._words, adaptive._RING
    for at in range(ring, ring + 4 * 100):
        words[at] = rng.getrandbits(rng.choice((8, 40, 64)))
    words[adaptive._FIRST], words[adaptive._NEXT], words[adaptive._BYTES] = 0, 100, 1 << 40
    before = names(trying)
    trying.put("auto", "new", b"n" * 20_000)
    assert len(before - names(trying)) <= 2
    assert "new" in names(trying)


def test_a_full_disk_costs_the_choice_and_nothing_else(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(store, "auto", "auto", sum(SIZES[:50]))

    def full(self: SharedTable, fill: object = None) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(SharedTable, "create", full)
    hits(store, "auto", range(100))
    assert not policy_file(store).exists()
    assert leader(store) == "none"


def test_a_read_only_opener_changes_nothing_and_sees_which_leads(store: Store) -> None:
    filled(store, "auto", "auto", sum(SIZES) // 2)
    for epoch in permutations(COUNT, 2):
        hits(store, "auto", epoch)
    before = policy_file(store).read_bytes()

    def look() -> str:
        from forebay._engine.store import Settings

        mine = Store.open(store.root.path, Settings(), read_only=True)
        try:
            for key in range(50):
                mine.first_touch("auto", str(key), FOREVER)
            return leader(mine)
        finally:
            mine.close()

    assert in_child(look) == leader(store)
    assert policy_file(store).read_bytes() == before


def test_the_next_boot_goes_on_with_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(store, "auto", "auto", sum(SIZES) // 2)
    for epoch in permutations(COUNT, 2):
        hits(store, "auto", epoch)
    known = leader(store)
    monkeypatch.setattr(host, "boot_id", lambda: "00000000-0000-4000-8000-000000000001")
    with opened(store.root.path) as later:
        assert leader(later) == known


def test_a_hit_of_what_is_remembered_is_seen_if_its_key_is_sampled(store: Store) -> None:
    filled(store, "auto", "auto", 1 << 30)
    store.put("auto", "key", b"k" * 100)
    item = store.view("auto", "key")
    assert item is not None
    assert item.due == 0
    uses = space_of(store).ghosts.standing().uses
    hit = store.hot_lookup("auto")
    assert hit("key", FOREVER) is not None
    assert hit("key", FOREVER) is not None  # too soon after the first one
    assert space_of(store).ghosts.standing().uses == uses + 1
    space_of(store).ghosts._words[0] = 40
    assert not space_of(store).ghosts.is_sampled(hash_of("key"))
    item.due = 0
    assert hit("key", FOREVER) is not None
    assert space_of(store).ghosts.standing().uses == uses + 1


# -- what is dismissed -------------------------------------------------------------------------------------------------


def dismiss(store: Store, *keys: str) -> list[str]:
    return list(store.prefetching.dismiss("auto", keys))


@pytest.mark.parametrize("leads", [LRU, BIMODAL], ids=["lru", "bimodal"])
def test_what_is_dismissed_goes_first_whatever_leads(trying: Store, leads: int) -> None:
    space_of(trying).ghosts._words[2] = leads
    known = sorted(names(trying))
    assert not dismiss(trying, *known[10:20], "none")
    for number in range(10):
        trying.put("auto", f"new{number}", b"n" * 20_000)
    assert names(trying).isdisjoint(known[10:20])
    assert {*known[:10], *known[20:]} <= names(trying)


def test_what_is_used_again_is_not_dismissed_any_more(trying: Store) -> None:
    known = sorted(names(trying))
    dismiss(trying, known[30])
    assert trying.first_touch("auto", known[30], FOREVER) is not None
    for number in range(5):
        trying.put("auto", f"new{number}", b"n" * 20_000)
    assert known[30] in names(trying)


def test_what_another_process_dismissed_goes_first_once_its_lease_is_released(trying: Store) -> None:
    known = sorted(names(trying))
    held = trying.engine.parts.reading.take(trying.spaces.number("auto"), known[40])  # touches nothing
    assert held is not None

    def other() -> None:
        with opened(trying.root.path) as mine:
            assert not dismiss(mine, known[40], known[41])

    in_child(other)
    trying.put("auto", "new0", b"n" * 20_000)
    assert known[40] in names(trying)
    assert known[41] not in names(trying)
    held.close()
    trying.put("auto", "new1", b"n" * 20_000)
    assert known[40] not in names(trying)


def test_what_finds_no_place_now_is_left_for_later(trying: Store) -> None:
    known = sorted(names(trying))[:32]
    assert dismiss(trying, *known * 17) == known
    with trying.engine.parts.catalog.writer(), ThreadPoolExecutor(1) as pool:
        assert pool.submit(dismiss, trying, known[0]).result() == [known[0]]


def test_nothing_is_dismissed_where_the_policy_is_lru(trying: Store) -> None:
    trying.spaces.ensure("auto", policy="lru")
    known = sorted(names(trying))
    assert not dismiss(trying, known[40])
    trying.put("auto", "new", b"n" * 20_000)
    assert known[40] in names(trying)


@pytest.mark.parametrize("leads", [LRU, BIMODAL], ids=["lru", "bimodal"])
def test_a_plan_names_those_that_eviction_takes_first(trying: Store, leads: int) -> None:
    space_of(trying).ghosts._words[2] = leads
    for number in range(4):
        trying.put("auto", f"new{number}", b"n" * 20_000)
    known = sorted(names(trying))
    dismiss(trying, known[20], known[10])
    names_of = {entry.id: entry.key for entry in trying.seeing.entries("auto")}
    planned = [names_of[id] for id in trying.seeing.first_to_go()]
    assert planned[:2] == [known[20], known[10]]
    assert len(planned) == 2 + (leads == BIMODAL)
    before, lost = names(trying), list[str]()
    for number in range(len(planned)):
        trying.put("auto", f"newer{number}", b"n" * 20_000)
        lost += sorted(before - names(trying) - set(lost))
    assert lost == planned
    assert trying.first_touch("auto", known[30], FOREVER) is not None


def test_what_was_fetched_for_another_process_is_on_trial_once_that_one_has_used_it(trying: Store) -> None:
    space_of(trying).ghosts._words[2] = BIMODAL
    used, unused = [f"used{number}" for number in range(8)], [f"unused{number}" for number in range(8)]
    for key in (*used, *unused):
        trying.put_many("auto", [(key, b"n" * 20_000)], ahead=True)
    assert trying.prefetching.try_used("auto", [*used, *unused, "on its way"]) == [*used, *unused, "on its way"]

    def other() -> None:
        with opened(trying.root.path) as mine:
            assert all(mine.first_touch("auto", key, FOREVER) is not None for key in used)

    in_child(other)
    assert trying.prefetching.try_used("auto", [*used, *unused]) == unused
    for number in range(6):
        trying.put("auto", f"newer{number}", b"n" * 20_000)
    assert len(names(trying) & set(used)) <= 3
    assert names(trying) >= set(unused)
