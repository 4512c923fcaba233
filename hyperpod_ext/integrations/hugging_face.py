"""Hugging Face's Trainer on a `Run`: data parallel, with a step's data, seed and state as `run.steps` has them.

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
from hyperpod_ext.integrations.remembered import OwnAttributes, OwnCallbacks, Remembered, modules_of
from hyperpod_ext.integrations.steps import Steps
from hyperpod_ext.integrations.trainer_loader import TrainerLoader
from hyperpod_ext.runtime.training.run import Run


class ResilientTrainer(Trainer):
    """`Trainer(**options)`. Make a new one in each call of the training function, with a model from `run.keep`.

    Batches come from the trainer's own `get_train_dataloader`. For a trainer of another library, make it the first
    base: `class Mine(ResilientTrainer, GRPOTrainer)`. Changing attributes of such a class are part of the state.

    Raises:
        JobFailedError: the job's global_batch_size differs from that of `args`; `args` ask for FSDP or DeepSpeed; data
            cannot be read by position; a class before this one hides its methods.
    """

    model: Any

    def __init__(self, run: Run, **options: Any) -> None:
        gc.collect()  # the trainer of the call before, which holds the old process group
        check_adapter(run, "Hugging Face's ResilientTrainer", "transformers")
        see_world(run)
        self._run = run
        self._steps: Steps | None = None
        self._refuse_hidden()
        super().__init__(**options)
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise JobFailedError(
                "ResilientTrainer: args ask for FSDP or DeepSpeed",
                hint="Leave fsdp and deepspeed out: it is data parallel. For shards write the loop with fully_shard.",
            )
        if self.args.world_size != run.world_size:
            raise JobFailedError(
                f"TrainingArguments see {self.args.world_size} processes, the job has {run.world_size}",
                hint="Make them inside the training function; on CPUs give use_cpu=True.",
            )
        self.callback_handler.callbacks.insert(0, _Follow(self))

    def _refuse_hidden(self) -> None:
        """Refuse a base before this class whose methods would hide this class's.

        Raises:
            JobFailedError: there is such a base.
        """
        ours = {name for name, value in vars(ResilientTrainer).items() if callable(value)}
        for kind in type(self).__mro__[: type(self).__mro__.index(ResilientTrainer)]:
            hidden = sorted(ours & vars(kind).keys())
            if hidden and not issubclass(kind, ResilientTrainer):
                raise JobFailedError(
                    f"class {type(self).__name__}: {kind.__name__}.{hidden[0]} hides that of ResilientTrainer",
                    hint=f"Name ResilientTrainer first: class {type(self).__name__}(ResilientTrainer, ...).",
                )

    def train(self, *arguments: Any, **options: Any) -> Any:
        """See Trainer. The job's state, if it has one, takes precedence over `resume_from_checkpoint`."""
        try:
            return super().train(*arguments, **options)
        finally:
            if self._steps is not None:
                self._steps.__exit__(RuntimeError, RuntimeError(), None)
            # a reference to DDP would keep hooks on the model's gradients, and sockets
            self.model = self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)
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
                hint=f"Make the first two {self._run.batch_size} together: run.batch_size.",
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
        """Return where the loop starts: restore the job's state first."""
        super()._init_training_state(max_steps, num_update_steps_per_epoch, num_train_epochs, None, None)
        self.create_optimizer()
        self.create_scheduler(num_training_steps=max_steps)
        self._created_lr_scheduler = False  # keep it
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
        """Ignore a checkpoint's optimizer state if the job has restored a newer one."""
        checkpoint = None if self._run.step else resume_from_checkpoint
        return super()._prepare_for_training(max_steps, train_dataloader, checkpoint)

    def _run_epoch(self, **options: Any) -> None:
        """Run one epoch, or the rest of the first one: the loop finds the last step by its number."""
        options["resume_from_checkpoint"] = None  # it would skip batches a second time
        if options["epoch"] == self._batches.epoch and self._batches.made:
            made = self._batches.made
            options["steps_in_epoch"] -= made * self.args.gradient_accumulation_steps
            options["num_update_steps_per_epoch"] -= made
        super()._run_epoch(**options)

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        if not training or self.accelerator.unwrap_model(model, keep_torch_compile=False) is not model:
            return super()._wrap_model(model, training, dataloader)
        prepared = self.accelerator.prepare_model(model, evaluation_mode=True)  # without DDP, which is ours
        handler = self.accelerator.ddp_handler
        options = handler.to_kwargs() if handler is not None else {}
        if self.args.device.type != "cpu":
            options["device_ids"] = [self.args.device.index]
        return self._run.data_parallel(prepared, **options)

    def training_step(self, *arguments: Any, **options: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(*arguments, **options)
        if self._steps is not None:
            self._steps.add_loss(loss)
        return loss


class _Follow(TrainerCallback):
    """Reports steps to the run. It is the first callback, so that all others see the right epoch."""

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
    """Return the state of callbacks, and the best model: equal on every rank."""
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
