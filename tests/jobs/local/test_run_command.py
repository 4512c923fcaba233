"""`hp-ext run`: a script without changes, from its command line to its end."""

from __future__ import annotations

from pathlib import Path

import pytest
from command import begin_hp_ext, call_hp_ext
from local_place import LocalPlace

pytestmark = pytest.mark.slow

SCRIPT = """
import torch  # first: preloaded
import yaml
import os
import sys
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
first = 1
if os.path.exists("newest.pt"):
    saved = torch.load("newest.pt", weights_only=True)
    model.load_state_dict(saved["model"])
    first = saved["step"] + 1
print("begins at", first, "with", sys.argv[1:], "restart", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
parallel = DistributedDataParallel(model)
for step in range(first, 31):
    if step == 9 and dist.get_rank() == 1 and first == 1:
        os.kill(os.getpid(), 9)
    parallel(torch.randn(2, 4)).square().mean().backward()
    optimizer.step()
    if dist.get_rank() == 0 and step % 5 == 0:
        torch.save({"model": model.state_dict(), "step": step}, "newest.pt")
"""


def test_a_script_goes_on_from_its_own_checkpoint(
    place: LocalPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("My_Train.py").write_text(SCRIPT)
    done = begin_hp_ext("run", "--workers", "2", "-o", "json", "My_Train.py", "--lr", "3").wait()
    assert done.code == 0, done.stderr
    assert done.json["name"] == "my-train"
    (recovery,) = done.json["recoveries"]
    assert (recovery["fault"]["rank"], recovery["resumed_step"]) == (1, 5)
    assert done.json["steps"] == 30
    assert "begins at 1 with ['--lr', '3'] restart 0" in done.stderr
    assert "begins at 6 with ['--lr', '3'] restart 1" in done.stderr
    assert "recovered: all ranks continue after step 5" in done.stderr
    assert place.leftovers() == []


def test_mistakes_are_reported_before_anything_starts(
    place: LocalPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "does not exist" in call_hp_ext("run", "nowhere.py").stderr
    Path("train.py").write_text("")
    assert "--kill" in call_hp_ext("run", "--kill", "rank=x", "train.py").stderr
    beyond = call_hp_ext("run", "--kill", "rank=7@step=3", "train.py")
    assert (beyond.code, "rank" in beyond.stderr) == (3, True)
    Path("job.yaml").write_text("name: a\nscript: train.py\nmode: run\nelastic: {min_nodes: 1, max_nodes: 2}\n")
    refused = call_hp_ext("validate", "job.yaml", "--target", "local")
    assert "mode `run` has a fixed number of nodes" in refused.stderr
    assert place.leftovers() == []


def test_a_script_in_another_folder_runs_there(
    place: LocalPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path.with_name(f"{tmp_path.name}-scripts")
    folder.mkdir()
    (folder / "train.py").write_text("from pathlib import Path\nPath('here').write_text('')\n")
    done = begin_hp_ext("run", str(folder / "train.py")).wait()
    assert done.code == 0, done.stderr
    assert f"the script runs in its own folder, {folder}" in done.stderr
    assert (folder / "here").exists()
    assert place.leftovers() == []
