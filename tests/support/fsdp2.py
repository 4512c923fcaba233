"""Whether torch's FSDP2 runs on CPUs."""

from __future__ import annotations

import pytest


def skip_without_cpus() -> None:
    """Skip a test that needs it. Torch 2.6 asks a CPU's stream for what only a GPU's has; even with that, its backward
    pass raises."""
    import torch

    if not hasattr(torch.cpu.Stream, "record_event"):
        pytest.skip(f"FSDP2 of torch {torch.__version__} does not run on CPUs")
