"""TRL's direct preference optimization, with the job's snapshots."""

from datasets import Dataset
from trl import DPOConfig, DPOTrainer

import toy
from hyperpod_ext.integrations.hugging_face import ResilientTrainer
from hyperpod_ext.runtime import Run, resilient


class ResilientDPOTrainer(ResilientTrainer, DPOTrainer):
    pass


@resilient
def main(run: Run) -> None:
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
        save_strategy="no",
    )
    rows = range(100)
    data = Dataset.from_dict(
        {
            "prompt": [toy.text(row, 4) for row in rows],
            "chosen": [toy.text(100 + row, 4) for row in rows],
            "rejected": [toy.text(200 + row, 4) for row in rows],
        }
    )
    model, reference = run.keep(lambda: (toy.llama(), toy.llama()))
    trainer = ResilientDPOTrainer(
        run, model=model, ref_model=reference, args=args, train_dataset=data, processing_class=toy.tokenizer()
    )
    trainer.train()


main()
