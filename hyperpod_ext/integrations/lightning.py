"""Lightning's Trainer on a `Run`: data parallel, with the steps, seeds and restored state of `run.steps`.

@resilient
def train(run: Run) -> None:
    trainer = ResilientTrainer(run, max_steps=1000, accelerator="cpu")
    trainer.fit(run.keep(Model), ElasticDataLoader(...))
"""

from __future__ import annotations

import gc
import json
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins.environments import ClusterEnvironment
from lightning.pytorch.strategies import DDPStrategy

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.integrations.adapters import check_adapter
from hyperpod_ext.integrations.remembered import OwnCallbacks, Remembered, modules_of
from hyperpod_ext.integrations.steps import Batches, Steps
from hyperpod_ext.runtime.data.loader import ElasticDataLoader
from hyperpod_ext.runtime.data.positions import slots_of, steps_per_epoch
from hyperpod_ext.runtime.training.run import Run


class ResilientTrainer(Trainer):
    """A `Trainer(**options)` whose state survives faults.

    Make a new `ResilientTrainer` in each call of the training function, with a module from `run.keep`. The job
    determines the trainer's strategy, devices and nodes. The job's state includes the `state_dict` of each callback,
    and the modules in attributes of callbacks. The job's state includes neither hyperparameters nor metrics of an
    unfinished epoch.
    """

    def __init__(self, run: Run, **options: Any) -> None:
        gc.collect()  # free the previous call's trainer, which references the old process group
        check_adapter(run, "Lightning's ResilientTrainer", "lightning")
        reserved = sorted({"strategy", "devices", "num_nodes", "use_distributed_sampler"} & options.keys())
        if reserved:
            raise JobFailedError(
                f"ResilientTrainer({reserved[0]}=...) is not allowed: the job sets {reserved[0]}",
                hint=f"Leave {reserved[0]} out.",
            )
        self._run_of_job, self._follow = run, Follow(run)
        per_node = run.config.workers_per_node
        super().__init__(
            **options | {"callbacks": [self._follow, *_listed(options.get("callbacks"))]},
            strategy=ResilientStrategy(run),
            devices=per_node,
            num_nodes=run.world_size // per_node,
            use_distributed_sampler=False,
        )

    def fit(self, model: Any, train_dataloaders: Any = None, *arguments: Any, **options: Any) -> None:
        """Train as Trainer.fit does, and resume from the job's state if it has one.

        Raises:
            JobFailedError: the loader is no ElasticDataLoader, or its steps differ from the trainer's; the module uses
                manual optimization or several optimizers; or `ckpt_path` is given.
        """
        follow = self._follow
        if options.get("ckpt_path") is not None or len(arguments) > 2:
            raise JobFailedError(
                "fit(ckpt_path=...): Lightning would load it again after each fault, and overwrite the job's state",
                hint="Load the weights in the function that you pass to run.keep. Later states come from the job's "
                "tiers.",
            )
        follow.attach(self, model, train_dataloaders)
        try:
            super().fit(model, follow.batches, *arguments, **options)
        finally:
            follow.close()


class ResilientStrategy(DDPStrategy):
    """DDP over the job's process group. The strategy sets up optimizers, restores the job's state, then sets up DDP."""

    def __init__(self, run: Run, **options: Any) -> None:
        super().__init__(cluster_environment=_Environment(run), **options)
        self._run = run

    def setup(self, trainer: Any) -> None:
        """Set the strategy up as DDPStrategy does.

        Raises:
            JobFailedError: the trainer lacks the callback that reports its steps.
        """
        follow = next((each for each in trainer.callbacks if isinstance(each, Follow)), None)
        if follow is None:
            raise JobFailedError(
                f"the trainer uses {type(self).__name__}, but no callback reports its steps",
                hint="Add CheckpointlessCallback() to callbacks.",
            )
        self._follow = follow
        super().setup(trainer)

    def _configure_launcher(self) -> None:
        """Do nothing: the agent starts the processes."""

    def configure_ddp(self) -> None:
        super().setup_optimizers(self._follow.trainer)
        self._follow.restore(self)
        super().configure_ddp()

    def setup_optimizers(self, trainer: Any) -> None:
        """Do nothing: `configure_ddp` has already set up the optimizers."""

    def _setup_model(self, model: Any) -> Any:
        return self._run.data_parallel(model, device_ids=self.determine_ddp_device_ids(), **self._ddp_kwargs)

    def teardown(self) -> None:
        """Release DDP. Unlike in Lightning, the module and the optimizer stay on their device for the next call."""
        self.model = self.lightning_module
        if self._layer_sync and self.model is not None:
            self.model = self._layer_sync.revert(self.model)
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


