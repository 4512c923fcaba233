"""How faults are ordered in jobs of each target."""

from __future__ import annotations

from typing import Protocol

from hyperpod_ext.config.fault_injection import InjectedFault, NodeFault
from hyperpod_ext.errors import Problem, UnsupportedError
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
        from hyperpod_ext.submit.fault_injection.local import order as order_here

        return order_here
    if target == "hyperpod-eks":
        from hyperpod_ext.submit.fault_injection.pods import order as order_in_pods

        return order_in_pods
    get_target(target)
    hint = "write `chaos.inject` with `on_clusters: true` in the spec, or rehearse with --target local"
    raise UnsupportedError([Problem(f"no faults can be ordered in jobs of target {target}", hint=hint)])
