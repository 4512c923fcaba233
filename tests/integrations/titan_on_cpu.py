"""Let TorchTitan 0.2.2, which asks for an accelerator, run on the CPU."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import FSDPModule


def on_cpu() -> None:
    """Make the CPU TorchTitan's device. Call this before TorchTitan is imported."""
    torch._utils._get_available_device_type = lambda: "cpu"
    names = {
        "get_device_name": lambda *_: "cpu",
        "get_device_properties": lambda *_: type("Properties", (), {"total_memory": 8 << 30, "name": "cpu"}),
        "memory_stats": lambda *_: {},
        "reset_peak_memory_stats": lambda *_: None,
        "empty_cache": lambda *_: None,
        "current_device": lambda: 0,
    }
    for name, stand_in in names.items():
        if name == "current_device" or not hasattr(torch.cpu, name):
            setattr(torch.cpu, name, stand_in)
    divide = FSDPModule.set_gradient_divide_factor

    def with_sums_alone(self: FSDPModule, factor: float) -> None:
        self.set_force_sum_reduction_for_comms(True)  # gloo cannot scale in a reduction
        divide(self, factor)

    FSDPModule.set_gradient_divide_factor = with_sums_alone  # type: ignore[method-assign]
