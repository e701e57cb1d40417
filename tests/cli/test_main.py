"""The top: usage, errors in two lines, places, exit codes."""

from __future__ import annotations

import logging
import os
import subprocess
from pathlib import Path

import pytest

import forebay
from forebay import Cache
from forebay.cli import listing, main, output
from forebay.testing import ScriptedServer

from .conftest import COMMAND, Run

VERBS = [
    *("pull", "ls", "du", "stats", "rm", "prune", "clear", "verify", "path", "pin", "unpin", "warm", "claims", "doctor", "completion"),
    *("demo", "cat", "help", "push", "budget", "config", "report", "top", "which"),
]


def test_help_lists_the_verbs(run: Run) -> None:
    for ran in (run(), run("--help"), run("-h")):
        assert ran.code == 0
        assert [verb for verb in VERBS if f"\n  {verb} " not in ran.out] == []


def test_each_verb_has_help_and_json(run: Run) -> None:
    for verb in VERBS:
        ran = run(verb, "--help")
        assert ran.code == 0, verb
        assert ("--json" in ran.out) == (verb not in ("cat", "help")), verb  # the bytes of objects, and a text
        assert ("--root" in ran.out) == (verb not in ("claims", "completion", "demo", "help")), verb


def test_help_has_each_verb_once_below_a_task(run: Run) -> None:
    ran = run("help")
    assert (ran.code, ran.out) == (0, run("--help").out)
    tasks = [line for line in ran.lines if line.endswith(":") and not line.startswith((" ", "Usage", "Options"))]
    assert tasks == [f"{task}:" for task in main.TASKS]
    assert sorted(main.VERBS) == sorted(VERBS)


def test_help_of_one_verb(run: Run) -> None:
    assert run("help", "cat").out == run("cat", "--help").out
    ran = run("help", "cta")
    assert (ran.code, "there is no verb 'cta'" in ran.err) == (2, True)


def test_version(run: Run) -> None:
    assert run("--version").out == f"forebay {forebay.__version__}\n"


@pytest.mark.parametrize("arguments", [("nonsense",), ("ls", "--nonsense"), ("ls", "--sort", "colour"), ("ls", "-f", "x>1"), ("pull",)])
def test_a_usage_error_is_two_lines(run: Run, cache: Cache, arguments: tuple[str, ...]) -> None:
    ran = run(*arguments)
    assert ran.code == 2
    what, todo = ran.err.splitlines()
    assert what.startswith("error: ")
    assert todo.startswith(" hint: ")


@pytest.mark.parametrize(("arguments", "command"), [
    (("ls", "--filter"), "forebay ls"), (("prune", "--free"), "forebay prune"), (("--root",), "forebay"),
])  # fmt: skip
def test_an_option_without_its_value_has_its_verbs_hint(run: Run, cache: Cache, arguments: tuple[str, ...], command: str) -> None:
    ran = run(*arguments)
    assert ran.code == 2
    assert f"`{command} --help`" in ran.err


@pytest.mark.parametrize("arguments", [("--root=", "path"), ("path", "--root="), ("path", "-C", "")])
def test_an_empty_root_counts_as_unset(run: Run, cache: Cache, arguments: tuple[str, ...]) -> None:
    assert run(*arguments).lines == [str(cache.path)]


@pytest.mark.parametrize("verb", ["ls", "du", "stats", "verify", "path", "prune", "clear"])
def test_looking_makes_no_cache(run: Run, tmp_path: Path, verb: str) -> None:
    typo = tmp_path / "typo"
    ran = run(verb, "-C", typo)
    assert ran.code == 3
    assert str(typo) in ran.err
    assert len(ran.err.splitlines()) == 2
    assert not typo.exists()


def test_root_wins_over_the_environment(run: Run, cache: Cache, server: ScriptedServer, tmp_path: Path) -> None:
    url = server.put("/a", b"x")
    assert run("pull", "--root", tmp_path / "other", url).code == 0
    assert run("ls", "-q", "-C", tmp_path / "other").lines == [url]
    assert run("ls", "-q").lines == []


def test_a_root_that_is_refused(run: Run, tmp_path: Path) -> None:
    place = tmp_path / "mine"
    place.mkdir()
    (place / "thesis.tex").write_text("years of work")
    ran = run("pull", "-C", place, "http://127.0.0.1:9/x")
    assert ran.code == 1
    assert "thesis.tex" in ran.err
    assert len(ran.err.splitlines()) == 2


