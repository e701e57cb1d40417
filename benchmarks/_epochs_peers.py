"""The contestants of epochs.py: each is the beginning of a program, which sets ``dataset`` and, where PyTorch's own loader is not what its
documentation advises, ``loader``. Peers are set as their documentation advises; what is not installed is left out."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass

from _common import FLOOR, OURS, PEER

EPOCHS, BATCH, CONNECTIONS = 3, 32, 16
WORKERS = 16 if (os.cpu_count() or 1) >= 16 else 2
BUCKET = "bucket"


@dataclass(frozen=True)
class Contestant:
    """``needs``: modules without which it is left out. ``slow``: one round only, with ``share`` of the objects. ``epochs``: 1 where all
    of them are the same."""

    kind: str
    code: str
    needs: tuple[str, ...] = ()
    slow: bool = False
    share: float = 1.0
    epochs: int = EPOCHS

    def missing(self) -> str | None:
        """The first module that is not installed."""
        return next((name for name in self.needs if not _installed(name)), None)


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # what it is in is not installed
        return False


BEGIN = f"""
import json, os, sys, time
from types import SimpleNamespace
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, get_worker_info
given = SimpleNamespace(**json.loads(sys.argv[1]))
url, place, count, item = given.url, given.place, given.count, given.item
urls = [f"{{url}}/{BUCKET}/d/{{number:06d}}" for number in range(count)]
shards = [f"{{url}}/{BUCKET}/tar/{{name}}" for name in given.shards]
order = RandomSampler
begin_epoch = lambda epoch: None

class Own(Dataset):
    def __init__(self, get):
        self.get = get
    def __len__(self):
        return count
    def __getitem__(self, i):
        return self.get(i)

def lengths(items):
    return [len(item) for item in items]

def loader(dataset):
    sampler = None if isinstance(dataset, IterableDataset) else order(dataset)
    return DataLoader(dataset, sampler=sampler, **usual)

usual = dict(
    batch_size={BATCH}, num_workers={WORKERS}, collate_fn=lengths, persistent_workers=True, multiprocessing_context="fork",
)
"""

END = """
batches, walls = loader(dataset), []
for epoch in range(given.epochs):
    print("epoch", flush=True)
    sys.stdin.readline()
    began, seen = time.perf_counter(), 0
    begin_epoch(epoch)
    for batch in batches:
        assert all(length == item for length in batch)
        seen += len(batch)
        time.sleep(given.step)
    walls.append(time.perf_counter() - began)
    assert seen == count, f"{seen:,} of {count:,} samples"
print("done", json.dumps(walls), flush=True)
"""

_CACHE = """
import forebay
cache = forebay.Cache(place, budget=given.budget, min_free=0, max_age="forever")
"""

_POOL = """
import urllib3
pools = {}
def fetch(i):
    pool = pools.setdefault(os.getpid(), urllib3.PoolManager(maxsize=16))
    return pool.request("GET", urls[i]).data
"""

LOOKAHEAD, URLS, READ = "Forebay, UrlDataset and Lookahead", "Forebay, UrlDataset", "Forebay, read"
FILES, RAM = "local files", "in RAM"
PLAIN, THREADS = "no cache", f"no cache, {CONNECTIONS} at a time"
THREADS_OF_WORKER = max(1, CONNECTIONS // WORKERS)

OBJECTS = {
    LOOKAHEAD: Contestant(
        OURS,
        _CACHE
        + """
from forebay.adapters.torch import Lookahead, UrlDataset
dataset = UrlDataset(urls, cache=cache)
order = lambda dataset: Lookahead(RandomSampler(dataset), dataset)
""",
    ),
    URLS: Contestant(OURS, _CACHE + "from forebay.adapters.torch import UrlDataset\ndataset = UrlDataset(urls, cache=cache)\n"),
    READ: Contestant(OURS, _CACHE + "dataset = Own(lambda i: bytes(cache.read(urls[i])))\n", slow=True),
    FILES: Contestant(
        FLOOR,
        """
