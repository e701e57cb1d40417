"""What tests of adapters share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.adapters.ray_cluster import Nodes


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """A real Ray cluster of two nodes."""
    from tests.adapters.ray_cluster import running  # loads Ray

    with running() as found:
        yield found
