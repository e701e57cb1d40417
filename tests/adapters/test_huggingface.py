"""`snapshot_download` and `hf_hub_download` with the real transformers, safetensors and datasets, against a hub on this host."""

from __future__ import annotations

import importlib.util
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import forebay.remote
from forebay import Cache, errors
from forebay.adapters import huggingface
from forebay.adapters.huggingface import Snapshot, hf_hub_download, snapshot_download
from tests.processes import forked
from tests.servers.hub import Hub, hub

FILES = {"config.json": b"{}", "weights.bin": bytes(range(256)) * 100, "sub/a[1].txt": b"a", "sub/b.txt": b"b"}
MODEL = "me/model"
PAGE = next(folder for folder in Path(__file__).parents if (folder / "mkdocs.yml").exists()) / "docs/use/huggingface.md"


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "HF_HUB_OFFLINE", "HF_HUB_DISABLE_IMPLICIT_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf-home"))
    monkeypatch.setattr(forebay.remote, "_remotes", {})
    with hub() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        running.commit(MODEL, FILES)
        yield running


def files_below(path: str) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in Path(path).rglob("*") if p.is_file()}


def leased(cache: Cache) -> list[str]:
    """The names of the directories that are in use."""
    return [f"{entry.id:016x}" for entry in cache.entries("directories") if entry.leased]


def test_a_snapshot_is_the_directory_of_the_real_client(there: Hub, cache: Cache, tmp_path: Path) -> None:
    client = pytest.importorskip("huggingface_hub")
    theirs = client.snapshot_download(MODEL, endpoint=there.url, token=False, cache_dir=tmp_path / "hub")
    with snapshot_download(MODEL, cache=cache) as path:
        assert isinstance(path, str)
        assert files_below(path) == files_below(theirs) == FILES


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        ({"allow_patterns": "*.json"}, {"config.json"}),
        ({"allow_patterns": ["sub/"], "ignore_patterns": ["*b.txt"]}, {"sub/a[1].txt"}),
        ({"ignore_patterns": ("*.bin", "sub/*")}, {"config.json"}),
    ],
)
def test_patterns_select_what_the_real_client_selects(
    there: Hub, cache: Cache, tmp_path: Path, patterns: dict[str, str], names: set[str]
) -> None:
    client = pytest.importorskip("huggingface_hub")
    theirs = client.snapshot_download(MODEL, endpoint=there.url, token=False, cache_dir=tmp_path / "hub", **patterns)
    with snapshot_download(MODEL, cache=cache, **patterns) as path:
        assert set(files_below(path)) == set(files_below(theirs)) == names


def test_a_path_stays_until_the_process_ends_and_with_lets_it_go(there: Hub, cache: Cache) -> None:
    with snapshot_download(MODEL, cache=cache, allow_patterns="*.json"):
        assert leased(cache) != []
    assert leased(cache) == []
    path = str(snapshot_download(MODEL, cache=cache))  # the lease outlives the object
    assert leased(cache) == [Path(path).name]
    cache.clear().execute()
    assert files_below(path) == FILES
    (lease,) = huggingface._held.values()
    huggingface._held.clear()
    lease.close()
    cache.clear().execute()
    assert not Path(path).exists()


def test_a_snapshot_pickles_as_its_path(there: Hub, cache: Cache) -> None:
    with snapshot_download(MODEL, cache=cache) as path:
        copy = pickle.loads(pickle.dumps(path))
        assert (type(copy), copy) == (str, path)
        assert isinstance(path, Snapshot)