class _Environment(ClusterEnvironment):
    """Returns the rank and the world size of this process from the run."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run

    creates_processes_externally = True
    main_address, main_port = "127.0.0.1", 0  # placeholders: the runtime, not Lightning, opens the process groups

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self._run.world_size

    def global_rank(self) -> int:
        return self._run.rank

    def local_rank(self) -> int:
        return self._run.local_rank

    def node_rank(self) -> int:
        return self._run.rank // self._run.config.workers_per_node

    def set_world_size(self, size: int) -> None:
        """Do nothing: the job sets the world size."""

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the job sets the rank."""


class Follow(Callback):
    """Reports steps to the run, and restores the counters of Lightning's loops."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.batches: Batches | None = None
        self._steps: Steps | None = None
        self._in_step = False
        self._loops = ""
        self._callbacks = Remembered(self._states_of_callbacks, self._tell_callbacks)

    def attach(self, trainer: ResilientTrainer, model: Any, loader: Any) -> None:
        """Check that `trainer`, `model` and `loader` fit together, and use them in this call of `fit`.

        Raises:
            JobFailedError: the trainer, the module or the loader cannot be used.
        """
        if not isinstance(loader, ElasticDataLoader):
            raise JobFailedError(
                f"fit(train_dataloaders={type(loader).__name__}): after a fault this loader would repeat samples",
                hint="Pass a hyperpod_ext.runtime.data.ElasticDataLoader.",
            )
        if not model.automatic_optimization:
            raise JobFailedError(
                f"{type(model).__name__} uses manual optimization, so its steps cannot be counted",
                hint="Use automatic optimization, or write the loop with run.steps.",
            )
        changes = [
            each
            for each in trainer.callbacks
            if isinstance(each, GradientAccumulationScheduler) and len(set(each.scheduling.values())) > 1
        ]
        if changes:
            raise JobFailedError(
                f"{type(changes[0]).__name__} changes accumulate_grad_batches from epoch to epoch, but each step of "
                "the loader has the same number of micro-batches in all epochs",
                hint="Leave the callback out.",
            )
        sampler = loader.sampler
        batch, slots = sampler.global_batch_size, slots_of(sampler.global_batch_size, sampler.micro_batch_size)
        if slots != trainer.accumulate_grad_batches * self._run.world_size:
            raise JobFailedError(
                f"a step of {batch} samples is {slots} micro-batches; accumulate_grad_batches is "
                f"{trainer.accumulate_grad_batches}, and there are {self._run.world_size} ranks",
                hint="Choose the sizes so that micro-batches per step = accumulate_grad_batches x ranks.",
            )
        if sampler.length is None or (sampler.length % batch and not sampler.drop_last):
            raise JobFailedError(
                f"an epoch of {sampler.length} samples is not a multiple of the {batch} samples of a step",
                hint="Give ElasticDataLoader drop_last=True.",
            )
        of_epochs = steps_per_epoch(sampler.length, batch, sampler.drop_last) * (trainer.max_epochs or 1000)
        totals = [total for total in (trainer.max_steps, of_epochs) if total > 0]
        if not totals:
            raise JobFailedError(
                "the trainer has no last step, because neither max_steps nor max_epochs is limited",
                hint="Pass max_steps or max_epochs to the trainer.",
            )
        self.trainer, self.batches, self._total = trainer, Batches(loader), min(totals)

    def restore(self, strategy: ResilientStrategy) -> None:
        """Restore the job's state, including the counters of Lightning's loops."""
        assert self.batches is not None, "fit() has set the batches"
        if len(strategy.optimizers) != 1:
            raise JobFailedError(
                f"configure_optimizers returned {len(strategy.optimizers)} optimizers, but a job can have only one",
                hint="Return one optimizer, or write your own loop.",
            )
        schedulers = {f"scheduler{i}": config.scheduler for i, config in enumerate(strategy.lr_scheduler_configs)}
        scaler = getattr(strategy.precision_plugin, "scaler", None)
        scalers = {} if scaler is None else {"scaler": scaler}
        self._own = OwnCallbacks(self._others(), Callback)
        self._run.restore(
            model=strategy.lightning_module,
            optimizer=strategy.optimizers[0],
            data=self.batches.loader,
            loops=self,
            callbacks=self._callbacks,
            **schedulers,
            **scalers,
            **modules_of(self.trainer.callbacks),
        )
        if self._loops:
            self.trainer.fit_loop.load_state_dict(json.loads(self._loops))
        self._steps = Steps(self._run, self._total)

    def state_dict(self) -> dict[str, Any]:
        return {"loops": self._loops}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loops = state["loops"]

    def _states_of_callbacks(self) -> dict[str, Any]:
        states = {each.state_key: state for each in self._others() if (state := each.state_dict())}
        return {"states": states, "own": self._own.read(), "module": self._of_module()}

    def _tell_callbacks(self, saved: dict[str, Any]) -> None:
        for each in self._others():
            if each.state_key in saved["states"]:
                each.load_state_dict(saved["states"][each.state_key])
        self._own.write(saved["own"])
        if saved["module"]:
            module = self.trainer.lightning_module
            module.on_load_checkpoint({"state_dict": module.state_dict(), **saved["module"]})

    def _of_module(self) -> dict[str, Any]:
        """Return the entries that the module's `on_save_checkpoint` adds to a checkpoint."""
        module = self.trainer.lightning_module
        if type(module).on_save_checkpoint is LightningModule.on_save_checkpoint:
            return {}
        checkpoint = {"state_dict": module.state_dict()}
        module.on_save_checkpoint(checkpoint)
        del checkpoint["state_dict"]
        return checkpoint

    def _others(self) -> list[Callback]:
        return [each for each in self.trainer.callbacks if each is not self]

    def close(self) -> None:
        """Close the generator of the run's steps."""
        if self._steps is not None:
            self._steps.__exit__(RuntimeError, RuntimeError(), None)

    # --- called by Lightning ----------------------------------------------------------------------

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        if self._loops and json.loads(self._loops)["epoch_loop.batch_progress"]["is_last_batch"]:
            trainer.fit_loop.reset_restart_stage()  # without this call, Lightning would skip the new epoch's start

    def on_train_batch_start(self, *_: Any) -> None:
        assert self._steps is not None, "the strategy has restored"
        if not self._in_step:
            self._callbacks.freeze()
            self._steps.begin()
            self._in_step = True

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        assert self._steps is not None, "a step has begun"
        assert self.batches is not None, "a batch was read"
        assert self.batches.now is not None, "a batch was read"
        self._steps.add_loss(outputs["loss"])
        if trainer.fit_loop._should_accumulate():
            return
        self._steps.log_loss()
        self.batches.loader.ack(self.batches.now)
        loops = trainer.fit_loop.state_dict()
        # leave out the counters of the validation loop, which start from zero in each validation
        self._loops = json.dumps({name: value for name, value in loops.items() if ".val_loop." not in name})
        self._in_step = False

    def on_train_end(self, *_: Any) -> None:
        if self._steps is not None:
            self._callbacks.freeze()
            self._steps.end()


def _listed(callbacks: Any) -> list[Any]:
    return [] if callbacks is None else list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]
