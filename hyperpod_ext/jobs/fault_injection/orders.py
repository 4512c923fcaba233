"""Which faults there can be in a job, and what their orders are called."""

from __future__ import annotations

import secrets

from hyperpod_ext.config.fault_injection import InjectedFault, NodeFault
from hyperpod_ext.errors import ConfigError, Problem


def check(fault: InjectedFault | NodeFault, ranks: int, nodes: int) -> None:
    """Whether a job has the rank or node that it is to strike.

    Raises:
        ConfigError: it has not.
    """
    if isinstance(fault, InjectedFault) and fault.rank >= ranks:
        raise ConfigError([Problem(f"there is no rank {fault.rank}", source="--rank", hint=f"ranks: 0 to {ranks - 1}")])
    if isinstance(fault, NodeFault) and fault.node >= nodes:
        raise ConfigError([Problem(f"there is no node {fault.node}", source="--node", hint=f"nodes: 0 to {nodes - 1}")])


def name_of(fault: InjectedFault | NodeFault, place: str) -> str:
    """Of an order. Orders are carried out in the order of their names: `place` says where this one comes."""
    return f"{place}-{fault.kind}-{secrets.token_hex(3)}"
