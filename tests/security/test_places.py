"""Roots in directories to which others may write."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay import _config, errors
from tests.processes import USERS, as_user

ATTACKER, VICTIM = USERS

pytestmark = pytest.mark.root


@pytest.fixture
def temporary(public: Path) -> Path:
    """A directory as /tmp, and one of the victim's."""
    for name, mode, user in (("tmp", 0o1777, 0), ("precious", 0o700, VICTIM)):
        (public / name).mkdir()
        (public / name).chmod(mode)
        os.chown(public / name, user, user)
    return public / "tmp"


def default(temporary: Path) -> Path:
    """The default root of a user whose home is on a network file system."""
    environ = {"HOME": "/net/home", "TMPDIR": str(temporary)}
    return _config.default_root(is_network=lambda path: not path.is_relative_to(temporary), environ=environ)


@pytest.mark.parametrize("how", [{}, {"read_only": True}], ids=["to write", "to read"])
def test_another_users_link_is_not_followed_to_a_root(temporary: Path, children: Callable[..., Any], how: dict[str, Any]) -> None:
    precious = temporary.parent / "precious"

    def attack() -> None:
        (temporary / f"forebay-{VICTIM}").symlink_to(precious)

    def use() -> tuple[str, list[str]]:
        if how:
            forebay.Cache(precious).close()
        before = sorted(os.listdir(precious))
        with pytest.raises(errors.RootRefused, match=f"found a link of user {ATTACKER}") as refused:
            forebay.Cache(default(temporary), **how)
        assert sorted(os.listdir(precious)) == before
        return refused.value.path, before

    children(as_user(ATTACKER, attack)).result()
    path, before = children(as_user(VICTIM, use)).result()
    assert path == f"{temporary}/forebay-{VICTIM}"
    assert bool(before) == bool(how)


def test_a_users_own_link_and_one_of_root_are_followed(temporary: Path, children: Callable[..., Any]) -> None:
    precious = temporary.parent / "precious"

    def use() -> str:
        (temporary / "own").symlink_to(precious)
        with forebay.Cache(temporary / "own") as cache:
            cache.put("key", b"value")
        with forebay.Cache(temporary / "roots") as cache:
            assert cache.get("key") == b"value"
            return str(cache.path)

    (temporary / "roots").symlink_to(precious)
    assert children(as_user(VICTIM, use)).result() == str(precious)


def test_the_name_of_a_default_root_has_the_effective_user(temporary: Path, children: Callable[..., Any]) -> None:
    def name() -> str:
        os.setresuid(ATTACKER, VICTIM, 0)
        return default(temporary).name

    assert children(name).result() == f"forebay-{VICTIM}"
