"""A small Llama and Hugging Face's Trainer, with the job's snapshots."""

from transformers import TrainingArguments

import toy
from hyperpod_ext.integrations.hugging_face import ResilientTrainer
from hyperpod_ext.runtime import Run, resilient


@resilient
def main(run: Run) -> None:
    args = TrainingArguments(
        output_dir=toy.OUT,
        max_steps=toy.STEPS,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        logging_steps=4,
        report_to="none",
        use_cpu=True,
        save_strategy="no",
    )
    trainer = ResilientTrainer(run, model=run.keep(toy.llama), args=args, train_dataset=toy.Tokens())
    trainer.train()


main()
