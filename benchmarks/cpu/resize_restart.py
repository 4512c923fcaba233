"""The usual way to another number of ranks: a script that saves with DCP and ends, started again by torchrun.

It writes the monotonic time at which its last step ended, and at which its first one began, to the file in argv.
The same model and steps as `tests/faults/elastic.py`.
"""

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

parallel, width, steps, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model: nn.Module = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.LayerNorm(width), nn.Linear(width, 5))
if parallel == "ddp":
    model = DistributedDataParallel(model)
else:
    shape = (2, world_size // 2) if parallel == "hsdp" and world_size % 2 == 0 else (world_size,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    for layer in (model[0], model[3]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
done = 0
if (folder / "checkpoint").exists():
    mine, its = get_state_dict(model, optimizer)
    state = {"model": mine, "optimizer": its, "step": 0}
    dcp.load(state, checkpoint_id=folder / "checkpoint")
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    done = state["step"]
began = time.monotonic()
for step in range(done + 1, done + steps + 1):
    x = torch.randn(24 // world_size, 16, generator=torch.Generator().manual_seed(step))
    loss = (model(x).sum(1) - x.sum(1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
ended = time.monotonic()
mine, its = get_state_dict(model, optimizer)
dcp.save({"model": mine, "optimizer": its, "step": done + steps}, checkpoint_id=folder / "checkpoint")
(folder / f"times-{rank}.json").write_text(json.dumps({"began": began, "ended": ended}))
dist.destroy_process_group()
