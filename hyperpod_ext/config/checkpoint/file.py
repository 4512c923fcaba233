"""Section of a job's spec for the checkpoint tier in a directory that all nodes share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from hyperpod_ext.config.checkpoint.tier import DirectoryTier


class FileTier(DirectoryTier):
    """A directory of a shared POSIX file system, for example FSx. Checkpoints survive the loss of every node."""

    schemes = ("file", "")
    distance = 6
    kind: Literal["file"] = "file"
    path: Annotated[str, Field(min_length=1, examples=["/fsx/checkpoints"])]
    """Directory that every node sees under this path. Pods need a shared volume for the directory. Checkpoints are
    stored under `path/NAME-OF-THE-JOB/`."""
    shared: bool = False
    """Whether other users may read the checkpoints, as far as the umask of the job allows. Default: files have mode
    0600 and folders 0700, so that only the user that training runs as can read the checkpoints."""

    @model_serializer(mode="wrap")
    def _dump(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out `shared` if it is False, so that images with an older version, without `shared`, can read the
        spec."""
        dumped: dict[str, Any] = handler(self)
        if not self.shared:
            dumped.pop("shared", None)
        return dumped

    @property
    def options(self) -> dict[str, Any]:
        return {"shared": self.shared}
