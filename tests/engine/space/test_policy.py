from __future__ import annotations

import pytest

from forebay._model import Policy
from forebay.errors import ConfigError


def test_policies_have_names() -> None:
    assert [Policy.parse(name) for name in ("auto", "lru", "FREEZE", "wait")] == [Policy.AUTO, Policy.LRU, Policy.FREEZE, Policy.WAIT]
    assert [p.evicts_own for p in Policy] == [True, True, False, True]
    assert [p.adapts for p in Policy] == [True, False, False, True]
    with pytest.raises(ConfigError, match=r"'mru'.*auto, lru, freeze, wait"):
        Policy.parse("mru")


def test_only_objects_of_urls_are_adaptive_unless_it_is_said() -> None:
    assert [Policy.default(name) for name in ("urls", "values", "directories", "mine")] == [Policy.AUTO, Policy.LRU, Policy.LRU, Policy.LRU]
