"""Data, evaluation and metrics of examples/20-trainer."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from hyperpod_ext.runtime import Run, resilient


def test_held_out_samples_are_not_learned(trainer: SimpleNamespace, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(100)))
    learn, held_out = trainer.data.open_samples([str(text)], "bytes", tmp_path, 9, 3)
    assert (len(learn), len(held_out)) == (8, 3)
    assert learn[0].tolist() == list(range(10))
    assert held_out[0].tolist() == list(range(72, 82))
    assert [each.tolist() for each in held_out.__getitems__([2, 0])] == [held_out[2].tolist(), held_out[0].tolist()]
    assert learn.fingerprint != held_out.fingerprint
    with pytest.raises(ValueError, match="11 samples, and 11 are held out"):
        trainer.data.open_samples([str(text)], "bytes", tmp_path, 9, 11)


def test_evaluation_is_the_mean_loss_of_all_samples(
    trainer: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(128)) * 4)
    shape = trainer.model.SHAPES["llama-tiny"]
    _, held_out = trainer.data.open_samples([str(text)], "bytes", tmp_path, 16, 7)
    monkeypatch.setattr(trainer.train, "args", Namespace(device="cpu", micro_batch=3), raising=False)
    found: list[float] = []

    @resilient
    def train(run: Run) -> None:
        mesh = trainer.parallel.make_mesh("cpu", 1, 1)
        model = trainer.parallel.build_model(shape, mesh, bf16=False, recompute=False, compiled=False)
        run.restore(model=model)
        found.append(trainer.train.evaluate(model, held_out, mesh).item())
        with torch.no_grad():
            each = [trainer.train.loss_of(model, held_out[number].unsqueeze(0))[0] for number in range(7)]
        found.append(torch.stack(each).mean().item())

    train()
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_a_mesh_needs_a_divisor_of_the_ranks(trainer: SimpleNamespace) -> None:
    with pytest.raises(SystemExit, match="--tensor 3 does not divide the 4 ranks"):
        trainer.parallel.make_mesh("cpu", 4, 3)


@pytest.mark.parametrize("kind", ["tensorboard", "wandb", "mlflow"])
def test_a_tracker_that_is_not_installed_is_an_error_at_the_start(
    trainer: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["train.py", "--metrics", kind])
    with pytest.raises(SystemExit) as ended:
        trainer.train.parse()
    assert ended.value.code == 2
    assert f"--metrics {kind} needs the package {kind}, which is not installed" in capsys.readouterr().err
    assert trainer.metrics.missing_package("none") == ""


def test_weights_without_a_model_are_an_error_at_the_start(
    trainer: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--weights", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        trainer.train.parse()
    assert ended.value.code == 2
    assert f"--weights {tmp_path} has no config.json" in capsys.readouterr().err


class Calls:
    """A library that records its calls; `results` are those of functions by name."""

    def __init__(self, **results: Any) -> None:
        self.results, self.calls = results, []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            self.calls.append((name, arguments, options))
            return self.results.get(name)

        return call

    def of(self, name: str) -> list[tuple[Any, ...]]:
        return [(*arguments, *options.values()) for called, arguments, options in self.calls if called == name]


def write_two_processes(trainer: SimpleNamespace, folder: Path, kind: str) -> None:
    """Two steps of a process, and two of one that replaces it."""
    for steps in ((1, 2), (3, 4)):
        writer = trainer.metrics.MetricsWriter(kind, folder, "job", {"lr": 0.1})
        for step in steps:
            writer.write(step, 100, {"loss": 4.0 - step})
    writer.close()


def test_weights_and_biases_continues_the_same_run(
    trainer: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Calls()
    run.id = "a1"
    wandb = Calls(init=run)
    monkeypatch.setitem(sys.modules, "wandb", wandb)  # type: ignore[arg-type]  # as a module is used
    write_two_processes(trainer, tmp_path / "metrics", "wandb")
    assert [options["id"] for _, _, options in wandb.calls] == [None, "a1"]
    assert [(step, values["loss"]) for values, step in run.of("log")] == [(1, 3.0), (2, 2.0), (3, 1.0), (4, 0.0)]
    assert len(run.of("finish")) == 1
    assert "step 4: loss 0, tokens_per_s " in capsys.readouterr().out


def test_mlflow_continues_the_same_run(
    trainer: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = Calls(start_run=SimpleNamespace(info=SimpleNamespace(run_id="b2")))
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)  # type: ignore[arg-type]  # as a module is used
    write_two_processes(trainer, tmp_path / "metrics", "mlflow")
    assert mlflow.of("start_run") == [(None,), ("b2",)]
    assert mlflow.of("log_params") == [({"lr": 0.1},)]
    assert [step for _, step in mlflow.of("log_metrics")] == [1, 2, 3, 4]
    assert len(mlflow.of("end_run")) == 1


def test_tensorboard_drops_steps_that_are_repeated(
    trainer: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Calls()
    module = ModuleType("torch.utils.tensorboard")
    purged: list[int] = []
    module.SummaryWriter = lambda _folder, purge_step: purged.append(purge_step) or writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    write_two_processes(trainer, tmp_path / "metrics", "tensorboard")
    assert purged == [1, 3]
    assert [(name, step) for name, _, step in writer.of("add_scalar") if name == "loss"] == [
        ("loss", step) for step in (1, 2, 3, 4)
    ]
