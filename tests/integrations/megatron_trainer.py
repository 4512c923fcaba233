"""A GPT of Megatron-core, its tensor parallelism over two ranks, as `test_trainers.py` runs it through faults.

Megatron-core asks for CUDA. What stands between it and a CPU is `OnCpu`, and nothing of that is ours to mend.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

STEPS, BATCH, WORDS, LENGTH, TENSOR_PARALLEL = 16, 2, 256, 32, 2


class OnCpu(TorchFunctionMode):
    """Whatever is to be on a GPU is on the CPU, and says that it is not."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        device = options.get("device")
        if isinstance(device, int) or "cuda" in str(device):
            options["device"] = "cpu"
        if function is torch.Tensor.type and len(args) == 1 and not options:
            return function(args[0]).replace("torch.", "torch.cuda.")
        if function is torch.Tensor.cuda:
            return args[0]
        return function(*args, **options)


torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
torch.cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
torch.cuda.manual_seed = torch.manual_seed  # type: ignore[assignment]

from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel import random as megatron_random  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from hyperpod_ext.runtime import Run, resilient  # noqa: E402

megatron_random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
megatron_random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


def build() -> tuple[Any, Any]:
    if parallel_state.model_parallel_is_initialized():  # this process has outlived a fault
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(TENSOR_PARALLEL)
    megatron_random.model_parallel_cuda_manual_seed(123)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        tensor_model_parallel_size=TENSOR_PARALLEL,
        gradient_accumulation_fusion=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )
    layers = get_gpt_layer_local_spec()
    model = GPTModel(config, layers, vocab_size=WORDS, max_sequence_length=LENGTH)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    return model, get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3), [model])


def batches(seed: int) -> Iterator[torch.Tensor]:
    chance = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randint(0, WORDS, (BATCH, LENGTH + 1), generator=chance)


def forward(data: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Any]:
    words = next(data)
    places = torch.arange(LENGTH)[None].expand(BATCH, -1)
    later = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1)[None, None]
    result = model(words[:, :-1].contiguous(), places, later, labels=words[:, 1:].contiguous())
    return result, lambda losses: (losses.float().mean(), {"loss": losses.float().mean().detach()})


@resilient
def train(run: Run) -> None:
    with OnCpu():
        model, optimizer = run.keep(build)
        (adam,) = (each.optimizer for each in getattr(optimizer, "chained_optimizers", [optimizer]))
        run.restore(model=model, optimizer=adam)
        make_gradients = get_forward_backward_func()
        for step in run.steps(STEPS):
            model.zero_grad_buffer()
            optimizer.zero_grad()
            losses = make_gradients(
                forward_step_func=forward,
                data_iterator=batches(100 * step + parallel_state.get_data_parallel_rank()),
                model=model,
                num_microbatches=2,
                seq_length=LENGTH,
                micro_batch_size=BATCH,
                decoder_seq_length=LENGTH,
                forward_only=False,
            )
            model.finish_grad_sync()
            optimizer.step()
            mean = torch.stack([each["loss"] for each in losses]).mean() / run.world_size
            dist.all_reduce(mean)
            run.log(loss=mean)


if os.environ.get("HPX_RUNTIME"):
    train()
