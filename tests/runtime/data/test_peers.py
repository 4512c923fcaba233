"""Other libraries around our sampler, for real: torchdata, Hugging Face, MosaicML."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import whole_run
from sdk_venvs import python_of

from hyperpod_ext.runtime.data import ArrowStore, ElasticBatchSampler, ElasticDataLoader
from hyperpod_ext.runtime.data.sources import fingerprint_of

ROOT = Path(__file__).resolve().parents[3]
SUPPORT = ROOT / "tests" / "support"
TORCHDATA = "torchdata==0.11.0"
MOSAICML = (
    "mosaicml-streaming==0.13.0",
    *("Brotli==1.2.1", "catalogue==2.0.10", "cramjam==2.14.0", "python-snappy==0.7.3"),
    *("tqdm==4.70.1", "xxhash==3.8.2", "zstd==1.5.7.2"),
)


def installed(name: str, *packages: str) -> Path:
    """A folder with these packages, without what they depend on."""
    folder = ROOT / ".venv" / "bench" / name
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *packages]
    if whole_run.once(f"bench-{name}", lambda: not folder.exists() and subprocess.run(pip, timeout=300).returncode):
        pytest.skip(f"{name} cannot be installed here")
    return folder


@pytest.fixture(scope="module")
def stateful_loader() -> Any:
    """torchdata's StatefulDataLoader; installed without its dependencies, with our torch."""
    folder = installed("torchdata", TORCHDATA)
    sys.path.append(str(folder))
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader

        yield StatefulDataLoader
    finally:
        sys.path.remove(str(folder))


def sampler_of(rank: int, world_size: int, n: int) -> ElasticBatchSampler:
    return ElasticBatchSampler(
        range(n),
        global_batch_size=12,
        micro_batch_size=2,
        rank=rank,
        world_size=world_size,
        acknowledge=False,
        fingerprint="numbers",
    )


@pytest.mark.thorough
@pytest.mark.parametrize("workers", [0, 2])
def test_stateful_dataloader_around_our_sampler_reads_each_sample_once_through_resizes(
    stateful_loader: Any, workers: int
) -> None:
    """Around torchdata's own sampler, 8, 12 and 6 ranks repeat 24,005 of 100,003 samples and miss 6,000."""
    n = 503
    seen: list[int] = []
    state: dict[str, Any] | None = None
    place: dict[str, Any] = {}
    for world, steps in ((4, 9), (3, 7), (6, 1000)):
        samplers = [sampler_of(rank, world, n) for rank in range(world)]
        loaders = [stateful_loader([*range(n)], batch_sampler=one, num_workers=workers) for one in samplers]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        passes = [iter(loader) for loader in loaders]
        guides = [sampler_of(rank, world, n) for rank in range(world)]  # say which are ghosts
        for guide in guides:
            if place:
                guide.load_state_dict(place)
        for _ in range(steps):
            if guides[0].cursor.epoch:
                break
            for batches, guide in zip(passes, guides, strict=True):
                for slot in guide.step():
                    batch = next(batches)
                    assert batch.tolist() == slot.ids
                    seen += slot.ids if slot.weight else []
                guide.ack()
        states = [loader.state_dict() for loader in loaders]
        state, place = states[-1], guides[-1].state_dict()
        if guides[0].cursor.epoch:
            assert all(next(batches, None) is None for batches in passes)
    assert sorted(seen) == [*range(n)]


