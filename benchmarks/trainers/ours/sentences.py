"""Embeddings of sentence-transformers, with the job's snapshots."""

from datasets import Dataset
from sentence_transformers import (
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.losses import MultipleNegativesRankingLoss

import toy
from hyperpod_ext.integrations.hugging_face import ResilientTrainer
from hyperpod_ext.runtime import Run, resilient


class ResilientSentenceTransformerTrainer(ResilientTrainer, SentenceTransformerTrainer):
    pass


@resilient
def main(run: Run) -> None:
    args = SentenceTransformerTrainingArguments(
        output_dir=toy.OUT,
        max_steps=toy.STEPS,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        logging_steps=4,
        report_to="none",
        use_cpu=True,
        batch_sampler="no_duplicates",
        save_strategy="no",
    )
    rows = range(200)
    data = Dataset.from_dict(
        {"anchor": [toy.text(row) for row in rows], "positive": [toy.text(row + 300) for row in rows]}
    )
    model = run.keep(toy.sentence_model)
    trainer = ResilientSentenceTransformerTrainer(
        run, model=model, args=args, train_dataset=data, loss=MultipleNegativesRankingLoss(model)
    )
    trainer.train()


main()
