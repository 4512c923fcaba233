"""Models of examples/20-trainer: equations of the layers, names of weights, and the example's length."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "20-trainer"
TINY = ("llama-tiny", "moe-tiny")


def built(trainer: SimpleNamespace, name: str) -> nn.Module:
    torch.manual_seed(0)
    model = trainer.model.Model(trainer.model.SHAPES[name])
    trainer.model.initialize(model, 2)
    return model


def tokens(count: int = 17) -> torch.Tensor:
    return torch.randint(256, (2, count), generator=torch.Generator().manual_seed(1))


def test_the_example_has_less_than_800_lines() -> None:
    assert sum(len(file.read_text().splitlines()) for file in EXAMPLE.glob("*.py")) < 800


def test_a_token_follows_from_earlier_tokens_only(trainer: SimpleNamespace) -> None:
    model, first = built(trainer, "llama-tiny"), tokens()
    second = first.clone()
    second[:, 9:] = 0
    logits, others = model.logits(first)[0], model.logits(second)[0]
    assert torch.equal(logits[:, :9], others[:, :9])
    assert not torch.allclose(logits[:, 9:], others[:, 9:])


def test_attention_depends_on_distances_alone(trainer: SimpleNamespace) -> None:
    cos, sin = trainer.model.rotations(trainer.model.SHAPES["llama-tiny"], 32, torch.device("cpu"))
    q, k = torch.randn(2, 1, 1, 16).unbind()
    rotated = [trainer.model.rotate(each.expand(1, 1, 32, 16), cos, sin)[0, 0] for each in (q, k)]
    products = rotated[0] @ rotated[1].T
    assert torch.allclose(products[5, 2], products[25, 22], atol=1e-5)
    assert not torch.allclose(products[5, 2], products[5, 3], atol=1e-3)


def test_each_token_goes_through_its_experts(trainer: SimpleNamespace) -> None:
    shape = trainer.model.SHAPES["moe-tiny"]
    moe = trainer.model.MoE(shape)
    nn.init.normal_(moe.router.weight)
    trainer.model.initialize(moe.experts, 2)
    x = torch.randn(2, 5, shape.hidden_size)
    output, balance = moe(x)
    experts, load = moe.experts, torch.zeros(shape.num_local_experts)
    for sequence in range(2):
        for position in range(5):
            token = x[sequence, position]
            weights, chosen = moe.router(token).softmax(-1).topk(2)
            load[chosen] += 1
            expected = torch.zeros_like(token)
            for weight, expert in zip(weights / weights.sum(), chosen.tolist(), strict=True):
                inner = F.silu(experts.gate[expert] @ token) * (experts.up[expert] @ token)
                expected += weight * (experts.down[expert] @ inner)
            assert torch.allclose(output[sequence, position], expected, atol=1e-6)
    scores = moe.router(x).softmax(-1).flatten(0, 1)
    assert torch.allclose(balance, 4 * (load / 10 * scores.mean(0)).sum())


def test_recomputed_activations_give_the_same_gradients(trainer: SimpleNamespace) -> None:
    gradients = []
    for recompute in (False, True):
        model = built(trainer, "moe-tiny")
        for block in model.blocks:
            block.recompute = recompute
        loss, balance = model(tokens()[:, :-1], tokens()[:, 1:])
        (loss + balance).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(plain, again) for plain, again in zip(*gradients, strict=True))


@pytest.mark.parametrize("name", TINY)
def test_each_tensor_has_its_name_of_hugging_face(trainer: SimpleNamespace, name: str) -> None:
    shape = trainer.model.SHAPES[name]
    ours = [own for own, _ in built(trainer, name).named_parameters()]
    theirs = [each for own in ours for each in trainer.weights.names_of(own, shape)]
    experts = shape.num_local_experts
    assert len(set(theirs)) == len(theirs) == 3 + 2 * (6 + (1 + 3 * experts if experts else 3))
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.layers.1.self_attn.o_proj.weight"} <= set(theirs)
    last = "block_sparse_moe.experts.3.w2" if experts else "mlp.down_proj"
    assert f"model.layers.1.{last}.weight" in theirs


@pytest.mark.parametrize("name", TINY)
def test_the_sizes_in_config_json_are_read_again(trainer: SimpleNamespace, tmp_path: Path, name: str) -> None:
    shape = trainer.model.SHAPES[name]
    (tmp_path / "config.json").write_text(json.dumps(trainer.weights.config_of(shape)))
    assert trainer.weights.read_shape(tmp_path) == shape


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"attention_bias": True}, "attention_bias True"),
        ({"model_type": "qwen3"}, "model_type 'qwen3'"),
        ({"head_dim": 32}, "head_dim 32"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_type 'yarn'"),
    ],
)
def test_other_models_are_refused(
    trainer: SimpleNamespace, tmp_path: Path, change: dict[str, object], error: str
) -> None:
    config = trainer.weights.config_of(trainer.model.SHAPES["llama-tiny"]) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=error):
        trainer.weights.read_shape(tmp_path)
