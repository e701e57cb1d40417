"""The user's rules for the queries of HTTP URLs: what of a query names the object, and what, such as a signature, does not."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TypeAlias

from forebay._kernel.interrupts import of_program
from forebay._model import exact_str
from forebay.errors import ConfigError
from forebay.remote.urls import canonical

KeyUrl: TypeAlias = str | re.Pattern[str] | Callable[[str], str]
"""A rule: a pattern of the names of parameters, or a function from a URL to the URL that names the object."""

_HOST = r"\*|(?:\*\.)?(?:[^\s*/?#@:\[\]]+|\[[^\s/?#@\[\]]+\])(?::[0-9]+)?"


def checked(value: object) -> KeyUrl | dict[str, KeyUrl] | None:
    """``RemoteOptions.key_url``, its hosts in lower case. Raises `ConfigError`."""
    if not isinstance(value, Mapping):
        return None if value is None else _checked_rule(value)
    rules = {}
    for given, rule in value.items():
        host = exact_str(given)
        if host is None or not re.fullmatch(_HOST, host):
            shown = repr(given)[:100]
            raise ConfigError(f"key_url has a rule for {shown}: write a host, such as cdn.example.com, or *.example.com", name="key_url")
        rules[host.lower()] = _checked_rule(rule)
    return rules


def _checked_rule(rule: object) -> KeyUrl:
    text = exact_str(rule)
    if text is not None:
        try:
            re.compile(text)
        except re.error as error:
            raise ConfigError(f"key_url={text!r} is no regular expression: {error}", name="key_url", value=text) from error
        return text
    if not (callable(rule) or (isinstance(rule, re.Pattern) and isinstance(rule.pattern, str))):
        message = f"key_url must be a pattern, a function, or a mapping of hosts to these, not {type(rule).__name__}"
        raise ConfigError(message, name="key_url")
    return rule


def key_query(rules: KeyUrl | Mapping[str, KeyUrl] | None, url: str, query: str) -> str:
    """What of ``query`` is part of the key. ``url``: what stands before the query, without a user, its host in lower case. Raises
    `ConfigError` for a function that raises, or that returns no URL with the same host and path."""
    rule = _rule_for(rules, url.partition("://")[2].partition("/")[0]) if isinstance(rules, Mapping) else rules
    if rule is None:
        return query
    if isinstance(rule, (str, re.Pattern)):
        return "&".join(pair for pair in query.split("&") if not re.fullmatch(rule, pair.partition("=")[0]))
    shown = canonical(url)
    try:
        answer = of_program(rule)(f"{url}?{query}")
    except Exception as error:
        raise ConfigError(f"key_url raised {type(error).__name__} for {shown}", name="key_url", value=shown) from error
    named, _, left = (exact_str(answer) or "").partition("#")[0].partition("?")
    if named != url:
        message = f"key_url did not return {shown} with a query, or without one: it can only change the query"
        raise ConfigError(message, name="key_url", value=shown)
    return left


def _rule_for(rules: Mapping[str, KeyUrl], host: str) -> KeyUrl | None:
    """The rule for the host and port, else for the host, else for the nearest ``*.`` above it, else that for ``*``."""
    name = re.sub(r":[0-9]*\Z", "", host)
    above = [f"*{name[at:]}" for at, character in enumerate(name) if character == "."]
    return next((rules[each] for each in (host, name, *above, "*") if each in rules), None)
