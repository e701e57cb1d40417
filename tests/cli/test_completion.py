"""What a shell completes: verbs and options, names of entries and spaces; quick, and without a word on the terminal."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay import Cache
from forebay.cli import arguments
from forebay.testing import ScriptedServer

from .conftest import COMMAND, HANG

Bash = Iterator["Shell"]


def completed(line: str, **environ: str) -> list[str]:
    """What `bash` is told for this line, without the kinds."""
    env = os.environ | {"_FOREBAY_COMPLETE": "bash_complete", arguments.LINE: line} | environ
    found = subprocess.run(COMMAND, env=env, capture_output=True, text=True, check=True, timeout=HANG)
    assert found.stderr == ""
    return [text.partition(",")[2] for text in found.stdout.splitlines() if text]


@pytest.fixture
def filled(cache: Cache, server: ScriptedServer) -> str:
    """The URL of a server of which the cache has two objects; beside them two values, and a value of a space."""
    for name in ("/dir/a.tar", "/dir/b.tar"):
        cache.read(server.put(name, b"x"))
    cache.put("large", b"x")
    cache.put("a b", b"x")
    cache.space("features").put("17", b"x")
    return server.url


def test_names_of_entries(filled: str) -> None:
    assert completed("forebay rm ") == ["features:17", f"{filled}/dir/a.tar", f"{filled}/dir/b.tar", "values:a b", "values:large"]
    assert completed(f"forebay path {filled}/dir/b") == [f"{filled}/dir/b.tar"]
    assert completed(f"forebay cat --refresh {filled}/dir/b.tar") == [f"{filled}/dir/b.tar"]
    assert completed("forebay -q unpin values:l") == ["values:large"]
    assert completed("forebay ls val") == ["values:a b", "values:large"]
    assert completed("forebay pin 'values:a ") == ["values:a b"]
    assert completed("forebay pin none") == []


def test_names_of_spaces(filled: str) -> None:
    for verb in ("ls", "prune", "clear"):
        assert "features" in completed(f"forebay {verb} --space fe")


def test_the_root_on_the_line_counts(filled: str, home: Path, tmp_path: Path) -> None:
    elsewhere = str(tmp_path / "elsewhere")
    for line in (f"forebay rm -C {home} val", f"forebay --root {home} rm val"):
        assert completed(line, FOREBAY_HOME=elsewhere) == ["values:a b", "values:large"]
    assert completed("forebay rm val", FOREBAY_HOME=elsewhere) == []
    assert not os.path.exists(elsewhere)


def test_what_is_wrong_stays_silent(filled: str, home: Path, tmp_path: Path) -> None:
    assert completed("forebay rm val", FOREBAY_OFFLINE="perhaps", FOREBAY_BUDGTE="1", FOREBAY_BUDGET="5") != []
    broken = tmp_path / "broken"
    with Cache(broken, budget=50_000_000) as cache:
        cache.put("k", b"v")
    (broken / "catalog.sqlite").write_bytes(b"no catalog" * 1000)
    assert completed(f"forebay rm -C {broken} val") == []


def test_of_many_names_their_beginnings(cache: Cache) -> None:
    for folder in ("one", "two"):
        for number in range(arguments.MOST_NAMES):
            cache.put(f"x/{folder}/{number:03}", b"v")
    cache.put("x/three/1", b"v")
    cache.put("y", b"v")
    assert completed("forebay rm val") == ["values:x/", "values:y"]
    assert completed("forebay rm values:x") == ["values:x/one/", "values:x/three/", "values:x/two/"]
    assert completed("forebay rm values:x/th") == ["values:x/three/1"]
    cache.space("s").put("z", b"v")
    assert completed("forebay rm ") == ["s:", "values:"]


def test_verbs_and_options_load_no_engine() -> None:
    env = os.environ | {"_FOREBAY_COMPLETE": "bash_complete", arguments.LINE: "forebay pull --"}
    script = "import atexit, sys; atexit.register(lambda: print([m for m in sys.modules if 'forebay._engine' in m or 'pycurl' in m]))\n"
    script += "from forebay.cli.main import run; run()"
    found = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True, timeout=HANG)
    assert "plain,--pin" in found.stdout
    assert found.stdout.splitlines()[-1] == "[]"


# -- bash --------------------------------------------------------------------------------------------------------------


class Shell:
    """An interactive bash on a terminal of its own, which has the script; `type` returns the line once it ends as expected."""

    def __init__(self, directory: Path) -> None:
        command = directory / "forebay"
        command.write_text(f'#!/bin/sh\nexec {" ".join(COMMAND)} "$@"\n')
        command.chmod(0o755)
        self._screen, inside = pty.openpty()
        env = os.environ | {"PATH": f"{directory}:{os.environ['PATH']}", "TERM": "dumb", "PS1": "", "COLUMNS": "500", "HISTFILE": ""}
        self._bash = subprocess.Popen(
            ["bash", "--norc", "--noprofile", "-i"], stdin=inside, stdout=inside, stderr=inside, env=env, start_new_session=True
        )
        os.close(inside)
        self.type('bind "set enable-bracketed-paste off"; PS1=; eval "$(forebay completion bash)"; echo rea""dy\n', "ready")

    def type(self, text: str, until: str) -> None:
        os.write(self._screen, text.encode())
        seen, deadline = "", time.monotonic() + HANG
        while until not in seen:
            assert select.select([self._screen], [], [], max(deadline - time.monotonic(), 0))[0], (until, seen)
            seen += os.read(self._screen, 65536).decode(errors="replace").replace("\r", "")

    def close(self) -> None:
        self._bash.kill()
        self._bash.wait()
        os.close(self._screen)


def test_bash_completes_names_with_colons_and_blanks(filled: str, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    with contextlib.closing(Shell(tmp_path / "bin")) as shell:
        shell.type("forebay path http\tb\t--json\n", f'"name": "{filled}/dir/b.tar"')
        shell.type("forebay unpin values:l\t--json\n", '"values:large"')
        shell.type("forebay unpin values:a\t--json\n", '"values:a b"')
        shell.type("forebay ls --space fea\t-q\n", "features:17")


@pytest.mark.parametrize("quote", ["", '"', "'"], ids=["bare", "double quotes", "single quotes"])
def test_a_name_that_bash_completes_is_a_word_and_no_command(cache: Cache, tmp_path: Path, quote: str) -> None:
    """The names of remote objects are their owners' choice. zsh and fish quote by themselves what is inserted."""
    own = tmp_path / "own"
    names = [f"a$(rm {own})", f"b`rm {own}`", f'c"; rm {own}; "x', f"d'; rm {own}; 'x", f"e\\$(rm {own})", f"f\\`rm {own}`", "g$HOME"]
    for name in names:
        cache.put(name, b"x")
    own.touch()
    (tmp_path / "bin").mkdir()
    with contextlib.closing(Shell(tmp_path / "bin")) as shell:
        for name in names:
            shell.type(f"forebay unpin {quote}values:{name[0]}\t--json\n", json.dumps(f"values:{name}"))
        cache.put("h!rm", b"x")
        if quote == '"':  # no quoting there stops bash from expanding its history: the name is not offered
            shell.type('forebay unpin "values:h\t" --json\n', '"values:h"')
        else:
            shell.type(f"forebay unpin {quote}values:h\t--json\n", '"values:h!rm"')
    assert own.exists()
