"""What only Slurm has."""

from __future__ import annotations

from hyperpod_ext.config.base import Config


class Slurm(Config):
    """What only Slurm has."""
