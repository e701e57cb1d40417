"""The Python blocks of each page run, as one program over what the page takes as given; none is forgotten."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import re
import tarfile
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from forebay.testing import ScriptedServer
from tests.harness import QUICK_RAY, require
from tests.pages import DOCS, blocks, run

REPO = DOCS.parent
ELSEWHERE = {
    "docs/operate/seeing.md": "project/test_tutorials.py",
    "docs/reference/testing.md": "adapters/test_pytest_plugin.py",
    "docs/start/first-cache.md": "project/test_tutorials.py",
    "docs/start/loops.md": "project/test_tutorials.py",
    "docs/start/migrate.md": "project/test_migrations.py",
    "docs/start/training-loop.md": "project/test_tutorials.py",
    "docs/use/fsspec.md": "adapters/test_fsspec_libraries.py",
    "docs/use/joblib.md": "adapters/test_joblib.py",
    "docs/use/loaders.md": "adapters/test_loaders.py",
    "docs/use/train.md": "project/test_tutorials.py",
}
"""Pages whose blocks another file of tests runs, all of them."""

SECTION_BY_SECTION = {"docs/start/migrate.md": 12, "docs/use/loaders.md": 9}
"""Pages of which those files name the sections that they run, and how many blocks these have: whoever adds one adds its test, too."""


@dataclass(frozen=True)
class Given:
    """What a page takes as given: code before its blocks, before single ones (by number), and after them, to use what they made.

    ``order``: of the blocks, if not the page's. ``replaced``: texts of the page, such as the size of a cluster."""

    before: str = ""
    between: dict[int, str] = field(default_factory=dict)
    after: str = ""
    needs: tuple[str, ...] = ()
    order: tuple[int, ...] = ()
    replaced: dict[str, str] = field(default_factory=dict)


CACHE = "import forebay\ncache = forebay.Cache('/nvme/forebay', budget='1GB')\n"
URLS = "urls = [f'https://host/{number}.bin' for number in range(8)]\nurl = urls[0]\n"
LOADERS = "from torch.utils.data import DataLoader\n"
SEVEN = """
import threading

def seven(wait):
    for number in range(7):
        threading.Thread(target=wait, daemon=True).start()
"""

VISION = """
import importlib, os, sys
try:
    importlib.import_module("torchvision")
except (ImportError, RuntimeError):  # one that was built for another torch
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    sys.path.insert(0, os.environ["STAND_INS"])
"""

