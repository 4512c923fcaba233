"""Compare checksums of replicated state between ranks at intervals.

Nothing else detects steps that differ between ranks (a dropout mask that should not be, a wrong reduction, a flipped
bit): training continues with diverging weights.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist

from hyperpod_ext.errors import ReplicasDifferError
from hyperpod_ext.runtime.snapshot.image import local_of
from hyperpod_ext.runtime.snapshot.manifest import crc64nvme
from hyperpod_ext.runtime.snapshot.tree import leaf_paths
from hyperpod_ext.runtime.state.training_state import CapturedState, raw_bytes

_SIGN = 1 << 63
_WRAP = 1 << 64


def is_due(step: int, every: int) -> bool:
    """Return True for step 1, which shows ranks that were built differently, and every `every` steps. 0: never."""
    return every > 0 and (step == 1 or step % every == 0)


def check_replicas(step: int, captured: CapturedState, among: Collection[int] | None = None) -> None:
    """Compare the state that data parallelism keeps equal. Collective: all ranks of the job, at the same step.

    Args:
        among: ranks with the same part as this one; None: all.

    Raises:
        ReplicasDifferError: the states differ; names the ranks, and the first different tensor.
    """
    own = {id(tensor) for tensor in captured.own}
    shared = [tensor for tensor in captured.parts.tensors if id(tensor) not in own]
    sums = [checksum(tensor) for tensor in shared]
    combined = crc64nvme(b"".join(value.to_bytes(8, "little") for value in sums))
    everywhere = _gather([combined], shared)
    groups = group_by({rank: sums for rank, sums in enumerate(everywhere) if among is None or rank in among})
    if len(groups) == 1:
        return
    where = _where(captured, shared, sums) if among is None else ""  # otherwise only some ranks are here
    raise ReplicasDifferError(
        f"ranks do not hold the same state after step {step}: {describe(groups)}{where}",
        hint="Every rank must make the same step: wrap the model in run.data_parallel, draw random numbers that "
        "change weights from a generator seeded alike, and give what each rank has of its own to restore() as an "
        "object that is neither module nor optimizer. If none of this is so, suspect the machine of the odd one out.",
    )


def checksum(tensor: torch.Tensor) -> int:
    """Return 64 bits over the values; on a GPU a sum of words, which any single flipped bit changes."""
    if tensor.device.type == "cpu":
        return crc64nvme(raw_bytes(tensor))
    words = local_of(tensor).contiguous().view(-1).view(torch.uint8)
    total = words[: words.numel() // 4 * 4].view(torch.int32).sum(dtype=torch.int64)
    return int(total + words[words.numel() // 4 * 4 :].sum(dtype=torch.int64)) % _WRAP


def _where(captured: CapturedState, shared: Sequence[torch.Tensor], sums: Sequence[int]) -> str:
    """Return a phrase with the first different tensor. Collective."""
    each = _gather(sums, shared)
    first = next((i for i, column in enumerate(zip(*each, strict=True)) if len(set(column)) > 1), None)
    if first is None:
        return ""
    names = [".".join(map(str, path)) for path in leaf_paths(captured.parts.shape)[0]]
    return ", first in " + names[next(i for i, t in enumerate(captured.parts.tensors) if t is shared[first])]


def group_by(sums: Mapping[int, Sequence[int]]) -> dict[tuple[int, ...], list[int]]:
    """Return the ranks grouped by sums, the largest group first."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, values in sums.items():
        groups.setdefault(tuple(values), []).append(rank)
    return dict(sorted(groups.items(), key=lambda item: -len(item[1])))


def describe(groups: Mapping[tuple[int, ...], Sequence[int]]) -> str:
    """Return a phrase such as `rank 2 differs from ranks 0, 1, 3`."""
    most, *others = groups.values()
    odd = sorted(rank for group in others for rank in group)
    return f"{_ranks(odd)} {'differs' if len(odd) == 1 else 'differ'} from {_ranks(most)}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"


def _gather(values: Sequence[int], like: Sequence[torch.Tensor]) -> list[list[int]]:
    """Return these numbers of every rank, by rank. Collective."""
    gpu = dist.get_backend() == "nccl" and bool(like)
    device = like[0].device if gpu else torch.device("cpu")
    ours = torch.tensor([v - _WRAP if v >= _SIGN else v for v in values], dtype=torch.int64, device=device)
    everywhere = [torch.empty_like(ours) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, ours)
    return [theirs.tolist() for theirs in everywhere]
