"""FSDP under plain torchrun, checkpoints through torch.distributed.checkpoint, every step of them in memory.

    torchrun --nproc-per-node 2 examples/02-dcp/train.py --steps 200

Kill it at any moment, even with -9, and start it again, with another number of processes if you like: it
goes on from the last step that all ranks had saved.
"""

import argparse

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hyperpod_ext.runtime import TieredStorageReader, TieredStorageWriter, Tiers

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--durable", default="/tmp/hyperpod-ext-02-dcp", help="a directory that every node sees")
arguments = parser.parse_args()

dist.init_process_group("gloo")  # on GPUs: "cpu:gloo,cuda:nccl"
policy = {"tiers": [{"kind": "memory"}, {"kind": "file", "path": arguments.durable, "every_steps": 50}]}
tiers = Tiers("example-02-dcp", policy)

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def state() -> dict[str, object]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "step": step}


step = 0
if tiers.latest() is not None:
    loaded = state()
    dcp.load(loaded, storage_reader=TieredStorageReader(tiers))
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    step = loaded["step"]

while step < arguments.steps:
    step += 1
    inputs = torch.randn(64, 32, generator=torch.Generator().manual_seed(step))
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    dcp.save(state(), storage_writer=TieredStorageWriter(tiers, step))
    if dist.get_rank() == 0 and step % 10 == 0:
        print(f"step {step}, loss {loss.item():.4f}", flush=True)

tiers.wait_durable(60, newest=True)
dist.destroy_process_group()
