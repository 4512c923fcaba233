"""Embeddings of sentence-transformers, with the trainer's own checkpoints."""

from pathlib import Path

from datasets import Dataset
from sentence_transformers import (
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.losses import MultipleNegativesRankingLoss
from transformers.trainer_utils import get_last_checkpoint

import toy


def main() -> None:
    args = SentenceTransformerTrainingArguments(
        output_dir=toy.OUT,
        max_steps=toy.STEPS,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        logging_steps=4,
        report_to="none",
        use_cpu=True,
        batch_sampler="no_duplicates",
        save_steps=toy.SAVE_EVERY,
    )
    rows = range(200)
    data = Dataset.from_dict(
        {"anchor": [toy.text(row) for row in rows], "positive": [toy.text(row + 300) for row in rows]}
    )
    model = toy.sentence_model()
    trainer = SentenceTransformerTrainer(
        model=model, args=args, train_dataset=data, loss=MultipleNegativesRankingLoss(model)
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(toy.OUT) if Path(toy.OUT).is_dir() else None)


main()
