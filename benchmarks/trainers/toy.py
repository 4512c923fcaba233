"""Models and data that both scripts of a trainer use. They are small and need no network."""

from __future__ import annotations

import os
import random
from typing import Any

import torch

STEPS, SAVE_EVERY = 16, 4
OUT = os.environ.get("OUT", "out")
"""Folder of the checkpoints that a script saves by itself."""
WORDS = [f"w{number}" for number in range(60)]


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    special = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=63, num_key_value_heads=2, attention_dropout=0.1, **shape, **special)
    )


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, padding_side="left", **special)


def text(number: int, words: int = 8) -> str:
    drawn = random.Random(number)
    return " ".join(drawn.choice(WORDS) for _ in range(words))


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random token sequences."""

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = torch.randint(3, 63, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": words, "labels": words}


class Rotated(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Random vectors, each with the same vector rotated by one place."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(64, generator=torch.Generator().manual_seed(index))
        return x, x.roll(1)


class Images(torch.utils.data.Dataset[torch.Tensor]):
    """Random images of 3 channels, 16 pixels wide and high."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(index))


def sentence_model() -> Any:
    from sentence_transformers import SentenceTransformer, models

    embedding = models.StaticEmbedding(tokenizer().backend_tokenizer, embedding_dim=16)
    return SentenceTransformer(modules=[embedding])