def test_a_second_call_asks_nothing_and_a_third_works_offline(there: Hub, cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    with snapshot_download(MODEL, cache=cache):
        count = len(there.asked)
    with snapshot_download(MODEL, cache=cache):
        assert len(there.asked) == count
    there.repositories.clear()
    with snapshot_download(MODEL, cache=cache, local_files_only=True) as path:
        assert files_below(path) == FILES
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with snapshot_download(MODEL, cache=cache) as path:
        assert files_below(path) == FILES
    with pytest.raises(errors.Offline):
        snapshot_download("me/other", cache=cache)
    assert len(there.asked) == count


def test_one_file_has_its_own_name(there: Hub, cache: Cache) -> None:
    with hf_hub_download(MODEL, "a[1].txt", subfolder="sub", cache=cache) as path:
        assert path.endswith("/sub/a[1].txt")
        assert Path(path).read_bytes() == b"a"
    assert there.sent == 1
    with pytest.raises(errors.NotFound):
        hf_hub_download(MODEL, "none.txt", cache=cache)


# -- files of one commit lie side by side ------------------------------------------------------------------------------


@pytest.fixture
def release() -> Iterator[None]:
    """The leases of paths that a test does not close."""
    yield
    for lease in list(huggingface._held.values()):
        lease.close()
    huggingface._held.clear()


def in_another_process(cache: Cache, name: str, **how: str) -> str:
    """The path that another process got, which has ended since."""
    program = "import sys, forebay; from forebay.adapters.huggingface import *; how = eval(sys.argv[3])\n"
    program += f"print(hf_hub_download({MODEL!r}, sys.argv[2], cache=forebay.Cache(sys.argv[1]), **how))"
    command = [sys.executable, "-c", program, str(cache.path), name, repr(how)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


@pytest.mark.parametrize("names", [sorted(FILES), sorted(FILES, reverse=True)])
@pytest.mark.usefixtures("release")
def test_files_that_are_fetched_one_by_one_lie_side_by_side(there: Hub, cache: Cache, names: list[str]) -> None:
    first = hf_hub_download(MODEL, names[0], cache=cache)
    top = Path(first.removesuffix(names[0]))
    for number, name in enumerate(names[1:], 2):
        path = hf_hub_download(MODEL, name, cache=cache) if number % 2 else in_another_process(cache, name)
        assert path == f"{top}/{name}"
        assert files_below(str(top)) == {each: FILES[each] for each in names[:number]}
    count = len(there.asked)
    assert in_another_process(cache, names[0], revision="main") == first
    assert len(there.asked) <= count + 1  # of another process: which commit the branch is
    assert cache.check(deep=True) == []
    for name in names:
        assert not os.access(os.path.dirname(f"{top}/{name}"), os.W_OK) or os.geteuid() == 0
        assert os.stat(os.path.dirname(f"{top}/{name}")).st_mode & 0o777 == 0o555


@pytest.mark.usefixtures("release")
def test_a_branch_and_its_commit_share_a_directory_and_a_snapshot_is_in_it(there: Hub, cache: Cache) -> None:
    commit = there.commit(MODEL, FILES)
    config = hf_hub_download(MODEL, "config.json", cache=cache)
    top = os.path.dirname(config)
    assert hf_hub_download(MODEL, "a[1].txt", subfolder="sub", revision=commit, cache=cache) == f"{top}/sub/a[1].txt"
    assert snapshot_download(MODEL, allow_patterns="sub/", cache=cache) == top
    assert files_below(top).keys() == {"config.json", "sub/a[1].txt", "sub/b.txt"}
    assert snapshot_download(MODEL, revision=commit, cache=cache) == top
    assert files_below(top) == FILES
    assert in_another_process(cache, "weights.bin", revision=commit) == f"{top}/weights.bin"
    assert cache.check(deep=True) == []


@pytest.mark.usefixtures("release")
def test_another_commit_is_another_directory(there: Hub, cache: Cache) -> None:
    old = hf_hub_download(MODEL, "weights.bin", cache=cache)
    there.commit(MODEL, FILES | {"config.json": b"[]"})
    how = {"cache": cache, "force_download": True}
    new = [hf_hub_download(MODEL, name, **how) for name in ("weights.bin", "config.json")]  # one is cached, the other is not
    assert os.path.dirname(old) != os.path.dirname(new[0]) == os.path.dirname(new[1])
    assert files_below(os.path.dirname(old)) == {"weights.bin": FILES["weights.bin"]}
    assert files_below(os.path.dirname(new[0])) == {"weights.bin": FILES["weights.bin"], "config.json": b"[]"}


def test_the_directory_of_an_older_commit_goes_when_it_is_in_use_no_more(there: Hub, cache: Cache) -> None:
    with hf_hub_download(MODEL, "weights.bin", cache=cache) as old:
        pass
    there.commit(MODEL, {"weights.bin": b"new"})
    with hf_hub_download(MODEL, "weights.bin", cache=cache, force_download=True) as new:
        assert Path(new).read_bytes() == b"new"
        assert not Path(old).exists()
    assert sum(entry.size for entry in cache.entries("urls")) == 3


def test_a_path_stays_while_it_is_held_however_full_the_cache_is(there: Hub, tmp_path: Path) -> None:
    with Cache(tmp_path / "small", budget=1_000_000, min_free=0) as cache:
        with hf_hub_download(MODEL, "weights.bin", cache=cache) as first:
            beside = in_another_process(cache, "config.json")
            for number in range(30):
                cache.put(f"filler {number}", bytes(100_000))
            assert Path(first).read_bytes() == FILES["weights.bin"]
            assert Path(beside).read_bytes() == FILES["config.json"]
            assert cache.check(deep=True) == []
        for number in range(30):
            cache.put(f"filler {number}", bytes(100_000))
        assert not Path(first).exists()


@pytest.mark.usefixtures("release")
def test_threads_and_a_forked_child_get_the_same_directory(there: Hub, cache: Cache) -> None:
    with ThreadPoolExecutor(4) as threads:
        paths = list(threads.map(lambda name: hf_hub_download(MODEL, name, cache=cache), [*FILES] * 3))
    assert {path.removesuffix(name) for path, name in zip(paths, [*FILES] * 3, strict=True)} == {paths[0].removesuffix("config.json")}
    there.commit(MODEL, FILES | {"more": b"more"})
    path = hf_hub_download(MODEL, "more", cache=cache, force_download=True)
    child = forked(lambda: os.path.dirname(hf_hub_download(MODEL, "config.json", cache=cache)) == os.path.dirname(path))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert files_below(os.path.dirname(path)) == {"more": b"more", "config.json": b"{}"}


@pytest.mark.usefixtures("release")
@pytest.mark.parametrize("how", ["removed", "written to", "replaced"])
def test_a_file_that_was_changed_is_put_right(there: Hub, cache: Cache, how: str) -> None:
    first = hf_hub_download(MODEL, "config.json", cache=cache)
    path = Path(hf_hub_download(MODEL, "weights.bin", cache=cache))
    path.parent.chmod(0o755)
    if how == "written to":
        path.chmod(0o644)
        path.write_bytes(b"damaged")
    else:
        path.unlink()
        if how == "replaced":
            path.write_bytes(FILES["weights.bin"])
    again = hf_hub_download(MODEL, "weights.bin", cache=cache)
    assert Path(again).read_bytes() == FILES["weights.bin"]
    assert (again == str(path)) is (how == "removed")
    assert os.path.dirname(hf_hub_download(MODEL, "config.json", cache=cache)) == os.path.dirname(again)
    assert Path(first).read_bytes() == b"{}"
    for lease in list(huggingface._held.values()):
        lease.close()
    cache.repair()
    assert cache.check(deep=True) == []


def test_a_root_that_can_only_be_read_gives_what_it_has(there: Hub, cache: Cache) -> None:
    for name in FILES:
        hf_hub_download(MODEL, name, cache=cache).close()
    with Cache(cache.path, read_only=True) as reader, hf_hub_download(MODEL, "config.json", cache=reader, local_files_only=True) as path:
        assert files_below(os.path.dirname(path)) == FILES


def test_a_revision_and_a_kind_are_those_of_the_real_client(there: Hub, cache: Cache) -> None:
    there.commit("datasets/me/data", {"rows.txt": b"v1"}, branch="release/1")
    old = there.commit("datasets/me/data", {"rows.txt": b"old"})
    there.commit("datasets/me/data", {"rows.txt": b"new"})
    for revision, body in (("release/1", b"v1"), (old, b"old"), (None, b"new")):
        with snapshot_download("me/data", repo_type="dataset", revision=revision, cache=cache) as path:
            assert files_below(path) == {"rows.txt": body}


def test_tokens_are_chosen_by_call(there: Hub, cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    there.repositories[MODEL].needs = "hf_mine"
    with pytest.raises(errors.ConfigError, match="there is none"):
        snapshot_download(MODEL, token=True, cache=cache)
    with pytest.raises(errors.NotFound):
        snapshot_download(MODEL, token=False, cache=cache)
    with snapshot_download(MODEL, token="hf_mine", cache=cache) as path:
        assert files_below(path) == FILES
    assert {a.token for a in there.asked if a.host == "cdn"} == {""}


def test_a_gated_repository_says_what_to_do(there: Hub, cache: Cache) -> None:
    there.repositories[MODEL].gated, there.repositories[MODEL].needs = True, "hf_mine"
    with pytest.raises(errors.AccessDenied, match="accept the terms at"):
        snapshot_download(MODEL, cache=cache)


@pytest.mark.parametrize("name", ["../x", "x/..", ".", "a/b/c", "/a", "a/", "a@b", "a b", "a?b", ""])
def test_what_names_no_repository_is_not_asked_for(there: Hub, cache: Cache, name: str) -> None:
    with pytest.raises(errors.ConfigError, match="is not a repository"):
        snapshot_download(name, cache=cache)
    assert there.asked == []


@pytest.mark.parametrize("keyword", ["local_dir", "cache_dir", "proxies", "endpoint"])
def test_keywords_that_must_not_be_ignored_are_refused(there: Hub, cache: Cache, keyword: str) -> None:
    with pytest.raises(errors.ConfigError, match=keyword):
        snapshot_download(MODEL, cache=cache, **{keyword: "https://elsewhere.example"})  # type: ignore[arg-type]


def test_each_keyword_of_the_real_client_is_known(there: Hub, cache: Cache) -> None:
    client = pytest.importorskip("huggingface_hub")
    from inspect import signature

    for ours, theirs in ((snapshot_download, client.snapshot_download), (hf_hub_download, client.hf_hub_download)):
        known = {*signature(ours).parameters, *huggingface._IGNORED, *huggingface._REFUSED}
        assert set(signature(theirs).parameters) - known <= {"force_filename"}
    with pytest.raises(TypeError, match="no_such"):
        snapshot_download(MODEL, cache=cache, no_such=1)


# -- with the real packages --------------------------------------------------------------------------------------------

MODELS = """
import sys
sys.modules["torchvision"] = None  # one that does not fit the torch that is installed would keep transformers from being imported
import safetensors.torch, torch, transformers
from forebay.adapters.huggingface import snapshot_download
config = transformers.BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=64)
made = transformers.BertModel(config)
made.save_pretrained("bert")
print("saved", flush=True)
sys.stdin.readline()
for local_files_only in (False, True):
    with snapshot_download("me/bert", local_files_only=local_files_only) as path:
        tensors = safetensors.torch.load_file(f"{path}/model.safetensors")
        model = transformers.AutoModel.from_pretrained(path)
        for loaded in (tensors, model.state_dict()):
            assert all(torch.equal(loaded[name], value) for name, value in made.state_dict().items())
    print("loaded", flush=True)
    sys.stdin.readline()
"""


def started(program: str, folder: Path) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FOREBAY_")}
    environment |= {"FOREBAY_HOME": str(folder / "home"), "FOREBAY_MIN_FREE": "0", "HF_HOME": str(folder / "hf")}
    command = [sys.executable, "-c", program]
    return subprocess.Popen(command, cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


@pytest.mark.rotates
def test_a_model_is_loaded_by_transformers_and_safetensors_also_offline(there: Hub, tmp_path: Path) -> None:
    for package in ("torch", "transformers", "safetensors"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    with started(MODELS, tmp_path) as process:
        assert said(process) == "saved\n"
        there.commit("me/bert", {p.name: p.read_bytes() for p in (tmp_path / "bert").iterdir()})
        go_on(process)
        assert said(process) == "loaded\n"
        count = len(there.asked)
        go_on(process)
        assert said(process) == "loaded\n"
        go_on(process)
    assert (process.returncode, len(there.asked)) == (0, count)


def test_the_snippet_about_data_sets_runs_also_offline(there: Hub, tmp_path: Path) -> None:
    if importlib.util.find_spec("datasets") is None:
        pytest.skip("datasets is not installed")
    there.commit("datasets/me/rows", {"train.jsonl": "".join(f'{{"text": "row {number}"}}\n' for number in range(5)).encode()})
    snippet = next(block for block in PAGE.read_text().split("```") if block.startswith("python") and "load_dataset" in block)
    shows = "print(len(rows), rows[4]['text'], flush=True)\ninput()\n"
    offline = "import os, shutil\nos.environ['HF_HUB_OFFLINE'] = '1'\nshutil.rmtree(datasets.config.HF_DATASETS_CACHE)\n"
    program = snippet.removeprefix("python\n") + shows
    with started(program + offline + program, tmp_path) as process:
        assert said(process) == "5 row 4\n"
        count = len(there.asked)
        go_on(process)
        assert said(process) == "5 row 4\n"
        go_on(process)
    assert (process.returncode, len(there.asked)) == (0, count)
