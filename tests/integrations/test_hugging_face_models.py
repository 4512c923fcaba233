"""Hugging Face's Trainer with FSDP2 and with LoRA, the real libraries: two kills change no bit and lose no step."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from integrations_env import hp_ext
from killed_twice import AT_ONCE, run_killed

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(1200)]
LOAD = """
import sys, torch
from transformers import AutoModelForCausalLM
if sys.argv[2] == "lora":
    from peft import AutoPeftModelForCausalLM as AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
assert all(torch.isfinite(each).all() for each in model.parameters())
print(sum(each.numel() for each in model.parameters()))
"""


@pytest.mark.parametrize(
    "kind",
    ["sharded", "accumulated", "checkpointed", "sharded-by-script", "bf16", "sharded-bf16", "lora", "sharded-lora"],
)
def test_two_kills_change_no_bit(tmp_path: Path, kind: str) -> None:
    report = run_killed(tmp_path, "hugging_face_models.py", kind, str(tmp_path), batch=4, name=kind, checkpoint=AT_ONCE)
    assert sorted(map(int, report["losses"])) == list(range(1, 17))
    assert len(set(report["losses"].values())) == 16, "it learns"
    saved = [tmp_path / "saved", "lora" if "lora" in kind else ""]
    if "lora" not in kind:  # the configuration of a LoRA names a base model, which was never saved
        subprocess.run([hp_ext().with_name("python"), "-c", LOAD, *saved], check=True, timeout=200)
