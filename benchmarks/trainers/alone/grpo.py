"""TRL's group relative policy optimization, with the trainer's own checkpoints."""

from pathlib import Path

from datasets import Dataset
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOConfig, GRPOTrainer

import toy


def reward(completions, **_):
    return [float(len(set(each.split()))) for each in completions]


def main() -> None:
    args = GRPOConfig(
        output_dir=toy.OUT,
        max_steps=toy.STEPS,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        logging_steps=4,
        report_to="none",
        use_cpu=True,
        bf16=False,
        num_generations=2,
        max_completion_length=8,
        save_steps=toy.SAVE_EVERY,
    )
    data = Dataset.from_dict({"prompt": [toy.text(number, 6) for number in range(60)]})
    trainer = GRPOTrainer(
        model=toy.llama(), args=args, reward_funcs=reward, train_dataset=data, processing_class=toy.tokenizer()
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(toy.OUT) if Path(toy.OUT).is_dir() else None)


main()
