"""Parameters of models as the library transformers builds them on the meta device; prints JSON, name to count.

Runs by itself, where transformers is: its own default configurations where those are the model, else the published
differences from them.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import transformers as hf

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {}),
    "gpt2-xl": ("GPT2Config", "GPT2LMHeadModel", {"n_layer": 48, "n_embd": 1600, "n_head": 25}),
    "gpt-neo-1.3b": ("GPTNeoConfig", "GPTNeoForCausalLM", {}),
    "gpt-neox-20b": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {}),
    "llama2-7b": ("LlamaConfig", "LlamaForCausalLM", {}),
    "llama3-8b": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256},
    ),
    "llama3-70b": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {
            "num_hidden_layers": 80,
            "hidden_size": 8192,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "intermediate_size": 28672,
            "vocab_size": 128256,
        },
    ),
    "mistral-7b": ("MistralConfig", "MistralForCausalLM", {}),
    "mixtral-8x7b": ("MixtralConfig", "MixtralForCausalLM", {}),
    "qwen2.5-7b": (
        "Qwen2Config",
        "Qwen2ForCausalLM",
        {
            "num_hidden_layers": 28,
            "hidden_size": 3584,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "intermediate_size": 18944,
            "vocab_size": 152064,
        },
    ),
    "qwen2.5-0.5b": (
        "Qwen2Config",
        "Qwen2ForCausalLM",
        {
            "num_hidden_layers": 24,
            "hidden_size": 896,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "intermediate_size": 4864,
            "tie_word_embeddings": True,
        },
    ),
    "gemma2-2b": ("Gemma2Config", "Gemma2ForCausalLM", {}),
    "deepseek-v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", {}),
    "olmo-7b": ("OlmoConfig", "OlmoForCausalLM", {}),
    "phi3-mini": ("Phi3Config", "Phi3ForCausalLM", {}),
    "falcon-7b": ("FalconConfig", "FalconForCausalLM", {}),
}


def count(name: str) -> int:
    config_name, class_name, changes = MODELS[name]
    config = getattr(hf, config_name)(**changes)
    with torch.device("meta"):
        model = getattr(hf, class_name)(config)
    model.tie_weights()
    return sum(parameter.numel() for parameter in model.parameters())


if __name__ == "__main__":
    json.dump({name: count(name) for name in sys.argv[1:] or MODELS}, sys.stdout)
