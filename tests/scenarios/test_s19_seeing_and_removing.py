"""Scenario 19: what is cached can be seen and removed in part, while a job runs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay.testing import ScriptedServer

MiB = 1 << 20


@pytest.fixture
def job(root: Path, server: ScriptedServer, children: Callable[..., Any], flag: Callable[[], Any]) -> list[str]:
    """A running job that holds the first of six URLs."""
    urls = [server.put(f"/{i}.bin", os.urandom(300_000 * (i + 1))) for i in range(6)]
    held = flag()

    def run() -> None:
        with forebay.Cache(root, budget="64MiB", max_age="forever") as cache:
            for url in urls:
                cache.read(url)
            cache.put("small", b"v" * 100)
            with cache.local(urls[0]):
                held.set()
                flag().wait(600)

    children(run)
    assert held.wait(60)
    return urls


def said(done: Any, *, code: int = 0) -> Any:
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


@pytest.mark.rotates
def test_s19_all_verbs_beside_a_running_job(
    root: Path, job: list[str], command: Callable[..., Any], disk_usage: Callable[[Path], int]
) -> None:
    at = ("--root", root, "--json")
    listed = said(command("ls", *at))
    assert {entry["name"] for entry in listed} == {*job, "values:small"}
    assert [entry["name"] for entry in listed if entry["leased"]] == [job[0]]
    assert [entry["name"] for entry in said(command("ls", "--leased", *at))] == [job[0]]
    assert [entry["name"] for entry in said(command("ls", "--sort", "size", *at))][:2] == [job[5], job[4]]
    assert {entry["name"] for entry in said(command("ls", "--filter", "size>1MB", *at))} == set(job[3:])

    usage = said(command("du", *at))
    blobs = disk_usage(root / "blobs")
    assert 0 <= usage["used"] - blobs <= 4096
    assert usage["used"] == said(command("stats", *at))["bytes_used"]
    assert abs(sum(space["bytes"] for space in usage["spaces"].values()) - blobs) <= 4096 * len(listed)

    path = Path(said(command("path", job[2], *at))["path"])
    assert path.stat().st_size == 900_000
    assert said(command("verify", *at)) == {"mended": [], "problems": []}

    dry = said(command("prune", "--free", "63MiB", "--dry-run", *at))
    assert dry["frees"] > 0
    assert {entry["name"] for entry in said(command("ls", *at))} == {*job, "values:small"}  # nothing went

    # Held: left alone, and named.
    report = said(command("rm", job[0], job[1], *at), code=1)
    assert (report["removed"], report["spared"]) == ([job[1]], [job[0]])
    assert job[0] in command("rm", job[0], "--root", root).stdout
    assert said(command("rm", "--filter", "size>1.7MB", "--yes", *at))["removed"] == [job[5]]
    report = said(command("clear", "--yes", *at), code=0 if True else 1)
    assert report["spared"] == [job[0]]
    assert report["freed"] > 0
    assert [entry["name"] for entry in said(command("ls", *at))] == [job[0]]
    assert said(command("rm", job[3], *at), code=3)["removed"] == []


def test_s19_a_plan_is_shown_then_executed_then_reported(root: Path, job: list[str]) -> None:
    with forebay.Cache(root) as cache:
        plan = cache.plan(where=lambda entry: entry.size > 500_000)
        assert {victim.name for victim in plan.victims} == set(job[1:])
        assert plan.frees == sum(victim.charge for victim in plan.victims)
        assert len(cache.entries()) == 7
        cache.pin(job[2])
        report = plan.execute()
        assert set(report.removed) == {job[1], *job[3:]}
        assert report.spared == (job[2],)
        assert report.freed == plan.frees - next(v.charge for v in plan.victims if v.name == job[2])
        everything = cache.clear()
        assert set(everything.execute().spared) == {job[0]}


def test_s19_what_is_not_there(root: Path, tmp_path: Path, command: Callable[..., Any]) -> None:
    done = command("ls", "--root", tmp_path / "mistyped")
    assert done.returncode == 3
    assert "there is no cache at" in done.stderr
    assert not (tmp_path / "mistyped").exists()
