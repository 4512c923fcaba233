"""What the peers of the recovery benchmark train is what the example trains."""

from __future__ import annotations

import argparse
import sys

import pytest
import torch
from recovery_training import Training

import hyperpod_ext.runtime


def test_a_step_of_the_example_is_made_and_repeats_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hyperpod_ext.runtime", hyperpod_ext.runtime)  # it has something else stand there
    training = Training(argparse.Namespace(seed=0, width=16, layers=1, batch_size=2, device="cpu"))
    model, optimizer = training.build()
    loss = training.loss(model, 1, 0)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    assert torch.equal(training.loss(training.build()[0], 1, 0), loss)
    assert not torch.equal(training.loss(model, 1, 0), loss)
