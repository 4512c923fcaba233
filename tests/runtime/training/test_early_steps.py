"""The check of a process's first optimizer step, in processes of its own."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import warm_code

from hyperpod_ext.runtime.events.of_training import UNPROTECTED

IN_JOB = {"TORCHELASTIC_RUN_ID": "a", "MASTER_ADDR": "127.0.0.1", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
SCRIPT = """
import torch
from torch.optim import optimizer as o
from hyperpod_ext.runtime import resilient

parameter = torch.nn.Parameter(torch.ones(1))
parameter.grad = torch.ones(1)
seen = []
{before}
for _ in range(3):
    torch.optim.SGD([parameter], lr=0.5).step()
print(len(o._global_optimizer_pre_hooks), len(o._global_optimizer_post_hooks), *seen, parameter.item())
"""
USER_HOOKS = """
o.register_optimizer_step_pre_hook(lambda *_: seen.append("pre"))
o.register_optimizer_step_post_hook(lambda *_: seen.append("post"))
"""


def run(before: str = "", **variables: str) -> tuple[str, str]:
    """Return what the script printed, and its errors."""
    environ = {name: value for name, value in os.environ.items() if name not in IN_JOB} | variables
    with mock.patch.dict(os.environ, environ, clear=True):
        done = warm_code.run(SCRIPT.format(before=before))
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


def test_a_rank_warns_once_and_later_steps_cost_nothing() -> None:
    printed, errors = run(**IN_JOB)
    assert printed == "0 0 -0.5"
    assert errors.count(f"hyperpod_ext: warning: SGD.step() is called, but {UNPROTECTED}") == 1


def test_hooks_of_the_script_are_kept() -> None:
    printed, errors = run(USER_HOOKS, **IN_JOB)
    assert printed == "1 1 pre post pre post pre post -0.5"
    assert errors.count(UNPROTECTED) == 1


@pytest.mark.parametrize("variables", [{}, IN_JOB | {"RANK": "1"}], ids=["no job", "another rank"])
def test_others_do_not_warn(variables: dict[str, str]) -> None:
    assert run(**variables) == ("0 0 -0.5", "")


def test_a_step_that_raises_is_warned_of_once() -> None:
    failing = """
import contextlib
with contextlib.suppress(ZeroDivisionError):
    torch.optim.SGD([parameter], lr=0.5).step(lambda: 1 / 0)
"""
    printed, errors = run(failing, **IN_JOB)
    assert printed == "0 0 -0.5"
    assert errors.count(UNPROTECTED) == 1


def test_a_compiled_step_is_warned_of() -> None:
    compiled = """
torch.compile(torch.optim.SGD([parameter], lr=0.0).step, backend="eager")()
"""
    printed, errors = run(compiled, **IN_JOB)
    assert printed == "0 0 -0.5"
    assert errors.count(UNPROTECTED) == 1
