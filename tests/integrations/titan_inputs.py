"""What TorchTitan reads, written beside this script: its configuration, a tokenizer and texts; the package has none."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

HERE = Path(__file__).parent
CONFIG = f"""
[job]
dump_folder = "{HERE}/outputs"
[metrics]
log_freq = 1
[model]
name = "llama3"
flavor = "debugmodel"
hf_assets_path = "{HERE}/tokenizer"
[optimizer]
name = "AdamW"
lr = 8e-4
[training]
local_batch_size = 2
seq_len = 64
steps = 16
dataset = "c4_test"
dataset_path = "{HERE}/samples"
"""


def write_inputs() -> None:
    special = ["<|begin_of_text|>", "<|end_of_text|>"]
    texts = [f"{n} times {n + k} is {n * (n + k)}, as everybody knows. " * 8 for n in range(40) for k in range(5)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=600, special_tokens=special))
    (HERE / "tokenizer").mkdir()
    tokenizer.save(str(HERE / "tokenizer" / "tokenizer.json"))
    named = dict(zip(("bos_token", "eos_token"), special, strict=True))
    (HERE / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(named))
    (HERE / "samples").mkdir()
    (HERE / "samples" / "data.json").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (HERE / "debug.toml").write_text(CONFIG)


write_inputs()
