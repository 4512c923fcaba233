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
from hyperpod_ext.runtime.data.loader import ElasticDataLoader
from hyperpod_ext.runtime.integrations.accelerate import see_world
from hyperpod_ext.runtime.integrations.steps import Batches, Steps
from hyperpod_ext.runtime.training.run import Run


class ResilientTrainer(Trainer):
    """`Trainer(**options)`, made anew in each call of the training function; the model comes from `run.keep`.

    Samples come from `ElasticDataLoader`, in an order of its own that follows from `args.data_seed` (or `args.seed`)
    and the step. An epoch leaves out the samples at its end that do not make a whole step.

    Raises:
        JobFailedError: the job's global_batch_size is another than that of `args`; a model that is not kept by
            parallelism of ours (FSDP, DeepSpeed); a dataset without length.
    """

    model: Any

    def __init__(self, run: Run, **options: Any) -> None:
        gc.collect()  # the trainer of the call before, and what it holds of the process group before
        see_world(run)
        self._run = run
        self._steps: Steps | None = None
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

    def train(self, *arguments: Any, **options: Any) -> Any:
        """See Trainer. Where the job has state, that is what it goes on from, and not `resume_from_checkpoint`."""
        try:
            return super().train(*arguments, **options)
        finally:
            if self._steps is not None:
                self._steps.__exit__(RuntimeError, RuntimeError(), None)
            # whoever holds DDP holds hooks on the model's gradients, and sockets
            self.model = self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)
            self.model_wrapped = self.model
            self.accelerator.free_memory()

    def get_train_dataloader(self) -> Any:
        args, dataset = self.args, self.train_dataset
        share = args.per_device_train_batch_size * args.gradient_accumulation_steps
        if self._run.config.global_batch_size not in (None, share * self._run.world_size):
            raise JobFailedError(
                f"a step of per_device_train_batch_size {args.per_device_train_batch_size} x "
                f"gradient_accumulation_steps {args.gradient_accumulation_steps} x {self._run.world_size} ranks has "
                f"{share * self._run.world_size} samples; the job's global_batch_size is "
                f"{self._run.config.global_batch_size}",
                hint=f"Make the first two {self._run.batch_size} together: run.batch_size.",
            )
        if hasattr(dataset, "column_names"):  # as Trainer does for its own
            dataset, collate = self._remove_unused_columns(dataset, description="training"), self.data_collator
        else:
            collate = self._get_collator_with_removed_columns(self.data_collator, description="training")
        loader = ElasticDataLoader(
            dataset,
            global_batch_size=share * self._run.world_size,
            micro_batch_size=args.per_device_train_batch_size,
            rank=self._run.rank,
            world_size=self._run.world_size,
            seed=args.seed if args.data_seed is None else args.data_seed,
            drop_last=True,  # else the last mean of an epoch would weigh samples unequally
            uneven="error",
            collate=collate,
            workers=args.dataloader_num_workers,
        )
        self._batches = Batches(loader)
        return self._batches

    def _init_training_state(
        self, max_steps: int, num_update_steps_per_epoch: int, num_train_epochs: int, *_: Any
    ) -> tuple[int, int]:
        """Here the loop asks where it goes on."""
        super()._init_training_state(max_steps, num_update_steps_per_epoch, num_train_epochs, None, None)
        self.create_optimizer()
        self.create_scheduler(num_training_steps=max_steps)
        self._created_lr_scheduler = False  # keep it
        scaler = self.accelerator.scaler
        step = self._run.restore(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.lr_scheduler,
            data=self._batches.loader,
            trainer=_Progress(self),
            **({} if scaler is None else {"scaler": scaler}),
        )
        self._steps = Steps(self._run, max_steps)
        self._steps_per_epoch = num_update_steps_per_epoch
        self.state.global_step, self.state.epoch = step, step / num_update_steps_per_epoch
        return step // num_update_steps_per_epoch, 0

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        if not training or self.accelerator.unwrap_model(model, keep_torch_compile=False) is not model:
            return super()._wrap_model(model, training, dataloader)
        prepared = self.accelerator.prepare_model(model, evaluation_mode=True)  # all but DDP: that is ours
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
    """Tells the run of steps. First among the callbacks, so that all others see the right epoch."""

    def __init__(self, trainer: ResilientTrainer) -> None:
        self._trainer = trainer

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        assert self._trainer._steps is not None, "the loop has asked where it goes on"
        self._trainer._steps.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer = self._trainer
        assert trainer._steps is not None, "a step has begun"
        trainer._steps.log_loss()
        trainer._batches.loader.ack(trainer._batches.now)  # type: ignore[arg-type]  # it was read
        state.epoch = state.global_step / trainer._steps_per_epoch

    def on_train_end(self, *_: Any, **__: Any) -> None:
        if self._trainer._steps is not None:
            self._trainer._steps.end()


class _Progress:
    """What callbacks remember, and the best model: equal on every rank."""

    _NAMES = ("best_metric", "best_global_step", "best_model_checkpoint")

    def __init__(self, trainer: ResilientTrainer) -> None:
        self._trainer = trainer

    def _callbacks(self) -> dict[str, Any]:
        known = self._trainer.callback_handler.callbacks
        return {type(one).__name__: one for one in known if isinstance(one, ExportableState)}

    def state_dict(self) -> dict[str, Any]:
        best = {name: getattr(self._trainer.state, name) for name in self._NAMES}
        return best | {"callbacks": {name: one.state()["attributes"] for name, one in self._callbacks().items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in self._NAMES:
            setattr(self._trainer.state, name, state[name])
        for name, one in self._callbacks().items():
            for attribute, value in state["callbacks"].get(name, {}).items():
                setattr(one, attribute, value)
