"""`claims`, and what `prune` and `doctor` say of them: a live one, and one whose job was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import forebay
from forebay import Cache
from forebay.testing import ScriptedServer

from .conftest import COMMAND, Run, Terminal

REMOTE = "s3://bucket/train?token=secret"
JOB = f"""
import forebay, signal, sys
claim = forebay.claim([sys.argv[1] + "/train", sys.argv[1] + "/eval"], [{REMOTE!r}, None], job="the \\033[31mother")
claim.buffer("shared", 1 << 20)
print("ready", flush=True)
signal.pause()
"""


@pytest.fixture
def job(home: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A job that lives, and has a claim with a megabyte of shared memory."""
    process = subprocess.Popen([sys.executable, "-c", JOB, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def end(job: subprocess.Popen[str]) -> None:
    job.send_signal(signal.SIGKILL)
    job.wait()


def findings(run: Run) -> list[dict[str, str]]:
    return [each for each in run("doctor", "--json").json if each["name"] == "claims"]


# -- claims ------------------------------------------------------------------------------------------------------------


def test_without_any_there_is_nothing_to_show(run: Run, tmp_path: Path) -> None:
    ran = run("claims")
    assert (ran.code, ran.out, ran.err) == (0, "", "")
    assert run("claims", "--json").json == []
    assert run("prune", "--json").json == {"claims": []}
    assert not (tmp_path / "claims").exists()


def test_s19_live_and_dead_ones_are_shown(run: Run, job: subprocess.Popen[str], tmp_path: Path) -> None:
    header, live = run("claims").lines
    assert header.split() == ["PREFIX", "STATE", "AGE", "USER", "PROCESSES", "MEMORY", "JOB", "DIRECTORIES"]
    assert live.split()[:2] == ["000000", "live"]
    assert f" {job.pid} " in live
    assert " 1.05 MB " in live
    assert live.endswith(f"the \\x1b[31mother  {tmp_path}/train {tmp_path}/eval")
    end(job)
    dead = run("claims").lines[1]
    assert dead.split()[:2] == ["000000", "dead"]
    assert f" {job.pid} " not in dead


def test_the_document_has_all_facts_and_no_secrets(run: Run, job: subprocess.Popen[str], tmp_path: Path) -> None:
    ran = run("claims", "--json")
    (claim,) = ran.json
    assert claim["prefix"] == 0
    assert claim["live"] is True
    assert (claim["leader"], claim["pids"]) == (job.pid, [job.pid])
    assert claim["uid"] == os.geteuid()
    assert claim["directories"] == [f"{tmp_path}/train", f"{tmp_path}/eval"]
    assert claim["remotes"][1] is None
    assert claim["bytes"] >= 1 << 20
    assert claim["age"] >= 0
    assert "secret" not in claim["remotes"][0]


def test_many_processes_are_cut_in_the_table_only(run: Run, home: Path, tmp_path: Path) -> None:
    pids, (read, write), (heard, tell) = [os.getpid()], os.pipe(), os.pipe()
    with forebay.claim(tmp_path / "data", job="many"):
        for _ in range(5):
            if (pid := os.fork()) == 0:
                os.close(write)
                os.write(tell, b".")  # it has taken its place in the claim
                os.read(read, 1)  # until the parent closes its end
                os._exit(0)
            pids.append(pid)
            os.read(heard, 1)
        (claim,) = run("claims", "--json").json
        shown = run("claims").lines[1]
        os.close(write)
        for pid in pids[1:]:
            os.waitpid(pid, 0)
    for fd in (read, heard, tell):
        os.close(fd)
    assert claim["pids"] == pids
    assert f" {pids[0]} {pids[1]} {pids[2]} +3 " in shown


def test_what_is_damaged_is_shown(run: Run, job: subprocess.Popen[str], tmp_path: Path) -> None:
    end(job)
    (directory,) = (tmp_path / "claims").glob("000000.*")
    (directory / "claim").write_bytes(b"\0" * 100)
    assert run("claims").lines[1].endswith("damaged")
    assert run("prune").code == 0
    assert run("claims").out == ""


def test_a_registry_that_cannot_be_is_two_lines(run: Run, home: Path, tmp_path: Path) -> None:
    (tmp_path / "claims").write_text("a file")
    ran = run("claims")
    assert ran.code == 1
    what, todo = ran.err.splitlines()
    assert "FOREBAY_CLAIMS" in what
    assert "FOREBAY_CLAIMS" in todo


def test_on_a_terminal_nothing_moves_the_cursor(job: subprocess.Popen[str]) -> None:
    with Terminal("claims") as terminal:
        assert terminal.end() == 0
        assert "other" in terminal.seen
        assert "\x1b[31m" not in terminal.seen


# -- prune -------------------------------------------------------------------------------------------------------------


def test_prune_frees_the_dead_and_spares_the_living(run: Run, cache: Cache, job: subprocess.Popen[str], tmp_path: Path) -> None:
    assert run("prune").out == "0 entries removed, 0 B freed\n"
    end(job)
    freed = f"{tmp_path}/train, {tmp_path}/eval"
    shown = run("prune", "--dry-run").lines
    assert shown[0].startswith("claim 000000 of a dead job, 1.")
    assert shown[0].endswith(f"of shared memory would be freed: {freed}")
    assert run("claims").lines[1:] != []
    assert run("prune").lines[0].endswith(f"of shared memory freed: {freed}")
    assert run("claims").out == ""


def test_prune_needs_no_cache(run: Run, job: subprocess.Popen[str]) -> None:
    end(job)
    ran = run("prune")
    assert ran.code == 0
    assert ran.out.startswith("claim 000000 of a dead job")
    assert "there is no cache at" in ran.err
    assert run("prune", "--json").json == {"claims": []}


def test_the_report_of_prune_has_the_claims(run: Run, cache: Cache, job: subprocess.Popen[str]) -> None:
    end(job)
    assert [claim["prefix"] for claim in run("prune", "--json", "--dry-run").json["claims"]] == [0]
    report = run("prune", "--json").json
    assert [claim["prefix"] for claim in report["claims"]] == [0]
    assert report["removed"] == []


def test_a_prune_for_room_leaves_claims_alone(run: Run, cache: Cache, server: ScriptedServer, job: subprocess.Popen[str]) -> None:
    end(job)
    assert "claims" not in run("prune", "--free", "1MB", "--yes", "--json").json
    assert len(run("claims").lines) == 2


def test_prune_does_what_it_can_where_the_registry_is_broken(run: Run, cache: Cache, tmp_path: Path) -> None:
    (tmp_path / "claims").write_text("a file")
    ran = run("prune")
    assert (ran.code, ran.out) == (0, "0 entries removed, 0 B freed\n")
    assert ran.err.startswith("claims: ")


# -- doctor ------------------------------------------------------------------------------------------------------------


def test_doctor_looks_at_the_registry_and_makes_none(run: Run, home: Path, tmp_path: Path) -> None:
    (finding,) = findings(run)
    assert finding["state"] == "ok"
    assert finding["found"].startswith("none yet")
    assert not (tmp_path / "claims").exists()


def test_doctor_counts_claims(run: Run, job: subprocess.Popen[str]) -> None:
    (finding,) = findings(run)
    assert (finding["state"], finding["todo"]) == ("ok", "")
    assert finding["found"].startswith("1 live, 0 dead; 1.")
    end(job)
    (finding,) = findings(run)
    assert finding["found"].startswith("0 live, 1 dead; 1.")
    assert "forebay prune" in finding["todo"]


def test_doctor_tells_of_a_small_dev_shm(run: Run, job: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.cli.checkup.ENOUGH_SHARED", 1 << 60)
    (finding,) = findings(run)
    assert finding["state"] == "slow"
    assert "--shm-size" in finding["todo"]


def test_doctor_tells_of_a_registry_that_cannot_be(run: Run, home: Path, tmp_path: Path) -> None:
    (tmp_path / "claims").write_text("a file")
    (finding,) = findings(run)
    assert finding["state"] == "wrong"
    assert "FOREBAY_CLAIMS" in finding["found"]


def test_the_verb_starts_without_the_engine(home: Path) -> None:
    code = "import sys; from forebay.cli import main; main.run(['claims']); print(*sys.modules.keys() & {'numpy', 'sqlite3', 'pycurl'})"
    done = subprocess.run([COMMAND[0], "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
