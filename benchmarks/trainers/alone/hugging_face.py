"""A small Llama and Hugging Face's Trainer, with the trainer's own checkpoints."""

from pathlib import Path

from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import toy


def main() -> None:
    args = TrainingArguments(
        output_dir=toy.OUT,
        max_steps=toy.STEPS,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        logging_steps=4,
        report_to="none",
        use_cpu=True,
        save_steps=toy.SAVE_EVERY,
    )
    trainer = Trainer(model=toy.llama(), args=args, train_dataset=toy.Tokens())
    trainer.train(resume_from_checkpoint=get_last_checkpoint(toy.OUT) if Path(toy.OUT).is_dir() else None)


main()
