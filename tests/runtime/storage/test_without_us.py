"""What lies in a directory or on S3, for people who have PyTorch alone: a virtual environment without hyperpod_ext."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from durable_place import Bucket, Directory, Place, folder_of
from s3_server import CREDENTIALS
from small_job import MEMORY, SmallJob, trained

LOAD = """\
import importlib.util, json, sys, warnings
warnings.filterwarnings("ignore")
assert importlib.util.find_spec("hyperpod_ext") is None
import torch, torch.distributed.checkpoint as dcp
folder, whole = sys.argv[1:]
want = torch.load(whole)
have = {name: torch.zeros_like(tensor) for name, tensor in want.items()}
dcp.load(have, checkpoint_id=folder)
print(json.dumps({name: torch.equal(have[name], tensor) for name, tensor in want.items()}))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that has all we have but ourselves."""
    folder = tmp_path_factory.mktemp("plain")
    venv.EnvBuilder(symlinks=True).create(folder)
    packages = next(path for path in map(Path, sys.path) if path.name == "site-packages" and path.is_dir())
    own = next(folder.glob("lib/python*/site-packages"))
    for package in packages.iterdir():
        if "hyperpod_ext" not in package.name and not (own / package.name).exists() and package.suffix != ".pth":
            own.joinpath(package.name).symlink_to(package)
    return folder / "bin" / "python"


@pytest.fixture(params=["file", pytest.param("s3", marks=[pytest.mark.slow, pytest.mark.thorough])])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    if request.param == "file":
        return Directory(tmp_path / "checkpoints")
    bucket = Bucket()
    for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": bucket.url}.items():
        monkeypatch.setenv(name, value)
    return bucket


@pytest.fixture
def job(place: Place, tmp_path: Path) -> Iterator[SmallJob]:
    """Two nodes of two ranks, their state in shards."""
    job = SmallJob(tmp_path / "job", tiers=(MEMORY, place.tier()), workers=2).start()
    yield job
    job.stop()


def test_plain_dcp_loads_it_in_an_environment_without_us(job, place, python, tmp_path):
    trained(job, 4)
    step = folder_of(place, 4)
    copy, whole = tmp_path / step, tmp_path / "whole.pt"
    copy.mkdir()
    for name in place.names():
        if name.startswith(f"{step}/"):
            (copy / name.removeprefix(f"{step}/")).write_bytes(place.read(name))
    torch.save(job.states[4], whole)
    done = subprocess.run([python, "-I", "-c", LOAD, copy, whole], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    equal = json.loads(done.stdout)
    assert len(equal) >= 15  # five parameters, with two moments each
    assert all(equal.values()), equal