PAGES = {
    "README.md": Given(
        f"{URLS}{LOADERS}{SEVEN}"
        """
import os
import numpy as np
from forebay.adapters.torch import CachedDataset, UrlDataset

def build():
    return b"words"

def decode(url, data):
    return np.frombuffer(data, "uint8")

def augment(item):
    return item

class AutoModel:
    from_pretrained = staticmethod(os.listdir)

keys = [f"clip_{number:04}.mp4" for number in range(4)]
""",
        between={2: "dataset = UrlDataset(urls, decode, cache=cache)"},
        needs=("torch", "numpy"),
        replaced={
            "http://127.0.0.1:8930": "https://host",
            "claim.barrier": "seven(lambda: claim.barrier('epoch').wait(8))\nclaim.barrier",
        },
        after="""
assert sum(len(batch) for batch in loader) == len(urls) and samples.filled == len(urls)
assert bytes(table) == b"words" and bytes(clip) == b"clip" and model == ["config.json"]
assert features.tag_of("train", []).endswith("features-train")
assert counts.shape == (1_000_000,)
assert os.listdir("s3://bucket/run/step_200")
""",
    ),
    "docs/index.md": Given(after="assert len(buf) == 10_240"),
    "docs/internals/faults.md": Given(after="assert logging.getLogger('forebay.store').isEnabledFor(logging.INFO)"),
    "docs/operate/budget.md": Given(
        f"""
{CACHE}{URLS}
words = cache.space("words")
for number in range(8):
    words.put(str(number), bytes(100_000))
cache.read("https://host/old.tar")
""",
        between={3: "forebay.Cache('/nvme/forebay', budget=2_000_000)"},
        replaced={'need="20GB"': 'need="1500KB"'},
        after="assert len(report.removed) == len(plan.victims) > 0",
    ),
    "docs/operate/sharing.md": Given(
        f"{URLS}import forebay, os, torch\nfrom forebay.adapters.torch import tensor\nos.umask(0o002)\n",
        between={2: "forebay.Cache('/opt/prefilled').close()\nforebay.Cache('/shared/prefilled').close()"},
        needs=("torch",),
        after="assert sum(len(batch) for batch in loader) == len(urls)",
    ),
    "docs/reference/settings.md": Given("import forebay\n", after="cache.read('https://host/0.bin')"),
    "docs/use/checkpoint.md": Given(
        """
import os, shutil, torch

class Model:
    load_state_dict = staticmethod(len)

model = Model()
torch.save({}, "s3://bucket/run/step_100/model.pt")
""",
        between={1: "ckpt = forebay.Checkpoint('s3://bucket/run/step_100')\n"},
        needs=("torch",),
        after="assert 'model.pt' in os.listdir('s3://bucket/run/step_200')",
    ),
    "docs/use/claims.md": Given(
        f"{SEVEN}import torch\ndef fetch_what_is_missing(directory):\n    pass\n",
        between={
            1: "claim.close()",
            3: "claim = forebay.claim('/local/train')",
            4: "seven(lambda: [claim.barrier('epoch').wait(8) for _ in range(2)])",
        },
        needs=("torch", "numpy"),
        after="assert Dataset(claim)[0] is None",
    ),
    "docs/use/prefetch.md": Given(
        """
import torch
keys = [f"clip_{number:04}.mp4" for number in range(4)]
trained = []
train = trained.append

def decode(data):
    return bytes(data)
""",
        between={1: "from forebay.sources import UrlSource\nsource = UrlSource('s3://bucket/clips')\nold = pool"},
        needs=("torch",),
        after="assert Clips(old, keys).__getitems__([0, 2]) == [b'clip'] * 2 and len(trained) == 4",
    ),
    "docs/use/samples.md": Given(
        """
import numpy as np
paths = range(1000)
N = 20

def decode(path):
    return np.full((4, 4), path)

def decode_all(paths):
    return [decode(path) for path in paths]
""",
        needs=("numpy",),
        after="assert image[0, 0] == 17 and [item is None for item in batch] == [False] * 3",
    ),
    "docs/use/sources.md": Given(
        """
import json

def parse(key, data):
    return json.loads(data)

def decode_jpeg(key, data):
    return bytes(data)

def fetch(key):
    return key.encode()

decode_mask = decode_jpeg
""",
        after="assert DecodedSource(Table(), decode)['a.seg.png'] == b'a.seg.png'",
    ),
    "docs/use/tasks.md": Given(
        """
import os
import joblib
from types import SimpleNamespace
paths = ["a"]
state = {"step": 3}
cfg = SimpleNamespace(name="small", lr=0.1)

class Result:
    parse = staticmethod(str)
""",
        needs=("joblib", "pyarrow", "yaml"),
        after="""
assert hit and state == {"step": 3}
os.mkdir("recordings")
open("recordings/simulate.txt", "w").write("recorded")
play = forebay.Cache("/nvme/forebay").tasks("played", config="flow.yaml")
play.set_provider("simulate", recorded)

@play.cached
def simulate(step):
    return "run"

assert simulate(3) == "recorded"
""",
    ),
    "docs/use/torch.md": Given(
        f"{URLS}{LOADERS}"
        """
import io
import numpy as np
import torch
from PIL import Image
urls = [url.replace(".bin", ".ppm") for url in urls]
labels = {url: number for number, url in enumerate(urls)}
trained = []
train = trained.append

def transform(picture):
    return torch.from_numpy(np.array(picture))

def augment(item):
    return item

def image(name, data):
    return transform(Image.open(io.BytesIO(data)))
""",
        between={
            1: "assert sum(len(labels) for _, labels in loader) == 8",
            2: "assert sum(len(labels) for _, labels in loader) == 8",
            3: "assert len(trained) == 4 and trained[0]['jpg'].shape[1:] == (8, 8, 3)",
            4: "assert list(loader)",
            5: "assert sum(len(labels) for _, labels in loader) == 8\ncache.put('weights', torch.ones(4).numpy().tobytes())",
            6: """
assert weights.sum() == 8
import torch.distributed.checkpoint
state = {"w": torch.ones(4)}
torch.distributed.checkpoint.save(state, checkpoint_id="s3://bucket/run/step-1000")
torch.save(state, "s3://bucket/model.pt")
""",
            7: "assert state['w'].sum() == 4",
            8: "import safetensors.torch\nsafetensors.torch.save_file(dict(state), 's3://bucket/model.safetensors')",
        },
        needs=("torch", "torchdata", "safetensors", "PIL", "numpy"),
        replaced={"num_workers=8": "num_workers=2", "{000000..001023}": "{000000..000001}", "range(90)": "range(2)"},
        after="assert state['w'].sum() == 4",
    ),
    "docs/use/urls.md": Given(
        f"{URLS}import pyarrow.parquet\nmine = 'secret'\nload = len\n",
        between={
            3: """
table = pyarrow.table({"price": [1.0, 2.0], "volume": [1, 2], "name": ["a", "b"]})
pyarrow.parquet.write_table(table, "s3://bucket/table.parquet")
""",
            7: "import asyncio\ndef make():\n    return b'made'\n",
        },
        needs=("pyarrow",),
        after="""
asyncio.run(work())
assert table.column_names == ["price", "volume"] and not report.failed
assert [bytes(view) for view in views] == [bytes(view) for view in results] == [bytes([n]) * 1000 for n in range(8)]
assert cache.get("key") == b"made"
""",
    ),
}

