"""Lightning's checkpoints without a pickle: signed, checksummed, in a folder or on S3.

trainer = Trainer(plugins=[HyperpodCheckpointIO()], callbacks=[ModelCheckpoint(...)])
trainer.fit(model, loader, ckpt_path="last")

Lightning decides when to save and which checkpoints to keep. Jobs with `lightning.ResilientTrainer` survive faults
without these checkpoints.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import CheckpointIO

from hyperpod_ext.errors import Problem, UnsupportedError
from hyperpod_ext.integrations.single_rank_checkpoint import SingleRankCheckpoint
from hyperpod_ext.runtime.ipc.environment import ENV_SECRET_FILE, read_secret
from hyperpod_ext.runtime.memory_server.client.start import secret_file_of


class HyperpodCheckpointIO(CheckpointIO):
    """Saves tensors as they are and everything else as JSON; a path is a folder, or an S3 prefix.

    Other objects are refused, with their name in the checkpoint. An interrupted save, also by `kill -9`, leaves the
    previous checkpoint intact.

    Args:
        job: owner of the checkpoints. Checkpoints of another job are refused.
        secret_file: signs them; at least 16 bytes, closed to other users. Default: HPX_SECRET_FILE, or a new file in
            the user's state directory, which is enough for one machine.
    """

    def __init__(self, job: str = "lightning", *, secret_file: str | os.PathLike[str] | None = None) -> None:
        self._job = job
        self._secret_file = None if secret_file is None else Path(secret_file)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """See CheckpointIO; Lightning calls it on rank 0 alone.

        Raises:
            JobFailedError: an object is neither a tensor nor JSON; the error has its path.
            UnsupportedError: storage options are given.
        """
        if storage_options is not None:
            raise UnsupportedError([Problem("trainer.save_checkpoint(storage_options=...)", hint="Leave it out.")])
        self._at(path).save(checkpoint, int(checkpoint.get("global_step", 0)))

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """See CheckpointIO. `weights_only` makes no difference, because nothing is unpickled.

        Args:
            map_location: a device. Otherwise tensors stay on the CPU, and Lightning moves them.

        Raises:
            NotFoundError: the path has no complete checkpoint.
            CorruptSnapshotError: it is damaged, or signed with another secret.
        """
        loaded: dict[str, Any] = self._at(path).load()
        if isinstance(map_location, str | torch.device | int):
            loaded = _moved(loaded, torch.device(map_location))
        return loaded

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """See CheckpointIO."""
        self._at(path).remove()

    def _at(self, path: str | os.PathLike[str]) -> SingleRankCheckpoint:
        return SingleRankCheckpoint(os.fspath(path), job=self._job, secret=self._secret())

    def _secret(self) -> bytes:
        named = os.environ.get(ENV_SECRET_FILE)
        return read_secret(self._secret_file or (Path(named) if named else secret_file_of(self._job, durable=True)))


def _moved(node: Any, device: torch.device) -> Any:
    if isinstance(node, torch.Tensor):
        return node.to(device)
    if isinstance(node, Mapping):
        return type(node)((key, _moved(value, device)) for key, value in node.items())  # type: ignore[call-arg]  # a dict of some kind
    if isinstance(node, list | tuple):
        return type(node)(_moved(value, device) for value in node)
    return node
