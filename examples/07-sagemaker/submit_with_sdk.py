"""Submit job.yaml through the SageMaker Python SDK, 2.x or 3.x: the request is the one that hp-ext sends."""

from importlib.metadata import version

from hyperpod_ext.config.files.load import load
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.submit.sagemaker.estimator import (
    estimator_kwargs,
    fit_kwargs,
    model_trainer,
    model_trainer_kwargs,
)

job = load(JobConfig, "job.yaml")

if version("sagemaker").startswith("2."):
    from sagemaker.pytorch import PyTorch

    estimator = PyTorch(entry_point=job.script, source_dir=".", **estimator_kwargs(job))
    estimator.fit(**fit_kwargs(job))
else:
    from sagemaker.train import ModelTrainer

    trainer = model_trainer(ModelTrainer(**model_trainer_kwargs(job, source_dir=".")), job)
    trainer.train()
