"""What a new user tries, and what the command line makes of it."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from forebay import Cache, _config, errors
from forebay.testing import ScriptedServer
from tests.remote_directories import FILES, http_directory

from .conftest import COMMAND, Run

REPO = Path(__file__).parents[2]


# -- help --------------------------------------------------------------------------------------------------------------


def test_no_line_of_the_help_is_cut(run: Run) -> None:
    text = run("--help").out
    assert "..." not in text.partition("\n")[2]
    assert text.count(".\n") >= 17


@pytest.mark.parametrize("columns", ["60", "200"])
def test_help_fits_its_terminal(columns: str) -> None:
    found = subprocess.run([*COMMAND, "--help"], env=os.environ | {"COLUMNS": columns}, capture_output=True, text=True, check=True)
    assert max(map(len, found.stdout.splitlines())) <= int(columns)


def test_a_hint_names_the_verb(run: Run, cache: Cache) -> None:
    for verb in (("ls", "-f", "x>1"), ("prune", "--free", "lots"), ("rm",)):
        ran = run(*verb)
        assert ran.code == 2
        assert f"`forebay {verb[0]} --help`" in ran.err
        assert "VERB" not in ran.err


def test_a_missing_argument_is_said_on_one_line(run: Run) -> None:
    ran = run("completion")
    assert ran.err.splitlines()[0] == "error: Missing argument 'bash|zsh|fish'. Choose from: bash, zsh, fish"


def test_the_root_may_stand_before_the_verb(run: Run, cache: Cache, tmp_path: Path) -> None:
    cache.put("k", b"v")
    with Cache(tmp_path / "other", budget=50_000_000) as other:
        other.put("o", b"v")
    place = str(tmp_path / "other")
    assert run("-C", place, "ls", "-q").lines == ["values:o"]
    assert run("--root", place, "path").lines == [place]
    assert run("-C", "/nowhere", "ls", "-q", "-C", place).lines == ["values:o"]
    assert run("-C", "/nowhere", "du").code == 3
    assert run("ls", "-q").lines == ["values:k"]


# -- pull --------------------------------------------------------------------------------------------------------------


def test_a_directory_without_its_slash_is_told(run: Run, server: ScriptedServer, tmp_path: Path) -> None:
    url = http_directory(server, FILES, "/run/step_100")
    (tmp_path / "near").mkdir()
    (tmp_path / "near" / "file").write_bytes(b"x")
    for name in (url.rstrip("/"), str(tmp_path / "near")):
        ran = run("pull", name)
        assert (ran.code, "but a directory" in ran.err, "a slash at the end" in ran.err) == (1, True, True), ran
    ran = run("pull", f"{server.url}/nope")
    assert "404" in ran.err
    assert "ends with a slash" in ran.err
    ran = run("pull", f"{server.url}/nope/")
    assert "check the" not in ran.err
    assert "name its files one by one" in ran.err


def test_a_copy_replaces_no_file_in_silence(run: Run, server: ScriptedServer, tmp_path: Path) -> None:
    url, target = server.put("/a", b"new"), tmp_path / "notes"
    for there in (b"old", b"new and more", b"ne", b""):
        target.write_bytes(there)
        ran = run("pull", url, "--to", target)
        assert (ran.code, target.read_bytes()) == (1, there)
        assert str(target) in ran.err
        assert "--overwrite" in ran.err
    target.unlink()
    target.symlink_to("nowhere")
    assert run("pull", url, "--to", target).code == 1
    assert os.readlink(target) == "nowhere"
    assert run("pull", url, "--to", target, "--overwrite").code == 0
    assert run("pull", url, "--to", target).code == 0  # it is the same already
    assert (target.read_bytes(), target.is_symlink()) == (b"new", False)
    assert run("pull", url, "--overwrite").code == 2
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    ran = run("pull", url, "--to", fifo, "--overwrite")
    assert (ran.code, "not a regular file" in ran.err) == (2, True)


def test_debug_tells_what_a_pull_does(run: Run, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    url = server.put("/a", b"new")
    monkeypatch.setenv("FOREBAY_VERBOSITY", "debug")
    first, second = run("pull", url).err, run("pull", url).err
    assert f"{url}: fetched 3 bytes, by 1 requests" in first
    assert f"{url}: in the cache already" in second
    monkeypatch.setenv("FOREBAY_VERBOSITY", "warning")
    assert run("pull", url).err == "1 URL: 1 in the cache already\n"


@pytest.mark.parametrize(
    ("url", "package", "said"), [("gs://b/x", "fsspec", "the extra 'fsspec'"), ("az://b/x/", "fsspec", "the extra 'fsspec'"),
                                 ("s3://b/x", "botocore", "the extra 's3'")]
)  # fmt: skip
def test_a_missing_package_names_the_extra(home: Path, tmp_path: Path, url: str, package: str, said: str) -> None:
    (tmp_path / "without" / package).mkdir(parents=True)
    (tmp_path / "without" / package / "__init__.py").write_text(f"raise ModuleNotFoundError('no {package}', name={package!r})")
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path / "without"), os.environ["PYTHONPATH"]])}
    ran = subprocess.run([*COMMAND, "pull", url], env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert said in ran.stderr
    assert package in ran.stderr
    assert "forebay[" not in ran.stderr


# -- prune -------------------------------------------------------------------------------------------------------------


def test_room_that_can_never_be_is_no_success(run: Run, cache: Cache) -> None:
    cache.put("k", bytes(100_000))
    for arguments in (("--free", "1TB", "-n"), ("--free", "1TB", "--yes"), ("--free", "60MB", "-n")):
        ran = run("prune", *arguments)
        assert (ran.code, "more than the budget of 50 MB" in ran.err) == (2, True)
    cache.pin("k")
    for arguments in (("-n",), ("--yes",)):
        ran = run("prune", "--free", "49.95MB", *arguments)
        assert (ran.code, "--free 49.95MB requires the removal of " in ran.err) == (1, True), ran
    assert cache.get("k") is not None
    cache.unpin("k")
    assert run("prune", "--free", "49.95MB", "--yes").code == 0
    assert cache.get("k") is None


def test_what_has_no_room_says_what_it_takes(run: Run, server: ScriptedServer, home: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Cache(home, budget=10):
        pass
    ran = run("pull", server.put("/a", b"8 bytes."))
    assert ran.code == 1
    found = re.search(r"8 bytes \(([\d,]+) on the disk\), 10 of the budget of 10 are available", ran.err)
    assert found is not None, ran.err
    assert int(found[1].replace(",", "")) > 10
    caplog.clear()


# -- variables, extras -------------------------------------------------------------------------------------------------


def test_a_variable_that_nobody_knows_is_told_once(monkeypatch: pytest.MonkeyPatch, run: Run, cache: Cache) -> None:
    monkeypatch.setattr(_config, "_warned", set())
    monkeypatch.setenv("FOREBAY_BUDGTE", "5GB")
    monkeypatch.setenv("FOREBAY_XYZ", "1")
    err = run("du").err
    assert "FOREBAY_BUDGTE is unknown and ignored: did you mean FOREBAY_BUDGET?" in err
    assert "FOREBAY_XYZ is unknown and ignored" in err
    assert run("du").err == ""


def test_the_known_variables_are_those_on_the_page() -> None:
    page = (REPO / "docs" / "reference" / "settings.md").read_text()
    assert set(re.findall(r"FOREBAY_(\w+)", page)) == _config.KNOWN


def test_doctor_lists_all_extras(run: Run) -> None:
    text = (REPO / "pyproject.toml").read_text()
    found = re.search(r'^all = \["forebay\[([\w,]+)\]"\]', text, re.MULTILINE)
    assert found is not None
    assert set(found[1].split(",")) == set(errors.EXTRAS)
    for extra, packages in errors.EXTRAS.items():
        line = re.search(rf"^{extra} = \[(.*)\]", text, re.MULTILINE)
        assert line is not None
        assert sorted(re.findall(r'"([\w.-]+(?:\[\w+\])?)', line[1])) == sorted(packages)
    (line,) = [finding["found"] for finding in run("doctor", "--json").json if finding["name"] == "extras"]
    assert set(re.findall(r"\w+", line)) >= set(errors.EXTRAS)
