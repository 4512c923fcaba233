"""Transformers as plain torch.nn modules, written from their papers: on the meta device they weigh nothing, and torch
counts their parameters. No forward pass is here; what is compared is what a checkpoint would hold."""

from __future__ import annotations

import torch
from torch import nn


class Linear(nn.Linear):
    """Not filled with numbers: there is nothing to fill."""

    def reset_parameters(self) -> None:
        pass


class Scale(nn.Module):
    """RMSNorm has one number a channel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))


class Gpt2Block(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.c_attn, self.c_proj = Linear(d, 3 * d), Linear(d, d)
        self.fc, self.proj = Linear(d, 4 * d), Linear(4 * d, d)


class Gpt2(nn.Module):
    def __init__(self, layers: int, d: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(50257, d), nn.Embedding(1024, d)
        self.h = nn.ModuleList(Gpt2Block(d) for _ in range(layers))
        self.ln_f = nn.LayerNorm(d)
        self.lm_head = Linear(d, 50257, bias=False)
        self.lm_head.weight = self.wte.weight


class GptNeoBlock(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.q, self.k, self.v = (Linear(d, d, bias=False) for _ in range(3))
        self.o, self.fc, self.proj = Linear(d, d), Linear(d, 4 * d), Linear(4 * d, d)


class GptNeo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(50257, 2048), nn.Embedding(2048, 2048)
        self.h = nn.ModuleList(GptNeoBlock(2048) for _ in range(24))
        self.ln_f, self.lm_head = nn.LayerNorm(2048), Linear(2048, 50257, bias=False)
        self.lm_head.weight = self.wte.weight


class NeoX(nn.Module):
    """Output layer of its own; query, key and value in one matrix."""

    def __init__(self, layers: int, d: int, vocab: int) -> None:
        super().__init__()
        self.embed_in, self.embed_out = nn.Embedding(vocab, d), Linear(d, vocab, bias=False)
        self.layers = nn.ModuleList(Gpt2Block(d) for _ in range(layers))
        self.final_layer_norm = nn.LayerNorm(d)


class GatedMlp(nn.Module):
    def __init__(self, d: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = Linear(d, inner, bias=False), Linear(d, inner, bias=False)
        self.down_proj = Linear(inner, d, bias=False)


class Mixture(nn.Module):
    def __init__(self, d: int, inner: int, experts: int, shared: int = 0) -> None:
        super().__init__()
        self.gate = Linear(d, experts, bias=False)
        self.experts = nn.ModuleList(GatedMlp(d, inner) for _ in range(experts))
        if shared:
            self.shared = GatedMlp(d, shared * inner)


class GroupedAttention(nn.Module):
    def __init__(self, d: int, heads: int, kv: int, head: int, bias: bool = False, head_norm: bool = False) -> None:
        super().__init__()
        self.q_proj = Linear(d, heads * head, bias=bias)
        self.k_proj, self.v_proj = Linear(d, kv * head, bias=bias), Linear(d, kv * head, bias=bias)
        self.o_proj = Linear(heads * head, d, bias=False)
        if head_norm:
            self.q_norm, self.k_norm = Scale(head), Scale(head)


class LlamaBlock(nn.Module):
    def __init__(self, d: int, attention: nn.Module, mlp: nn.Module, norms: int = 2) -> None:
        super().__init__()
        self.self_attn, self.mlp = attention, mlp
        self.norms = nn.ModuleList(Scale(d) for _ in range(norms))


class Llama(nn.Module):
    """And all that are built like it."""

    def __init__(self, d: int, vocab: int, blocks: list[LlamaBlock], tied: bool = False) -> None:
        super().__init__()
        self.embed_tokens, self.lm_head = nn.Embedding(vocab, d), Linear(d, vocab, bias=False)
        self.layers, self.norm = nn.ModuleList(blocks), Scale(d)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight


def llama(
    layers: int,
    d: int,
    heads: int,
    kv: int,
    inner: int,
    vocab: int,
    *,
    head: int = 128,
    bias: bool = False,
    tied: bool = False,
    norms: int = 2,
    head_norm: bool = False,
    experts: int = 0,
) -> Llama:
    def block() -> LlamaBlock:
        mlp: nn.Module = Mixture(d, inner, experts) if experts else GatedMlp(d, inner)
        return LlamaBlock(d, GroupedAttention(d, heads, kv, head, bias, head_norm), mlp, norms)

    return Llama(d, vocab, [block() for _ in range(layers)], tied)


class LatentAttention(nn.Module):
    """DeepSeek-V3, section 2.1.1."""

    def __init__(self) -> None:
        super().__init__()
        self.q_a_proj, self.q_a_layernorm = Linear(7168, 1536, bias=False), Scale(1536)
        self.q_b_proj = Linear(1536, 128 * (128 + 64), bias=False)
        self.kv_a_proj_with_mqa, self.kv_a_layernorm = Linear(7168, 512 + 64, bias=False), Scale(512)
        self.kv_b_proj = Linear(512, 128 * (128 + 128), bias=False)
        self.o_proj = Linear(128 * 128, 7168, bias=False)


def deepseek_v3() -> Llama:
    def block(layer: int) -> LlamaBlock:
        if layer < 3:
            return LlamaBlock(7168, LatentAttention(), GatedMlp(7168, 18432))
        mixture = Mixture(7168, 2048, 256, shared=1)
        mixture.register_buffer("e_score_correction_bias", torch.empty(256))
        return LlamaBlock(7168, LatentAttention(), mixture)

    return Llama(7168, 129280, [block(layer) for layer in range(61)])


class Olmo(nn.Module):
    """Its norms have no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens, self.lm_head = nn.Embedding(50304, 4096), Linear(4096, 50304, bias=False)
        self.attention = nn.ModuleList(GroupedAttention(4096, 32, 32, 128) for _ in range(32))
        self.mlp = nn.ModuleList(GatedMlp(4096, 11008) for _ in range(32))
        self.norm = nn.LayerNorm(4096, elementwise_affine=False)


