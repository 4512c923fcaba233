"""Compare checksums of replicated state between ranks, every few steps.

Ranks may get different weights, for example by an unintended dropout mask, a wrong reduction or a flipped bit. Without
this check, training would continue with diverging weights, and no error would be reported.
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
    """Return whether state is compared after `step`: after step 1, and after every multiple of `every`.

    The comparison after step 1 detects ranks that were built differently.

    Args:
        step: number of the finished step.
        every: interval in steps; 0: never compare.
    """
    return every > 0 and (step == 1 or step % every == 0)


def check_replicas(step: int, captured: CapturedState, among: Collection[int] | None = None) -> None:
    """Compare the state that data parallelism keeps equal. Collective: all ranks of the job call this at the same step.

    Args:
        step: number of the finished step, for the error.
        captured: the state of this rank.
        among: ranks that hold the same shard as this rank; None: all ranks hold the same state.

    Raises:
        ReplicasDifferError: the states differ. The error message names the ranks and, if `among` is None, the first
            tensor that differs.
    """
    own = {id(tensor) for tensor in captured.own}
    shared = [tensor for tensor in captured.parts.tensors if id(tensor) not in own]
    sums = [checksum(tensor) for tensor in shared]
    combined = crc64nvme(b"".join(value.to_bytes(8, "little") for value in sums))
    everywhere = _gather([combined], shared)
    groups = group_by({rank: sums for rank, sums in enumerate(everywhere) if among is None or rank in among})
    if len(groups) == 1:
        return
    where = _where(captured, shared, sums) if among is None else ""  # `_where` is a collective of all ranks
    raise ReplicasDifferError(
        f"ranks do not hold the same state after step {step}: {describe(groups)}{where}",
        hint="Every rank must make the same step: wrap the model in run.data_parallel, draw random numbers that "
        "change weights from a generator with the same seed on every rank, and pass state that may differ between "
        "ranks to restore() as an object that is neither module nor optimizer. If the script does all of this, the "
        "hardware of the rank that differs may be faulty.",
    )


def checksum(tensor: torch.Tensor) -> int:
    """Return a 64-bit checksum of a tensor's values: a CRC on the CPU, a sum of 32-bit words on a GPU.

    A single flipped bit always changes the checksum.
    """
    if tensor.device.type == "cpu":
        return crc64nvme(raw_bytes(tensor))
    words = local_of(tensor).contiguous().view(-1).view(torch.uint8)
    total = words[: words.numel() // 4 * 4].view(torch.int32).sum(dtype=torch.int64)
    return int(total + words[words.numel() // 4 * 4 :].sum(dtype=torch.int64)) % _WRAP


def _where(captured: CapturedState, shared: Sequence[torch.Tensor], sums: Sequence[int]) -> str:
    """Return a phrase that names the first tensor that differs between ranks. Collective.

    Args:
        captured: the state of this rank.
        shared: the compared tensors.
        sums: checksums of the compared tensors.
    """
    each = _gather(sums, shared)
    first = next((i for i, column in enumerate(zip(*each, strict=True)) if len(set(column)) > 1), None)
    if first is None:
        return ""
    names = [".".join(map(str, path)) for path in leaf_paths(captured.parts.shape)[0]]
    return ", first in " + names[next(i for i, t in enumerate(captured.parts.tensors) if t is shared[first])]


def group_by(sums: Mapping[int, Sequence[int]]) -> dict[tuple[int, ...], list[int]]:
    """Group the ranks that have equal checksums. The keys of the result are the checksums; the largest group comes
    first."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, values in sums.items():
        groups.setdefault(tuple(values), []).append(rank)
    return dict(sorted(groups.items(), key=lambda item: -len(item[1])))


def describe(groups: Mapping[tuple[int, ...], Sequence[int]]) -> str:
    """Return a phrase on the groups of `group_by`, such as `rank 2 differs from ranks 0, 1, 3`."""
    most, *others = groups.values()
    odd = sorted(rank for group in others for rank in group)
    return f"{_ranks(odd)} {'differs' if len(odd) == 1 else 'differ'} from {_ranks(most)}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"


def _gather(values: Sequence[int], like: Sequence[torch.Tensor]) -> list[list[int]]:
    """Return the `values` of every rank, indexed by rank. Collective.

    Args:
        values: unsigned 64-bit numbers of this rank, as many as on every other rank.
        like: tensors whose device the collective uses with NCCL.
    """
    gpu = dist.get_backend() == "nccl" and bool(like)
    device = like[0].device if gpu else torch.device("cpu")
    ours = torch.tensor([v - _WRAP if v >= _SIGN else v for v in values], dtype=torch.int64, device=device)
    everywhere = [torch.empty_like(ours) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, ours)
    return [theirs.tolist() for theirs in everywhere]