# -- pages on other packages ---------------------------------------------------------------------------------------------

PAGES |= {
    "docs/use/huggingface.md": Given(
        "import safetensors.torch\nfrom transformers import AutoConfig as AutoModel\n",
        needs=("transformers", "torch", "safetensors", "datasets", "huggingface_hub"),
        after="assert type(model).__name__ == 'BertConfig' and tensors['x'].shape == (2,) and len(rows) == 5",
    ),
    "docs/use/pfio.md": Given(
        """
import torch
from forebay.adapters.pfio import MultiprocessFileCache
decode = str.upper
made = MultiprocessFileCache(20, dir="/scratch/pfio", do_pickle=True)
for number in range(20):
    made.put(number, {"number": number})
assert made.preserve("train")
made.close()
""",
        needs=("torch", "numpy"),
        after="""
loader = torch.utils.data.DataLoader(Images(list("abcdefgh")), num_workers=2)
assert [item for batch in loader for item in batch] == list("ABCDEFGH")
assert image == {"number": 17}
""",
    ),
    "docs/use/streaming.md": Given(
        VISION,
        needs=("streaming", "torch", "numpy"),
        after="""
from streaming import MDSWriter
with MDSWriter(out="s3://bucket/mds", columns={"n": "int"}) as out:
    for number in range(10):
        out.write({"n": number})
rows = StreamingDataset(remote="s3://bucket/mds", local="/local/mds", batch_size=1)
assert sorted(row["n"] for row in rows) == list(range(10)) and prefix >= 0
""",
    ),
    "docs/use/energon.md": Given(
        """
import io, json, tarfile
from pathlib import Path
from PIL import Image
from megatron.energon import Cooker, DefaultTaskEncoder, Sample, TextSample, basic_sample_keys, stateless
from megatron.energon.cache import CachePool, FileStore, Lazy
from megatron.energon.edataclass import edataclass
from megatron.energon.flavors import BaseWebdatasetFactory
from megatron.energon.task_encoder.cooking import cooker

@edataclass
class Cooked(Sample):
    image: Lazy

def prepared(name, members):
    with tarfile.open(Path(name).mkdir() or f"{name}/0.tar", "w") as tar:
        for member, data in members.items():
            info = tarfile.TarInfo(member)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    BaseWebdatasetFactory.prepare_dataset(Path(name), ["0.tar"], split_parts_ratio=[("train", 1.0)], shuffle_seed=None, workers=1)
    Path(name, ".nv-meta/dataset.yaml").write_text("__module__: megatron.energon\\n__class__: CrudeWebdataset\\n")

picture = io.BytesIO()
Image.new("RGB", (8, 8)).save(picture, "jpeg")
prepared("main", {f"{n}.json": json.dumps({"image": f"p{n}"}).encode() for n in range(8)})
prepared("media", {f"p{n}.jpg": picture.getvalue() for n in range(8)})
splits = {"train": {"path": "main", "aux": {"media": "media"}}}
head = {"__module__": "megatron.energon", "__class__": "MetadatasetV2"}
Path("metadataset.yaml").write_text(json.dumps({**head, "splits": splits}))
""",
        between={0: "class Encoder(Encoder):\n    def select_samples_to_pack(self, samples):\n        return [samples]\n"},
        needs=("megatron", "torch", "PIL"),
        replaced={
            "        ...\n": "        return TextSample.derive_from(samples[0], text=str([tuple(image.shape) for image in images]))\n",
            "default_worker_config()": "default_worker_config(0)",
            "packing_buffer_size=64": "packing_buffer_size=4",
            "batch_size=16": "batch_size=2",
        },
        after="""
batch = next(iter(loader))
assert batch.text == ["[(3, 8, 8), (3, 8, 8), (3, 8, 8), (3, 8, 8)]"] * 2, batch
pool.close()
""",
        order=(1, 0),
    ),
    "docs/use/ray.md": Given(
        """
import os
import ray.train.torch
import torch
ray.init()

class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(1, 1)

def train_epoch(model):
    with open("/data/epochs", "a") as log:
        log.write("x")
    if os.path.getsize("/data/epochs") == 2:
        raise RuntimeError("as was agreed")
    return 0.5

def build_design(design, seed):
    return f"{design} {seed}"

design = "chip"
""",
        between={1: "assert trainer.fit().metrics['loss'] == 0.5 and os.path.getsize('/data/epochs') == 3  # resumed\nray.shutdown()"},
        needs=("ray", "torch"),
        replaced={
            "ray.init()": "ray.init('local', num_cpus=4, resources={'eda': 1}, include_dashboard=False, log_to_driver=False)",
            '{"epochs": 10}': '{"epochs": 2}',
            "RunConfig(": "RunConfig(failure_config=ray.train.FailureConfig(max_failures=1), ",
        },
        after="assert report == value == 'chip 3' and hit\nray_tasks.stop()",
    ),
    "docs/use/chia.md": Given(
        """
import hashlib, os, pickle
os.mkdir("/data/chia_cache")
with open(f"/data/chia_cache/old_{hashlib.sha256(b'old').hexdigest()[:16]}.pkl", "wb") as file:
    pickle.dump(("old", 3), file)
""",
        needs=("chia", "ray", "yaml"),
        order=(1, 0),
        replaced={"ray.init()": "ray.init('local', num_cpus=2, include_dashboard=False, log_to_driver=False)"},
        after="""
@ChiaFunction()
def run_verilator_test(seed):
    open("log", "a").write("run\\n")
    return seed + 1

assert [get(run_verilator_test.chia_remote(7, _chia_tag="iter7")) for _ in range(2)] == [8, 8]
assert open("log").read() == "run\\n" and tasks.keys() == ["old", "iter7"]
""",
    ),
}
FRAMEWORKS = {"chia", "megatron", "ray", "streaming", "torch"}
FLOWS = {
    "docs/use/chia.md": "cache:\n  run_verilator_test: true\nbypass:\n  run_verilator_test: true\n",
    "docs/use/ray.md": "cache:\n  build_design: true\n",
    "docs/use/tasks.md": "",
}
"""The flow.yaml of a page; "" for what it shows."""


