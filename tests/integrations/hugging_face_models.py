"""Hugging Face's Trainer with models of the kind that the first argument names: sharded, with LoRA, or both."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from hyperpod_ext.integrations.hugging_face import ResilientTrainer
from hyperpod_ext.runtime import Run, resilient

STEPS = 16
FSDP = {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}


def llama() -> LlamaForCausalLM:
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=63, num_key_value_heads=2, **shape))


def sharded_llama() -> LlamaForCausalLM:
    model = llama()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def with_lora() -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = torch.randint(3, 63, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": words, "labels": words}


def train(run: Run, build: Callable[[], Any], **options: Any) -> None:
    """Train, and save the model to a folder that a test then reads."""
    common = {"output_dir": tempfile.mkdtemp(), "max_steps": STEPS, "learning_rate": 1e-2, "save_strategy": "no"}
    common |= {"report_to": "none", "use_cpu": True, "per_device_train_batch_size": 2, "logging_steps": 4}
    trainer = ResilientTrainer(
        run, model=run.keep(build), args=TrainingArguments(**common | options), train_dataset=Tokens()
    )
    trainer.train()
    trainer.save_model(str(Path(sys.argv[2]) / "saved"))


KINDS: dict[str, Callable[[Run], None]] = {
    "sharded": lambda run: train(run, llama, **FSDP),
    "accumulated": lambda run: train(run, llama, gradient_accumulation_steps=2, per_device_train_batch_size=1, **FSDP),
    "checkpointed": lambda run: train(run, llama, gradient_checkpointing=True, **FSDP),
    "bf16": lambda run: train(run, llama, bf16=True),
    "sharded-bf16": lambda run: train(run, llama, bf16=True, **FSDP),
    "sharded-by-script": lambda run: train(run, sharded_llama),
    "lora": lambda run: train(run, with_lora),
    "sharded-lora": lambda run: train(run, with_lora, **FSDP),
}

if __name__ == "__main__":
    resilient(KINDS[sys.argv[1]])()
