"""For the site: the names of `forebay._dataclass` and `forebay._typing` are the standard library's, so that classes have a signature."""

from __future__ import annotations

from typing import Any

import griffe

STANDARD = {"forebay._dataclass": "dataclasses", "forebay._typing": "typing"}


class StandardNames(griffe.Extension):
    """Lets the names that are imported from these modules lead to the standard library's."""

    def on_alias_instance(self, *, alias: griffe.Alias, **kwargs: Any) -> None:
        module, _, name = alias.target_path.rpartition(".")
        if module in STANDARD:
            alias.target_path = f"{STANDARD[module]}.{name}"
