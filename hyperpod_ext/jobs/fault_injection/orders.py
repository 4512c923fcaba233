"""Checks and names of requested faults."""

from __future__ import annotations

import secrets

from hyperpod_ext.config.fault_injection import InjectedFault, NodeFault
from hyperpod_ext.errors import ConfigError, Problem


def check(fault: InjectedFault | NodeFault, ranks: int, nodes: int) -> None:
    """Check that the job has the rank or node in which the fault is requested.

    Args:
        ranks: number of ranks of the job.
        nodes: number of nodes of the job.

    Raises:
        ConfigError: the job has no such rank or node.
    """
    if isinstance(fault, InjectedFault) and fault.rank >= ranks:
        raise ConfigError([Problem(f"there is no rank {fault.rank}", source="--rank", hint=f"ranks: 0 to {ranks - 1}")])
    if isinstance(fault, NodeFault) and fault.node >= nodes:
        raise ConfigError([Problem(f"there is no node {fault.node}", source="--node", hint=f"nodes: 0 to {nodes - 1}")])


def name_of(fault: InjectedFault | NodeFault, place: str) -> str:
    """Return a name for a fault request.

    Args:
        place: beginning of the name. A job carries out its requests in alphabetical order of their names.
    """
    return f"{place}-{fault.kind}-{secrets.token_hex(3)}"
