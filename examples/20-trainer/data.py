"""Tokens for training and evaluation, from a token store: one memory-mapped copy per node (docs/data-store.md)."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from hyperpod_ext.runtime.data import Packed, TensorSource, follow


class SampleRange:
    """The samples of `source` from number `begin` up to `end`."""

    def __init__(self, source: TensorSource, begin: int, end: int) -> None:
        self.source, self.begin, self.end = source, begin, end
        self.fingerprint = f"{source.fingerprint} {begin}:{end}"
        """Saved with the position in the data, so that a job refuses to continue with other samples."""

    def __len__(self) -> int:
        return self.end - self.begin

    def __getitem__(self, number: int) -> torch.Tensor:
        return self.source[self.begin + number]

    def __getitems__(self, numbers: Sequence[int]) -> list[torch.Tensor]:
        return self.source.__getitems__([self.begin + number for number in numbers])


def open_samples(
    sources: Sequence[str], tokenizer: str, folder: Path, length: int, held_out: int
) -> tuple[SampleRange, SampleRange]:
    """Return the samples to learn from, and the last `held_out` samples; each has `length` + 1 tokens.

    One rank of a node converts the sources, at low priority, unless an earlier job has; the others wait for it.
    """
    conversion = follow(sources or [str(write_example(folder))], tokenizer=tokenizer, place=folder / "stores")
    source = TensorSource(Packed(conversion.wait(), length))
    learned = len(source) - held_out
    if learned < 1:
        raise ValueError(
            f"the data has {len(source)} samples, and {held_out} are held out; lower --held-out or --length"
        )
    return SampleRange(source, 0, learned), SampleRange(source, learned, len(source))


def write_example(folder: Path) -> Path:
    """Return a file with Python's own sources, for a first run without data."""
    folder.mkdir(parents=True, exist_ok=True)
    file, partial = folder / "python.txt", folder / f"python.{os.getpid()}.tmp"
    if not file.exists():
        sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        partial.write_text("\n".join(source.read_text(errors="replace") for source in sources), encoding="utf-8")
        with suppress(FileExistsError):
            file.hardlink_to(partial)  # the first rank's file: no other rank sees half of it
        partial.unlink()
    return file
