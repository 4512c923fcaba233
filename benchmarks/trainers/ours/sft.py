"""TRL's supervised fine-tuning, with the job's snapshots."""

from datasets import Dataset
from trl import SFTConfig, SFTTrainer

import toy
from hyperpod_ext.integrations.hugging_face import ResilientTrainer
from hyperpod_ext.runtime import Run, resilient


class ResilientSFTTrainer(ResilientTrainer, SFTTrainer):
    pass


@resilient
def main(run: Run) -> None:
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
        save_strategy="no",
    )
    data = Dataset.from_dict({"text": [toy.text(number) for number in range(100)]})
    trainer = ResilientSFTTrainer(
        run, model=run.keep(toy.llama), args=args, train_dataset=data, processing_class=toy.tokenizer()
    )
    trainer.train()


main()
