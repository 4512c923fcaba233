"""A trainer for models in the shape of Llama and Mixtral: FSDP2 and tensor parallelism, to be read and changed.

    hp-ext create-job -f job.yaml --target local --wait

docs/trainer.md describes the settings. After a `kill -9` of any rank it continues with the same weights, bit for bit.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from data import SampleRange, open_samples
from metrics import PACKAGES, MetricsWriter, missing_package
from model import SHAPES, Model
from parallel import build_model, clip_gradients, make_mesh, make_optimizer
from torch.distributed.device_mesh import DeviceMesh
from weights import export, load, read_shape

from hyperpod_ext.runtime import Run, resilient
from hyperpod_ext.runtime.data import ElasticDataLoader, learning_rate


def loss_of(model: Model, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean loss of predicting each next token, and the balance loss of the experts."""
    tokens = tokens.to(args.device).long()
    return model(tokens[:, :-1], tokens[:, 1:])


@torch.no_grad()
def evaluate(model: Model, samples: SampleRange, mesh: DeviceMesh) -> torch.Tensor:
    """Return the mean loss of held-out samples. Copies read equal shares, because a forward pass communicates."""
    copies, copy = mesh["dp"].size(), mesh["dp"].get_local_rank()
    if len(samples) < copies:
        raise ValueError(f"{len(samples)} samples cannot be shared by {copies} copies of the model. Raise --held-out.")
    share = range(copy, len(samples) // copies * copies, copies)
    total = torch.zeros((), device=args.device)
    for first in range(0, len(share), args.micro_batch):
        numbers = share[first : first + args.micro_batch]
        total += loss_of(model, torch.stack(samples.__getitems__(numbers)))[0] * len(numbers)
    dist.all_reduce(total)
    return total / (len(share) * dist.get_world_size())


@resilient  # called again after a fault; healthy processes stay
def train(run: Run) -> None:
    shape = read_shape(args.weights) if args.weights else SHAPES[args.shape]

    def build() -> tuple[DeviceMesh, Model, torch.optim.Optimizer]:
        mesh = make_mesh(args.device, run.world_size, args.tensor)
        model = build_model(shape, mesh, bf16=args.bf16, recompute=args.recompute, compiled=args.compile)
        return mesh, model, make_optimizer(model, args.weight_decay)

    mesh, model, optimizer = run.keep(build)
    metrics = run.keep(lambda: MetricsWriter(args.metrics, args.folder / "metrics", run.config.name, vars(args)))
    run.leave_out(metrics)  # training does not depend on it

    samples, held_out = open_samples(args.data, args.tokenizer, args.folder, args.length, args.held_out)
    copies, copy = mesh["dp"].size(), mesh["dp"].get_local_rank()
    loader = ElasticDataLoader(
        samples,
        global_batch_size=run.config.global_batch_size or args.micro_batch * copies,
        micro_batch_size=args.micro_batch,
        rank=copy,  # all ranks of a model copy read the same samples
        world_size=copies,
        seed=run.config.seed,
        drop_last=True,
    )
    if run.restore(model=model, optimizer=optimizer, data=loader) == 0 and args.weights:
        load(model, args.weights)

    for step, batches in zip(run.steps(args.steps), loader.steps(), strict=False):
        total = torch.zeros((), device=args.device)
        for batch, weight in batches:
            loss, balance = loss_of(model, batch)
            ((loss + shape.router_aux_loss_coef * balance) * weight * copies).backward()  # FSDP2 divides by copies
            total += loss.detach() * weight
        norm = clip_gradients(model, args.clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, peak=args.lr, total_steps=args.steps, warmup_steps=args.warmup)
        optimizer.step()
        optimizer.zero_grad()
        loader.ack(batches)

        dist.all_reduce(total)
        values = {"loss": total / args.tensor, "gradient_norm": norm}
        if step % args.evaluate_every == 0:
            values["held_out_loss"] = evaluate(model, held_out, mesh)
        run.log(**values)
        if run.rank == 0:
            tokens = batches.samples * args.length
            metrics.write(step, tokens, {name: value.item() for name, value in values.items()})

    metrics.close()
    run.log(held_out_loss=evaluate(model, held_out, mesh))
    if args.export:
        export(model, args.export)


def parse() -> argparse.Namespace:
    """Return the command line's settings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = parser.add_argument_group("model")
    model.add_argument("--shape", choices=SHAPES, default="llama-tiny", help="sizes of a model with random weights")
    model.add_argument(
        "--weights", type=Path, help="folder with a Hugging Face model to start from, instead of --shape"
    )
    model.add_argument("--export", type=Path, help="folder for the trained model, in Hugging Face's format")
    data = parser.add_argument_group("data")
    data.add_argument("--data", nargs="*", default=[], help="files of text or records; default: Python's own sources")
    data.add_argument("--tokenizer", default="bytes", help="bytes, none, hf:NAME or a tokenizer.json")
    data.add_argument("--length", type=int, default=128, help="tokens of a sample")
    data.add_argument("--held-out", type=int, default=32, help="samples for evaluation")
    data.add_argument(
        "--folder", type=Path, default=Path("/tmp/hyperpod-ext-20-trainer"), help="for tokens and metrics"
    )
    training = parser.add_argument_group("training")
    training.add_argument("--steps", type=int, default=40, help="optimizer steps")
    training.add_argument("--micro-batch", type=int, default=4, help="samples of one forward pass")
    training.add_argument("--lr", type=float, default=1e-3, help="highest learning rate")
    training.add_argument("--warmup", type=int, default=5, help="steps until the highest learning rate")
    training.add_argument("--weight-decay", type=float, default=0.1)
    training.add_argument("--clip", type=float, default=1.0, help="limit for the norm of the gradients")
    training.add_argument("--evaluate-every", type=int, default=20, help="steps between two evaluations")
    training.add_argument("--metrics", choices=PACKAGES, default="none", help="where metrics are sent")
    machine = parser.add_argument_group("machine")
    machine.add_argument("--device", default="cpu", help="cpu or cuda")
    machine.add_argument("--tensor", type=int, default=1, help="ranks that share each layer (tensor parallelism)")
    machine.add_argument("--bf16", action="store_true", help="compute in bfloat16; weights stay float32")
    machine.add_argument("--recompute", action="store_true", help="activation checkpointing")
    machine.add_argument("--compile", action="store_true", help="compile the blocks")
    settings = parser.parse_args()
    if error := missing_package(settings.metrics):
        parser.error(error)
    if settings.weights and not (settings.weights / "config.json").is_file():
        parser.error(f"--weights {settings.weights} has no config.json. Name the folder of a Hugging Face model.")
    return settings


if __name__ == "__main__":
    args = parse()
    train()
