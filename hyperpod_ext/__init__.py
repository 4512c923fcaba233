"""Typed job specs, templates and an in-container runtime for SageMaker HyperPod.

    from hyperpod_ext import JobConfig, load, make_plan, estimator_kwargs

Names are loaded on first use: importing this package needs neither torch nor pydantic.
"""

from typing import TYPE_CHECKING

from hyperpod_ext.lazy import loader
from hyperpod_ext.version import __version__ as __version__

if TYPE_CHECKING:
    from hyperpod_ext.config.clusters.cluster import ClusterConfig as ClusterConfig
    from hyperpod_ext.config.files.load import load as load
    from hyperpod_ext.config.job.job import JobConfig as JobConfig
    from hyperpod_ext.submit.plan import make_plan as make_plan
    from hyperpod_ext.submit.sagemaker.estimator import distributed as distributed
    from hyperpod_ext.submit.sagemaker.estimator import distribution as distribution
    from hyperpod_ext.submit.sagemaker.estimator import estimator_kwargs as estimator_kwargs
    from hyperpod_ext.submit.sagemaker.estimator import fit_kwargs as fit_kwargs
    from hyperpod_ext.submit.sagemaker.estimator import model_trainer as model_trainer
    from hyperpod_ext.submit.sagemaker.estimator import model_trainer_kwargs as model_trainer_kwargs
    from hyperpod_ext.submit.sagemaker.secret import ensure_secret as ensure_secret

_MODULES = {
    "ClusterConfig": ".config.clusters.cluster",
    "JobConfig": ".config.job.job",
    "distributed": ".submit.sagemaker.estimator",
    "distribution": ".submit.sagemaker.estimator",
    "ensure_secret": ".submit.sagemaker.secret",
    "estimator_kwargs": ".submit.sagemaker.estimator",
    "fit_kwargs": ".submit.sagemaker.estimator",
    "load": ".config.files.load",
    "make_plan": ".submit.plan",
    "model_trainer": ".submit.sagemaker.estimator",
    "model_trainer_kwargs": ".submit.sagemaker.estimator",
}

__all__ = sorted(_MODULES)

__getattr__ = loader(__name__, _MODULES)
