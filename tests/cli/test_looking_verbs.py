"""`ls`, `du`, `stats`, `verify`, `doctor`, `completion`: they show what is, and change nothing."""

from __future__ import annotations

import mmap
import os
import resource
import subprocess
from pathlib import Path

import pytest

from forebay import Cache
from forebay._kernel import host
from forebay.testing import ScriptedServer

from .conftest import COMMAND, Run


@pytest.fixture
def filled(cache: Cache, server: ScriptedServer) -> Cache:
    """Three objects, the largest used first, and a value."""
    for name, size in (("large", 300_000), ("small", 1000), ("middle", 50_000)):
        cache.read(server.put(f"/{name}", os.urandom(size)))
    cache.put("key", b"value")
    return cache


def names(lines: list[str]) -> list[str]:
    return [line.rsplit(maxsplit=1)[-1].rsplit("/", 1)[-1] for line in lines]


# -- ls ----------------------------------------------------------------------------------------------------------------


def test_ls_in_a_pipe_cuts_nothing(run: Run, cache: Cache, server: ScriptedServer) -> None:
    url = server.put("/" + "long" * 60, b"x")
    cache.read(url)
    assert run("ls").lines[1].endswith(url)


@pytest.mark.parametrize(
    ("options", "order"),
    [
        ((), ["large", "middle", "small", "values:key"]),
        (("--reverse",), ["values:key", "small", "middle", "large"]),
        (("--sort", "size"), ["large", "middle", "small", "values:key"]),
        (("--sort", "size", "--reverse"), ["values:key", "small", "middle", "large"]),
        (("--sort", "created"), ["values:key", "middle", "small", "large"]),
        (("--sort", "used"), ["values:key", "middle", "small", "large"]),
        (("--filter", "size>10kB"), ["large", "middle"]),
        (("-f", "size>10kB", "-f", "size<100kB"), ["middle"]),
        (("--filter", "used>30d"), []),
        (("--space", "values"), ["values:key"]),
        (("--leased",), []),
    ],
)
def test_ls(run: Run, filled: Cache, options: tuple[str, ...], order: list[str]) -> None:
    ran = run("ls", "-q", *options)
    assert ran.code == 0
    assert names(ran.lines) == order


def test_ls_by_the_beginning_of_a_name(run: Run, filled: Cache, server: ScriptedServer) -> None:
    assert names(run("ls", "-q", f"{server.url}/m", "values:").lines) == ["middle", "values:key"]


def test_ls_shows_who_is_leased_and_pinned(run: Run, filled: Cache, server: ScriptedServer) -> None:
    filled.pin(f"{server.url}/small")
    with filled.local(f"{server.url}/large"):
        assert names(run("ls", "-q", "--leased").lines) == ["large"]
        states = {record["name"].rsplit("/", 1)[-1]: (record["life"], record["leased"]) for record in run("ls", "--json").json}
    assert states["large"] == ("cached", True)
    assert states["small"] == ("pinned", False)
    assert "pinned" in next(line for line in run("ls").lines if line.endswith("small"))


def test_ls_as_json_gives_bytes_and_seconds(run: Run, filled: Cache, server: ScriptedServer) -> None:
    record = next(r for r in run("ls", "--json").json if r["name"].endswith("/middle"))
    entry = filled.entry(f"{server.url}/middle")
    assert entry is not None
    assert (record["size"], record["space"], record["kind"], record["checksum"]) == (50_000, "urls", "blob", entry.checksum.hex())
    assert abs(record["created"] - entry.created) < 1e-3


def test_an_empty_cache(run: Run, cache: Cache) -> None:
    assert (run("ls").out, run("ls", "--json").json) == ("", [])


def test_names_cannot_play_with_the_terminal(run: Run, cache: Cache) -> None:
    cache.put("evil\x1b[2Jname\nsecond line [red]", b"x")
    out = run("ls", "-q").out
    assert out == "values:evil\\x1b[2Jname\\nsecond line [red]\n"


# -- du, stats ---------------------------------------------------------------------------------------------------------


def test_du(run: Run, filled: Cache) -> None:
    found = run("du", "--json").json
    assert found["spaces"]["urls"] == {"entries": 3, "bytes": 351_000}
    assert found["budget"] == 50_000_000
    assert found["used"] >= 351_000
    assert "50 MB" in run("du").out


