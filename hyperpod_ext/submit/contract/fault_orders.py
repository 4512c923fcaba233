"""Faults that are ordered in a job that runs: what each target does with an order, and which there can be."""

from __future__ import annotations

import secrets
from typing import Protocol

from hyperpod_ext.config.fault_injection import InjectedFault, NodeFault
from hyperpod_ext.errors import ConfigError, Problem, UnsupportedError
from hyperpod_ext.submit.contract.handle import JobHandle
from hyperpod_ext.submit.contract.targets import get_target


class Order(Protocol):
    """Orders a fault; returns the order's name.

    Raises:
        NotFoundError: there is no such job.
        ConflictError: it does not run.
        ConfigError: it has no such rank or node.
        UnsupportedError: nobody there could carry it out.
    """

    def __call__(self, handle: JobHandle, fault: InjectedFault | NodeFault) -> str: ...


def get_order(target: str) -> Order:
    """How faults are ordered in jobs of `target`.

    Raises:
        UnsupportedError: they cannot be.
    """
    if target == "local":
        from hyperpod_ext.submit.local.fault_injection import order as local_order

        return local_order
    if target == "hyperpod-eks":
        from hyperpod_ext.submit.kubernetes.fault_injection import order as order_in_pods

        return order_in_pods
    get_target(target)
    hint = "write `chaos.inject` with `on_clusters: true` in the spec, or rehearse with --target local"
    raise UnsupportedError([Problem(f"no faults can be ordered in jobs of target {target}", hint=hint)])


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
