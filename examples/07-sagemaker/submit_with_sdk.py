"""Submit job.yaml through the SageMaker Python SDK, 2.x or 3.x: the request is the one that hp-ext sends."""

from importlib.metadata import version

from hyperpod_ext import JobConfig, estimator_kwargs, fit_kwargs, load, model_trainer, model_trainer_kwargs

job = load(JobConfig, "job.yaml")

if version("sagemaker").startswith("2."):
    from sagemaker.pytorch import PyTorch

    estimator = PyTorch(entry_point=job.script, source_dir=".", **estimator_kwargs(job))
    estimator.fit(**fit_kwargs(job))
else:
    from sagemaker.train import ModelTrainer

    trainer = model_trainer(ModelTrainer(**model_trainer_kwargs(job, source_dir=".")), job)
    trainer.train()
