"""TRL's group relative policy optimization, with the job's snapshots."""

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

import toy
from hyperpod_ext.integrations.hugging_face import ResilientTrainer
from hyperpod_ext.runtime import Run, resilient


def reward(completions, **_):
    return [float(len(set(each.split()))) for each in completions]


class ResilientGRPOTrainer(ResilientTrainer, GRPOTrainer):
    pass


@resilient
def main(run: Run) -> None:
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
        save_strategy="no",
    )
    data = Dataset.from_dict({"prompt": [toy.text(number, 6) for number in range(60)]})
    trainer = ResilientGRPOTrainer(
        run,
        model=run.keep(toy.llama),
        args=args,
        reward_funcs=reward,
        train_dataset=data,
        processing_class=toy.tokenizer(),
    )
    trainer.train()


main()
