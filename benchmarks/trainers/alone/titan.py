"""TorchTitan's Trainer, with TorchTitan's own checkpoints."""

from pathlib import Path

import toy
from titan_on_cpu import on_cpu

on_cpu()  # before TorchTitan is imported

from torchtitan.config import ConfigManager  # noqa: E402
from torchtitan.train import Trainer  # noqa: E402


def main() -> None:
    config = ["--job.config_file", str(Path(__file__).with_name("debug.toml"))]
    config += ["--checkpoint.enable", "--checkpoint.interval", str(toy.SAVE_EVERY), "--checkpoint.folder", toy.OUT]
    trainer = Trainer(ConfigManager().parse_args(config))
    trainer.train()
    trainer.close()


main()