def test_stats_are_the_nodes_and_can_be_zeroed(run: Run, filled: Cache, server: ScriptedServer) -> None:
    filled.read(f"{server.url}/small")
    found = run("stats", "--json").json
    assert (found["misses"], found["fills"], found["bytes_remote"]) == (3, 3, 351_000)
    assert found["hits"] == 1
    assert found["hit_rate"] == 0.25
    ran = run("stats", "--zero")
    assert ran.code == 0
    assert any(line.split() == ["hits", "1"] for line in ran.lines)
    assert run("stats", "--json").json["hits"] == 0


# -- verify ------------------------------------------------------------------------------------------------------------


def test_verify_of_a_sound_cache(run: Run, filled: Cache) -> None:
    ran = run("verify")
    assert (ran.code, ran.out) == (0, "no problems found (4 entries)\n")
    assert run("verify", "--json").json == {"mended": [], "problems": []}


def test_verify_finds_a_flipped_byte_and_repair_mends_it(run: Run, filled: Cache, server: ScriptedServer) -> None:
    url = f"{server.url}/large"
    path = Path(run("path", url).out.strip())
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(1000)
        byte = file.read(1)
        file.seek(1000)
        file.write(bytes([byte[0] ^ 1]))
    path.chmod(0o444)
    ran = run("verify")
    assert ran.code == 1
    assert "1 problem found" in ran.out
    assert url in ran.out
    assert run("verify", "--quick").code == 0
    ran = run("verify", "--repair")
    assert ran.code == 0
    assert "repaired" in ran.out
    assert run("verify").code == 0


# -- doctor ------------------------------------------------------------------------------------------------------------


def states(run: Run, *options: object) -> dict[str, str]:
    return {finding["name"]: finding["state"] for finding in run("doctor", "--json", *options).json}


def test_doctor_of_a_healthy_cache(run: Run, filled: Cache) -> None:
    ran = run("doctor")
    assert ran.code == 0
    assert "wrong" not in states(run).values()
    assert "4 entries" in ran.out


def index_finding(run: Run) -> dict[str, str]:
    ran = run("doctor", "--json")
    assert ran.code == 0
    (finding,) = [finding for finding in ran.json if finding["name"] == "index of keys"]
    assert bool(finding["todo"]) == (finding["state"] == "slow")
    return dict(finding)


def test_doctor_tells_that_the_index_leads_to_all_entries(run: Run, filled: Cache) -> None:
    finding = index_finding(run)
    assert finding["state"] == "ok"
    assert "leads to 4 of 4 entries" in finding["found"]
    assert "0% full, last grown" in finding["found"]


def test_doctor_tells_that_there_is_no_index(run: Run, filled: Cache) -> None:
    (filled.path / "shared" / "keys").unlink()
    finding = index_finding(run)
    assert (finding["state"], "none yet" in finding["found"]) == ("slow", True)


def test_doctor_tells_that_the_index_is_damaged(run: Run, filled: Cache) -> None:
    keys = filled.path / "shared" / "keys"
    keys.unlink()
    keys.write_bytes(bytes(8192))
    finding = index_finding(run)
    assert finding["state"] == "slow"
    assert finding["found"].startswith(f"{keys} is damaged")


def test_doctor_tells_that_the_index_leads_nowhere(run: Run, filled: Cache) -> None:
    with open(filled.path / "shared" / "records-000", "rb+") as file, mmap.mmap(file.fileno(), 0) as records:
        for at in range(4096, len(records), 128):
            records[at + 32 : at + 40] = bytes(8)  # the hash of the key
    finding = index_finding(run)
    assert (finding["state"], "leads to 0 of 4 entries" in finding["found"]) == ("slow", True)


def test_doctor_tells_that_the_index_is_full(run: Run, filled: Cache) -> None:
    with open(filled.path / "shared" / "keys", "rb+") as file, mmap.mmap(file.fileno(), 0) as table:
        words = table[16:24]
        table[24:32] = words  # so many buckets of so many are in use
    finding = index_finding(run)
    assert (finding["state"], "100% full" in finding["found"]) == ("slow", True)


def test_doctor_looks_into_a_groups_root(run: Run, home: Path) -> None:
    with Cache(home, budget=50_000_000, shared=True) as cache:
        cache.put("k", b"v")
    finding = {finding["name"]: finding for finding in run("doctor", "--json").json}["content"]
    assert (finding["state"], "1 entry" in finding["found"]) == ("ok", True)


def test_doctor_makes_nothing(run: Run, home: Path) -> None:
    ran = run("doctor")
    assert ran.code == 0
    assert "no cache" in ran.out
    assert not home.exists()


def test_doctor_sees_a_network_file_system(run: Run, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "fs_kind", lambda path: "nfs")
    assert states(run)["file system"] == "wrong"
    assert run("doctor").code == 1


