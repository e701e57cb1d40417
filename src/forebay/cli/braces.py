"""Braces in the URLs that verbs take, written as in a shell: ``shard-{000..127}.tar``, ``{train,val}.parquet``."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Sequence

from forebay.errors import ConfigError

MOST = 1_000_000
"""URLs that one argument may stand for: a longer list belongs in a file."""

_RANGE = re.compile(r"(?:(-?\d{1,18})\.\.(-?\d{1,18})|([A-Za-z])\.\.([A-Za-z]))(?:\.\.-?(\d{1,18}))?", re.ASCII)
_PADDED = re.compile(r"-?0\d")
_ESCAPED = re.compile(r"\\([{},])")


def expand_all(texts: Sequence[str]) -> list[str]:
    """Expand each text, in order; each result once. Raises `ConfigError`."""
    return list(dict.fromkeys(itertools.chain.from_iterable(map(expand, texts))))


def expand(text: str) -> list[str]:
    """The texts that a text with braces stands for, in order; the text alone if it has none, or names a local file.

    A group is a list (``{a,b}``) or a range of numbers or letters (``{000..127}``, ``{1..9..2}``); groups may be nested. What bash leaves
    alone stays: ``{}``, ``{a}``, ``${a,b}``, a brace without its partner. A backslash makes ``{``, ``}`` and ``,`` literal.
    Raises `ConfigError` for more than `MOST` texts."""
    if "{" not in text or os.path.lexists(text):
        return [text]
    if _count(text) > MOST:
        raise _too_many(text)
    return [_ESCAPED.sub(r"\1", one) for one in _expanded(text)]


def _too_many(text: str) -> ConfigError:
    message = f"{text}: its braces stand for more than {MOST:,} URLs: write them to a file, for `forebay warm FILE`"
    return ConfigError(message, name="URL", value=text)


def _expanded(text: str) -> Iterator[str]:
    group = _first_group(text)
    if group is None:
        yield text
        return
    before, parts, behind = group
    tails = list(_expanded(behind))
    for part in parts:
        for middle in _expanded(part):
            for tail in tails:
                yield f"{before}{middle}{tail}"


def _count(text: str) -> int:
    """The number of texts, which may be too large to make them."""
    group = _first_group(text)
    return 1 if group is None else sum(map(_count, group[1])) * _count(group[2])


def _first_group(text: str) -> tuple[str, Sequence[str], str] | None:
    """The first pair of braces: the text before it, what it stands for, the text behind it."""
    for start, sign in _signs(text, 0):
        if sign == "{" and text[start - 1 : start] != "$":
            parts, end = _parts(text, start)
            if parts:
                return text[:start], parts, text[end + 1 :]
    return None


def _signs(text: str, start: int) -> Iterator[tuple[int, str]]:
    """Where braces and commas without a backslash stand."""
    return ((at, text[at]) for at in range(start, len(text)) if text[at] in "{,}" and text[at - 1 : at] != "\\")


def _parts(text: str, start: int) -> tuple[Sequence[str], int]:
    """What the braces at ``start`` stand for, and where they close; nothing if they do not, or hold neither a list nor a range."""
    depth, cuts = 0, [start]
    for at, sign in _signs(text, start):
        depth += {"{": 1, "}": -1}.get(sign, 0)
        if sign == "," and depth == 1:
            cuts.append(at)
        if not depth:
            match = _RANGE.fullmatch(text, start + 1, at)
            if match is not None:
                return _range(match), at
            cuts.append(at)
            return [text[begin + 1 : end] for begin, end in itertools.pairwise(cuts)] if len(cuts) > 2 else [], at
    return [], -1


def _range(match: re.Match[str]) -> Sequence[str]:
    low, high, first_letter, last_letter, step = match.groups()
    first, last = (int(low), int(high)) if low else (ord(first_letter), ord(last_letter))
    step = max(int(step or 1), 1) * (1 if last >= first else -1)
    numbers = range(first, last + (1 if step > 0 else -1), step)
    if len(numbers) > MOST:
        raise _too_many(f"{{{match[0]}}}")
    if not low:
        return [chr(number) for number in numbers]
    width = max(len(low), len(high)) if _PADDED.match(low) or _PADDED.match(high) else 0
    return [f"{number:0{width}}" for number in numbers]
