"""A plugin: a test that tests/known_flaky.toml lists may fail without failing the run. Any other test that fails once fails it."""

from __future__ import annotations

import re
import tomllib
from datetime import date, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest

FILE = "tests/known_flaky.toml"
MOST = 5
DAYS = 30


class Flaky(NamedTuple):
    """A row of the file: a test, and all its parameters if the id names none."""

    test: str
    cause: str
    module: str
    since: date

    def __str__(self) -> str:
        return f"{self.test}: {self.cause} ({self.module}, since {self.since})"


rows = pytest.StashKey[list[Flaky]]()


def listed(root: Path, today: date) -> list[Flaky]:
    """The rows of the file of a repository. Raises ValueError, which says what is wrong with them."""
    text = (root / FILE).read_text()
    try:
        found = [row(root, test, facts, today) for test, facts in tomllib.loads(text).items()]
    except ValueError as error:
        raise ValueError(f"{FILE}: {error}") from error
    if len(found) > MOST:
        raise ValueError(f"{FILE}: {len(found)} tests, of at most {MOST}: mend one of them")
    return found


def row(root: Path, test: str, facts: Any, today: date) -> Flaky:
    """One row. Raises ValueError."""
    if not isinstance(facts, dict) or facts.keys() != {"cause", "module", "since"}:
        raise ValueError(f'{test}: a row is "TEST ID" = {{ cause = "SENTENCE", module = "PATH", since = YYYY-MM-DD }}')
    cause, module, since = facts["cause"], facts["module"], facts["since"]
    path, _, name = test.partition("[")[0].partition("::")
    if not (root / path).is_file() or not re.search(rf"\bdef {re.escape(name.rpartition('::')[2])}\(", (root / path).read_text()):
        raise ValueError(f"{test}: there is no such test")
    if not isinstance(cause, str) or not cause.strip():
        raise ValueError(f"{test}: `cause` is a sentence")
    if not isinstance(module, str) or not (root / module).is_file():
        raise ValueError(f"{test}: `module` is the file at fault, such as src/forebay/reports.py")
    if type(since) is not date or since > today + timedelta(days=1):  # it is tomorrow already where somebody listed it
        raise ValueError(f"{test}: `since` is the date on which it was listed")
    if today - since > timedelta(days=DAYS):
        raise ValueError(f"{test}: listed for {(today - since).days} days, of at most {DAYS}: mend or remove it")
    return Flaky(test, cause, module, since)


def pytest_configure(config: pytest.Config) -> None:
    try:
        config.stash[rows] = listed(config.rootpath, date.today())
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error


def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    known = {flaky.test: flaky for flaky in config.stash[rows]}
    for item in items:
        flaky = known.get(item.nodeid) or known.get(item.nodeid.partition("[")[0])
        if flaky is not None:
            item.add_marker(pytest.mark.xfail(reason=f"known to be flaky: {flaky.cause}", strict=False))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for flaky in config.stash[rows]:
        terminalreporter.write_line(f"known to be flaky: {flaky}")
