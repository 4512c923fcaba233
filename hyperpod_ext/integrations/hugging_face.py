"""Hugging Face's Trainer on a `Run`: DDP or FSDP2, with the steps, seeds and restored state of `run.steps`.

@resilient
def train(run: Run) -> None:
    trainer = ResilientTrainer(run, model=run.keep(build), args=TrainingArguments(...), train_dataset=samples)
    trainer.train()
"""

from __future__ import annotations

import gc
from typing import Any

import torch
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.integrations.accelerate import see_world
from hyperpod_ext.integrations.adapters import check_adapter
from hyperpod_ext.integrations.hugging_face_shards import shard, unsharded_state, without_reduction
from hyperpod_ext.integrations.remembered import OwnAttributes, OwnCallbacks, Remembered, modules_of
from hyperpod_ext.integrations.steps import Steps
from hyperpod_ext.integrations.trainer_loader import TrainerLoader
from hyperpod_ext.runtime.training.run import Run


class ResilientTrainer(Trainer):
    """A `Trainer(**options)` whose state survives faults.

    Make a new `ResilientTrainer` in each call of the training function, with a model from `run.keep`. Batches come from
    the trainer's own `get_train_dataloader`.

    To use a trainer of another library, derive a class with `ResilientTrainer` as its first base, such as
    `class Mine(ResilientTrainer, GRPOTrainer)`. Attributes of the derived class that change during training are part of
    the state.

    The model is sharded if `args` ask for FSDP2, or if it was built with `fully_shard`.

    Raises:
        JobFailedError: the job's global_batch_size differs from the batch size in `args`; `args` ask for FSDP1 or
            DeepSpeed; the environment enables FSDP; the data cannot be read by position; or a base class hides a method
            of `ResilientTrainer`.
    """

    model: Any

    def __init__(self, run: Run, **options: Any) -> None:
        gc.collect()  # free the previous call's trainer, which references the old process group
        check_adapter(run, "Hugging Face's ResilientTrainer", "transformers")
        see_world(run)
        self._run = run
        self._steps: Steps | None = None
        self._refuse_hidden()
        self._is_sharded = shard(run, options)
        super().__init__(**options)
        if self.is_fsdp_enabled:
            raise JobFailedError(
                "ResilientTrainer: FSDP is enabled outside of args",
                hint="Unset ACCELERATE_USE_FSDP, and set fsdp=True with fsdp_config={'version': 2} in the arguments.",
            )
        if self.is_deepspeed_enabled:
            raise JobFailedError(
                "ResilientTrainer: args enable DeepSpeed, whose state cannot be restored after a fault",
                hint="Leave deepspeed out. To shard the model, set fsdp=True with fsdp_config={'version': 2}.",
            )
        if self.args.world_size != run.world_size:
            raise JobFailedError(
                f"TrainingArguments found {self.args.world_size} processes, but the job has {run.world_size}",
                hint="Make the TrainingArguments inside the training function; on CPUs pass use_cpu=True.",
            )
        self.callback_handler.callbacks.insert(0, _Follow(self))

    def _refuse_hidden(self) -> None:
        """Check that no other class hides a method of `ResilientTrainer`.

        Raises:
            JobFailedError: a class before `ResilientTrainer` in the method resolution order hides a method.
        """
        ours = {name for name, value in vars(ResilientTrainer).items() if callable(value)}
        for kind in type(self).__mro__[: type(self).__mro__.index(ResilientTrainer)]:
            hidden = sorted(ours & vars(kind).keys())
            if hidden and not issubclass(kind, ResilientTrainer):
                raise JobFailedError(
                    f"class {type(self).__name__}: {kind.__name__}.{hidden[0]} hides ResilientTrainer.{hidden[0]}",
                    hint=f"Name ResilientTrainer first: class {type(self).__name__}(ResilientTrainer, ...).",
                )

    def train(self, *arguments: Any, **options: Any) -> Any:
        """Train as Trainer.train does. Saved state of the job takes precedence over `resume_from_checkpoint`."""
        try:
            return super().train(*arguments, **options)
        finally:
            if self._steps is not None:
                self._steps.__exit__(RuntimeError, RuntimeError(), None)
            # drop all references to the DDP module, which would keep gradient hooks on the model, and sockets open;
            # unwrap_model keeps the autocast wrapper, which is added only once
            self.model = self.accelerator.unwrap_model(self.model)
            self.model_wrapped = self.model
            self.accelerator.free_memory()

    def get_train_dataloader(self) -> Any:
        args = self.args
        share = args.per_device_train_batch_size * args.gradient_accumulation_steps
        if self._run.config.global_batch_size not in (None, share * self._run.world_size):
            raise JobFailedError(
                f"a step of per_device_train_batch_size {args.per_device_train_batch_size} x "
                f"gradient_accumulation_steps {args.gradient_accumulation_steps} x {self._run.world_size} ranks has "
                f"{share * self._run.world_size} samples; the job's global_batch_size is "
                f"{self._run.config.global_batch_size}",
                hint="Choose per_device_train_batch_size and gradient_accumulation_steps so that their product is "
                f"run.batch_size, {self._run.batch_size}.",
            )
        self._batches = TrainerLoader(
            super().get_train_dataloader(),
            seed=args.seed if args.data_seed is None else args.data_seed,
            rank=self._run.rank,
            per_step=args.gradient_accumulation_steps,
        )
        return self._batches

    def _init_training_state(
        self, max_steps: int, num_update_steps_per_epoch: int, num_train_epochs: int, *_: Any
    ) -> tuple[int, int]:
        """Restore the job's state; return the epoch in which the loop starts, and 0 as the number of steps to skip."""
        super()._init_training_state(max_steps, num_update_steps_per_epoch, num_train_epochs, None, None)
        self.create_optimizer()
        self.create_scheduler(num_training_steps=max_steps)
        self._created_lr_scheduler = False  # if this is False, Trainer creates no second scheduler
        scaler = self.accelerator.scaler
        own = OwnAttributes(self, ResilientTrainer)
        callbacks = OwnCallbacks(self.callback_handler.callbacks, TrainerCallback)

        def remember(state: dict[str, Any]) -> None:
            _tell_callbacks(self, state["callbacks"])
            callbacks.write(state["of_callbacks"])
            own.write(state["own"])

        self._remembered = Remembered(
            lambda: {"callbacks": _callbacks_of(self), "of_callbacks": callbacks.read(), "own": own.read()}, remember
        )
        step = self._run.restore(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.lr_scheduler,
            data=self._batches,
            trainer=self._remembered,
            **({} if scaler is None else {"scaler": scaler}),
            **modules_of(self.callback_handler.callbacks),
        )
        self._steps = Steps(self._run, max_steps)
        self.state.global_step, self.state.epoch = step, self._batches.epochs_made
        return self._batches.epoch, 0

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        """Prepare as Trainer does, but ignore a checkpoint's optimizer state if the job has restored a newer state."""
        checkpoint = None if self._run.step else resume_from_checkpoint
        return super()._prepare_for_training(max_steps, train_dataloader, checkpoint)

    def _run_epoch(self, **options: Any) -> None:
        """Run one epoch, or only the remaining steps of the epoch in which the job was restored."""
        options["resume_from_checkpoint"] = None  # with a checkpoint path, Trainer would skip batches a second time
        if options["epoch"] == self._batches.epoch and self._batches.made:
            made = self._batches.made
            options["steps_in_epoch"] -= made * self.args.gradient_accumulation_steps
            options["num_update_steps_per_epoch"] -= made
        super()._run_epoch(**options)

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        if (
            self._is_sharded
            or not training
            or self.accelerator.unwrap_model(model, keep_torch_compile=False) is not model
        ):
            return super()._wrap_model(model, training, dataloader)
        prepared = self.accelerator.prepare_model(model, evaluation_mode=True)  # evaluation_mode=True avoids DDP
        handler = self.accelerator.ddp_handler
        options = handler.to_kwargs() if handler is not None else {}
        if self.args.device.type != "cpu":
            options["device_ids"] = [self.args.device.index]
        return self._run.data_parallel(prepared, **options)

    def _defer_fsdp_gradient_reduction(self) -> Any:
        return without_reduction(self.model)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if self._is_sharded and state_dict is None:
            state_dict = unsharded_state(self.model)
        super()._save(output_dir, state_dict)

    def training_step(self, *arguments: Any, **options: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(*arguments, **options)
        if self._steps is not None:
            self._steps.add_loss(loss)
        return loss


class _Follow(TrainerCallback):
    """First callback of the trainer, which reports steps to the run, and sets the epoch that later callbacks see."""

    def __init__(self, trainer: ResilientTrainer) -> None:
        self._trainer = trainer

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        assert self._trainer._steps is not None, "the loop has started"
        self._trainer._remembered.freeze()
        self._trainer._steps.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer = self._trainer
        assert trainer._steps is not None, "a step has begun"
        trainer._steps.log_loss()
        trainer._batches.step_made()
        state.epoch = trainer._batches.epochs_made

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        self._trainer._batches.epoch_made()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        if self._trainer._steps is not None:
            self._trainer._remembered.freeze()
            self._trainer._steps.end()


_BEST = ("best_metric", "best_global_step", "best_model_checkpoint")


def _callbacks_of(trainer: ResilientTrainer) -> dict[str, Any]:
    """Return the state of exportable callbacks and the record of the best model, both equal on every rank."""
    known = trainer.callback_handler.callbacks
    return {
        **{name: getattr(trainer.state, name) for name in _BEST},
        "attributes": {
            type(one).__name__: one.state()["attributes"] for one in known if isinstance(one, ExportableState)
        },
    }


def _tell_callbacks(trainer: ResilientTrainer, state: dict[str, Any]) -> None:
    for name in _BEST:
        setattr(trainer.state, name, state[name])
    for one in trainer.callback_handler.callbacks:
        for attribute, value in state["attributes"].get(type(one).__name__, {}).items():
            setattr(one, attribute, value)
