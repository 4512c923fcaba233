"""A small causal language model with Accelerate, epochs and evaluation, with the checkpoints of Accelerate."""

import math
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, Subset
from transformers import default_data_collator, get_scheduler

import toy

EPOCHS, BATCH = 4, 2


def grouped(model):
    plain = [weight for name, weight in model.named_parameters() if "norm" in name]
    decayed = [weight for name, weight in model.named_parameters() if "norm" not in name]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]


def main() -> None:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    train_data, eval_data = Subset(toy.Tokens(), range(16)), Subset(toy.Tokens(), range(16, 24))
    train_loader = DataLoader(train_data, batch_size=BATCH, shuffle=True, collate_fn=default_data_collator)
    eval_loader = DataLoader(eval_data, batch_size=BATCH, collate_fn=default_data_collator)
    model = toy.llama()
    optimizer = torch.optim.AdamW(grouped(model), lr=1e-3)
    schedule = get_scheduler("linear", optimizer, num_warmup_steps=2, num_training_steps=toy.STEPS)
    model, optimizer, train_loader, eval_loader, schedule = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, schedule
    )
    saved = sorted(Path(toy.OUT).glob("step-*"))
    completed = 0
    if saved:
        accelerator.load_state(str(saved[-1]))
        completed = int(saved[-1].name[5:])
    for epoch in range(completed // len(train_loader), EPOCHS):
        model.train()
        skipped = completed - epoch * len(train_loader)
        for batch in accelerator.skip_first_batches(train_loader, skipped) if skipped else train_loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            completed += 1
            if completed % toy.SAVE_EVERY == 0:
                accelerator.save_state(f"{toy.OUT}/step-{completed:03}")
        model.eval()
        losses = []
        for batch in eval_loader:
            with torch.no_grad():
                loss = model(**batch).loss
            losses.append(accelerator.gather_for_metrics(loss.repeat(BATCH)))
        accelerator.print(f"epoch {epoch}: perplexity {math.exp(torch.cat(losses).mean()):.3f}")


main()
