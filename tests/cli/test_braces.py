"""Braces in URLs: they stand for what they stand for in bash, and a literal one stays possible."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from forebay import Cache, errors
from forebay.cli.arguments import MOST, expand
from forebay.testing import ScriptedServer

from .conftest import Run

AS_BASH = [
    *("s-{000..003}.tar", "{a,b}{1..3}", "x{}y", "x{a}y", "{a,b", "a}b{c,d}", "{a,{b,c}d}e", "{{a,b},c}", "{1..9..3}", "{9..1..3}"),
    *("{-05..5..5}", "{a..e..2}", "{e..a}", "{x{a,b}}", "{1..3,x}", "{01..3}", "{1..03}", "{-1..1}", "{a,b}/{{1,2}}", "{1..3..0}"),
    *("{a..3}", "x{,.idx}", "{0..2}x{,.idx}", "{a,b,}x", "{1..-2}", "a{{b", "}{"),
]


def test_braces_stand_for_what_bash_makes_of_them(tmp_path: Path) -> None:
    script = "\n".join(f"printf '%s\\n' {text}; echo =" for text in AS_BASH)
    bash = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert ["\n".join(expand(text)) for text in AS_BASH] == bash.stdout.removesuffix("\n=\n").split("\n=\n")


def test_a_backslash_and_a_dollar_keep_braces() -> None:
    assert expand(r"s3://b/\{1,2\}") == ["s3://b/{1,2}"]
    assert expand(r"{a\,b,c}") == ["a,b", "c"]
    assert expand("${a,b}") == ["${a,b}"]
    assert expand(r"a\b") == [r"a\b"]


def test_a_local_file_with_braces_in_its_name_is_itself(tmp_path: Path) -> None:
    (tmp_path / "{a,b}").touch()
    assert expand(f"{tmp_path}/{{a,b}}") == [f"{tmp_path}/{{a,b}}"]
    assert expand(f"{tmp_path}/{{a,c}}") == [f"{tmp_path}/a", f"{tmp_path}/c"]


@pytest.mark.parametrize("text", [f"{{1..{MOST + 1}}}", "{1..2000}{1..2000}", "{1..999999999999999999}", "{{1..1000000},x}"])
def test_braces_that_stand_for_too_many_are_refused_at_once(text: str) -> None:
    with pytest.raises(errors.ConfigError, match="more than 1,000,000"):
        expand(text)


# -- verbs -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def shards(server: ScriptedServer) -> str:
    """The beginning of the URLs of five shards, which hold their numbers."""
    for number in range(8, 13):
        server.put(f"/shard-{number:03}.tar", b"%d;" % number)
    return f"{server.url}/shard-"


@pytest.mark.parametrize("verb", ["pull", "warm"])
def test_verbs_that_fetch_take_braces(run: Run, cache: Cache, shards: str, verb: str) -> None:
    assert run(verb, shards + "{008..012}.tar").code == 0
    assert run("ls", "-q").lines == [f"{shards}{number:03}.tar" for number in range(8, 13)]


def test_cat_writes_them_in_their_order(run: Run, cache: Cache, shards: str) -> None:
    assert run("cat", shards + "{012..008..2}.tar").out == "12;10;8;"


def test_warm_takes_what_an_unquoted_brace_makes(run: Run, cache: Cache, shards: str, tmp_path: Path) -> None:
    (tmp_path / "list").write_text(f"{shards}012.tar\n")
    assert run("warm", f"{shards}008.tar", f"{shards}009.tar", tmp_path / "list").code == 0
    assert run("ls", "-q").lines == [f"{shards}{number:03}.tar" for number in (8, 9, 12)]


def test_warm_with_braces_lists_prefixes_and_reads_files(run: Run, cache: Cache, shards: str, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
        (tmp_path / f"{name}.txt").write_text(f"{shards}0{8 if name == 'one' else 12:02}.tar\n")
    assert run("warm", f"file://{tmp_path}/{{one,two}}/", f"{tmp_path}/{{one,two}}.txt").code == 0
    names = run("ls", "-q").lines
    assert names == [*(f"file://{tmp_path}/{name}/file" for name in ("one", "two")), f"{shards}008.tar", f"{shards}012.tar"]


def test_too_many_are_a_usage_error_that_names_the_way_out(run: Run, home: Path) -> None:
    ran = run("pull", "http://h/{1..9999999}")
    assert (ran.code, "forebay warm FILE" in ran.err, home.exists()) == (2, True, False)
