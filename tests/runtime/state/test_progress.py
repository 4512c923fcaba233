"""What a run tells of its phases, and that telling it changes nothing."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend "fake"
from world_of_one import world_of_one

from hyperpod_ext.runtime.detection.heartbeat import Phase
from hyperpod_ext.runtime.process_group.torch_private import collectives_begun
from hyperpod_ext.runtime.state.progress import Progress


class Phases:
    """Takes down every phase."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def at(self, phase: Phase, step: int) -> None:
        self.seen.append(f"{phase.word} {step}")


def test_a_step_tells_its_phases_in_order():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    progress, phases = Progress(), Phases()
    progress.listener = phases
    progress.follow([model, optimizer])
    progress.begin_step(3)
    loss = model(torch.ones(2, 4)).sum()
    loss.backward()
    optimizer.step()
    assert phases.seen == ["data 3", "forward 3", "backward 3", "optimizer 3", "rest 3"]
    progress.follow([model])  # the hooks of before are gone, not doubled
    model(torch.ones(2, 4))
    assert phases.seen[5:] == ["forward 3"]


def test_outputs_of_any_shape_tell_their_backward_pass():
    class Structured(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> dict[str, object]:
            return {"name": "x", "out": (None, [self.linear(x)])}

    model, progress, phases = Structured(), Progress(), Phases()
    progress.listener = phases
    progress.follow([model])
    model(torch.ones(1, 2))["out"][1][0].sum().backward()  # type: ignore[index]
    assert phases.seen == ["forward 0", "backward 0"]


def test_a_module_is_compiled_as_one_graph_all_the_same():
    model, progress, phases = nn.Linear(4, 4), Progress(), Phases()
    progress.listener = phases
    progress.follow([model])
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    compiled(torch.ones(1, 4)).sum().backward()
    assert phases.seen == []


def test_gradients_are_bit_for_bit_the_same():
    def gradients(watched: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        if watched:
            Progress().follow([model])
        model(torch.randn(4, 8)).square().mean().backward()
        return [parameter.grad for parameter in model.parameters()]  # type: ignore[misc]

    assert all(torch.equal(a, b) for a, b in zip(gradients(True), gradients(False), strict=True))


def test_a_group_that_counts_no_collectives_hides_none_of_the_others():
    """Device meshes have such groups for dimensions of size 1, where a trainer says so."""
    with world_of_one():
        dist.new_group(backend="fake")
        own = dist.new_group()
        begun = collectives_begun()
        dist.barrier(group=own)
        assert collectives_begun() > begun