def test_doctor_sees_low_limits(run: Run, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 256))
    found = states(run)
    assert found["open files"] == "slow"
    assert found["file size"] == "slow"
    assert run("doctor").code == 0


def test_doctor_tells_of_a_log_without_its_index(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "prefilled"
    with Cache(place, budget=1_000_000):
        pass
    Path(f"{place}/catalog.sqlite-wal").touch()
    Path(f"{place}/catalog.sqlite-shm").unlink(missing_ok=True)
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)  # as another user; root may write anywhere
    ran = run("doctor", "--root", place)
    assert ran.code == 1
    assert f"forebay ls --root {place}" in ran.out


def test_doctor_sees_damage(run: Run, filled: Cache, server: ScriptedServer) -> None:
    path = Path(run("path", f"{server.url}/large").out.strip())
    kept = path.read_bytes()
    path.chmod(0o600)
    path.write_bytes(b"short")
    try:
        assert states(run)["soundness"] == "wrong"
    finally:
        path.write_bytes(kept)
        path.chmod(0o444)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("FOREBAY_BUDGET", "500"), ("FOREBAY_MIN_FREE", "120%"), ("FOREBAY_OFFLINE", "perhaps"), ("FOREBAY_VERBOSITY", "loud")),
        *(("FOREBAY_ATTEMPTS", "0"), ("FOREBAY_READ_TIMEOUT", "soon"), ("FOREBAY_CLIENT_CERT", "/none")),
    ],
)
def test_doctor_tells_a_setting_that_makes_no_sense(
    run: Run, filled: Cache, name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setenv(name, value)
    ran = run("doctor", "--json")
    found = {finding["name"]: finding for finding in ran.json}
    assert (ran.code, ran.err) == (1, "")
    assert found[name]["state"] == "wrong"
    assert repr(value) in found[name]["found"]
    assert {"file system", "free space", "root", "content", "claims"} <= found.keys()
    assert ("4 entries" in found["content"]["found"]) == (name in ("FOREBAY_BUDGET", "FOREBAY_MIN_FREE"))


def test_doctor_shows_no_secret(run: Run, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_TOKEN", "hush")
    monkeypatch.setenv("https_proxy", "http://user:hush@proxy")
    ran = run("doctor")
    assert "FOREBAY_TOKEN" in ran.out
    assert "hush" not in ran.out


# -- completion --------------------------------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(run: Run, shell: str) -> None:
    ran = run("completion", shell)
    assert ran.code == 0
    assert "_FOREBAY_COMPLETE" in ran.out


def test_completion_completes() -> None:
    env = os.environ | {"_FOREBAY_COMPLETE": "bash_complete", "COMP_WORDS": "forebay p", "COMP_CWORD": "1"}
    found = subprocess.run(COMMAND, env=env, capture_output=True, text=True, check=True)
    assert set(found.stdout.split()) == {f"plain,{verb}" for verb in ("pull", "prune", "path", "pin", "push")}


@pytest.mark.parametrize("page", [3, 10])
def test_s19_a_damaged_catalog_is_told_by_who_looks_and_mended_by_who_is_asked(home: Path, run: Run, page: int) -> None:
    with Cache(home, budget="200MB") as cache:
        for n in range(200):
            assert cache.put(f"k{n}", bytes(1000))
    with open(home / "catalog.sqlite", "r+b") as file:
        file.seek(page * 4096)
        file.write(os.urandom(20_000))
    for verb in (["ls"], ["du"], ["stats"], ["verify"], ["verify", "--quick"], ["doctor"], ["clear", "--dry-run"]):
        found = run(*verb)
        assert found.code == 1, verb
        assert "damaged" in found.err + found.out or "catalog" in found.out
        assert "verify --repair" in found.err + found.out or verb[0] == "verify"
    assert run("verify", "--repair").code == 1  # all that was listed is lost
    assert run("verify").code == 0
    assert run("du", "--json").json["budget"] == 200_000_000


def test_s19_a_deleted_catalog_is_told_by_who_mends_it(home: Path, run: Run) -> None:
    with Cache(home, budget="200MB") as cache:
        cache.put("k", b"v")
    for path in home.glob("catalog.sqlite*"):
        path.unlink()
    ran = run("verify", "--repair")
    assert (ran.code, "was deleted" in ran.out, ran.out.count("no problems found")) == (1, True, 1)
    ran = run("verify", "--repair")
    assert (ran.code, ran.out.count("no problems found")) == (0, 1)
