"""torch.save of each rank's own tensors to a file, renamed when it is whole."""

from __future__ import annotations

from pathlib import Path

import torch

from checkpoint.adapters import Adapter
from checkpoint.state import State, leaves, local_state


class TorchSave(Adapter):
    def save(self, state: State, step: int) -> None:
        partial = self._file(step).with_suffix(".partial")
        torch.save({"step": step, "state": local_state(state)}, partial)
        partial.rename(self._file(step))

    def flush(self) -> None:
        for old in sorted(self.place.folder.glob(f"rank{self.place.rank}.*.pt"))[:-1]:
            old.unlink()

    def restore(self, state: State) -> int:
        newest = max(self.place.folder.glob(f"rank{self.place.rank}.*.pt"))
        saved = torch.load(newest, weights_only=True, mmap=True)
        for mine, theirs in zip(leaves(local_state(state)), leaves(saved["state"]), strict=True):
            mine.copy_(theirs)
        return int(saved["step"])

    def _file(self, step: int) -> Path:
        return self.place.folder / f"rank{self.place.rank}.{step:08}.pt"
