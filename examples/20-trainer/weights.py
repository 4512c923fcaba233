"""Weights in Hugging Face's format: a folder with config.json and files of safetensors. Nothing here is unpickled."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path

import torch
import torch.distributed as dist
from model import Model, Shape
from torch.distributed.tensor import DTensor, distribute_tensor

TOP = {"embed.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight", "head.weight": "lm_head.weight"}
IN_BLOCK = {
    "attention_norm.weight": "input_layernorm.weight",
    **{f"attention.{name}.weight": f"self_attn.{name}_proj.weight" for name in "qkvo"},
    "mlp_norm.weight": "post_attention_layernorm.weight",
    **{f"mlp.{name}.weight": f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
    "mlp.router.weight": "block_sparse_moe.gate.weight",
    "mlp.experts.gate": "block_sparse_moe.experts.{}.w1.weight",
    "mlp.experts.down": "block_sparse_moe.experts.{}.w2.weight",
    "mlp.experts.up": "block_sparse_moe.experts.{}.w3.weight",
}
"""Our names of tensors, with Hugging Face's. A tensor with `{}` is one for each expert."""

FILE_BYTES = 5 << 30


def names_of(name: str, shape: Shape) -> list[str]:
    """Return Hugging Face's names of our tensor `name`: one, or one for each expert."""
    if name in TOP:
        return [TOP[name]]
    _, number, rest = name.split(".", 2)
    found = f"model.layers.{number}.{IN_BLOCK[rest]}"
    return [found.format(expert) for expert in range(shape.num_local_experts)] if "{}" in found else [found]


def read_shape(folder: Path) -> Shape:
    """Return the sizes in config.json.

    Raises:
        ValueError: the model is not in the shape of Llama or Mixtral.
    """
    config = json.loads((folder / "config.json").read_text())
    heads, width = config["num_attention_heads"], config["hidden_size"]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}  # of newer, and of older versions
    kind = rope.get("rope_type", rope.get("type", "default"))
    expected = {
        "model_type": (config.get("model_type"), ("llama", "mistral", "mixtral")),
        "hidden_act": (config.get("hidden_act", "silu"), ("silu",)),
        "head_dim": (config.get("head_dim") or width // heads, (width // heads,)),
        "rope_type": (kind, ("default", "llama3")),
        **{name: (config.get(name) or False, (False,)) for name in ("attention_bias", "mlp_bias", "sliding_window")},
    }
    if wrong := [f"{name} {value!r}" for name, (value, valid) in expected.items() if value not in valid]:
        raise ValueError(f"{folder}/config.json: {', '.join(wrong)}: model.py has no such model. Choose another model.")
    known = {field.name for field in fields(Shape)} - {"rope_scaling"}
    sizes = {name: value for name, value in {**rope, **config}.items() if name in known and value is not None}
    return Shape(**{"num_key_value_heads": heads, **sizes}, rope_scaling=rope if kind == "llama3" else None)


def load(model: Model, folder: Path) -> None:
    """Read the weights. Each process reads one tensor after the other, and keeps its own part of each.

    Raises:
        ValueError: a tensor is missing, or the model has none of this name.
    """
    from safetensors import safe_open

    files = [safe_open(file, framework="pt") for file in sorted(folder.glob("*.safetensors"))]
    found = {name: (file, name) for file in files for name in file.keys()}  # noqa: SIM118  # file is no dict
    if "model.embed_tokens.weight" in found:  # tied weights: both copies begin with the same values
        found.setdefault("lm_head.weight", found["model.embed_tokens.weight"])
    wanted = {name: names_of(name, model.shape) for name, _ in model.named_parameters()}
    known = {each for names in wanted.values() for each in names}
    if known != found.keys():
        missing, unknown = sorted(known - found.keys()), sorted(found.keys() - known)
        raise ValueError(
            f"{folder}: {len(missing)} tensors are missing, such as {missing[:1]}; {len(unknown)} are not of this "
            f"model, such as {unknown[:1]}. Pass a folder with the .safetensors files of one Llama or Mixtral model."
        )
    for name, parameter in model.named_parameters():
        parts = [file.get_tensor(each) for file, each in map(found.__getitem__, wanted[name])]
        put(parameter, torch.stack(parts) if is_stacked(name) else parts[0])


@torch.no_grad()
def put(parameter: torch.Tensor, complete: torch.Tensor) -> None:
    """Copy this rank's part of a tensor into the parameter, without communication."""
    if parameter.shape != complete.shape:
        raise ValueError(f"a tensor has the shape {tuple(complete.shape)}; config.json says {tuple(parameter.shape)}")
    if isinstance(parameter, DTensor):
        mesh, placements = parameter.device_mesh, parameter.placements
        part = distribute_tensor(complete.to(parameter.dtype), mesh, placements, src_data_rank=None)
        parameter.to_local().copy_(part.to_local())
    else:
        parameter.copy_(complete)


def is_stacked(name: str) -> bool:
    """Return whether our tensor `name` has the weights of all experts."""
    return ".experts." in name


def complete_tensors(model: Model) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor with Hugging Face's name. Collective."""
    for name, parameter in model.named_parameters():
        tensor = parameter.detach()
        complete = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        parts = list(complete) if is_stacked(name) else [complete]
        yield from zip(names_of(name, model.shape), (part.cpu().contiguous() for part in parts), strict=True)


def export(model: Model, folder: Path, file_bytes: int = 5 << 30) -> None:
    """Write config.json and the weights in files of `file_bytes`. Collective; rank 0 writes.

    A file appears under its name when it is complete; the index is written last.
    """
    from safetensors.torch import save_file

    writes = dist.get_rank() == 0
    places: dict[str, str] = {}
    batch: dict[str, torch.Tensor] = {}
    written = 0

    def write() -> None:
        nonlocal batch, written
        written += 1
        file = folder / f"model-{written:05}.safetensors"
        save_file(batch, file.with_suffix(".partial"), metadata={"format": "pt"})
        file.with_suffix(".partial").replace(file)
        places.update(dict.fromkeys(batch, file.name))
        batch = {}

    if writes:
        folder.mkdir(parents=True, exist_ok=True)
    total = 0
    for name, tensor in complete_tensors(model):
        if writes:
            if batch and sum(each.nbytes for each in batch.values()) + tensor.nbytes > file_bytes:
                write()
            batch[name] = tensor.clone()
            total += tensor.nbytes
    if writes:
        write()
        (folder / "config.json").write_text(json.dumps(config_of(model.shape), indent=2))
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def config_of(shape: Shape) -> dict[str, object]:
    """Return the contents of config.json."""
    moe = shape.num_local_experts > 0
    experts = () if moe else ("num_local_experts", "num_experts_per_tok", "router_aux_loss_coef")
    return {
        "architectures": ["MixtralForCausalLM" if moe else "LlamaForCausalLM"],
        "model_type": "mixtral" if moe else "llama",
        **{name: value for name, value in asdict(shape).items() if name not in experts},
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
