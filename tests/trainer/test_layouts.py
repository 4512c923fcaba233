"""Training of one model by examples/20-trainer, with the model divided among ranks in several ways."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import fsdp2
import pytest
import torch

pytestmark = pytest.mark.thorough


def trained(shape: str, ranks: int, tensor: int, folder: Path) -> dict[str, torch.Tensor]:
    file = folder / f"{ranks}-{tensor}.pt"
    command = [sys.executable, Path(__file__).with_name("layouts.py"), shape, str(ranks), str(tensor), file]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, torch.Tensor] = torch.load(file)
    return found


@pytest.mark.parametrize(
    ("shape", "layout", "reference"),
    [
        ("llama-tiny", (2, 1), (1, 1)),
        ("llama-tiny", (2, 2), (1, 1)),
        ("llama-tiny", (4, 2), (1, 1)),
        ("moe-tiny", (2, 2), (1, 1)),
        ("moe-tiny", (4, 2), (2, 1)),  # the balance loss is that of one copy's tokens
    ],
)
def test_a_divided_model_is_trained_as_a_complete_one(
    tmp_path: Path, shape: str, layout: tuple[int, int], reference: tuple[int, int]
) -> None:
    fsdp2.skip_without_cpus()
    expected, found = trained(shape, *reference, tmp_path), trained(shape, *layout, tmp_path)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        # Adam's first steps have the size of lr for any gradient: weights with a gradient near zero may differ
        close = torch.isclose(found[name], tensor, atol=1e-5).float().mean()
        assert close > 0.999, (name, close)
    assert expected["steps"].isclose(found["steps"], rtol=1e-5).all()
