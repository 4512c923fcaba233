"""Typed job specs, templates and an in-container runtime for SageMaker HyperPod.

    from hyperpod_ext import JobConfig, load, make_plan, submit, estimator_kwargs

Public names are imported on first use, so that `import hyperpod_ext` needs neither torch nor pydantic.
"""

from typing import TYPE_CHECKING

from hyperpod_ext.lazy import loader
from hyperpod_ext.version import __version__ as __version__

if TYPE_CHECKING:
    from hyperpod_ext.config.clusters.cluster import ClusterConfig as ClusterConfig
    from hyperpod_ext.config.files.load import load as load
    from hyperpod_ext.config.job.job import JobConfig as JobConfig
    from hyperpod_ext.jobs.plan import make_plan as make_plan
    from hyperpod_ext.jobs.sagemaker.estimator import distributed as distributed
    from hyperpod_ext.jobs.sagemaker.estimator import distribution as distribution
    from hyperpod_ext.jobs.sagemaker.estimator import estimator_kwargs as estimator_kwargs
    from hyperpod_ext.jobs.sagemaker.estimator import fit_kwargs as fit_kwargs
    from hyperpod_ext.jobs.sagemaker.estimator import model_trainer as model_trainer
    from hyperpod_ext.jobs.sagemaker.estimator import model_trainer_kwargs as model_trainer_kwargs
    from hyperpod_ext.jobs.sagemaker.secret import ensure_secret as ensure_secret
    from hyperpod_ext.jobs.submit import submit as submit

_MODULES = {
    "ClusterConfig": ".config.clusters.cluster",
    "JobConfig": ".config.job.job",
    "distributed": ".jobs.sagemaker.estimator",
    "distribution": ".jobs.sagemaker.estimator",
    "ensure_secret": ".jobs.sagemaker.secret",
    "estimator_kwargs": ".jobs.sagemaker.estimator",
    "fit_kwargs": ".jobs.sagemaker.estimator",
    "load": ".config.files.load",
    "make_plan": ".jobs.plan",
    "model_trainer": ".jobs.sagemaker.estimator",
    "model_trainer_kwargs": ".jobs.sagemaker.estimator",
    "submit": ".jobs.submit",
}

__all__ = sorted(_MODULES)

__getattr__ = loader(__name__, _MODULES)
