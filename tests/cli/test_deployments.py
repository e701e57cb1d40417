"""The page on Docker, Kubernetes and Slurm: its scripts run, its manifests fit together, its directories take several users."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay.testing import ScriptedServer
from tests.pages import blocks, section
from tests.processes import in_child

PAGE = "operate/deploy.md"


def manifests() -> list[Any]:
    yaml = pytest.importorskip("yaml")
    return [document for block in blocks(section(PAGE, "## Kubernetes"), "yaml") for document in yaml.safe_load_all(block)]


def test_the_manifests_fit_together() -> None:
    documents = manifests()
    assert [document["kind"] for document in documents] == ["ConfigMap", "Job", "Pod"]
    settings = documents[0]["data"]
    for pod in (documents[1]["spec"]["template"]["spec"], documents[2]["spec"]):
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        for container in (*pod.get("initContainers", []), *pod["containers"]):
            mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
            assert mounts.keys() <= volumes.keys()
            variables = {variable["name"]: variable["value"] for variable in container.get("env", [])}
            for source in container.get("envFrom", []):
                assert source["configMapRef"]["name"] == documents[0]["metadata"]["name"]
                variables |= settings
            if variables:
                assert Path(variables["FOREBAY_HOME"]).parent == Path(mounts["cache"])  # the first process creates the root itself
                assert container["securityContext"] if "FOREBAY_SHARED" in variables else pod["securityContext"]
    job = documents[1]["spec"]["template"]["spec"]
    directory, warm = job["initContainers"]
    assert directory["command"][2].split()[2] == directory["volumeMounts"][0]["mountPath"]
    assert f"chown 0:{job['securityContext']['supplementalGroups'][0]} " in directory["command"][2]
    assert warm["command"][2] == "/etc/forebay/shards.txt"
    assert {"shards.txt"} == {item["path"] for item in job["volumes"][1]["configMap"]["items"]} <= settings.keys()


def test_the_settings_of_the_manifests_are_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = manifests()
    own = {variable["name"]: variable["value"] for variable in documents[2]["spec"]["containers"][0]["env"]}
    for number, settings in enumerate((documents[0]["data"], own)):
        with monkeypatch.context() as patch:
            for name, value in settings.items():
                if name.startswith("FOREBAY_") and name != "FOREBAY_HOME":
                    patch.setenv(name, value)
            with forebay.Cache(tmp_path / str(number)) as cache:
                assert cache.budget == {"500GB": 500 * 10**9, "100GB": 100 * 10**9}[settings["FOREBAY_BUDGET"]]


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    """A directory with a list of two shards to warm and stand-ins for Slurm's commands, which run what they are given."""
    commands = tmp_path / "bin"
    commands.mkdir()
    (tmp_path / "local_scratch").mkdir()
    skip = 'while [ "${1#-}" != "$1" ]; do [ "$1" = -- ] && { shift; break; }; [ "$1" = -u ] && shift; shift; done'
    for name in ("srun", "runuser"):
        (commands / name).write_text(f'#!/bin/bash\necho "$@" >>"$CALLS"\n{skip}\nexec "$@"\n')
    (commands / "python").write_text(f'#!/bin/bash\nexec {sys.executable} "$@"\n')
    (commands / "forebay").write_text(f'#!/bin/bash\nexec {sys.executable} -m forebay.cli "$@"\n')
    (commands / "setsid").write_text('#!/bin/bash\nexec /usr/bin/setsid --wait "$@"\n')  # else the test would not see its end
    for command in commands.iterdir():
        command.chmod(0o755)
    return tmp_path


