"""Sizes of well-known models: computed from their architecture, and as they were published."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from hyperpod_ext.errors import ConfigError, NotFoundError
from hyperpod_ext.planner.presets import PRESETS, preset
from hyperpod_ext.planner.shapes import Decoder
from hyperpod_ext.planner.state import FORMATS, StateFormat, size_of, size_of_count, state_format

PUBLISHED = {
    "gpt2": (124_439_808, 1_244_398_672),
    "gpt2-xl": (1_557_611_200, 15_576_114_320),
    "gpt-neo-1.3b": (1_315_575_808, 13_155_759_344),
    "gpt-neox-20b": (20_554_567_680, 205_545_678_928),
    "pythia-6.9b": (6_857_302_016, 68_573_021_712),
    "llama2-7b": (6_738_415_616, 67_384_157_324),
    "llama2-13b": (13_015_864_320, 130_158_644_652),
    "llama2-70b": (68_976_648_192, 689_766_484_812),
    "llama3-8b": (8_030_261_248, 80_302_613_644),
    "llama3-70b": (70_553_706_496, 705_537_067_852),
    "llama3.1-405b": (405_853_388_800, 4_058_533_892_548),
    "llama3.2-1b": (1_235_814_400, 12_358_144_584),
    "llama3.2-3b": (3_212_749_824, 32_127_499_256),
    "mistral-7b": (7_241_732_096, 72_417_322_124),
    "mixtral-8x7b": (46_702_792_704, 467_027_931_020),
    "qwen2.5-0.5b": (494_032_768, 4_940_328_840),
    "qwen2.5-7b": (7_615_616_512, 76_156_166_476),
    "qwen2.5-72b": (72_706_203_648, 727_062_040_332),
    "qwen3-8b": (8_190_735_360, 81_907_355_196),
    "gemma2-2b": (2_614_341_888, 26_143_420_032),
    "gemma2-9b": (9_241_705_984, 92_417_061_696),
    "gemma2-27b": (27_227_128_320, 272_271_285_232),
    "deepseek-v3": (671_026_404_352, 6_710_264_284_260),
    "olmo-7b": (6_888_095_744, 68_880_958_344),
    "phi3-mini": (3_821_079_552, 38_210_796_300),
    "falcon-7b": (6_921_720_704, 69_217_207_820),
}
"""Parameters, tied ones once; and bytes of the state with AdamW's moments and a counter for each tensor, as torch and
transformers 5.23 built it."""


def size_of_tree(state: Any) -> int:
    """Return the bytes of the tensors in a nested state dict; repeated tensors count once."""
    seen = {id(tensor): tensor for tensor in _tensors(state)}
    return sum(int(tensor.numel()) * int(tensor.element_size()) for tensor in seen.values())


def _tensors(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _tensors(one)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        for one in value:
            yield from _tensors(one)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_size_that_was_published(name: str) -> None:
    size = size_of(preset(name), FORMATS["bf16+fp32-adam"])
    assert (size.parameters, size.nbytes) == PUBLISHED[name]


def test_the_state_of_a_real_optimizer_has_the_size_that_was_said() -> None:
    tiny = Decoder(2, 64, 4, 128, 100, kv_heads=2)
    model = nn.ParameterList(torch.ones(shape) for _, shape in tiny.parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    assert size_of_tree(state) == size_of(tiny, FORMATS["fp32"]).nbytes


def test_the_sizes_that_people_quote_of_70b() -> None:
    """2 and 8 bytes of 70e9 parameters, in GiB, are the 130 and 521 that AWS calls GB."""
    nominal = 70_000_000_000
    assert size_of_count(nominal, FORMATS["weights"]).nbytes / 2**30 == pytest.approx(130.39, abs=0.005)
    moments = StateFormat("fp32", moments=("bf16", "bf16"), step_counters=False)
    assert size_of_count(nominal, moments).nbytes / 2**30 == pytest.approx(521.54, abs=0.005)
    assert str(size_of(preset("llama3-70b"), FORMATS["weights"])) == "141.11 GB (131.42 GiB)"


def test_what_is_kept_of_each_parameter() -> None:
    assert [one.bytes_per_parameter for one in FORMATS.values()] == [2, 6, 8, 10, 12, 14, 18]


def test_a_tensor_that_is_there_twice_counts_once() -> None:
    weight = torch.zeros(3, 5)
    assert size_of_tree({"a": weight, "b": [weight, {"c": torch.zeros(7, dtype=torch.int8)}], "step": 4}) == 67


def test_names_that_are_not_there_come_with_the_nearest() -> None:
    with pytest.raises(NotFoundError) as unknown:
        preset("llama3-70")
    assert "did you mean" in unknown.value.hint
    with pytest.raises(ConfigError, match="did you mean `mixed`"):
        state_format("mixd")
    with pytest.raises(ConfigError, match="there is no type 'fp23'"):
        StateFormat("fp23")
