"""examples/12-data as it stands: the rank that may convert dies, and the run is the undisturbed one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import hp_ext
from local_place import LocalPlace


@pytest.mark.thorough
def test_the_example_reads_its_store_through_a_kill(root: Path, tmp_path: Path, place: LocalPlace) -> None:
    arguments = json.dumps(["--steps", "20", "--data", str(tmp_path / "data")])
    job = root / "examples" / "12-data" / "job.yaml"
    done = hp_ext("create-job", "-f", job, "--target", "local", "--wait", "--set", f"args={arguments}", "-o", "json")
    assert done.code == 0, done.stderr
    assert (done.json["loss_equal"], done.json["weights_equal"]) == (True, True)
    (store,) = (tmp_path / "data" / "stores").iterdir()
    assert hp_ext("data", "verify", store, "--source").code == 0