os.makedirs(place)
for number in range(count):
    with open(f"{place}/{number}", "wb") as file:
        file.write(os.urandom(item))
def get(i):
    with open(f"{place}/{i}", "rb") as file:
        return file.read()
dataset = Own(get)
""",
    ),
    RAM: Contestant(FLOOR, "values = [os.urandom(item) for _ in range(count)]\ndataset = Own(values.__getitem__)\n"),
    PLAIN: Contestant(PEER, _POOL + "dataset = Own(fetch)\n", ("urllib3",), slow=True, epochs=1),
    THREADS: Contestant(
        PEER,
        _POOL
        + f"""
from concurrent.futures import ThreadPoolExecutor
threads = {{}}
class Batches(Own):
    def __getitems__(self, indices):
        return list(threads.setdefault(os.getpid(), ThreadPoolExecutor({THREADS_OF_WORKER})).map(fetch, indices))
dataset = Batches(fetch)
""",
        ("urllib3",),
    ),
    "fsspec filecache": Contestant(
        PEER,
        """
import fsspec
files = {}
def get(i):
    if os.getpid() not in files:
        files[os.getpid()] = fsspec.filesystem("filecache", target_protocol="http", cache_storage=place)
    with files[os.getpid()].open(urls[i], "rb") as file:
        return file.read()
dataset = Own(get)
""",
        ("aiohttp", "fsspec"),
        slow=True,
        share=0.1,
    ),
    "diskcache": Contestant(
        PEER,
        _POOL
        + """
import diskcache
values = diskcache.Cache(place, size_limit=given.budget)
def get(i):
    data = values.get(i)
    if data is None:
        data = fetch(i)
        values.set(i, data)
    return data
dataset = Own(get)
""",
        ("diskcache", "urllib3"),
        slow=True,
    ),
    "Energon's pool": Contestant(
        PEER,
        _POOL
        + f"""
from pathlib import Path
from megatron.energon.cache import FileStore, FileStoreCachePool
from megatron.energon.source_info import SourceInfo
class Store(FileStore):
    def __getitem__(self, key):
        return fetch(int(key)), SourceInfo(dataset_path=url, index=key, shard_name="", file_names=(key,))
    def get_path(self):
        return url
store, pools_of = Store(), {{}}
os.makedirs(place)
class Batches(Own):
    def __getitems__(self, indices):
        if os.getpid() not in pools_of:
            pools_of[os.getpid()] = FileStoreCachePool(
                parent_cache_dir=Path(place), num_workers={THREADS_OF_WORKER}, max_cache_size_gbytes=given.budget / 2**30
            )
        ahead = [pools_of[os.getpid()].get_lazy(store, str(i)) for i in indices]
        return [lazy.get() for lazy in ahead]
dataset = Batches(None)
""",
        ("megatron.energon", "urllib3"),
    ),
}

SHARDS_OURS = "Forebay, Shards"
_TORCHVISION = f"""
import sys
sys.path.append({os.path.dirname(os.path.abspath(__file__))!r})
from _torchvision import import_or_stand_in
import_or_stand_in()
"""
_KEYS = (
    _TORCHVISION
    + """
os.environ.update(
    AWS_ACCESS_KEY_ID="key", AWS_SECRET_ACCESS_KEY="secret", AWS_DEFAULT_REGION="us-east-1", AWS_EC2_METADATA_DISABLED="true",
    S3_ENDPOINT_URL=url,
)
"""
)

SHARDS = {
    SHARDS_OURS: Contestant(
        OURS,
        _CACHE
        + """
from forebay.adapters.torch import Shards
dataset = Shards(shards, cache=cache, shuffle_shards=True, buffer=100)
begin_epoch = dataset.set_epoch
usual["collate_fn"] = lambda samples: [len(sample["bin"]) for sample in samples]
""",
    ),
    FILES: Contestant(
        FLOOR,
        """