def test_a_wrong_variable_is_a_usage_error(run: Run, cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_OFFLINE", "perhaps")
    for verb in ("ls", "du", "path", "claims", "prune", "demo"):
        ran = run(verb)
        assert (ran.code, "FOREBAY_OFFLINE" in ran.err) == (2, True), verb


@pytest.mark.processes
def test_limits_that_make_no_sense_keep_nobody_from_looking(run: Run, cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.put("key", b"value")
    monkeypatch.setenv("FOREBAY_BUDGET", "plenty")
    monkeypatch.setenv("FOREBAY_MIN_FREE", "120%")
    assert run("ls", "-q").lines == ["values:key"]
    for verb in (["du"], ["stats"], ["path"], ["verify"], ["claims"], ["completion", "bash"]):
        assert run(*verb).code == 0, verb
    for verb in (["stats", "--zero"], ["verify", "--repair"], ["prune"], ["rm", "key"], ["pin", "key"], ["pull", "http://h/"], ["demo"]):
        ran = run(*verb)
        assert (ran.code, "FOREBAY_BUDGET" in ran.err) == (2, True), verb
    assert cache.get("key") is not None


def fault(*args: object, **kwargs: object) -> None:
    raise ZeroDivisionError("division by zero")


def test_a_fault_of_our_own_shows_no_traceback(run: Run, cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "check_space", fault)
    ran = run("ls")
    assert ran.code == 1
    assert "Traceback" not in ran.err
    assert ran.err.splitlines()[0] == "error: ZeroDivisionError: division by zero"
    assert "report" in ran.err


def test_debug_shows_where_a_fault_is(run: Run, cache: Cache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("FOREBAY_VERBOSITY", "debug")
    monkeypatch.setattr(listing, "check_space", fault)
    assert "in fault" in run("ls").err
    caplog.clear()  # its record holds the frames, and these the cache


def test_the_log_goes_to_standard_error(run: Run, cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_VERBOSITY", "info")

    def check_space(cache: Cache, space: str | None) -> None:
        logging.getLogger("forebay.test").info("seen [red]\x1b[2J")

    monkeypatch.setattr(listing, "check_space", check_space)
    ran = run("ls")
    assert ran.err == "info: seen [red]\\x1b[2J\n"


def test_quiet_before_the_verb_shows_errors_only(run: Run, cache: Cache, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    url = server.put("/a", b"x")
    monkeypatch.setenv("FOREBAY_VERBOSITY", "debug")
    monkeypatch.setenv("FOREBAY_PROGRESS", "1")
    assert run("pull", url).err != ""
    ran = run("-q", "pull", url)
    assert (ran.code, ran.out, ran.err) == (0, "", "")
    ran = run("--quiet", "pull", f"{server.url}/none")
    assert (ran.code, len(ran.err.splitlines())) == (1, 2)
    ran = run("-q", "ls", "-q")
    assert ran.lines == [url]


def test_verbose_before_the_verb_shows_more_of_the_log(
    run: Run, cache: Cache, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = server.put("/a", b"x")
    monkeypatch.setenv("FOREBAY_VERBOSITY", "error")
    assert "debug: " in run("-vv", "pull", "--refresh", url).err
    assert "debug: " not in run("-v", "pull", "--refresh", url).err
    assert "debug: " not in run("pull", "--refresh", url).err  # for that one verb


def test_quiet_behind_a_verb_that_has_no_such_option_is_explained(run: Run, cache: Cache) -> None:
    for option in ("-q", "--verbose"):
        ran = run("du", option)
        assert (ran.code, f"`forebay {option} du`" in ran.err) == (2, True)
    assert run("-q", "-v", "ls").code == 2


def test_a_reader_who_has_gone_before_the_first_line(cache: Cache, home: Path) -> None:
    cache.put("k", b"v")
    ours, its = os.pipe()
    os.close(ours)
    ls = subprocess.run([*COMMAND, "ls"], stdout=its, stderr=subprocess.PIPE, check=False)
    os.close(its)
    assert (ls.stderr, ls.returncode) == (b"", 141)  # as of a tool that SIGPIPE ends


def test_nobody_reads_the_errors(cache: Cache) -> None:
    ours, its = os.pipe()
    os.close(ours)
    assert subprocess.run([*COMMAND, "pull", "/nowhere"], stderr=its, check=False).returncode == 141
    assert subprocess.run([*COMMAND, "ls"], stderr=its, check=False).returncode == 0
    os.close(its)


@pytest.mark.parametrize(("closed", "code"), [("<&-", 1), (">&-", 1), ("2>&-", 1), ("<&- >&- 2>&-", 1)])
def test_streams_that_the_shell_closed(cache: Cache, closed: str, code: int) -> None:
    cache.put("k", b"v")
    shell = " ".join([*COMMAND, "clear", closed])
    ran = subprocess.run(["sh", "-c", shell], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert ran.returncode == code
    assert "fault" not in ran.stderr
    assert bytes(cache.get("k") or b"") == b"v"
    assert cache.check(deep=True) == []  # what was to be printed went into no file of the cache


def test_a_log_that_nobody_reads_fails_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def print(self, *args: object, **how: object) -> None:
            raise BrokenPipeError

    monkeypatch.setattr(output.LOG_LINES, "target", Gone())
    monkeypatch.setattr(logging, "raiseExceptions", False)
    output.LOG_LINES.emit(logging.LogRecord("forebay", logging.WARNING, "", 0, "a warning", (), None))


def test_a_reader_who_has_had_enough(cache: Cache, home: Path) -> None:
    for number in range(1500):
        cache.put(f"{number:05d}" + "x" * 60, b"v")
    ls = subprocess.Popen([*COMMAND, "ls", "-q"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert ls.stdout is not None
    ls.stdout.readline()
    ls.stdout.close()
    assert ls.stderr is not None
    assert (ls.stderr.read(), ls.wait()) == (b"", 141)
    ls.stderr.close()


def test_help_does_not_load_the_engine() -> None:
    code = "import sys; from forebay.cli import main; main.run(['--help']); print([m for m in sys.modules if 'forebay._engine' in m])"
    found = subprocess.run([COMMAND[0], "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1] == "[]"
