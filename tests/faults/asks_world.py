"""A script whose objects ask torch.distributed while their state is taken, as those do that call `get_state_dict` of
`torch.distributed.checkpoint.state_dict`, or Megatron's parallel_state."""

import os

import torch
import torch.distributed as dist
from torch import nn

from hyperpod_ext.runtime import Run, resilient


class Position:
    """Where the job is in its data, with what it was cut for."""

    def __init__(self) -> None:
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        if "HPX_TEST_COLLECTIVE" in os.environ:
            dist.all_reduce(torch.zeros(1))
        return {"place": self.place, "ranks": dist.get_world_size()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


@resilient
def train(run: Run) -> None:
    model = run.keep(lambda: nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    position = Position()
    run.restore(model=model, optimizer=optimizer, position=position)
    parallel = run.data_parallel(model)
    for _ in run.steps(8):
        position.place += 1
        optimizer.zero_grad()
        loss = parallel(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        mean = loss.detach() / run.world_size
        dist.all_reduce(mean)
        run.log(loss=mean)
    run.log(weights=sum(parameter.double().sum() for parameter in model.parameters()))


train()
