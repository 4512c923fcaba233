"""What lies in a durable tier is a checkpoint of torch.distributed.checkpoint, for people who have only that."""

from __future__ import annotations

import json
import subprocess
import sys

from dcp_job import Job

PLAIN = """\
import json, sys, warnings
warnings.filterwarnings("ignore")
sys.modules["hyperpod_ext"] = None  # importing it is an error from here on
import torch, torch.distributed.checkpoint as dcp
folder, whole = sys.argv[1:]
want = torch.load(whole)
have = {}
for name, value in want.items():
    have[name] = torch.empty_like(value) if isinstance(value, torch.Tensor) else None
dcp.load(have, checkpoint_id=folder)
def equal(one, other):
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
wrong = [name for name, value in want.items() if not equal(have[name], value)]
ours = [name for name in sys.modules if name.startswith("hyperpod_ext.")]
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
one = folder + ".pt"
dcp_to_torch_save(folder, one)
state = torch.load(one)
print(json.dumps({"wrong": wrong, "names": len(want), "ours": ours, "about": state["about"],
                  "shape": list(state["model"]["0.weight"].shape)}))
"""


def test_plain_dcp_loads_the_durable_copy(job: Job) -> None:
    """And makes one file of it."""
    policy = {"tiers": [{"kind": "memory"}, {"kind": "file", "path": f"{job.directory}/f", "every_steps": 1}]}
    whole = job.directory / "whole.pt"
    job.run("save_whole", 4, policy=policy, path=str(whole))
    (folder,) = (job.directory / "f" / "j").glob("step-*")
    command = [sys.executable, "-I", "-c", PLAIN, str(folder), str(whole)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["wrong"] == answer["ours"] == []
    assert answer["names"] > 20
    assert (answer["about"]["note"], answer["about"]["lines"]) == ("é", [1, [2, 3]])
    assert answer["shape"] == [13, 7]
