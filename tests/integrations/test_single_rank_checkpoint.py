"""A checkpoint by itself: what comes back, what is refused, and what a save that is broken off leaves."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import s3_server
import torch
import torch.distributed.checkpoint as dcp

from hyperpod_ext.errors import (
    ConflictError,
    CorruptSnapshotError,
    JobFailedError,
    NotFoundError,
    StaleGenerationError,
    UnreachableError,
)
from hyperpod_ext.integrations import single_rank_checkpoint
from hyperpod_ext.integrations.single_rank_checkpoint import SingleRankCheckpoint
from hyperpod_ext.runtime.snapshot.manifest import sign
from hyperpod_ext.runtime.storage.file import FileStore

SECRET = b"0123456789abcdef"


def at(path: Path, job: str = "job", secret: bytes = SECRET) -> SingleRankCheckpoint:
    return SingleRankCheckpoint(str(path), job=job, secret=secret)


def tree(value: float = 1.0) -> dict[str, Any]:
    """As a library's checkpoint is: tensors of all kinds, numbers, text, whole numbers as keys."""
    return {
        "state_dict": {"weight": torch.full((3, 2), value), "half": torch.arange(4, dtype=torch.bfloat16)},
        "optimizer_states": [{"state": {0: {"step": torch.tensor(7.0), "none": torch.empty(0, 5)}}, "lr": 1e-3}],
        "callbacks": {"Checkpoint{'monitor': 'loss'}": {"best": math.inf, "path": "a.b/c", "pair": (1, None)}},
        "loops": {"done": True, "epochs": [1, [2, 3]]},
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


@pytest.mark.parametrize("chunk", [single_rank_checkpoint._CHUNK, 61])
def test_what_was_saved_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(
        single_rank_checkpoint, "_CHUNK", chunk
    )  # pieces that end within tensors, and within what is around them
    at(tmp_path / "a").save(tree(), 5)
    loaded = at(tmp_path / "a").load()
    assert same(tree(), loaded)
    loaded["state_dict"]["weight"].add_(1)
    assert same(tree(), at(tmp_path / "a").load()), "tensors are the reader's own"


def test_plain_dcp_reads_it(tmp_path: Path) -> None:
    at(tmp_path / "a").save({"state_dict": {"weight": torch.arange(6.0).view(2, 3)}, "epoch": 4}, 5)
    (folder,) = (tmp_path / "a").glob("step-*")
    state = {"state_dict": {"weight": torch.zeros(2, 3)}, "epoch": 0}
    dcp.load(state, checkpoint_id=folder)
    assert state["epoch"] == 4
    assert torch.equal(state["state_dict"]["weight"], torch.arange(6.0).view(2, 3))  # type: ignore[index, call-overload]


@pytest.mark.parametrize("steps", [(5, 9), (9, 5), (5, 5)])
def test_a_place_has_what_was_written_last(tmp_path: Path, steps: tuple[int, int]) -> None:
    for number, step in enumerate(steps):
        at(tmp_path / "a").save(tree(number), step)
    assert same(tree(1), at(tmp_path / "a").load())
    assert len(list((tmp_path / "a").glob("step-*"))) == 1, "what was there before is gone"


class Dying(FileStore):
    """Takes so many writes, and then no more: as of a process that was killed."""

    left = 0

    def put(self, *arguments: Any, **options: Any) -> None:
        self._count()
        super().put(*arguments, **options)

    def put_new(self, *arguments: Any) -> bool:
        self._count()
        return super().put_new(*arguments)

    def _count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise UnreachableError("killed")


def test_a_save_that_is_broken_off_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "a"
    at(place).save(tree(0), 5)
    for writes in itertools.count():  # at each moment, until it comes to its end
        dying = Dying(place)
        dying.left = writes
        with monkeypatch.context() as patched:
            patched.setattr(single_rank_checkpoint, "open_store", lambda url, store=dying: store)
            broken = at(place)
        try:
            broken.save(tree(writes + 1), 4)
        except UnreachableError:
            assert same(tree(0), at(place).load()), writes
        else:
            break
    assert writes >= 5, "claim, plan, image, two files for dcp, manifest"
    assert same(tree(writes + 1), at(place).load())
    assert len(list(place.glob("step-*"))) == 1, "nothing is left of those that died"


def test_of_two_that_write_at_the_same_time_one_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at(tmp_path / "a").save(tree(), 5)
    other = at(tmp_path / "a")
    monkeypatch.setattr(other._checkpoints, "newest_generation", lambda: 0)  # it looked before the first began
    with pytest.raises(StaleGenerationError):
        other.save(tree(1), 6)
    assert same(tree(), at(tmp_path / "a").load())


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ({"hparams": {"loss": torch.nn.MSELoss()}}, "hparams.loss is a value of type MSELoss"),
        ({"callbacks": {"mine": {"seen": {1, 2}}}}, "callbacks.mine.seen is a value of type set"),
        ({"a": {(1, 2): 3}}, "is a dictionary key of type tuple"),
        ({"a": torch.eye(3).to_sparse()}, "a is a tensor of type torch.float32 and layout torch.sparse"),
    ],
)
def test_what_is_neither_tensor_nor_json_is_refused_by_its_name(tmp_path: Path, bad: Any, named: str) -> None:
    at(tmp_path / "a").save(tree(), 5)
    with pytest.raises(JobFailedError, match=named.replace(".", r"\.")) as raised:
        at(tmp_path / "a").save(tree() | bad, 6)
    assert raised.value.hint
    assert same(tree(), at(tmp_path / "a").load()), "nothing was touched"


