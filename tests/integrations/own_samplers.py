"""Trainers that choose their samples themselves, by the kind that the first argument names, with the real libraries.

The samples of each step are written to `samples-RANK.jsonl` in the folder that SAMPLES names, for a test to look at."""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Trainer, TrainingArguments

from hyperpod_ext.integrations.hugging_face import ResilientTrainer
from hyperpod_ext.runtime import Run, resilient

STEPS = 12
WORDS = [f"w{number}" for number in range(60)]


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    specials = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, padding_side="left", **specials)


def text(number: int, words: int) -> str:
    drawn = random.Random(number)
    return " ".join(drawn.choice(WORDS) for _ in range(words))


def model() -> LlamaForCausalLM:
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    ends = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=63, num_key_value_heads=2, **shape, **ends))


def told(seen: Any) -> None:
    folder = Path(os.environ.get("SAMPLES", "."))
    with (folder / f"samples-{os.environ.get('RANK', 0)}.jsonl").open("a") as out:
        out.write(json.dumps(seen) + "\n")


def arguments(kind: type, **options: Any) -> Any:
    common = {
        "output_dir": tempfile.mkdtemp(),
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "logging_steps": 4,
    }
    return kind(**common | options)


def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    told(prompts)
    return [float(len(set(each.split()))) for each in completions]


def grpo(prompts: int, **options: Any) -> tuple[type, type, dict[str, Any]]:
    """TRL's class, the same on our adapter, and their options."""
    from trl import GRPOConfig, GRPOTrainer

    class Mine(ResilientTrainer, GRPOTrainer):
        pass

    data = Dataset.from_dict({"prompt": [text(number, 6) for number in range(prompts)]})
    args = arguments(GRPOConfig, num_generations=2, max_completion_length=8, **options)
    common = {"reward_funcs": reward, "args": args, "train_dataset": data, "processing_class": tokenizer()}
    return GRPOTrainer, Mine, common


def groups(run: Run, **options: Any) -> None:
    _, kind, common = grpo(14, **options)
    kind(run, model=run.keep(model), **common).train()


def as_alone(run: Run) -> None:
    """64 batches of TRL's own loader and of ours, then a training."""
    theirs, kind, common = grpo(300)
    alone = theirs(model=run.keep(model), **common)
    mine = kind(run, model=run.keep(model), **common)
    loaders = alone.get_train_dataloader(), mine.get_train_dataloader()
    batches = [[each["prompt"] for each in batch] for batch in itertools.islice(loaders[0], 64)]
    pairs = list(zip(batches, ([each["prompt"] for each in batch] for batch in loaders[1]), strict=False))
    told({"equal": sum(first == second for first, second in pairs)})
    mine.train()


def reused(run: Run) -> None:
    """Completions of one step are used by the three that follow."""
    groups(run, steps_per_generation=2, num_iterations=2, gradient_accumulation_steps=1)


def leave_one_out(run: Run) -> None:
    from trl import RLOOConfig, RLOOTrainer

    class Mine(ResilientTrainer, RLOOTrainer):
        pass

    data = Dataset.from_dict({"prompt": [text(number, 6) for number in range(14)]})
    args = arguments(RLOOConfig, num_generations=2, max_completion_length=8, beta=0.0)
    common = {"reward_funcs": reward, "args": args, "train_dataset": data, "processing_class": tokenizer()}
    Mine(run, model=run.keep(model), **common).train()


def preferences(run: Run) -> None:
    from trl import KTOConfig, KTOTrainer

    class Mine(ResilientTrainer, KTOTrainer):
        pass

    rows = range(22)
    columns = {"prompt": [text(n, 4) for n in rows], "completion": [text(99 + n, 4) for n in rows]}
    data = Dataset.from_dict({**columns, "label": [n % 2 == 0 for n in rows]})
    args = arguments(KTOConfig, max_length=16)
    trained, reference = run.keep(lambda: (model(), model()))
    common = {"args": args, "train_dataset": data, "processing_class": tokenizer()}
    Mine(run, model=trained, ref_model=reference, **common).train()


def pairs(run: Run) -> None:
    """Two datasets, whose batches never mix and hold no text twice."""
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
        losses,
        models,
    )

    class Mine(ResilientTrainer, SentenceTransformerTrainer):
        def compute_loss(self, model: Any, inputs: Any, **options: Any) -> Any:
            told([sorted(inputs), inputs.get("dataset_name")])
            return super().compute_loss(model, inputs, **options)

    def build() -> SentenceTransformer:
        embedding = models.StaticEmbedding(tokenizer().backend_tokenizer, embedding_dim=16)
        return SentenceTransformer(modules=[embedding])

    def of(start: int, count: int) -> Dataset:
        rows = range(start, start + count)
        return Dataset.from_dict(
            {"anchor": [text(n % 9, 5) for n in rows], "positive": [text(n + 50, 5) for n in rows]}
        )

    data = {"first": of(0, 37), "second": of(100, 30)}
    args = arguments(SentenceTransformerTrainingArguments, batch_sampler="no_duplicates", max_steps=-1)
    args.num_train_epochs = 3
    made = run.keep(build)
    Mine(run, model=made, args=args, train_dataset=data, loss=losses.MultipleNegativesRankingLoss(made)).train()


class Noisy(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Tokens, some of which are replaced by chance."""

    def __len__(self) -> int:
        return 45

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index >= len(self):
            raise IndexError(index)
        words = torch.randint(3, 63, (8,), generator=torch.Generator().manual_seed(index))
        words = torch.where(torch.rand(8) < 0.2, torch.randint(3, 63, (8,)), words)
        return {"input_ids": words, "labels": words}


class OwnRandom(ResilientTrainer):
    """The sampler draws from the global generator, and anew in each epoch."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return torch.utils.data.WeightedRandomSampler(torch.arange(1.0, 46.0), 45)


def noisy(run: Run) -> None:
    """Epochs whose last step is smaller; samples that workers change by chance."""
    args = arguments(TrainingArguments, gradient_accumulation_steps=2, dataloader_num_workers=2, num_train_epochs=4)
    args.max_steps = -1
    OwnRandom(run, model=run.keep(model), args=args, train_dataset=Noisy()).train()


def by_length(run: Run) -> None:
    args = arguments(TrainingArguments, train_sampling_strategy="group_by_length", dataloader_drop_last=True)
    ResilientTrainer(run, model=run.keep(model), args=args, train_dataset=Noisy()).train()


def without_adapter(run: Run) -> None:
    Trainer(model=run.keep(model), args=arguments(TrainingArguments), train_dataset=Noisy()).train()


KINDS: dict[str, Callable[[Run], object]] = {
    each.__name__.replace("_", "-"): each
    for each in (groups, as_alone, reused, leave_one_out, preferences, pairs, noisy, by_length, without_adapter)
}

if __name__ == "__main__":
    resilient(KINDS[sys.argv[1]])()
