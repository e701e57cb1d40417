"""A griffe extension, for the reference pages: clauses of docstrings, "``name``: what it means.", become a table with one row a parameter.

A clause begins with its names, "``a``, ``b``: ", at the start of a paragraph or after a full stop or a semicolon. It ends before the next
clause, before a sentence that begins with one of `WORDS`, or with its paragraph. What is in no clause stays text.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

WORDS = "Raises|Returns|Callable|Usable|Picklable|Without|Reading|Nothing|A hit|The same|The remote|The limits"
HEAD = re.compile(r"(?:^|(?<=[.;])\s+)(``\w+``(?:, ``\w+``)*):\s+")
END = re.compile(rf"(?<=[.])\s+(?=(?:{WORDS})\b)")
CONSTRUCTED = ("RemoteOptions", "Served", "SourceInfo")
"""Dataclasses whose objects callers make: their fields are parameters. Those of all others, and of errors, are attributes."""
MADE = re.compile(r"(?:Made by|Created by|Returned by|result of) `([\w.]+)`")
"""What the docstring of a class says that callers do not construct: its page shows no constructor."""


def pieces(paragraph: str) -> list[tuple[str, str]]:
    """A paragraph as clauses, each with its names and its description, and the text around them, which has no names."""
    heads = list(HEAD.finditer(paragraph))
    found = [("", paragraph[: heads[0].start()] if heads else paragraph)]
    for head, end in zip(heads, [*(after.start() for after in heads[1:]), len(paragraph)], strict=False):
        description, *rest = END.split(paragraph[head.end() : end], maxsplit=1)
        description = description.strip().rstrip(";.") + "."
        found += [(head[1], description[0].upper() + description[1:]), *(("", text) for text in rest)]
    return [(names, text) for names, text in found if text.strip()]


def row(obj: griffe.Object, name: str, text: str) -> dict[str, Any]:
    """A row of the table, with the type of the parameter or field, and its default."""
    for known in (getattr(obj, "parameters", ()), getattr(obj, "all_members", ())):
        if name in known:
            default = getattr(known[name], "default", None) or getattr(known[name], "value", None)
            return {"name": name, "annotation": known[name].annotation, "value": default, "description": text}
    return {"name": name, "description": text}


def has_parameters(obj: griffe.Object, names: list[str]) -> bool:
    """Whether these are what a caller passes; else they are attributes."""
    if obj.is_function or obj.name in CONSTRUCTED:
        return True
    is_dataclass = any("dataclass" in str(decorator.value) for decorator in getattr(obj, "decorators", ()))
    if is_dataclass or obj.path.startswith("forebay.errors.") or (obj.docstring and MADE.search(obj.docstring.value)):
        return False
    return all(name in getattr(obj, "parameters", ()) for name in names) or not any(name in obj.members for name in names)


class ParameterTables(griffe.Extension):
    """Sets the parsed sections of each docstring that has clauses."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if not obj.docstring or not (obj.is_function or obj.is_class):
            return
        self.set_sections(obj, obj.docstring)
        if obj.is_class and MADE.search(obj.docstring.value):
            obj.members.pop("__init__", None)

    def set_sections(self, obj: griffe.Object, docstring: griffe.Docstring) -> None:
        found = [piece for part in re.split(r"\n\s*\n", docstring.value) for piece in [*pieces(part), ("", "\n\n")]]
        rows = [row(obj, name, text) for names, text in found for name in re.findall(r"\w+", names)]
        if not rows:
            return
        first = next(i for i, (names, _) in enumerate(found) if names)
        before, after = (" ".join(text for names, text in part if not names).strip() for part in (found[:first], found[first:]))
        table: griffe.DocstringSection
        if has_parameters(obj, [r["name"] for r in rows]):
            table = griffe.DocstringSectionParameters([griffe.DocstringParameter(**r) for r in rows])
        else:
            made = MADE.search(docstring.value)
            title = f"Arguments of {made[1]}:" if made and not any(r["name"] in obj.members for r in rows) else None
            table = griffe.DocstringSectionAttributes([griffe.DocstringAttribute(**r) for r in rows], title=title)
        sections = [griffe.DocstringSectionText(before), table, griffe.DocstringSectionText(after)]
        docstring.parsed = [section for section in sections if section.value]
