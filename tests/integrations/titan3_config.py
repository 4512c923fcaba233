"""A small configuration of TorchTitan 0.3, which reads the files of titan_inputs.py beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torchtitan.models.llama3.config_registry import llama3_debugmodel

HERE = Path(__file__).parent


def small(steps: int) -> Any:
    config = llama3_debugmodel()
    config.dump_folder, config.hf_assets_path = str(HERE / "outputs"), str(HERE / "tokenizer")
    config.dataloader.dataset_path = str(HERE / "samples")
    config.training.local_batch_size, config.training.seq_len, config.training.steps = 2, 64, steps
    config.training.mixed_precision_param = "float32"
    config.activation_checkpoint = None
    return config