def test_damage_and_strangers_are_refused(tmp_path: Path) -> None:
    place = tmp_path / "a"
    at(place).save(tree(), 5)
    with pytest.raises(CorruptSnapshotError, match="not signed with this job's secret"):
        at(place, secret=b"fedcba9876543210").load()
    with pytest.raises(CorruptSnapshotError, match="belongs to job 'job'"):
        at(place, job="other").load()
    (image,) = place.glob("*/__0_0.distcp")
    data = bytearray(image.read_bytes())
    data[len(data) // 2] ^= 1
    image.write_bytes(data)
    with pytest.raises(CorruptSnapshotError, match="CRC64-NVME"):
        at(place).load()
    image.write_bytes(data[:-1])
    with pytest.raises(CorruptSnapshotError, match="too early"):
        at(place).load()


def test_where_nothing_is_and_where_a_file_is(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no complete checkpoint in file://"):
        at(tmp_path / "none").load()
    torch.save({"a": 1}, tmp_path / "old.ckpt")
    for url in (tmp_path / "old.ckpt", (tmp_path / "old.ckpt").as_uri()):
        with pytest.raises(ConflictError, match="is a file, but a checkpoint of hyperpod_ext is a folder") as raised:
            SingleRankCheckpoint(str(url), job="job", secret=SECRET)
        assert "pickle" in raised.value.hint


def test_what_several_ranks_saved_is_not_taken_for_the_whole(tmp_path: Path) -> None:
    at(tmp_path / "a").save(tree(), 5)
    (file,) = tmp_path.glob("a/*/manifest.json")
    manifest = json.loads(file.read_text()) | {"world_size": 2}
    file.write_text(json.dumps(sign(manifest, SECRET)))
    with pytest.raises(CorruptSnapshotError, match="the checkpoint has the parts of 2 ranks"):
        at(tmp_path / "a").load()


def test_it_is_taken_away_and_nothing_else(tmp_path: Path) -> None:
    at(tmp_path / "a").save(tree(), 5)
    at(tmp_path / "b").save(tree(), 5)
    (tmp_path / "b" / "notes.txt").write_text("mine")
    at(tmp_path / "a").remove()
    at(tmp_path / "b").remove()
    at(tmp_path / "none").remove()
    assert [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))] == ["b", "b/notes.txt"]


def test_what_a_link_leads_to_is_left_alone(tmp_path: Path) -> None:
    """As Lightning links the last checkpoint to the best, and takes the link away or saves there again."""
    at(tmp_path / "best").save(tree(0), 5)
    for name in ("removed", "saved", "dangling"):
        (tmp_path / name).symlink_to("best" if name != "dangling" else "gone")
    assert same(tree(0), at(tmp_path / "removed").load())
    at(tmp_path / "removed").remove()
    at(tmp_path / "dangling").remove()
    at(tmp_path / "saved").save(tree(1), 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "saved"]
    assert same(tree(0), at(tmp_path / "best").load())
    assert same(tree(1), at(tmp_path / "saved").load())


@pytest.mark.slow
def test_on_s3_it_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    server = s3_server.endpoint()
    for name, value in {**s3_server.CREDENTIALS, "AWS_ENDPOINT_URL_S3": server}.items():
        monkeypatch.setenv(name, value)
    url = f"s3://{s3_server.new_bucket(server)}/runs/epoch=0-step=5.ckpt"
    for number in range(2):
        SingleRankCheckpoint(url, job="job", secret=SECRET).save(tree(number), 5)
    here = SingleRankCheckpoint(url, job="job", secret=SECRET)
    assert same(tree(1), here.load())
    here.remove()
    with pytest.raises(NotFoundError, match="no complete checkpoint in s3://"):
        here.load()
