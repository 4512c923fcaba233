"""What only SageMaker training jobs have."""

from __future__ import annotations

from hyperpod_ext.config.base import Config


class SageMaker(Config):
    """What only SageMaker training jobs have."""
