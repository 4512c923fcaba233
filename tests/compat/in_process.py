"""A loop in plain PyTorch, with the names of tier 3 of AWS's launch article: it saves and loads its own checkpoint."""

from pathlib import Path

import torch
import torch.distributed as dist
from hyperpod_checkpointless_training.inprocess.health_check import CudaHealthCheck
from hyperpod_checkpointless_training.inprocess.train_utils import HPAgentK8sAPIFactory
from hyperpod_checkpointless_training.inprocess.wrap import HPWrapper
from torch.nn.parallel import DistributedDataParallel

STEPS = 24


@HPWrapper(
    health_check=CudaHealthCheck(),
    hp_api_factory=HPAgentK8sAPIFactory(),
    abort_timeout=60.0,
)
def re_executable_codeblock():
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    model, first = torch.nn.Linear(4, 4), 1
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if Path("newest.pt").exists():
        saved = torch.load("newest.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        first = saved["step"] + 1
    print("begins at", first, flush=True)
    parallel = DistributedDataParallel(model)
    for step in range(first, STEPS + 1):
        loss = parallel(torch.full((2, 4), step / STEPS)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"loss {dist.get_rank()} {step} {loss.item():.17g}", flush=True)
        if dist.get_rank() == 0 and step % 5 == 0:
            torch.save({"model": model.state_dict(), "step": step}, "newest.pt")
    dist.destroy_process_group()


re_executable_codeblock()
