"""Metrics of training: lines on rank 0, and one switch for TensorBoard, Weights & Biases or MLflow."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PACKAGES = {"none": None, "tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}
"""Values of `--metrics`, each with the package that it needs."""

Log = Callable[[int, dict[str, float]], object]


def missing_package(kind: str) -> str:
    """Return an error if the package of a tracker is not installed; empty if it is."""
    package = PACKAGES[kind]
    if package is None or importlib.util.find_spec(package) is not None:
        return ""
    return f"--metrics {kind} needs the package {package}, which is not installed. Run `pip install {package}`."


def open_tracker(
    kind: str, folder: Path, job: str, settings: dict[str, Any], step: int
) -> tuple[Log, Callable[[], object]]:
    """Return a function that logs the metrics of a step, and one that closes the tracker.

    step: the first step to log. A process that replaces rank 0 continues the run of the one before.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(folder), purge_step=step)
        return lambda step, values: [
            writer.add_scalar(name, value, step) for name, value in values.items()
        ], writer.close
    file = folder / f"{kind}-run"
    known = file.read_text() if step > 1 and file.exists() else None
    if kind == "wandb":
        import wandb

        run = wandb.init(project=job, id=known, resume="allow", dir=str(folder), config=settings)
        file.write_text(run.id)
        return lambda step, values: run.log(values, step=step), run.finish
    import mlflow

    mlflow.set_experiment(job)
    file.write_text(mlflow.start_run(run_id=known).info.run_id)
    if known is None:
        mlflow.log_params(settings)
    return lambda step, values: mlflow.log_metrics(values, step=step), mlflow.end_run


class MetricsWriter:
    """Writes the metrics of each step, with tokens per second. Use it on rank 0 only."""

    def __init__(self, kind: str, folder: Path, job: str, settings: dict[str, Any]) -> None:
        self.kind, self.arguments = kind, (kind, folder, job, settings)
        self.tracker: tuple[Log, Callable[[], object]] | None = None
        self.began = time.perf_counter()

    def write(self, step: int, tokens: int, values: dict[str, float]) -> None:
        """Write the metrics of a step of `tokens` tokens over all ranks."""
        now = time.perf_counter()
        values = values | {"tokens_per_s": tokens / (now - self.began)}
        self.began = now
        print(f"step {step}: " + ", ".join(f"{name} {value:.5g}" for name, value in values.items()), flush=True)
        if self.kind != "none":
            self.tracker = self.tracker or open_tracker(*self.arguments, step)
            self.tracker[0](step, values)

    def close(self) -> None:
        """Close the tracker, so that all metrics are sent."""
        if self.tracker is not None:
            self.tracker[1]()
            self.tracker = None
