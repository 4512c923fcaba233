"""Lightning with HyperpodCheckpointIO, beside what the example does; run by the tests in an environment that has it."""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.integrations.lightning_checkpoint import HyperpodCheckpointIO
from hyperpod_ext.runtime.storage.checkpoints import Checkpoints


class Model(L.LightningModule):
    """One layer, on data that it makes itself."""

    def __init__(self, thing: Any = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(4, 4)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss, on_epoch=True)
        return loss

    def test_step(self, batch: list[torch.Tensor]) -> None:
        self.log("test_loss", self.layer(batch[0]).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def trainer(folder: Path, plugin: Any, epochs: int = 2) -> L.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    saves = ModelCheckpoint(folder, monitor="loss", save_top_k=1)
    return L.Trainer(max_epochs=epochs, accelerator="cpu", devices=1, plugins=[plugin], callbacks=[saves], **quiet)


def scenes(folder: Path) -> dict[str, Any]:
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 4)), batch_size=4)
    found: dict[str, Any] = {}

    best = trainer(folder / "best", HyperpodCheckpointIO())
    best.fit(Model(), data)
    found["kept"] = [path.name for path in (folder / "best").iterdir()]
    trained = {name: value.clone() for name, value in best.model.state_dict().items()}
    loaded = best.test(Model(), data, ckpt_path="best", verbose=False)[0]["test_loss"]
    with torch.no_grad():
        for weight in best.model.parameters():
            weight.zero_()
    zeroed = best.test(best.model, data, verbose=False)[0]["test_loss"]
    found["test losses"] = [loaded, zeroed]

    beside = trainer(folder / "beside", AsyncCheckpointIO(HyperpodCheckpointIO()))
    beside.fit(Model(), data)
    by_hand = folder / "by-hand.ckpt"
    beside.save_checkpoint(by_hand, weights_only=True)
    beside.strategy.checkpoint_io.teardown()
    here = HyperpodCheckpointIO().load_checkpoint(by_hand, map_location="cpu")
    now = beside.model.state_dict()
    found["weights"] = all(torch.equal(value, here["state_dict"][name]) for name, value in now.items())
    found["hyperparameters"] = dict(here["hyper_parameters"])
    (kept,) = (folder / "best").iterdir()
    weights = HyperpodCheckpointIO().load_checkpoint(kept)["state_dict"]
    found["as trained"] = all(torch.equal(value, weights[name]) for name, value in trained.items())

    try:
        trainer(folder / "object", HyperpodCheckpointIO()).fit(Model(thing=object()), data)
    except JobFailedError as error:
        found["refused"] = [str(error), error.hint]
    torch.save({}, folder / "old.ckpt")
    try:
        trainer(folder / "old", HyperpodCheckpointIO()).fit(Model(), data, ckpt_path=folder / "old.ckpt")
    except Exception as error:
        found["old"] = str(error)
    return found


def die_in_save(number: int, script: str, arguments: list[str]) -> None:
    """Run `script`, and kill this process in its `number`th save, when all is written but what makes it exist."""
    commit, saves = Checkpoints.commit, 0

    def deadly(self: Checkpoints, *args: Any) -> bool:
        nonlocal saves
        saves += 1
        if saves == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return commit(self, *args)

    Checkpoints.commit = deadly  # type: ignore[method-assign]
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1] == "scenes":
        print(json.dumps(scenes(Path(sys.argv[2]))))
    else:
        die_in_save(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
