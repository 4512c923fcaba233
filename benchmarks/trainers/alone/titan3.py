"""TorchTitan 0.3's Trainer, with TorchTitan's own checkpoints."""

import toy
from titan_on_cpu import attention_on_cpu, on_cpu

on_cpu()  # before TorchTitan is imported

from titan3_config import small  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402


def main() -> None:
    attention_on_cpu()
    config = small(toy.STEPS)
    config.checkpoint.enable, config.checkpoint.interval = True, toy.SAVE_EVERY
    config.checkpoint.folder = toy.OUT
    trainer = Trainer(config)
    trainer.train()
    trainer.close()


main()
