"""Lightning checkpoints without pickle: signed, checksummed, and stored in a folder or on S3.

trainer = Trainer(plugins=[HyperpodCheckpointIO()], callbacks=[ModelCheckpoint(...)])
trainer.fit(model, loader, ckpt_path="last")

Lightning decides when to save and which checkpoints to keep. Jobs with `lightning.ResilientTrainer` survive faults
without Lightning checkpoints.
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
    """Saves tensors byte for byte and everything else as JSON. The path of a checkpoint is a folder or an S3 prefix.

    An object that is neither a tensor nor JSON is refused, and the error has the object's name in the checkpoint. If a
    save is interrupted, even by `kill -9`, the previous checkpoint stays intact.

    Args:
        job: name of the job that owns the checkpoints; checkpoints of another job are refused.
        secret_file: file with the secret that signs checkpoints, at least 16 bytes, readable only by this user. The
            default secret file is $HPX_SECRET_FILE or, if this variable is unset, a new file in the user's state
            directory, which is enough for jobs on one machine.
    """

    def __init__(self, job: str = "lightning", *, secret_file: str | os.PathLike[str] | None = None) -> None:
        self._job = job
        self._secret_file = None if secret_file is None else Path(secret_file)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Save `checkpoint` at `path`. Lightning calls this method only on rank 0.

        Raises:
            JobFailedError: an object is neither a tensor nor JSON. The error has the object's path in the checkpoint.
            UnsupportedError: `storage_options` is given.
        """
        if storage_options is not None:
            wrong = "trainer.save_checkpoint(storage_options=...) is not supported by HyperpodCheckpointIO"
            raise UnsupportedError([Problem(wrong, hint="leave storage_options out")])
        self._at(path).save(checkpoint, int(checkpoint.get("global_step", 0)))

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load the checkpoint at `path`. `weights_only` makes no difference, because nothing is unpickled.

        Args:
            map_location: a device to load tensors to; with another type of value, tensors stay on the CPU until
                Lightning moves them.

        Raises:
            NotFoundError: there is no complete checkpoint at `path`.
            CorruptSnapshotError: the checkpoint is damaged, or signed with another secret.
        """
        loaded: dict[str, Any] = self._at(path).load()
        if isinstance(map_location, str | torch.device | int):
            loaded = _moved(loaded, torch.device(map_location))
        return loaded

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Delete the checkpoint at `path`."""
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
