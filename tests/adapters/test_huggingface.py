"""`snapshot_download` and `hf_hub_download` with the real transformers, safetensors and datasets, against a hub on this host."""

from __future__ import annotations

import importlib.util
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import forebay.remote
from forebay import Cache, errors
from forebay.adapters import huggingface
from forebay.adapters.huggingface import Snapshot, hf_hub_download, snapshot_download
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
    name = f"directories:hf://{MODEL}@main/"
    path = str(snapshot_download(MODEL, cache=cache))  # the lease outlives the object
    entry = cache.entry(name)
    assert entry is not None
    assert entry.leased
    assert files_below(path) == FILES
    with snapshot_download(MODEL, cache=cache, allow_patterns="*.json"):
        pass
    part = next(entry for entry in cache.entries("directories") if "include" in entry.key)
    assert not part.leased
    (lease,) = huggingface._held.values()
    huggingface._held.clear()
    lease.close()


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
