"""Let TorchTitan 0.2.2 and 0.3, which ask for an accelerator, run on the CPU."""

from __future__ import annotations

from typing import Any

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


def attention_on_cpu() -> None:
    """Replace FlexAttention of TorchTitan 0.3, which has no backward pass on the CPU, by torch's dense attention.

    Call this before a trainer is made.
    """
    from torch.nn.attention.flex_attention import create_mask
    from torch.nn.functional import scaled_dot_product_attention
    from torchtitan.models.common.attention import FlexAttention

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        block_mask: Any,
        scale: float | None,
        enable_gqa: bool,
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        batch, _, length, _ = query.shape
        mask = create_mask(block_mask.mask_mod, batch, 1, length, length, device="cpu")
        found = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
        return found, None

    FlexAttention.compiled_flex_attn = staticmethod(attend)
