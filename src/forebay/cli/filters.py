"""Filters such as ``size>1GB`` and ``used>30d``, parsed into one predicate."""

from __future__ import annotations

import operator
import re
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from forebay._config import parse_age, parse_size
from forebay.errors import ConfigError

if TYPE_CHECKING:
    from forebay._model import Entry

_TERM = re.compile(r"\s*([a-z]+)\s*(>=|<=|!=|>|<|=)\s*(.*?)\s*")
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
    "=": operator.eq,
    "!=": operator.ne,
}
_AGES = ("used", "created", "validated")
_WORDS = ("space", "kind", "life")


def parse_filters(terms: Sequence[str], *, now: float | None = None) -> Callable[[Entry], bool]:
    """Return a predicate that is true for entries that match every term.

    ``size`` compares with a size; ``used``, ``created`` and ``validated`` compare ages (``used>30d``: not used
    for 30 days); ``space``, ``kind`` and ``life`` compare words. Raises `ConfigError`.
    """
    moment = time.time() if now is None else now
    tests = [_parse_term(term, moment) for term in terms]
    return lambda entry: all(test(entry) for test in tests)


def _parse_term(term: str, now: float) -> Callable[[Entry], bool]:
    match = _TERM.fullmatch(term)
    if match is None:
        raise _wrong(term, "a filter is FIELD OPERATOR VALUE, quoted: 'size>1GB'")
    field, sign, text = match.groups()
    compare = _COMPARE[sign]
    if field == "size":
        size = parse_size(text, name="size")
        return lambda entry: compare(entry.size, size)
    if field in _AGES:
        age = parse_age(text, name=field)
        return lambda entry: compare(now - getattr(entry, field), age)
    if field in _WORDS and sign in ("=", "!="):
        return lambda entry: compare(getattr(entry, field), text)
    raise _wrong(term, f"fields are size, {', '.join(_AGES)}, and with = or != {', '.join(_WORDS)}")


def _wrong(term: str, why: str) -> ConfigError:
    return ConfigError(f"--filter {term!r} is invalid: {why}", name="--filter", value=term)
