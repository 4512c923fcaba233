"""How the script splits its model over ranks: nothing is done with it here but to check that the numbers agree."""

from __future__ import annotations

from pydantic import PositiveInt

from hyperpod_ext.config.base import Config


class Parallelism(Config):
    """Ranks that share one copy of the model. What is left of the world size is data parallelism."""

    tensor: PositiveInt = 1
    """Ranks that share each layer."""
    pipeline: PositiveInt = 1
    """Stages of layers."""
    context: PositiveInt = 1
    """Ranks that share each sequence."""

    @property
    def ranks_per_copy(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.tensor * self.pipeline * self.context
