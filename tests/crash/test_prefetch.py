"""A process dies before the k-th change of a file while it keeps what others will want, spills, begins a session: for every k."""

from __future__ import annotations

from collections.abc import Callable

import forebay
from forebay._engine.store import Store
from forebay._engine.write.reservations import Item
from tests.crash.conftest import Scene
from tests.harness import KiB, MiB, bytes_of
from tests.items import Items

NewScene = Callable[[int], Scene]
SIZES = {"inline": 300, "small": 20_000, "other": 30_000, "large": 400_000}


def nothing(store: Store) -> None:
    """An empty root."""


def item_body(key: str) -> bytes:
    return key.encode() * (SIZES[key] // len(key))


def keep(store: Store, *keys: str, more: int = 0) -> None:
    """Be promised room for all of them, and for ``more`` bytes; keep the small ones in one go, then the large one; give the rest back."""
    credit = store.reservations.open("v")
    need = credit.need(more)
    for key in keys:
        need = need.plus(credit.need(len(item_body(key))))
    credit.ask(need)
    small = [Item(key, item_body(key)) for key in keys if SIZES[key] < 256 * KiB]
    leases = credit.keep(small) if small else []
    leases += [credit.keep_large(Item(key, item_body(key))) for key in keys if SIZES[key] >= 256 * KiB]
    credit.give_back(credit.promised)
    for lease in leases:
        lease.close()


def is_whole(store: Store, *kept: str) -> None:
    """Each item is absent, or has all of its bytes; those of ``kept`` are there."""
    for key in SIZES:
        found = bytes_of(store, key)
        assert found in (None, item_body(key))
        assert found is not None or key not in kept


def test_items_are_kept_in_groups(scene: NewScene) -> None:
    steps = scene(2 * MiB).play(nothing, lambda store: keep(store, *SIZES, more=50_000), is_whole, least=12)
    assert any(step.startswith("set_word") for step in steps)


def test_room_is_made_for_them(scene: NewScene) -> None:
    """What was there goes when they are promised room, and nothing else does."""

    def before(store: Store) -> None:
        keep(store, "small", "large")

    def during(store: Store) -> None:
        credit = store.reservations.open("v")
        credit.ask(credit.need(500_000))
        credit.keep([Item("inline", item_body("inline"))])[0].close()

    scene(700 * KiB).play(before, during, is_whole, small_first=False)


def test_what_is_spilled_goes_with_its_process(scene: NewScene) -> None:
    def during(store: Store) -> None:
        for size in (300, 20_000, 400_000):
            store.reservations.spill("v", f"spilled {size}", bytes(size))

    def after(store: Store) -> None:
        store.put("v", "next", b"")
        assert [entry.key for entry in store.seeing.entries("v") if entry.key.startswith("spilled")] == []

    scene(2 * MiB).play(nothing, during, after, least=12)


def test_items_of_a_session_go_with_it(scene: NewScene) -> None:
    def during(store: Store) -> None:
        session = store.reservations.join("v", "~session/x")
        credit = store.reservations.open("v")
        credit.ask(credit.need(20_000).plus(credit.need(300)))
        credit.keep([Item(key, item_body(key), session.entry.id) for key in ("inline", "small")])

    def after(store: Store) -> None:
        for _ in range(2):  # the first removes the session, if nobody did
            store.put("v", "next", b"")
        assert {entry.key for entry in store.seeing.entries("v")} - {"next"} == set()

    scene(2 * MiB).play(nothing, during, after, least=6)


def test_a_whole_prefetcher(scene: NewScene) -> None:
    """With its threads: which step it dies at is chance, what is left is not."""
    place, keys = scene(MiB), ["k0", "k1", "large"]

    def items() -> Items:
        source = Items(20_000)
        source.sizes["large"] = 300_000
        return source

    def during(store: Store) -> None:
        source = items()
        with forebay.Cache(place.place) as cache, cache.prefetcher(source, name="v", workers=2) as pool:
            assert list(pool.stream(keys, ahead=2)) == [source.body(key) for key in keys]

    def after(store: Store) -> None:
        source = items()
        with forebay.Cache(place.place) as cache, cache.prefetcher(source, name="v", workers=2) as pool:
            assert pool.get_many(keys) == [source.body(key) for key in keys]

    place.play(nothing, during, after, least=10)
