"""How the ranks of an experiment run: several on one GPU in one of two ways, or on CPU with gloo in place of NCCL.

NCCL refuses two ranks of one node on one GPU. Lane `hostid` gives each rank a host id of its own, so that ranks count
as nodes and talk over sockets. Lane `multi-rank`, from NCCL 2.30 on, lets them share the GPU as ranks of one node.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from hyperpod_ext.runtime.process_group.nccl.environment import Engine, engines_used, nccl_environment

Name = Literal["hostid", "multi-rank", "fake"]
_CLEARED = ("NCCL_", "TORCH_NCCL_", "TORCH_FR_", "HPX_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_")
"""Of the caller's environment nothing that changes what is measured."""
_ONE_NODE = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NET_PLUGIN": "none",
    "NCCL_RAS_ENABLE": "0",
    # few small kernels: ranks share one GPU. One algorithm: sums are made in the same order in each run
    "NCCL_MAX_NCHANNELS": "2",
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
}
_DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


@dataclass(frozen=True)
class Lane:
    """Where the ranks of an experiment run."""

    name: Name
    torch: tuple[int, ...]
    nccl: tuple[int, ...] = ()
    """Empty: there is none."""

    @classmethod
    def from_json(cls, text: str) -> Lane:
        given = json.loads(text)
        return cls(given["name"], tuple(given["torch"]), tuple(given["nccl"]))

    def to_json(self) -> str:
        return json.dumps({"name": self.name, "torch": self.torch, "nccl": self.nccl})

    @property
    def fake(self) -> bool:
        return self.name == "fake"

    @property
    def backend(self) -> str:
        """torch's name."""
        return "gloo" if self.fake else "nccl"

    @property
    def device(self) -> Literal["cuda", "cpu"]:
        """Of every rank: they share one."""
        return "cpu" if self.fake else "cuda"

    @property
    def patience(self) -> float:
        """Times that limits are as long: a machine without a GPU may have few cores."""
        return 5.0 if self.fake else 1.0

    @property
    def engine(self) -> Engine:
        return "nccl2" if self.torch >= (2, 15) else "nccl"

    @property
    def can_share_node(self) -> bool:
        """Whether lane `multi-rank` is there; the fake stands for it, too."""
        return self.fake or (self.nccl >= (2, 30) and self.torch >= (2, 14))

    def environment(self, rank: int | None, *, recovery: bool = True) -> dict[str, str]:
        """Of a rank; `recovery`: with what recovery needs of NCCL. Without a rank: what all have in common."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(_CLEARED)}
        own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"} | _DETERMINISTIC
        if self.fake:
            return inherited | own
        engines = engines_used(".".join(map(str, self.torch)), {})
        own |= _ONE_NODE | (nccl_environment(engines, inherited) if recovery else {})
        if self.name == "multi-rank":
            own["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        elif rank is not None:
            own["NCCL_HOSTID"] = f"rank{rank}"
        return inherited | own


def lane_of(machine: Mapping[str, str], *, fake: bool, shared: bool = False) -> Lane:
    """The lane of an experiment on this machine; `shared`: the ranks are to be of one node, where that can be."""
    nccl = () if fake else _version(machine["NCCL"])
    lane = Lane("fake" if fake else "hostid", _version(machine["torch"]), nccl)
    return Lane("multi-rank", lane.torch, lane.nccl) if shared and not fake and lane.can_share_node else lane


def _version(text: str) -> tuple[int, ...]:
    """2.11.0+cu130 is 2.11.0."""
    return tuple(int(part) for part in re.findall(r"\d+", text.partition("+")[0])[:3])
