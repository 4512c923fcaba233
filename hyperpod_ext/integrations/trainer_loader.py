"""The data loader of another library's trainer, with its position in the data as state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hyperpod_ext.runtime.data.epoch_reader import EpochReader


class TrainerLoader(EpochReader):
    """An `EpochReader` with all attributes of the trainer's own loader, so that the trainer's loop can iterate it."""

    def __init__(self, loader: Any, *, seed: int, rank: int, per_step: int) -> None:
        super().__init__(loader, seed=seed, rank=rank, per_step=per_step)
        self.epoch, self.made = 0, 0
        """Epoch of the next step, and number of steps already made in that epoch."""
        self._asked_epoch = 0
        """Number of the epoch that the next call of `iter` reads."""

    def step_made(self) -> None:
        """Count one more step of the current epoch."""
        self.made += 1

    def epoch_made(self) -> None:
        """End the current epoch, and begin the next."""
        self.epoch, self.made = self.epoch + 1, 0

    @property
    def epochs_made(self) -> float:
        """Number of epochs made so far, including the finished fraction of the current epoch."""
        return self.epoch + self.made / self.steps_per_epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next step, and the values that must be equal after a restore."""
        return {**self.must_be_same(), "epoch": self.epoch, "made": self.made}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the position of the next step. Raises JobFailedError if the data or its order has changed."""
        self.check_same(state)
        self.epoch, self.made = int(state["epoch"]), int(state["made"])

    # --- called by the trainer's loop --------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["loader"], name)

    def __len__(self) -> int:
        return len(self.loader)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that the next call of `iter` reads."""
        self._asked_epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        """Yield the remaining batches of the epoch that `set_epoch` has set."""
        epoch = self._asked_epoch
        for _, fetched in self.read(epoch, self.made if epoch == self.epoch else 0):
            yield from (one.batch for one in fetched)
