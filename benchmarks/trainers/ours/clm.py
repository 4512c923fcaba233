"""A small causal language model with Accelerate, epochs and evaluation, with the job's snapshots."""

import math

import torch
from torch.utils.data import DataLoader, Subset
from transformers import default_data_collator, get_scheduler

import toy
from hyperpod_ext.integrations.accelerate import ResilientAccelerator
from hyperpod_ext.runtime import Run, resilient

EPOCHS, BATCH = 4, 2


def grouped(model):
    plain = [weight for name, weight in model.named_parameters() if "norm" in name]
    decayed = [weight for name, weight in model.named_parameters() if "norm" not in name]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]


@resilient
def main(run: Run) -> None:
    accelerator = ResilientAccelerator(run, cpu=True)
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
    for epoch, batches in accelerator.epochs(train_loader, EPOCHS):
        model.train()
        for batch in batches:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        model.eval()
        losses = []
        for batch in eval_loader:
            with torch.no_grad():
                loss = model(**batch).loss
            losses.append(accelerator.gather_for_metrics(loss.repeat(BATCH)))
        accelerator.print(f"epoch {epoch}: perplexity {math.exp(torch.cat(losses).mean()):.3f}")


main()