PICTURE = b"P6 8 8 255\n" + bytes(192)


def packed(members: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return file.getvalue()


def served(server: ScriptedServer) -> None:
    """What https://host has."""
    shard = packed({"000000.json": b"{}"})
    for number in range(8):
        server.put(f"/{number}.bin", bytes([number]) * 1000)
        server.put(f"/{number}.ppm", PICTURE)
    for name in ("shard-000.tar", "a.tar", "b.tar", "old.tar", "model.bin", "x.bin"):
        server.put(f"/{name}", shard)


def stored(folder: Path) -> None:
    """What s3://bucket has, and directories of this host."""
    files = {
        "bucket/shard-001.tar": packed({"000000.json": b"{}"}),
        "bucket/tokenizer.json": b"{}",
        "bucket/weights.bin": b"weights",
        "bucket/model/config.json": b"{}",
        "bucket/photos/2024/a b.jpg": b"photo",
        "bucket/train/shard-000017.tar": packed({"000123.jpg": b"photo"}),
        "data/photos/2024/a b.jpg": b"photo",
        "tmp/out/model.pt": b"weights",
        **{f"bucket/train/shard-00000{number}.tar": packed({"1.jpg": PICTURE, "1.cls": b"1"}) for number in range(2)},
        "bucket/run/step_100/config.json": b"{}",
        **{f"bucket/clips/clip_{number:04}.mp4": b"clip" for number in range(4)},
    }
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    for name in ("nvme", "local/train", "local/eval", "opt", "shared", "scratch/team"):
        (folder / name).mkdir(parents=True)


HOSTS = r"https://host\b|s3://bucket\b|(?<=['\"])/(?:data|local|nvme|opt|scratch|shared|tmp)\b"


def here(program: str, folder: Path, url: str) -> str:
    """A program with the hosts and directories of a test."""
    places = {"https://host": url, "s3://bucket": f"{folder}/bucket"}
    return re.sub(HOSTS, lambda found: places.get(found.group()) or f"{folder}{found.group()}", program)


def text_of(page: str) -> str:
    return (REPO / page).read_text()


def program_of(page: str) -> str:
    given = PAGES[page]
    found = blocks(text_of(page), "python")
    parts = [given.before]
    for number in given.order or range(len(found)):
        parts += [given.between.get(number, ""), found[number]]
    program = "\n".join([*parts, given.after])
    for old, new in given.replaced.items():
        assert old in program
        program = program.replace(old, new)
    return program


def fill(hub: Any) -> None:
    """The repositories of the page on the Hugging Face Hub."""
    numpy, save = importlib.import_module("numpy"), importlib.import_module("safetensors.numpy").save
    size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 10}
    weights = save({"x": numpy.zeros(2, "float32")}, metadata={"format": "pt"})
    hub.commit("me/bert", {"config.json": json.dumps({"model_type": "bert", **size}).encode(), "model.safetensors": weights})
    hub.commit("datasets/me/rows", {"train.jsonl": "".join(f'{{"text": "row {number}"}}\n' for number in range(5)).encode()})


