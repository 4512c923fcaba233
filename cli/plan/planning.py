"""Reads the job that the options of `hp-ext plan` and `hp-ext simulate` describe, and fills in defaults."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from ..spec import Specs

if TYPE_CHECKING:
    from hyperpod_ext.config.checkpoint import CheckpointPolicy
    from hyperpod_ext.config.job.job import JobConfig
    from hyperpod_ext.planner.costs import Spread
    from hyperpod_ext.planner.rates import Rates
    from hyperpod_ext.planner.recovery_tiers import Scenario
    from hyperpod_ext.planner.state import StateSize
    from hyperpod_ext.runtime.events.history import JobHistory

_STEP_S = 10.0
_ROOM_GIB = 80.0
"""Memory of an accelerator in GiB that is assumed if the instance type is unknown."""


@dataclass(frozen=True)
class Question:
    """Description of a job, which is the input of the planner and the simulator."""

    scenario: Scenario
    size: StateSize
    policy: CheckpointPolicy
    usd_per_hour: float | None
    """Price of all nodes together, in US dollars per hour. None: unknown."""
    notes: tuple[str, ...]
    """Sentences that name assumed numbers, and the sources of all other numbers."""
    warnings: tuple[str, ...]
    written: dict[str, int] | None
    """Steps between saves in the spec, by tier. None without a spec, or if an interval is `auto` or in seconds."""
    describes: str


def read_question(options: dict[str, Any]) -> Question:
    """Read the job that the options describe.

    Raises:
        ConfigError: options contradict one another, or do not describe a job.
        NotFoundError: a file, model or instance type that an option names does not exist.
    """
    from hyperpod_ext.errors import ConfigError, Problem

    try:
        return _Reader(options).read()
    except ValueError as error:
        raise ConfigError([Problem(str(error))]) from None


class _Reader:
    """Reads options, and fills in defaults. Each assumption becomes a note for the user."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._o = options
        self._notes: list[str] = []
        self._warnings: list[str] = []

    def read(self) -> Question:
        from hyperpod_ext.config.checkpoint import CheckpointPolicy, MemoryTier, PeerTier
        from hyperpod_ext.config.checkpoint.s3 import S3Tier
        from hyperpod_ext.planner.costs import catalogued, group_size
        from hyperpod_ext.planner.recovery_tiers import Scenario, costs_of, waits_of

        job = self._job()
        self._machine = self._find_machine(job)
        size, describes = self._size()
        spread = self._spread(size, job)
        storage = S3Tier(uri="s3://bucket/checkpoints")
        tiers = (MemoryTier(), PeerTier(), storage) if spread.nodes > 1 else (MemoryTier(), storage)
        policy = job.checkpoint if job else CheckpointPolicy(tiers=tiers)
        history = self._history()
        peer = policy.peer()
        scenario = Scenario(
            spread,
            self._step_s(history),
            self._rates(history).of_job(spread.nodes),
            frozenset({tier.level for tier in policy.tiers}),
            speeds=self._speeds(catalogued(self._machine, policy)),
            recovery=self._recovery(history, spread.nodes),
            overlap=policy.overlap,
            replicas=min(peer.replicas, spread.nodes - 1) if peer and spread.nodes > 1 else 1,
            parity=peer.parity if peer and spread.nodes > 1 else None,
            max_slowdown=peer.max_slowdown if peer else 0.05,
            in_process=job is None or job.mode == "ours",
            domains=self._o["domains"],
            rack_nodes=self._o["rack_nodes"],
            run_s=self._o["days"] * 86400,
            spares=self._spares(job, spread.nodes),
            repair_s=self._o["repair_hours"] * 3600,
        )
        waits = waits_of(scenario)
        if max(waits.node, waits.rack) >= 1:
            self._notes.append(
                f"with {scenario.spares} spares and repairs of {self._o['repair_hours']:g} h, a lost node waits "
                f"{waits.node:,.0f} s for a replacement on average, a lost rack {waits.rack:,.0f} s"
            )
        self._check_room(spread, policy)
        if scenario.parity is not None and not spread.redundant:
            others = group_size(spread.nodes, scenario.parity) - 1
            read_s = costs_of(scenario)["peer"].read_s
            self._notes.append(
                f"a lost node's state is rebuilt from the other {others} nodes of its parity group in at most "
                f"{read_s:,.0f} s, if these nodes send one after another"
            )
        return Question(
            scenario,
            size,
            policy,
            self._price(spread.nodes),
            tuple(self._notes),
            tuple(self._warnings),
            _written(policy) if job else None,
            describes,
        )

    def _spares(self, job: JobConfig | None, nodes: int) -> int | None:
        """Return the number of spare nodes; None if the job is elastic and continues with fewer nodes."""
        given: int | None = self._o["spares"]
        if given is None and job is not None and job.elastic is not None and not job.spares_in_all:
            self._notes.append("the job is elastic: it continues with fewer nodes, and this counts as no loss")
            return None
        if given is None and job is not None:
            given = job.spares_in_all
        if given is None:
            given = -(-nodes // 50)
            self._notes.append(f"{given} spare{'s'[: given != 1]}: 2 % of the nodes; change it with --spares")
        return given

    def _job(self) -> JobConfig | None:
        if self._o["file"] is None:
            if self._o["overrides"]:
                raise click.UsageError("--set changes a field of a spec: name the spec with -f job.yaml")
            return None
        return Specs(self._o["file"], None, self._o["overrides"]).job

    def _find_machine(self, job: JobConfig | None) -> Any:
        from hyperpod_ext.catalog.instances import instance, instances
        from hyperpod_ext.config.files.nearest import suggest
        from hyperpod_ext.errors import NotFoundError

        name = self._o["instance_type"] or (job.resources.instance_type if job else None)
        if name is None:
            return None
        if (found := instance(name)) is None:
            near = suggest(name, instances())
            hint = near if "did you" in near else "`hp-ext instances` lists the known types"
            raise NotFoundError(f"no instance type {name!r} is known here", hint=hint)
        return found

    def _size(self) -> tuple[StateSize, str]:
        from hyperpod_ext.planner.presets import preset
        from hyperpod_ext.planner.state import StateSize, size_of, size_of_count, state_format

        given = [name for name in ("model", "params", "state_gb") if self._o[name] is not None]
        if len(given) != 1:
            raise click.UsageError("Give the model's size with exactly one of --model, --params and --state-gb")
        if self._o["state_gb"] is not None:
            nbytes = round(self._o["state_gb"] * 1e9)
            return StateSize(0, nbytes), "as given"
        format = state_format(self._o["format_name"])
        if self._o["model"] is not None:
            size = size_of(preset(self._o["model"]), format)
        else:
            size = size_of_count(round(self._o["params"]), format)
        name = self._o["model"] or "given"
        return size, f"{name}: {size.parameters:,} parameters, {format.bytes_per_parameter} bytes each"

    def _spread(self, size: StateSize, job: JobConfig | None) -> Spread:
        from hyperpod_ext.planner.costs import Spread

        workers = self._o["workers_per_node"] or (job.workers_per_node if job else None)
        if workers is None:
            workers = (self._machine.accelerators if self._machine else 0) or 8
            self._notes.append(f"{workers} workers per node: {'one per accelerator' if self._machine else 'assumed'}")
        nodes = self._o["nodes"] or (job.nodes if job else self._fewest(size, workers))
        together = self._o["ranks_per_copy"]
        if together is None:
            at_least = job.parallelism.ranks_per_copy if job else 1
            together = at_least if self._o["replicated"] else nodes * workers
            if not self._o["replicated"]:
                self._notes.append(
                    "assumed: the state is sharded over all ranks; change it with --replicated or --ranks-per-copy"
                )
        return Spread(size.nbytes, nodes, workers, together, self._o["trained_share"])

    def _fewest(self, size: StateSize, workers: int) -> int:
        """Return the default number of nodes: the smallest number that can hold one copy of the state."""
        room = (self._machine.accelerator_memory_mib if self._machine else 0) / 1024 or _ROOM_GIB
        together: int | None = self._o["ranks_per_copy"]
        if together is not None:
            nodes, why = together // math.gcd(together, workers), "the fewest that hold one copy of the state"
        else:
            enough = math.ceil(size.nbytes / (workers * room * 2**30 / 2))
            nodes = 1 << max(0, enough - 1).bit_length()
            why = f"the fewest that hold the state in half of {workers} x {room:.0f} GiB each"
        self._notes.insert(0, f"{nodes} node{'s' if nodes > 1 else ''}: {why}; change it with --nodes")
        return nodes

    def _history(self) -> JobHistory | None:
        if self._o["history"] is None:
            return None
        from ..report.runs import read_run_history

        history = read_run_history(self._o["history"])
        self._warnings += history.warnings
        for name in ("process", "node", "correlated"):
            its = getattr(history, name)
            low, high = (f"{rate * 86400:.3g}" for rate in (its.low, its.high))
            self._notes.append(
                f"{name} failures: {its.events} in {its.exposure / 3600:.3g} node hours, which is {low} to {high} per "
                "node and day (95 % confidence)"
            )
        return history

    def _rates(self, history: JobHistory | None) -> Rates:
        from hyperpod_ext.planner.rates import Rates, published

        if history is not None:
            rates = history.rates()
        else:
            rates = published(self._o["rates"])
            hours = self._o["mtbf_hours"]
            if hours is not None:
                each = 1 / (hours * 3600 * rates.total)
                of = f"one failure of a node in {hours:g} h, classes in the shares of {self._o['rates']}"
                rates = Rates(rates.process * each, rates.node * each, rates.correlated * each, of)
        self._notes.append(f"failures: {rates.source}")
        return rates

    def _step_s(self, history: JobHistory | None) -> float:
        given: float | None = self._o["step_seconds"]
        if given is not None:
            return given
        if history is not None and history.step_s:
            self._notes.append(f"steps of {history.step_s:.3g} s: the median of the history")
            return history.step_s
        self._notes.append(f"steps of {_STEP_S:g} s: assumed; change it with --step-seconds")
        return _STEP_S

    def _speeds(self, found: Any) -> Any:
        from dataclasses import replace

        given = {name: self._o[f"{name}_gbs"] for name in ("copy", "peer", "durable", "disk")}
        changes: dict[str, Any] = {name: value * 1e9 for name, value in given.items() if value is not None}
        self._notes.append(f"speeds: {found.source}" if len(changes.keys() - {"disk"}) < 3 else "speeds: given")
        return replace(found, **changes)

    def _recovery(self, history: JobHistory | None, nodes: int) -> Any:
        from dataclasses import replace

        from hyperpod_ext.planner import control_plane
        from hyperpod_ext.planner.recovery_tiers import Recovery

        known = {name: self._o[f"{name}_s"] for name in ("process", "node", "job") if self._o[f"{name}_s"] is not None}
        if history is not None and history.recovery_s and "process" not in known:
            known["process"] = history.recovery_s
            self._notes.append(f"{history.recovery_s:.3g} s to resume after a dead process: the median of the history")
        if not known.keys() >= {"process", "node"}:
            assumed = Recovery()
            how = "measured" if nodes <= control_plane.MOST else f"extrapolated from {control_plane.MOST:,} nodes"
            self._notes.append(
                f"time to resume after a fault: unless given, {assumed.process:g} s are assumed after a lost process "
                f"and {assumed.node:g} s after a lost node, for the script and its devices; the control plane's "
                f"{control_plane.at(nodes).fault_s:.2g} s at {nodes:,} node{'s' if nodes > 1 else ''} are {how}"
            )
        return replace(Recovery.at(nodes), **known)

    def _price(self, nodes: int) -> float | None:
        if self._o["usd_per_node_hour"] is not None:
            return float(self._o["usd_per_node_hour"] * nodes)
        if self._machine is None:
            return None
        from hyperpod_ext.catalog.prices import machine_price, why_no_price

        price = machine_price(self._machine.name, self._o["region"])
        if price is None:
            why = why_no_price(self._machine.name)
            unknown = f"is {why}" if why else f"has no price for {self._o['region']} here"
            self._notes.append(f"{self._machine.name} {unknown}; set it with --usd-per-node-hour")
            return None
        self._notes.append(f"${price.usd:,.2f} per node and hour: {price.source}, {price.dated}")
        return price.usd * nodes

    def _check_room(self, spread: Spread, policy: CheckpointPolicy) -> None:
        """Add a warning if the state does not fit into the memory of nodes or accelerators."""
        from hyperpod_ext.catalog.instances import usable_memory_mib
        from hyperpod_ext.planner.costs import memory_per_node

        if self._machine is None:
            return
        needed, there = memory_per_node(spread, policy) / 2**30, usable_memory_mib(self._machine) / 1024
        if needed > there:
            self._warnings.append(
                f"the memory tier needs {needed:,.1f} GiB on each node, but pods can use only {there:,.1f} GiB of "
                f"{self._machine.name}; use more nodes, fewer replicas, or parity instead of replicas"
            )
        held = spread.node_bytes / spread.workers_per_node / 2**30
        if (room := self._machine.accelerator_memory_mib / 1024) and held > room:
            self._warnings.append(
                f"each worker's state is {held:,.1f} GiB, but one {self._machine.accelerator} has {room:,.0f} GiB: "
                f"shard "
                "it over more ranks"
            )


def _written(policy: CheckpointPolicy) -> dict[str, int] | None:
    """Return the intervals in the spec in steps, by tier. None if an interval is `auto` or in seconds."""
    found: dict[str, int] = {}
    for tier in policy.tiers:
        if getattr(tier, "auto", False) or getattr(tier, "every_seconds", None) is not None:
            return None
        found[tier.level] = min(found.get(tier.level, tier.every_steps), tier.every_steps)
    return found
