"""TRL's direct preference optimization, with the trainer's own checkpoints."""

from pathlib import Path

from datasets import Dataset
from transformers.trainer_utils import get_last_checkpoint
from trl import DPOConfig, DPOTrainer

import toy


def main() -> None:
    args = DPOConfig(
        output_dir=toy.OUT,
        max_steps=toy.STEPS,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        logging_steps=4,
        report_to="none",
        use_cpu=True,
        bf16=False,
        max_length=24,
        save_steps=toy.SAVE_EVERY,
    )
    rows = range(100)
    data = Dataset.from_dict(
        {
            "prompt": [toy.text(row, 4) for row in rows],
            "chosen": [toy.text(100 + row, 4) for row in rows],
            "rejected": [toy.text(200 + row, 4) for row in rows],
        }
    )
    trainer = DPOTrainer(
        model=toy.llama(), ref_model=toy.llama(), args=args, train_dataset=data, processing_class=toy.tokenizer()
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(toy.OUT) if Path(toy.OUT).is_dir() else None)


main()
