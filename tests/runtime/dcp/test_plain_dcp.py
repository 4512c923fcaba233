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
print(json.dumps({"wrong": wrong, "names": len(want), "ours": ours}))
"""


def test_plain_dcp_loads_the_durable_copy(job: Job) -> None:
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


def test_plain_dcp_makes_one_file_of_it(job: Job) -> None:
    policy = {"tiers": [{"kind": "memory"}, {"kind": "file", "path": f"{job.directory}/f", "every_steps": 1}]}
    whole = job.directory / "whole.pt"
    job.run("save_whole", 2, policy=policy, path=str(whole))
    (folder,) = (job.directory / "f" / "j").glob("step-*")
    code = (
        "import sys, torch; from torch.distributed.checkpoint.format_utils import dcp_to_torch_save as convert\n"
        "convert(sys.argv[1], sys.argv[2]); state = torch.load(sys.argv[2])\n"
        "assert state['about']['note'] == 'é' and state['about']['lines'] == [1, [2, 3]], state['about']\n"
        "assert state['model']['0.weight'].shape == (13, 7)\n"
    )
    command = [sys.executable, "-I", "-c", code, str(folder), f"{job.directory}/one.pt"]
    subprocess.run(command, check=True)
