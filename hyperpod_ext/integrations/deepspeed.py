"""DeepSpeed's engine with ZeRO-1 or ZeRO-2, whose state survives faults:

    engine = keep_engine(run, build)  # build() returns deepspeed.initialize(...)[0]
    for step in run.steps(1000):
        engine.backward(loss_of(engine))
        engine.step()

ZeRO flattens each parameter group into one vector, and each rank optimizes an equal part of it. `ZeroOptimizer` shows
these parts as DTensors. Source: `deepspeed/runtime/zero/stage_1_and_2.py` (0.19.8).
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import deepspeed.comm.comm as deepspeed_comm
import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import groups as deepspeed_groups
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.integrations.adapters import check_adapter
from hyperpod_ext.runtime.snapshot.image import local_of
from hyperpod_ext.runtime.state.training_state import Stateful
from hyperpod_ext.runtime.training.run import Run

_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


def keep_engine(run: Run, build: Callable[[], DeepSpeedEngine], **states: Stateful) -> DeepSpeedEngine:
    """Return the engine that `build` makes, with the state of the newest step that every rank can restore. Collective.

    The engine's module, optimizer and, if there is one, learning rate scheduler are restored.

    Args:
        run: the run whose state the engine is.
        build: makes the model and the engine; called again after a fault.
        states: further objects with state_dict() and load_state_dict(), with the same names on every rank.

    Raises:
        JobFailedError: `build` returns no engine, `ZeroOptimizer` does not support the engine, or the saved state does
            not fit.
        TypeError: a further state has the name `model`, `optimizer` or `lr_scheduler`.
    """
    check_adapter(run, "keep_engine", "deepspeed")

    def build_engine() -> tuple[DeepSpeedEngine, ZeroOptimizer]:
        gc.collect()  # free the former engine, whose gradient hooks reference the old process group
        deepspeed_comm.cdb = None  # DeepSpeed keeps process groups in globals, also after a fault
        deepspeed_groups._release_process_group_references()
        engine = build()
        if not isinstance(engine, DeepSpeedEngine):
            raise JobFailedError(
                f"keep_engine: build returned a {type(engine).__name__} instead of DeepSpeed's engine",
                hint="Return deepspeed.initialize(...)[0].",
            )
        return engine, ZeroOptimizer(engine)

    engine, optimizer = run.keep(build_engine)
    own: dict[str, Stateful] = {"model": engine.module, "optimizer": optimizer}
    if engine.lr_scheduler is not None:
        own["lr_scheduler"] = engine.lr_scheduler
    run.restore(**own, **states)  # type: ignore[arg-type]  # no state is named `cast`
    return engine


class ZeroOptimizer(torch.optim.Optimizer):
    """State of an engine's ZeRO optimizer, with this rank's part of each flat vector as a shard of a DTensor.

    `state_dict()` and `load_state_dict()` also cover the master weights, the loss scale and the engine's counters. The
    engine makes the steps.

    Raises:
        JobFailedError: the engine uses neither ZeRO-1 nor ZeRO-2, or uses offload, experts, or other parallelism than
            data parallelism.
    """

    def __init__(self, engine: DeepSpeedEngine) -> None:
        zero = engine.optimizer
        if type(zero) is not DeepSpeedZeroOptimizer:
            raise JobFailedError(
                f"keep_engine: the engine's optimizer is a {type(zero).__name__}, and ZeRO-1 or ZeRO-2 is needed",
                hint='Set zero_optimization.stage to 1 or 2 in DeepSpeed\'s config. For "stage": 0 use '
                "run.data_parallel, and for stage 3 fully_shard (FSDP2).",
            )
        if zero.cpu_offload or engine.has_moe_layers:
            option = "zero_optimization.offload_optimizer" if zero.cpu_offload else "a MoE layer"
            raise JobFailedError(
                f"keep_engine: {option} is not supported, because its state cannot be restored after a fault",
                hint=f"Leave {option} out.",
            )
        ranks, world_size = dist.get_world_size(zero.dp_process_group), dist.get_world_size()
        if ranks != world_size:
            raise JobFailedError(
                "keep_engine does not support model and pipeline parallelism, and this engine's ZeRO divides the state "
                f"among groups of {ranks} of the {world_size} ranks",
                hint="Leave mpu and PipelineModule out. To shard the model, use fully_shard (FSDP2).",
            )
        self._engine, self._zero, self.defaults = engine, zero, zero.optimizer.defaults
        device = zero.single_partition_of_fp32_groups[0].device.type
        self._mesh = DeviceMesh.from_group(zero.dp_process_group, device)
        self._parts = [self._shard(part.detach()) for part in zero.single_partition_of_fp32_groups]

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The options of each parameter group, with this rank's part of the flat vector as its only parameter."""
        groups = self._zero.optimizer.param_groups
        return [group | {"params": [part]} for group, part in zip(groups, self._parts, strict=True)]

    @property
    def state(self) -> dict[torch.Tensor, dict[str, Any]]:  # type: ignore[override]
        """The inner optimizer's state of each part; empty before the first step."""
        return {self._parts[at]: state for at, state in self._states().items()}

    def _states(self) -> dict[int, dict[str, Any]]:
        """Return the inner optimizer's state by parameter group, with DTensors."""
        return {
            at: {key: self._shard(value) if _fits(value, local) else value for key, value in of_part.items()}
            for at, local in enumerate(self._zero.single_partition_of_fp32_groups)
            if (of_part := self._zero.optimizer.state.get(local))
        }

    def register_step_pre_hook(self, hook: Any) -> Any:
        return self._zero.optimizer.register_step_pre_hook(lambda _, *args: hook(self, *args))

    def register_step_post_hook(self, hook: Any) -> Any:
        return self._zero.optimizer.register_step_post_hook(lambda _, *args: hook(self, *args))

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._zero.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the state. Tensors are not copied.

        Raises:
            JobFailedError: gradients wait for the engine's next step.
        """
        engine = self._engine
        if engine.micro_steps % engine.gradient_accumulation_steps():
            raise JobFailedError(
                "keep_engine: a step of run.steps ended before the optimizer step, and a snapshot does not contain the "
                "accumulated gradients",
                hint="In each step of run.steps, call engine.backward and engine.step for all "
                f"{engine.gradient_accumulation_steps()} batches (gradient_accumulation_steps).",
            )
        options = [{k: v for k, v in group.items() if k != "params"} for group in self.param_groups]
        return {
            "state": self._states(),
            "param_groups": [group | {"params": [at]} for at, group in enumerate(options)],
            "weights": list(self._parts),
            "loss_scale": self._loss_scale(),
            "counters": {name: getattr(engine, name) for name in _COUNTERS},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, also of another number of ranks.

        Raises:
            JobFailedError: another number of ranks saved the state with `round_robin_gradients`.
        """
        inner = self._zero.optimizer
        for group, saved in zip(inner.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        for at, local in enumerate(self._zero.single_partition_of_fp32_groups):
            local.data.copy_(self._part(state_dict["weights"][at], local))
            for key, value in state_dict["state"].get(at, {}).items():
                now = inner.state[local].get(key)
                part = self._part(value, local) if isinstance(value, torch.Tensor) and value.ndim else value
                if isinstance(now, torch.Tensor):  # DeepSpeed has made views of this tensor
                    now.copy_(part)
                else:
                    inner.state[local][key] = part.clone() if isinstance(part, torch.Tensor) else part
        vars(self._zero.loss_scaler).update(state_dict["loss_scale"])
        vars(self._engine).update(state_dict["counters"])

    def _loss_scale(self) -> dict[str, float]:
        return {key: value for key, value in vars(self._zero.loss_scaler).items() if isinstance(value, int | float)}

    def _part(self, value: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a saved flat vector, which may be padded for another number of ranks."""
        part = local_of(value)
        if part.shape == local.shape:
            return part
        if self._zero.round_robin_gradients:
            raise JobFailedError(
                "this state was saved with another number of ranks, and with zero_optimization.round_robin_gradients "
                "the order of the parameters depends on the number of ranks",
                hint="Start the job with the number of ranks that saved the state.",
            )
        vector = value.full_tensor() if isinstance(value, DTensor) else value
        mine = vector[self._mesh.get_local_rank() * local.numel() :][: local.numel()]
        return torch.nn.functional.pad(mine, (0, local.numel() - mine.numel()))

    def _shard(self, local: torch.Tensor) -> DTensor:
        return DTensor.from_local(local, self._mesh, [Shard(0)], run_check=False)


def _fits(value: object, local: torch.Tensor) -> bool:
    """Return whether a value of the inner optimizer's state has an element for each parameter of the part."""
    return isinstance(value, torch.Tensor) and value.shape == local.shape
