"""A process dies before the k-th change of a file while it keeps what others will want, spills, begins a session: for every k."""

from __future__ import annotations

from collections.abc import Callable

import forebay
from forebay._engine.catalog.entries import session_of
from forebay._engine.leases import Lease
from forebay._engine.publish import Writing
from forebay._engine.store import Store
from forebay._model import ObjectInfo
from tests.crash.conftest import Scene
from tests.harness import KiB, MiB, bytes_of
from tests.items import Items

NewScene = Callable[[int], Scene]
SIZES = {"inline": 300, "small": 20_000, "other": 30_000, "large": 400_000}


def nothing(store: Store) -> None:
    """An empty root."""


def item_body(key: str) -> bytes:
    return key.encode() * (SIZES[key] // len(key))


def keep(store: Store, *keys: str) -> None:
    """Store the small ones in one go, then the large one."""
    writings = []
    for key in keys:
        writing = store.writing("v", key, resume=False)
        writing.inline = True
        if SIZES[key] >= 256 * KiB:
            with writing:
                fill(writing, key)
                writing.publish_leased().close()
        else:
            fill(writing, key)
            writings.append(writing)
    for lease in store.publish_collected(writings, [True] * len(writings)) if writings else []:
        assert isinstance(lease, Lease)
        lease.close()


def fill(writing: Writing, key: str) -> None:
    writing.begin(ObjectInfo("", SIZES[key]))
    writing.write(0, item_body(key))


def is_whole(store: Store, *kept: str) -> None:
    """Each item is absent, or has all of its bytes; those of ``kept`` are there."""
    for key in SIZES:
        found = bytes_of(store, key)
        assert found in (None, item_body(key))
        assert found is not None or key not in kept


def test_items_are_kept_in_groups(scene: NewScene) -> None:
    steps = scene(2 * MiB).play(nothing, lambda store: keep(store, *SIZES), is_whole, least=12)
    assert any(step.startswith("set_word") for step in steps)


def test_room_is_made_for_them(scene: NewScene) -> None:
    """What was there goes for them, and nothing else does."""

    def before(store: Store) -> None:
        keep(store, "small", "large")

    def during(store: Store) -> None:
        store.put_held("v", "room", bytes(500_000)).close()
        keep(store, "inline")

    scene(700 * KiB).play(before, during, is_whole, small_first=False)


def test_what_is_spilled_goes_with_its_process(scene: NewScene) -> None:
    def during(store: Store) -> None:
        for size in (300, 20_000, 400_000):
            store.put_held("v", f"spilled {size}", bytes(size))

    def after(store: Store) -> None:
        store.put("v", "next", b"")
        assert [entry.key for entry in store.seeing.entries("v") if entry.key.startswith("spilled")] == []

    scene(2 * MiB).play(nothing, during, after, least=12)


def test_items_of_a_session_go_with_it(scene: NewScene) -> None:
    def during(store: Store) -> None:
        session = store.prefetching.join("v", "~session/x")
        for key in ("inline", "small"):
            store.put("v", key, item_body(key), validator=session_of(session.entry.id))

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
