"""TRL's supervised fine-tuning, with the trainer's own checkpoints."""

from pathlib import Path

from datasets import Dataset
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig, SFTTrainer

import toy


def main() -> None:
    args = SFTConfig(
        output_dir=toy.OUT,
        max_steps=toy.STEPS,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        logging_steps=4,
        report_to="none",
        use_cpu=True,
        bf16=False,
        max_length=16,
        save_steps=toy.SAVE_EVERY,
    )
    data = Dataset.from_dict({"text": [toy.text(number) for number in range(100)]})
    trainer = SFTTrainer(model=toy.llama(), args=args, train_dataset=data, processing_class=toy.tokenizer())
    trainer.train(resume_from_checkpoint=get_last_checkpoint(toy.OUT) if Path(toy.OUT).is_dir() else None)


main()