import random, tarfile
class Files(IterableDataset):
    def __iter__(self):
        worker = get_worker_info()
        own = given.shards[worker.id :: worker.num_workers]
        for name in random.sample(own, len(own)):
            with tarfile.open(f"{given.made}/tar/{name}") as tar:
                for member in tar:
                    yield tar.extractfile(member).read()
dataset = Files()
""",
    ),
    "webdataset": Contestant(
        PEER,
        f"""
import webdataset
os.makedirs(place)
dataset = webdataset.WebDataset(shards, shardshuffle=len(shards), cache_dir=place).shuffle(100).to_tuple("bin")
dataset = dataset.batched({BATCH}, collation_fn=lambda samples: [len(sample[0]) for sample in samples])
def loader(dataset):
    return webdataset.WebLoader(dataset, batch_size=None, num_workers={WORKERS}, persistent_workers=True)
""",
        ("webdataset",),
    ),
    "litData": Contestant(
        PEER,
        _KEYS
        + f"""
import litdata
from litdata.streaming import downloader
downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # there is no setting for it
options = dict(endpoint_url=url, aws_access_key_id="key", aws_secret_access_key="secret", region_name="us-east-1")
os.makedirs(place)
dataset = litdata.StreamingDataset("s3://{BUCKET}/litdata", cache_dir=place, shuffle=True, storage_options=options)
def loader(dataset):
    return litdata.StreamingDataLoader(
        dataset, batch_size={BATCH}, num_workers={WORKERS}, collate_fn=lengths, shuffle=True, persistent_workers=True
    )
""",
        ("litdata",),
    ),
    "MosaicML Streaming": Contestant(
        PEER,
        _KEYS
        + f"""
import streaming, torch
dataset = streaming.StreamingDataset(remote="s3://{BUCKET}/mds", local=place, shuffle=True, batch_size={BATCH})
for stream in dataset.streams:
    stream._downloader.clean_up()  # forked workers would share its connection, and mix up the answers
def loader(dataset):
    collate = lambda samples: torch.tensor([len(sample["bin"]) for sample in samples])  # it takes the length of what it gets
    return streaming.StreamingDataLoader(
        dataset, batch_size={BATCH}, num_workers={WORKERS}, collate_fn=collate, persistent_workers=True
    )
""",
        ("streaming", "boto3"),
    ),
}

# What the contestants of SHARDS read: the same samples, in shards of the same size. ``made``: the directory; ``count``, ``item``.
FORMATS = {
    "tar": """
import io, os, sys, tarfile
made, count, item, shard = sys.argv[1], *map(int, sys.argv[2:])
os.makedirs(f"{made}/tar")
for first in range(0, count, shard):
    with tarfile.open(f"{made}/tar/{first // shard:04d}.tar", "w") as tar:
        for number in range(first, min(first + shard, count)):
            member = tarfile.TarInfo(f"{number:06d}.bin")
            member.size = item
            tar.addfile(member, io.BytesIO(os.urandom(item)))
""",
    "mds": _TORCHVISION
    + """
import os, sys
from streaming import MDSWriter
made, count, item, shard = sys.argv[1], *map(int, sys.argv[2:])
with MDSWriter(out=f"{made}/mds", columns={"bin": "bytes"}, size_limit=shard * (item + 64)) as out:
    for number in range(count):
        out.write({"bin": os.urandom(item)})
""",
    "litdata": _TORCHVISION
    + """
import os, sys
import litdata
made, count, item, shard = sys.argv[1], *map(int, sys.argv[2:])
def sample(number):
    return os.urandom(item)
litdata.optimize(sample, list(range(count)), f"{made}/litdata", chunk_size=shard, num_workers=1, start_method="fork", verbose=False)
""",
}
FORMAT_OF = {"litData": "litdata", "MosaicML Streaming": "mds"}
