"""`forebay path`."""

from __future__ import annotations

from typing import Annotated

from forebay.cli.options import JsonOption, RootOption, argument, existing, opened
from forebay.cli.render import Output, shown_name
from forebay.errors import ConfigError, NotCached


def path(
    name: Annotated[str | None, argument("NAME", help="A URL, or a large value of a program; none: the cache's directory.")] = None,
    root: RootOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show where an entry's file lies, without fetching. It may be evicted once nobody holds it: `forebay pin` keeps it."""
    output = Output(as_json)
    if name is None:
        found = str(existing(root))
    else:
        with opened(root) as cache:
            entry = cache.entry(name)
            if entry is None:
                raise NotCached.of(shown_name(name))
            name = entry.name
            if entry.space not in ("urls", "directories") and entry.kind != "blob":
                what = "an array of samples" if entry.kind == "pack" else "a small value that a program put"
                todo = "read it in a program, by what stored it: Cache.get, a space, samples or tasks"
                raise ConfigError(
                    f"{name} is {what}: only what came from a URL, and large values, have files", name="NAME", value=name, todo=todo
                )
            with cache.hold(entry) as found:
                pass
    output.document({"name": name, "path": found})
    output.path(found)