def marked(page: str) -> Any:
    """A page, among the tests of adapters if its program takes as long as these."""
    marks = [pytest.mark.frameworks] if FRAMEWORKS & set(PAGES[page].needs) else []
    return pytest.param(page, marks=marks, id=page)


@pytest.mark.rotates
@pytest.mark.parametrize("page", [marked(page) for page in PAGES])
def test_the_blocks_of_the_page_run(page: str, server: ScriptedServer, tmp_path: Path) -> None:
    for package in PAGES[page].needs:
        require(package)
    served(server)
    stored(tmp_path)
    if page in FLOWS:
        (tmp_path / "flow.yaml").write_text(FLOWS[page] or blocks(text_of(page), "yaml")[0])
    with contextlib.ExitStack() as stack:
        variables = {"HOME": str(tmp_path), "FOREBAY_CLAIMS": str(tmp_path / "claims"), "STAND_INS": str(REPO / "tools" / "stand_ins")}
        if "huggingface_hub" in PAGES[page].needs:
            hub = stack.enter_context(importlib.import_module("tests.servers.hub").hub())
            fill(hub)
            variables |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        if "ray" in PAGES[page].needs:
            variables |= QUICK_RAY  # the paths of sockets are short
            variables["RAY_TMPDIR"] = stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True))
        run(here(program_of(page), tmp_path, server.url), tmp_path, **variables)


def test_no_block_is_forgotten() -> None:
    pages = [str(page.relative_to(REPO)) for page in (REPO / "README.md", *DOCS.rglob("*.md"))]
    shown = {page: len(blocks(text_of(page), "python")) for page in pages if "```python" in text_of(page)}
    assert sorted(shown) == sorted([*PAGES, *ELSEWHERE])
    assert shown == {page: text_of(page).count("```python") for page in shown}  # none is indented, and so left out
    assert {page: shown[page] for page in SECTION_BY_SECTION} == SECTION_BY_SECTION
    for page, given in PAGES.items():
        assert sorted(given.order) in ([], list(range(shown[page])))
        assert given.between.keys() <= set(range(shown[page]))


@pytest.mark.parametrize("page", ELSEWHERE)
def test_the_file_that_runs_a_page_names_it(page: str) -> None:
    assert page.rpartition("/")[2] in (REPO / "tests" / ELSEWHERE[page]).read_text()
