"""The state that an optimizer makes ahead is the one of its first step, and nothing else changes."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.distributed.checkpoint.state_dict import _init_optim_state

from hyperpod_ext.runtime.state.optimizer_state import make_state

MAKERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, amsgrad=True),
    "AdamW with a rate on the device": lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(1e-2)),
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.1),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_it_is_the_state_that_torch_makes_ahead(kind):
    def made(make):
        torch.manual_seed(0)
        parameters = [torch.nn.Parameter(torch.randn(3, 4)), torch.nn.Parameter(torch.randn(2), requires_grad=False)]
        optimizer = MAKERS[kind](parameters)
        before = [parameter.detach().clone() for parameter in parameters]
        rate = optimizer.param_groups[0]["lr"]
        make(optimizer)
        assert optimizer.param_groups[0]["lr"] is rate
        assert all(parameter.grad is None for parameter in parameters)
        return before, parameters, optimizer.state_dict()

    before, parameters, state = made(make_state)
    _, _, wanted = made(_init_optim_state)
    assert state["state"].keys() == wanted["state"].keys()
    for number, values in wanted["state"].items():
        assert state["state"][number].keys() == values.keys()
        assert all(
            torch.equal(state["state"][number][name], value) for name, value in values.items() if value is not None
        )
    assert all(torch.equal(was, now) for was, now in zip(before, parameters, strict=True))


def test_an_optimizer_that_has_made_steps_is_left_alone():
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter])
    parameter.grad = torch.ones(3)
    make_state(optimizer)
    assert not optimizer.state, "its gradient is somebody's"
    optimizer.step()
    make_state(optimizer)
    assert next(iter(optimizer.state.values()))["step"] == 1


@pytest.mark.slow
def test_what_a_joining_node_waits_for_imports_no_checkpoint_of_torch():
    code = (
        "import sys, torch; from hyperpod_ext.runtime.training import loop;"
        "from hyperpod_ext.runtime.state import optimizer_state as sizes;"
        "sizes.make_state(torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))]));"
        "sys.exit('torch.distributed.checkpoint' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
