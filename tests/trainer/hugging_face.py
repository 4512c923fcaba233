"""Weights of examples/20-trainer next to Hugging Face's models; `test_weights.py` runs this with their packages.

Prints one JSON object: the largest difference of logits in each case, and the result of a copy by four ranks.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "20-trainer"
sys.path.insert(0, str(EXAMPLE))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from model import SHAPES, Model, initialize  # noqa: E402
from parallel import build_model, make_mesh  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig  # noqa: E402
from weights import export, load, read_shape  # noqa: E402

SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LONGER = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**SIZES),
    "tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama 3.1": LlamaConfig(**SIZES, rope_parameters=LONGER),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, sliding_window=None),
}
TOKENS = torch.arange(128).remainder(97).view(2, 64)


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@torch.no_grad()
def difference(theirs: Any, ours: Model) -> float:
    return (theirs.eval()(TOKENS).logits - ours.logits(TOKENS)[0]).abs().max().item()


def from_theirs(config: Any, folder: Path) -> float:
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(config)
    for parameter in theirs.parameters():
        if parameter.dim() > 1:  # their first weights are so small that all logits are nearly equal
            torch.nn.init.normal_(parameter, std=0.2)
        else:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.1)
    theirs.save_pretrained(folder)
    ours = Model(read_shape(folder))
    load(ours, folder)
    return difference(theirs, ours)


def to_theirs(name: str, folder: Path) -> float:
    torch.manual_seed(1)
    ours = Model(SHAPES[name])
    initialize(ours, 1)
    export(ours, folder, file_bytes=100_000)
    assert len(list(folder.glob("*.safetensors"))) > 1
    again = Model(read_shape(folder))
    load(again, folder)
    assert all(torch.equal(one, other) for one, other in zip(ours.parameters(), again.parameters(), strict=True))
    return difference(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), ours)


def copy_by_four_ranks(source: Path, target: Path) -> bool:
    """Return whether tensors that FSDP2 and TP over 2 x 2 ranks have loaded are exported with the same bits."""
    store, children = tempfile.mktemp(), []
    for rank in range(4):
        if (child := os.fork()) == 0:
            dist.init_process_group("gloo", rank=rank, world_size=4, store=dist.FileStore(store, 4))
            mesh = make_mesh("cpu", 4, 2)
            model = build_model(read_shape(source), mesh, bf16=False, recompute=False, compiled=False)
            load(model, source)
            export(model, target)
            dist.barrier()
            os._exit(0)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    read, written = tensors_in(source), tensors_in(target)
    return read.keys() == written.keys() and all(torch.equal(read[name], written[name]) for name in read)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        found: dict[str, Any] = {f"from {name}": from_theirs(config, folder / name) for name, config in CONFIGS.items()}
        for name in ("llama", "mixtral"):
            found[f"four ranks {name}"] = copy_by_four_ranks(folder / name, folder / f"{name}-copy")
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        for name in ("llama-tiny", "moe-tiny"):
            found[f"to {name}"] = to_theirs(name, folder / name)
        dist.destroy_process_group()
    print(json.dumps(found))
