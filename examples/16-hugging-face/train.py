"""A small Llama learns to write Python from Python's own sources, one byte at a time, by Hugging Face's Trainer.

hp-ext create-job -f job.yaml --target local --wait
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from hyperpod_ext.integrations.hugging_face import ResilientTrainer
from hyperpod_ext.runtime import Run, resilient

CONTEXT = 64


class Bytes(torch.utils.data.Dataset):
    """Windows of the standard library's sources."""

    def __init__(self) -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:20]
        self.text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)

    def __len__(self) -> int:
        return 128  # an epoch of 8 steps

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = self.text[index * CONTEXT : (index + 1) * CONTEXT].long()
        return {"input_ids": window, "labels": window}


def build() -> LlamaForCausalLM:
    shape = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
        attention_dropout=0.1,
    )
    return LlamaForCausalLM(shape)


@resilient
def train(run: Run) -> None:
    arguments = TrainingArguments(
        output_dir="/tmp/hyperpod-ext-16-hugging-face",
        max_steps=args.steps,
        per_device_train_batch_size=run.batch_size // 2,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        warmup_steps=5,
        logging_steps=10,
        save_strategy="no",  # snapshots are the job's
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = ResilientTrainer(run, model=run.keep(build), args=arguments, train_dataset=Bytes())
    trainer.train()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
    args = parser.parse_args()
    train()