def output_of(python: Path | str, script: str, *folders: Path, packages: Path | None = None, **environ: str) -> Any:
    """What a script prints as JSON at its end, run by another interpreter or with packages that we do not have."""
    paths = [ROOT, SUPPORT, *([packages] if packages else [])]
    done = subprocess.run(
        [str(python), "-c", script, *map(str, folders)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


HUGGING_FACE = """
import json, sys
from datasets import Dataset
from hyperpod_ext.runtime.data import ElasticDataLoader, Stream
from hyperpod_ext.runtime.data.sources import fingerprint_of
from resized_reading import rows_of

dataset = Dataset.from_dict({"id": list(range(101)), "text": [str(i) for i in range(101)]})
other = dataset.map(lambda row: {"text": row["text"] + "!"})
stream = dataset.to_iterable_dataset()
source = Stream(lambda start: iter(stream.skip(start)), fingerprint=fingerprint_of(dataset))
streamed = []
loader = ElasticDataLoader(
    source, global_batch_size=8, micro_batch_size=2, rank=0, world_size=1, collate=list, shuffle=False
)
for step in loader.steps(1):
    streamed += [row["id"] for batch, _ in step for row in batch]
    loader.ack(step)
tokens = Dataset.from_dict({"ids": [[i, i + 1] * (i % 3) for i in range(50)], "text": ["a"] * 50})
tokens.save_to_disk(sys.argv[1], num_shards=2)
ids = [row["id"] for row in rows_of(dataset)]
print(json.dumps({"ids": ids, "streamed": streamed, "same": fingerprint_of(dataset) == fingerprint_of(other)}))
"""


@pytest.mark.thorough
@pytest.mark.timeout(1800)
def test_hugging_face_datasets_are_sources(tmp_path: Path) -> None:
    tokens, home = tmp_path / "tokens", str(tmp_path)
    found = output_of(python_of("datasets"), HUGGING_FACE, tokens, HF_HOME=home, HF_HUB_OFFLINE="1")
    assert sorted(found["ids"]) == found["streamed"] == [*range(101)]
    assert not found["same"]
    store = ArrowStore(tokens / "*.arrow")  # as `save_to_disk` leaves it
    assert [row.tolist() for row in store] == [[i, i + 1] * (i % 3) for i in range(50)]


MOSAIC = """
import importlib.util, json, sys

# their __init__ import torchvision and transformers, for datasets of pictures and texts that are not used here
for name in ("streaming", "streaming.base"):
    sys.modules[name] = importlib.util.module_from_spec(importlib.util.find_spec(name))
from streaming.base.dataset import StreamingDataset
from streaming.base.format import MDSWriter
from hyperpod_ext.runtime.data.sources import fingerprint_of
from resized_reading import rows_of

out, cache = sys.argv[1:]
with MDSWriter(columns={"id": "int", "text": "str"}, out=out, size_limit=1000, compression="zstd") as writer:
    for number in range(101):
        writer.write({"id": number, "text": str(number) * 3})
dataset = StreamingDataset(remote=out, local=cache, batch_size=1)
rows = [[int(row["id"]), row["text"]] for row in rows_of(dataset)]
print(json.dumps({"rows": rows, "shards": len(dataset.shards), "fingerprint": fingerprint_of(dataset)}))
"""


@pytest.mark.thorough
@pytest.mark.timeout(1800)
def test_mosaicml_shards_are_sources(tmp_path: Path) -> None:
    """Written and read by MosaicML's own classes, from compressed shards that it fetches to a cache."""
    packages = installed("mosaicml", *MOSAICML)
    found = output_of(sys.executable, MOSAIC, tmp_path / "remote", tmp_path / "local", packages=packages)
    assert sorted(found["rows"]) == [[number, str(number) * 3] for number in range(101)]
    assert found["shards"] > 2
    assert found["fingerprint"].endswith("/101")


class MosaicShaped:
    """As a MosaicML StreamingDataset: len() is one rank's share, samples are numbered over all of it."""

    shards = ("a", "b")
    num_samples = 90

    def __len__(self) -> int:
        return 45

    def __getitem__(self, index: int) -> int:
        assert 0 <= index < self.num_samples
        return index


def test_a_mosaicml_dataset_is_read_whole() -> None:
    loader = ElasticDataLoader(
        MosaicShaped(), global_batch_size=7, micro_batch_size=1, rank=0, world_size=1, collate=list
    )
    ids: list[int] = []
    for step in loader.steps(1):
        ids += [one for batch, _ in step for one in batch]
        loader.ack(step)
    assert sorted(ids) == [*range(90)]
    assert fingerprint_of(MosaicShaped()).endswith("/90")