def run_script(text: str, scratch: Path, **variables: str) -> str:
    script = scratch / "script.sh"
    script.write_text(text.replace("/local_scratch", str(scratch / "local_scratch")).replace("/shared/warm", str(scratch)))
    subprocess.run(["bash", "-n", str(script)], check=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FOREBAY_")} | variables
    environment |= {"PATH": f"{scratch / 'bin'}:{os.environ['PATH']}", "CALLS": str(scratch / "calls"), "FOREBAY_MIN_FREE": "0"}
    done = subprocess.run(["bash", str(script)], cwd=scratch, env=environment, capture_output=True, text=True, timeout=100)
    assert (done.returncode, [line for line in done.stderr.splitlines() if "2 URLs: 2 fetched; " not in line]) == (0, [])
    return done.stdout


def test_the_job_script_of_slurm_warms_the_node_and_trains(scratch: Path, server: ScriptedServer) -> None:
    job = blocks(section(PAGE, "## Slurm"), "bash")[0]
    urls = [server.put(f"/{number}.tar", b"%d" % number) for number in range(2)]
    (scratch / "shards.txt").write_text("\n".join(urls))
    (scratch / "train.py").write_text(f"import forebay\nwith forebay.Cache() as cache:\n    print(*map(bytes, cache.read_many({urls})))\n")
    shown = run_script(job, scratch, USER="ada", SLURM_NNODES="4")
    assert shown.splitlines()[-1] == "b'0' b'1'"
    assert server.gets == 2
    assert [call.partition(" --jobs")[0] for call in (scratch / "calls").read_text().splitlines()] == [
        "--ntasks=4 --ntasks-per-node=1 forebay warm shards.txt",
        "python train.py",
    ]
    with forebay.Cache(scratch / "local_scratch/ada/forebay") as cache:
        assert cache.budget == 500 * 10**9


def test_the_prolog_of_slurm_fills_the_users_cache(scratch: Path, server: ScriptedServer) -> None:
    prolog = blocks(section(PAGE, "## Slurm"), "bash")[1]
    user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
    variables = {"SLURM_JOB_USER": user, "SLURM_JOB_PARTITION": "gpu"}
    run_script(prolog, scratch, **variables)  # without a list
    assert not (scratch / "calls").exists()
    url = server.put("/0.tar", b"0")
    (scratch / "gpu.txt").write_text(f"{url}\n")
    run_script(prolog.replace("2>&1 &\n", "2>&1 &\nwait\n"), scratch, **variables)
    with forebay.Cache(scratch / "local_scratch" / user / "forebay", offline=True) as cache:
        assert bytes(cache.read(url)) == b"0"


def test_the_prolog_of_slurm_does_not_fail_where_it_cannot_help(scratch: Path) -> None:
    prolog = blocks(section(PAGE, "## Slurm"), "bash")[1]
    (scratch / "gpu.txt").write_text("")
    variables = {"SLURM_JOB_USER": "nobody of this name", "SLURM_JOB_PARTITION": "gpu"}
    assert "nobody of this name" in run_script(prolog.replace("|| exit 0", "2>&1 || exit 0"), scratch, **variables)
    assert not (scratch / "calls").exists()


@pytest.fixture
def public_path() -> Iterator[Path]:
    """A directory that other users can get into, unlike `tmp_path`."""
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o711)
        yield Path(place)


@pytest.mark.root
def test_users_of_a_group_share_the_directory_that_docker_mounts(public_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (install,) = [line for line in blocks(section(PAGE, "## Docker"), "bash")[1].splitlines() if "install" in line]
    mount = public_path / "team"
    subprocess.run(install.replace("sudo ", "").replace("/nvme/team", str(mount)).split(), check=True)
    monkeypatch.setenv("FOREBAY_SHARED", "1")

    def put() -> None:
        with forebay.Cache(mount / "forebay", budget="100MB", min_free=0) as cache:
            assert cache.put("key", b"of the first user")
            assert cache.path == mount / "forebay"

    def get() -> bytes:
        with forebay.Cache(mount / "forebay", min_free=0) as cache:
            return bytes(cache.get("key") or b"")

    def member(uid: int, work: Any) -> Any:
        def run() -> Any:
            os.setgroups([2000])
            os.setgid(uid)
            os.setuid(uid)
            return work()

        return in_child(run)

    member(1001, put)
    assert member(1002, get) == b"of the first user"
    assert (mount / "forebay").stat().st_gid == 2000
