"""FSDP2 models of Hugging Face's Trainer.

Transformers trains an already sharded model without wrapping it again, if the model is marked as sharded during
loading. Source: `is_distributed_loading_by_transformers` in `transformers/trainer.py` (5.23.0).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_apply_ac, fsdp2_prepare_model
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.training.run import Run


def shard(run: Run, options: dict[str, Any]) -> bool:
    """Shard the model as `args` ask for, and mark it as sharded. Return whether the model is sharded.

    Args:
        options: options of the trainer. `args` and `model` are replaced if `args` ask for FSDP: the trainer then gets a
            sharded model, and args without FSDP.

    Raises:
        JobFailedError: `args` ask for FSDP1, for FSDP in a job whose number of ranks may change, for FSDP without a
            model, or for checkpoints that transformers cannot make of a sharded model.
    """
    args = options.get("args")
    if getattr(args, "fsdp_plugin_args", None) is not None:  # untested versions of transformers may lack this field
        options["args"], options["model"] = _without_fsdp(args), _sharded(run, args, options.get("model"))
    model = options.get("model")
    if not isinstance(model, FSDPModule):
        return False
    if args is not None and args.save_strategy != "no" and not args.save_only_model:
        raise JobFailedError(
            "args: transformers cannot save the optimizer of a sharded model",
            hint="Set save_only_model=True, or save_strategy='no': the job's tiers keep the whole state.",
        )
    name = "is_distributed_loading_by_transformers"
    # in models of transformers, `is_distributed_loading_by_transformers` is a property without a setter
    setattr(model, f"_{name}" if hasattr(type(model), name) else name, True)
    setattr(model, "_is_fsdp_managed_module", True)  # noqa: B010  torch's class declares no such attribute
    return True


def _without_fsdp(args: Any) -> Any:
    args = copy.copy(args)
    args.fsdp, args.fsdp_plugin_args = None, None
    return args


def _sharded(run: Run, args: Any, model: Any) -> torch.nn.Module:
    """Shard `model` with accelerate's function, in the first call in this process; return the sharded model."""
    chosen = dict(args.fsdp_plugin_args)
    if chosen["fsdp_version"] != 2:
        raise JobFailedError(
            "args.fsdp_config enables FSDP1, whose state cannot be restored after a fault",
            hint="Set fsdp_config={'version': 2}.",
        )
    if run.config.elastic is not None or run.config.restart.policy == "continue":
        raise JobFailedError(
            "args enable FSDP, but the number of ranks of this job may change, and a model cannot be sharded twice",
            hint="Shard the model with fully_shard in the function given to run.keep, and leave fsdp out of args.",
        )
    if model is None:
        raise JobFailedError("args enable FSDP, but the trainer has no model", hint="Give model=run.keep(build).")
    # no cpu_ram_efficient_loading, because every rank has already built the model
    plugin = FullyShardedDataParallelPlugin(**chosen | {"cpu_ram_efficient_loading": False})

    def build() -> torch.nn.Module:
        if isinstance(model, FSDPModule):
            raise JobFailedError("args enable FSDP, but the model is already sharded", hint="Leave fsdp out of args.")
        precision = "bf16" if args.bf16 else "fp16" if args.fp16 else "no"
        state = SimpleNamespace(fsdp_plugin=plugin)
        accelerator = SimpleNamespace(
            state=state, mixed_precision=precision, device=args.device, is_main_process=run.rank == 0
        )
        plugin.set_auto_wrap_policy(model)
        prepared = fsdp2_apply_ac(accelerator, model) if plugin.activation_checkpointing else model
        sharded: torch.nn.Module = fsdp2_prepare_model(accelerator, prepared)
        return sharded

    return run.keep(build)


def unsharded_state(model: torch.nn.Module) -> dict[str, Any]:
    """Return the full state dict of a sharded model on rank 0; return an empty dict on other ranks. Collective."""
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


@contextlib.contextmanager
def without_reduction(model: Any) -> Iterator[None]:
    """Reduce no gradients of the sharded `model` in the `with` block, because more micro-batches of the step follow."""
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)
