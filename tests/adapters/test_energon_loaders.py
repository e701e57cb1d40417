"""A crude dataset of Energon's, cooked with lazies in its loaders: what comes out is what comes out without a cache."""

from __future__ import annotations

import gc
import re
import tarfile
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.energon")

from megatron.energon import (
    Batch,
    Cooker,
    DefaultTaskEncoder,
    Sample,
    TextSample,
    WorkerConfig,
    basic_sample_keys,
    get_loader,
    get_savable_loader,
    get_train_dataset,
    stateless,
)
from megatron.energon import FileCacheLazy as EnergonLazy
from megatron.energon import FileStoreCachePool as EnergonPool
from megatron.energon.cache import CachePool, FileStore, Lazy
from megatron.energon.edataclass import edataclass
from megatron.energon.flavors import BaseWebdatasetFactory
from megatron.energon.flavors.webdataset.sample_decoder import SampleDecoder
from megatron.energon.task_encoder.cooking import cooker

from forebay.adapters.energon import FileStoreCachePool, NoCachePool

pytestmark = [
    pytest.mark.filterwarnings("ignore:'pin_memory' argument"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.timeout(120),
    pytest.mark.keeps("Energon's watchdog holds the loaders, and these the lazies of the samples that they were at"),
]
ITEMS = 23
DATASET = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"
METADATASET = """
__module__: megatron.energon
__class__: MetadatasetV2
splits:
  train:
    path: main
    aux: {media: media, files: "filesystem://files"}
"""


@edataclass
class Cooked(Sample):
    text: str
    picture: Lazy[Any]
    file: Lazy[bytes]
    own: Lazy[str]
    spilled: Lazy[Any]


@edataclass
class Texts(Batch):
    texts: list[str]
    sources: list[int]


@stateless
@cooker(need_cache=True, need_primary=True)
def cook(sample: dict[str, Any], primary: FileStore, media: FileStore, files: FileStore, cache: CachePool) -> Cooked:
    number = int(sample["txt"])
    next_one = (number + 1) % ITEMS
    return Cooked(
        **basic_sample_keys(sample),
        text=f"{number}",
        picture=cache.get_lazy(media, f"{next_one:03d}.json"),
        file=cache.get_lazy(files, f"{number % 5}.bin"),
        own=cache.get_lazy(primary, f"{next_one:03d}.txt"),
        spilled=cache.to_cache({"spilled": number}, "spilled"),
    )


class Cooking(DefaultTaskEncoder):  # type: ignore[misc]
    decoder = SampleDecoder(image_decode="pilrgb")
    cookers = (Cooker(cook),)

    def select_samples_to_pack(self, samples: list[Cooked]) -> list[list[Cooked]]:
        return [[sample] for sample in samples]

    @stateless
    def pack_selected_samples(self, samples: list[Cooked]) -> TextSample:
        sample = samples[0]
        parts = [lazy.get(sample) for lazy in (sample.picture, sample.file, sample.own, sample.spilled)]
        assert isinstance(sample.picture, EnergonLazy) or sample.picture.get() is parts[0]  # its own pool gives a pair the second time
        return TextSample.derive_from(sample, text="|".join(str(part) for part in (sample.text, *parts)))

    def batch(self, samples: list[TextSample]) -> Texts:
        sources = [len(sample.__sources__) for sample in samples]
        return Texts.from_samples(samples, texts=[sample.text for sample in samples], sources=sources)


def tarred(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, BytesIO(data))


def prepared(path: Path, members: Callable[[int], dict[str, bytes]]) -> None:
    """A webdataset in shards of ten samples, with Energon's index."""
    path.mkdir()
    shards = range(0, ITEMS, 10)
    for number, first in enumerate(shards):
        tarred(path / f"{number}.tar", {n: d for i in range(first, min(first + 10, ITEMS)) for n, d in members(i).items()})
    shards_of = [f"{{0..{len(shards) - 1}}}.tar"]
    BaseWebdatasetFactory.prepare_dataset(path, shards_of, split_parts_ratio=[("train", 1.0)], shuffle_seed=None, workers=1)
    (path / ".nv-meta" / "dataset.yaml").write_text(DATASET)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("crude")
    prepared(place / "main", lambda i: {f"{i:03d}.txt": str(i).encode()})
    prepared(place / "media", lambda i: {f"{i:03d}.json": f'{{"media": {i}}}'.encode()})
    (place / "files").mkdir()
    for number in range(5):
        (place / "files" / f"{number}.bin").write_bytes(b"file %d" % number)
    (place / "metadataset.yaml").write_text(METADATASET)
    return place / "metadataset.yaml"


KINDS = {
    "raw": lambda place: FileStoreCachePool(parent_cache_dir=place, method="raw"),
    "pickle": lambda place: FileStoreCachePool(parent_cache_dir=place, method="pickle"),
    "small": lambda place: FileStoreCachePool(parent_cache_dir=place, max_cache_count=2, num_workers=2),
    "none": lambda place: NoCachePool(),
    "energon": lambda place: EnergonPool(parent_cache_dir=place),
}


@pytest.fixture(autouse=True)
def workers_that_end_at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """PyTorch's look for the end every five seconds only, and are waited for as long."""
    for place in ("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", "torch.utils.data._utils.worker.MP_STATUS_CHECK_INTERVAL"):
        monkeypatch.setattr(place, 0.1)
    yield
    gc.unfreeze()  # Energon freezes what there is, and nothing of it would be collected any more


@pytest.fixture(params=KINDS)
def pool(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CachePool]:
    made = KINDS[request.param](tmp_path)
    yield made
    made.close()


def train_dataset(dataset: Path, workers: int) -> Any:
    return get_train_dataset(
        dataset, batch_size=3, worker_config=WorkerConfig(rank=0, world_size=1, num_workers=workers), task_encoder=Cooking(),
        shuffle_buffer_size=None, max_samples_per_sequence=None, packing_buffer_size=4,
    )  # fmt: skip


def taken(loader: Any, count: int) -> list[tuple[str, ...]]:
    """The texts of so many batches, each of which is what the cooker asked for."""
    found = []
    for _, batch in zip(range(count), loader, strict=False):
        for text, sources in zip(batch.texts, batch.sources, strict=True):
            number, picture, file, own, spilled = text.split("|")
            following = (int(number) + 1) % ITEMS
            assert picture == str({"media": following})
            assert file == str(b"file %d" % (int(number) % 5))
            assert own == str(following)
            assert spilled == str({"spilled": int(number)})
            assert sources == 4, "its own, and those of three lazies"
        found.append(tuple(batch.texts))
    return found


@pytest.mark.rotates
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_over_a_crude_dataset(dataset: Path, pool: CachePool, workers: int) -> None:
    found = taken(get_loader(train_dataset(dataset, workers), cache_pool=pool), 20)
    assert len(found) == 20
    assert {int(re.match(r"\d+", text)[0]) for texts in found for text in texts} == set(range(ITEMS))  # type: ignore[index]


@pytest.mark.rotates
@pytest.mark.parametrize("pool", ["raw", "pickle", "small"], indirect=True)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_savable_loader_goes_on_where_it_was(dataset: Path, pool: CachePool, workers: int) -> None:
    def loader() -> Any:
        how = {"checkpoint_every_sec": 0, "checkpoint_every_min_n_samples": 1}
        return get_savable_loader(train_dataset(dataset, workers), cache_pool=pool, **how)

    first = loader()
    taken(first, 10)
    state = first.save_state_rank()
    after = taken(first, 10)
    del first
    second = loader()
    second.restore_state_rank(state)
    assert taken(second, 10) == after
