"""A GPT on characters with a trainer class, as in PyTorch's minGPT example, for torchrun."""

import argparse
import os
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, random_split


class Characters(Dataset):
    """Each sample is a window of the text, and the same window one character later."""

    def __init__(self, text: str, block_size: int) -> None:
        self.vocabulary = sorted(set(text))
        numbers = {character: number for number, character in enumerate(self.vocabulary)}
        self.tokens = torch.tensor([numbers[character] for character in text])
        self.block_size = block_size

    def __len__(self) -> int:
        return len(self.tokens) // self.block_size - 1

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        window = self.tokens[index * self.block_size :][: self.block_size + 1]
        return window[:-1], window[1:]


class GPT(nn.Module):
    def __init__(self, vocabulary: int, block_size: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, 32), nn.Embedding(block_size, 32)
        self.block = nn.TransformerEncoderLayer(32, 4, 128, dropout=0.1, batch_first=True, norm_first=True)
        self.head = nn.Linear(32, vocabulary)
        self.register_buffer("mask", torch.full((block_size, block_size), -torch.inf).triu(1), persistent=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.block(self.tokens(x) + self.places.weight, src_mask=self.mask)
        return F.cross_entropy(self.head(x).flatten(0, 1), y.flatten())


class Trainer:
    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, train: Dataset, test: Dataset) -> None:
        self.rank, self.device = int(os.environ["RANK"]), torch.device(args.device)
        self.train_loader, self.test_loader = self.loader(train), self.loader(test)
        self.optimizer = optimizer
        self.scaler = torch.amp.GradScaler(args.device, enabled=args.use_amp)
        self.epochs_run = 0
        self.load_snapshot(model)
        self.model = DistributedDataParallel(model.to(self.device))

    def loader(self, dataset: Dataset) -> DataLoader:
        sampler = DistributedSampler(dataset)
        return DataLoader(dataset, args.batch_size, sampler=sampler, num_workers=args.workers)

    def load_snapshot(self, model: nn.Module) -> None:
        if not Path(args.out).exists():
            return
        snapshot = torch.load(args.out, map_location=self.device)
        model.load_state_dict(snapshot["model"])
        self.optimizer.load_state_dict(snapshot["optimizer"])
        self.epochs_run = snapshot["epoch"]

    def save_snapshot(self, epoch: int) -> None:
        state = {"model": self.model.module.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(state | {"epoch": epoch}, args.out)

    def run_batch(self, x: torch.Tensor, y: torch.Tensor, train: bool) -> float:
        autocast = torch.autocast(self.device.type, torch.float16, enabled=args.use_amp)
        with torch.set_grad_enabled(train), autocast:
            loss = self.model(x.to(self.device), y.to(self.device))
        if train:
            self.optimizer.zero_grad(set_to_none=True)
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return loss.item()

    def run_epoch(self, epoch: int, loader: DataLoader, train: bool) -> None:
        self.model.train(train)
        for i, (x, y) in enumerate(loader):
            loss = self.run_batch(x, y, train)
            if i % 8 == 0 and self.rank == 0:
                print(f"epoch {epoch} {'train' if train else 'test'} batch {i}: loss {loss:.4f}")

    def train(self) -> None:
        for epoch in range(self.epochs_run, args.epochs):
            self.train_loader.sampler.set_epoch(epoch)
            self.run_epoch(epoch, self.train_loader, train=True)
            if self.rank == 0:
                self.save_snapshot(epoch + 1)
            self.run_epoch(epoch, self.test_loader, train=False)


def main() -> None:
    dist.init_process_group()
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(1)
    dataset = Characters(Path(args.text).read_text()[: args.characters], args.block_size)
    tenth = len(dataset) // 10
    train, test = random_split(dataset, [len(dataset) - tenth, tenth])
    model = GPT(len(dataset.vocabulary), args.block_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    Trainer(model, optimizer, train, test).train()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", default=f"{sysconfig.get_paths()['stdlib']}/typing.py", help="file of text")
    parser.add_argument("--out", default="snapshot.pt")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--characters", type=int, default=8192)
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--use-amp", action="store_true")
    args = parser.parse_args()
    main()
