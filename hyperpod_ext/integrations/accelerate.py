"""An adapter for Hugging Face Accelerate, whose `ResilientAccelerator.prepare` also restores the job's state.

@resilient
def train(run: Run) -> None:
    accelerator = ResilientAccelerator(run, cpu=True)
    model, optimizer = run.keep(build)
    accelerator.register_for_checkpointing(loader)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    for step in run.steps(1000):
        ...  # your own code: forward, accelerator.backward(loss), optimizer.step()

With a torch DataLoader, pass the loader to `prepare`, and write `for epoch, batches in accelerator.epochs(loader, 3)`.
"""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.integrations.adapters import check_adapter
from hyperpod_ext.runtime.training.epochs import Batches
from hyperpod_ext.runtime.training.run import Run


def see_world(run: Run) -> None:
    """Set Accelerate's rank and world size to those of `run`, because Accelerate reads the environment only once."""
    known = dict(PartialState._shared_state)
    os.environ |= {"RANK": str(run.rank), "WORLD_SIZE": str(run.world_size), "LOCAL_RANK": str(run.local_rank)}
    if known and (known.get("process_index"), known.get("num_processes")) != (run.rank, run.world_size):
        AcceleratorState._reset_state(reset_partial_state=True)
        PartialState(cpu=known["device"].type == "cpu")  # this call sets the state that all instances share


class ResilientAccelerator(Accelerator):
    """An `Accelerator(**options)` whose state survives faults.

    Make a new `ResilientAccelerator` in each call of the training function, and call its `prepare` once.

    The state consists of the prepared models, optimizers and schedulers, the loss scaler, and the objects registered
    for checkpointing before `prepare`. Build the model and the optimizer in `run.keep`. For the training data, use an
    `ElasticDataLoader`, or a DataLoader that `epochs` iterates.
    """

    def __init__(self, run: Run, **options: Any) -> None:
        gc.collect()  # free the previous call's accelerator, which references the old process group
        check_adapter(run, "ResilientAccelerator", "accelerate")
        see_world(run)
        self._run, self.prepared = run, False
        self._waiting: dict[str, Any] | None = None
        """Objects that `epochs` will restore together with the DataLoader; None if `prepare` restored them."""
        super().__init__(**options)
        if self.num_processes != run.world_size:
            raise JobFailedError(
                f"Accelerate found {self.num_processes} processes, but the job has {run.world_size}",
                hint="Make the accelerator inside the training function; on CPUs pass cpu=True.",
            )
        kind = self.distributed_type.value
        if kind != "NO" and not kind.startswith("MULTI_"):
            raise JobFailedError(
                f"ResilientAccelerator supports only data parallelism; these options enable {kind}",
                hint=f"Pass no {kind} plugin to the accelerator. To shard the model, write your own loop with "
                "fully_shard.",
            )

    def prepare(self, *things: Any, **options: Any) -> Any:
        """Prepare the objects as Accelerator.prepare does, and restore the job's state into them. Collective.

        After this call, `run.step` is the restored step. If one of the objects is a DataLoader, `epochs` restores the
        state, not this method.

        Raises:
            JobFailedError: `prepare` was called before, or an object cannot be saved.
        """
        if self.prepared:
            raise JobFailedError(
                "prepare() was called twice in one call of the training function",
                hint="Pass all models, optimizers and schedulers to one call.",
            )
        self.prepared = True
        state: dict[str, Any] = {} if self.scaler is None else {"scaler": self.scaler}
        with_state = [thing for thing in things if not isinstance(thing, DataLoader)]
        for thing in (*with_state, *self._custom_objects):
            state[_name(thing, state)] = thing
        if len(with_state) < len(things):
            self._waiting = state
            self._run.how_to_restore = (
                "prepare() got a DataLoader: write for epoch, batches in accelerator.epochs(...)."
            )
        else:
            self._run.restore(**state)
        return super().prepare(*things, **options)

    def epochs(self, loader: Any, epochs: int) -> Iterator[tuple[int, Batches]]:
        """Restore the job's state, then yield number and remaining batches of each unfinished epoch. Collective.

        Each batch is one step, and is on the accelerator's device. See `Run.epochs`.

        Args:
            loader: the training data, a DataLoader that `prepare` has returned.
            epochs: number of epochs of the whole job.

        Raises:
            JobFailedError: no DataLoader was passed to `prepare`, or the loader's batches have no index.
        """
        if self._waiting is None:
            raise JobFailedError(
                "epochs() was called, but prepare() got no DataLoader",
                hint="Pass the DataLoader to prepare(), with the model and the optimizer.",
            )
        found = self._run.epochs(loader, epochs, **self._waiting)
        return self._placed(found)

    def _placed(self, found: Iterator[tuple[int, Batches]]) -> Iterator[tuple[int, Batches]]:
        for epoch, batches in found:
            batches.place = lambda batch: send_to_device(batch, self.device)
            yield epoch, batches

    def prepare_data_loader(self, data_loader: Any, *args: Any, **options: Any) -> Any:
        """Prepare the loader as Accelerator.prepare_data_loader does, but order the samples by the job's seed.

        Raises:
            JobFailedError: the loader was not passed to `prepare`, so that `epochs` could not restore its position.
        """
        if not self.prepared:
            raise JobFailedError(
                "prepare_data_loader(): the loader's position would not be restored after a fault",
                hint="Pass the DataLoader to prepare(), with the model and the optimizer.",
            )
        settings = self.dataloader_config
        settings.use_seedable_sampler = True  # ranks shuffle alike, and each reads its own part
        settings.data_seed = self._run.config.seed if settings.data_seed is None else settings.data_seed
        return super().prepare_data_loader(data_loader, *args, **options)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Register `objects` as Accelerator.register_for_checkpointing does.

        Raises:
            JobFailedError: `prepare` was already called; `prepare` restores only objects that were registered before.
        """
        if self.prepared:
            raise JobFailedError(
                f"{', '.join(type(each).__name__ for each in objects)} was registered after prepare(), which restored "
                "the state without it",
                hint="Call register_for_checkpointing before prepare().",
            )
        super().register_for_checkpointing(*objects)

    def prepare_model(self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        """Prepare the model as Accelerator.prepare_model does, but wrap it with `run.data_parallel` instead of DDP."""
        prepared = super().prepare_model(model, device_placement, evaluation_mode=True)
        if evaluation_mode or not any(parameter.requires_grad for parameter in model.parameters()):
            return prepared
        options = self.ddp_handler.to_kwargs() if self.ddp_handler is not None else {}
        if self.device.type != "cpu":
            options["device_ids"] = [self.device.index]
        return self._run.data_parallel(prepared, **options)


def _name(thing: Any, used: dict[str, Any]) -> str:
    """Return a name for `thing`, which is `model`, `optimizer`, `scheduler` or the name of its class.

    A name that is already in `used` gets a number, as in `model1`.
    """
    if isinstance(thing, torch.nn.Module):
        name = "model"
    elif isinstance(thing, torch.optim.Optimizer):
        name = "optimizer"
    elif isinstance(thing, torch.optim.lr_scheduler.LRScheduler):
        name = "scheduler"
    else:
        name = type(thing).__name__
    numbered = (f"{name}{count}" for count in itertools.count(1))
    return next(free for free in itertools.chain([name], numbered) if free not in used)
