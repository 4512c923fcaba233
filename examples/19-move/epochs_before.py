"""A classifier trained in epochs, as in PyTorch's ImageNet example, for torchrun."""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Images(Dataset):
    """Squares in noise, in one of four corners; in training, with a random flip."""

    def __init__(self, count: int, train: bool) -> None:
        self.count, self.train = count, train

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        corner = index * 7 % 4
        image = torch.rand(1, 16, 16, generator=torch.Generator().manual_seed(index))
        image[0, corner // 2 * 8 :, corner % 2 * 8 :][:8, :8] += 0.5
        return (image + 0.1 * torch.rand(())) if self.train else image, corner


def train(loader: object, model: nn.Module, optimizer: torch.optim.Optimizer, first: int = 0) -> None:
    model.train()
    for i, (images, target) in enumerate(loader, first):
        images, target = images.to(args.device), target.to(args.device)
        loss = F.cross_entropy(model(images), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % args.print_freq == 0:
            print(f"batch {i}: loss {loss.item():.4f}")


@torch.no_grad()
def validate(loader: DataLoader, model: nn.Module) -> float:
    model.eval()
    right = torch.zeros(1, device=args.device)
    for images, target in loader:
        right += (model(images.to(args.device)).argmax(1) == target.to(args.device)).sum()
    dist.all_reduce(right)
    return right.item() / len(loader.dataset)


def main() -> None:
    dist.init_process_group()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if args.device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    args.batch_size = int(args.batch_size / world_size)
    torch.manual_seed(1)

    layers = [nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Dropout(0.1), nn.Linear(128, 4)).to(args.device)
    model = DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(model) if args.device == "cuda" else model)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    start_epoch = 0
    if Path(args.out).exists():
        checkpoint = torch.load(args.out, map_location=args.device)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        start_epoch = checkpoint["epoch"]

    train_data, val_data = Images(args.samples, train=True), Images(64, train=False)
    train_sampler = DistributedSampler(train_data)
    train_loader = DataLoader(train_data, args.batch_size, sampler=train_sampler, num_workers=args.workers)
    val_loader = DataLoader(val_data, args.batch_size, sampler=DistributedSampler(val_data, shuffle=False))
    for epoch in range(start_epoch, args.epochs):
        train_sampler.set_epoch(epoch)
        train(train_loader, model, optimizer)
        accuracy = validate(val_loader, model)
        scheduler.step()
        if rank == 0:
            print(f"epoch {epoch}: accuracy {accuracy:.4f}")
            checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(checkpoint | {"scheduler": scheduler.state_dict(), "epoch": epoch + 1}, args.out)

    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="checkpoint.pt")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--print-freq", type=int, default=4)
    args = parser.parse_args()
    main()
