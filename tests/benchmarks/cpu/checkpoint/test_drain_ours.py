"""A snapshot of ours arrives in the S3 of the benchmark, which forgets what it is sent."""

from __future__ import annotations

import torch
from checkpoint.adapters import Place
from checkpoint.adapters.ours import Ours
from sink import running_sink


def test_a_snapshot_becomes_durable(tmp_path):
    with running_sink() as url:
        place = Place(folder=tmp_path, sink=url)
        with Ours.hosting(place):
            ours, state = Ours(place), {"w": torch.ones(1000)}
            ours.prepare(state)
            ours.save(state, 1)
            ours.wait_sealed()
            ours.drain()