class Phi3Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj, self.o_proj = Linear(3072, 9216, bias=False), Linear(3072, 3072, bias=False)
        self.gate_up_proj, self.down_proj = Linear(3072, 16384, bias=False), Linear(8192, 3072, bias=False)
        self.input_layernorm, self.post_attention_layernorm = Scale(3072), Scale(3072)


class Phi3(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens, self.lm_head = nn.Embedding(32064, 3072), Linear(3072, 32064, bias=False)
        self.layers, self.norm = nn.ModuleList(Phi3Block() for _ in range(32)), Scale(3072)


class FalconBlock(nn.Module):
    """One key and one value for all 71 heads; attention and feed-forward beside each other behind one norm."""

    def __init__(self) -> None:
        super().__init__()
        d = 4544
        self.query_key_value, self.dense = Linear(d, d + 2 * 64, bias=False), Linear(d, d, bias=False)
        self.up, self.down = Linear(d, 4 * d, bias=False), Linear(4 * d, d, bias=False)
        self.input_layernorm = nn.LayerNorm(d)


class Falcon(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings, self.lm_head = nn.Embedding(65024, 4544), Linear(4544, 65024, bias=False)
        self.h, self.ln_f = nn.ModuleList(FalconBlock() for _ in range(32)), nn.LayerNorm(4544)
        self.lm_head.weight = self.word_embeddings.weight


def build(name: str) -> nn.Module:
    """The model of this name, with the numbers of its own paper or model card."""
    match name:
        case "gpt2":
            return Gpt2(12, 768)
        case "gpt2-xl":
            return Gpt2(48, 1600)
        case "gpt-neo-1.3b":
            return GptNeo()
        case "gpt-neox-20b":
            return NeoX(44, 6144, 50432)
        case "pythia-6.9b":
            return NeoX(32, 4096, 50432)
        case "llama2-7b":
            return llama(32, 4096, 32, 32, 11008, 32000)
        case "llama2-13b":
            return llama(40, 5120, 40, 40, 13824, 32000)
        case "llama2-70b":
            return llama(80, 8192, 64, 8, 28672, 32000)
        case "llama3-8b":
            return llama(32, 4096, 32, 8, 14336, 128256)
        case "llama3-70b":
            return llama(80, 8192, 64, 8, 28672, 128256)
        case "llama3.1-405b":
            return llama(126, 16384, 128, 8, 53248, 128256)
        case "llama3.2-1b":
            return llama(16, 2048, 32, 8, 8192, 128256, head=64, tied=True)
        case "llama3.2-3b":
            return llama(28, 3072, 24, 8, 8192, 128256, tied=True)
        case "mistral-7b":
            return llama(32, 4096, 32, 8, 14336, 32000)
        case "mixtral-8x7b":
            return llama(32, 4096, 32, 8, 14336, 32000, experts=8)
        case "qwen2.5-0.5b":
            return llama(24, 896, 14, 2, 4864, 151936, head=64, bias=True, tied=True)
        case "qwen2.5-7b":
            return llama(28, 3584, 28, 4, 18944, 152064, bias=True)
        case "qwen2.5-72b":
            return llama(80, 8192, 64, 8, 29568, 152064, bias=True)
        case "qwen3-8b":
            return llama(36, 4096, 32, 8, 12288, 151936, head_norm=True)
        case "gemma2-2b":
            return llama(26, 2304, 8, 4, 9216, 256000, head=256, tied=True, norms=4)
        case "gemma2-9b":
            return llama(42, 3584, 16, 8, 14336, 256000, head=256, tied=True, norms=4)
        case "gemma2-27b":
            return llama(46, 4608, 32, 16, 36864, 256000, tied=True, norms=4)
        case "deepseek-v3":
            return deepseek_v3()
        case "olmo-7b":
            return Olmo()
        case "phi3-mini":
            return Phi3()
        case "falcon-7b":
            return Falcon()
    raise KeyError(name)
