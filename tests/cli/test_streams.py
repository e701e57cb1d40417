"""Where output goes: a full device, a reader who has gone, a stream that takes no letters but ASCII."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from forebay import Cache
from forebay.testing import ScriptedServer

from .conftest import COMMAND


def command(*arguments: str, shell: str, **environ: str) -> subprocess.CompletedProcess[str]:
    line = f'"$@" {shell}'
    return subprocess.run(
        ["sh", "-c", line, "sh", *COMMAND, *arguments], capture_output=True, text=True, check=False, env=os.environ | environ, timeout=60
    )


@pytest.mark.parametrize("verb", [("ls",), ("--help",), ("doctor", "--json"), ("path",)], ids=" ".join)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_output_is_not_the_caches_fault(cache: Cache, verb: tuple[str, ...], unbuffered: str) -> None:
    cache.put("k", b"v")
    ran = command(*verb, shell=">/dev/full", PYTHONUNBUFFERED=unbuffered)
    assert ran.returncode == 1
    assert ran.stderr.splitlines() == [
        "error: the output cannot be written: No space left on device",
        " hint: the cache is fine: check where the output goes",
    ]


def test_full_errors_change_no_exit_code(cache: Cache, server: ScriptedServer) -> None:
    url = server.put("/a", b"x")
    assert command("pull", url, shell="2>/dev/full").returncode == 0
    assert command("path", "nothing", shell="2>/dev/full").returncode == 3
    assert command("nonsense", shell="2>/dev/full").returncode == 2
    assert command("ls", shell=">/dev/full 2>&1").returncode == 1


def test_letters_that_the_output_cannot_show(cache: Cache) -> None:
    cache.put("größe", b"x")
    ran = command("ls", "-q", shell="", PYTHONIOENCODING="ascii")
    assert (ran.returncode, ran.stdout) == (0, "values:gr\\xf6\\xdfe\n")


def test_a_path_is_given_to_programs_as_it_is(cache: Cache, server: ScriptedServer, tmp_path: Path) -> None:
    place = tmp_path / "raw\u200b"  # which is not printable
    url = server.put("/a", b"x")
    with Cache(place, budget=50_000_000) as other:
        other.pull(url)
    ran = subprocess.run([*COMMAND, "path", "-C", place, url], capture_output=True, check=False)
    assert ran.stdout.startswith(os.fsencode(place) + b"/blobs/")
    assert Path(os.fsdecode(ran.stdout[:-1])).read_bytes() == b"x"


def test_ctrl_c_while_the_command_line_is_still_being_imported() -> None:
    script = (
        "import sys\n"
        "class Interrupts:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'forebay.cli.main':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupts())\n"
        "from forebay.cli.__main__ import main\n"
        "main()\n"
    )
    ran = subprocess.run([COMMAND[0], "-c", script], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "interrupted\n")
