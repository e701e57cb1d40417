"""Every error ends in a hint and an exit code."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

import forebay
from forebay import errors
from forebay._engine.catalog.connection import Catalog
from forebay.cli import main
from forebay.cli.hints import ABSENT, FAILED, OK, USAGE, hint_for, shared_code

OURS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.ForebayError)]
GENERAL = (errors.ForebayError, errors.Closed, errors.FillFailed)  # the command line never meets the last two


def test_each_of_our_errors_says_what_to_do() -> None:
    for kind in OURS:
        if kind not in GENERAL:
            hint = hint_for(kind("x"))
            assert "report it" not in hint.todo, kind
            assert "\n" not in hint.todo, kind


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ConfigError("x"), USAGE),
        (errors.Offline("x"), ABSENT),
        (errors.NotCached("x"), ABSENT),
        (errors.NotFound("x"), FAILED),
        (errors.NoSpace("x"), FAILED),
        (PermissionError("x"), FAILED),
        (ZeroDivisionError("x"), FAILED),
    ],
)
def test_exit_codes(error: Exception, code: int) -> None:
    assert hint_for(error).code == code


def test_a_subclass_has_its_own_hint() -> None:
    assert hint_for(errors.NotFound("x")).todo != hint_for(errors.RemoteError("x")).todo
    assert hint_for(errors.NoSpace("x")).todo != hint_for(errors.CacheFault("x")).todo


@pytest.mark.parametrize(
    ("name", "todo"),
    [
        *(("nope", "forebay ls"), ("features:17", "forebay ls"), ("a/b.bin", "forebay ls")),
        *(("https://host/a", "forebay pull"), ("s3://b/a", "forebay pull"), ("/data/a", "forebay pull")),
    ],
)
def test_what_is_not_cached_can_be_fetched_only_if_it_is_a_url(name: str, todo: str) -> None:
    hint = hint_for(errors.NotCached.of(name))
    assert (todo in hint.todo, hint.code) == (True, ABSENT)


def test_what_is_written_to_all_the_time_is_not_called_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a process that only looks."""
    with forebay.Cache(tmp_path / "root", budget="200MB") as cache:
        cache.put("k", b"v")
        look = Catalog._try_all
        monkeypatch.setattr(Catalog, "_try_all", lambda self, sql, values: None if "integrity_check" in sql else look(self, sql, values))
        code = main.run(["-C", str(tmp_path / "root"), "verify"])
        said = capsys.readouterr()
        assert (code, "faster than the catalog can be read" in said.err, "--repair" in said.err) == (FAILED, True, False)
        main.run(["-C", str(tmp_path / "root"), "doctor"])
        said = capsys.readouterr()
        assert "it could not be read" in said.out
        assert "--repair" not in said.out


def test_several_failures_share_one_exit_code() -> None:
    offline, failed = errors.Offline("x"), errors.NotFound("x")
    assert [shared_code(found) for found in ([], [offline, offline], [offline, failed])] == [OK, ABSENT, FAILED]
