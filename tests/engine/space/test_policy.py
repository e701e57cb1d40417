from __future__ import annotations

import pytest

from forebay._model import Policy
from forebay.errors import ConfigError


def test_policies_have_names() -> None:
    assert [Policy.parse(name) for name in ("lru", "FREEZE", "wait")] == [Policy.LRU, Policy.FREEZE, Policy.WAIT]
    assert [p.evicts_own for p in Policy] == [True, False, True]
    with pytest.raises(ConfigError, match=r"'mru'.*lru, freeze, wait"):
        Policy.parse("mru")
