"""Checks that compare several fields of a spec with each other, or with the files in the spec's folder.

Each check is a pure function with two arguments: a config, and a function that lists the files in a folder. A check is
skipped if one of the fields that the check reads is invalid.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from hyperpod_ext.config.checkpoint import PeerTier
from hyperpod_ext.config.elastic import batch_at
from hyperpod_ext.config.files.document import Path
from hyperpod_ext.config.files.nearest import nearest
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.counts import count

if TYPE_CHECKING:
    from hyperpod_ext.config.clusters.cluster import ClusterConfig

_PATH = (r"/.*", "an absolute path", "write a path that begins with /")
SETTINGS = {
    "HPX_PORT_BASE": (
        r"102[4-9]|10[3-9]\d|1[1-9]\d\d|[2-9]\d{3}|[1-5]\d{4}|6[0-4]\d{3}|65000",
        "a port",
        "write a number from 1024 to 65000",
    ),
    "HPX_SOCKET_DIR": _PATH,
    "HPX_HYPERPODRUN_MODE": (r"in-process|process", "a mode of hyperpodrun", "write in-process or process"),
    "HPX_TERMINATION_LOG": _PATH,
}
"""Environment variables of the runtime that the spec's `env` may set. For each variable: the pattern of its value, the
kind of value for error messages, and a hint."""

ListFiles = Callable[[str], Sequence[str]]
"""Returns the names of the files in a folder, relative to the spec's folder."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A mistake in the field at `path`. The file and the line of the mistake are added later."""

    path: Path
    message: str
    hint: str


@dataclass(frozen=True, slots=True)
class Check:
    """A check of a spec.

    `reads` has the paths of all fields that the check reads; `*` in a path stands for any item.
    """

    reads: tuple[Path, ...]
    run: Callable[[Any, ListFiles | None], Iterator[Finding]]
    rule: str = ""
    """Id of the check, from HPX001 to HPX099. The module `check_texts` has title, cause and fix for each id."""


def script_is_python(job: JobConfig, _files: ListFiles | None) -> Iterator[Finding]:
    if job.command is None and not job.script.endswith(".py"):
        yield Finding(("script",), f"`{job.script}` is not a Python file", "name a file that ends in .py")


def script_is_in_spec_folder(job: JobConfig, files: ListFiles | None) -> Iterator[Finding]:
    if job.working_dir is not None or job.command is not None:
        return  # no check: the script is in the image or on a volume, or the job runs a command instead
    script = PurePosixPath(job.script)
    elsewhere = script.is_absolute() or ".." in script.parts
    if (script.is_absolute() and job.image is not None) or (elsewhere and job.mode == "plain"):
        return  # no check, because the script is in the image or on a shared file system
    if elsewhere:
        hint = "move the script into the folder of this file or below, and write its relative path"
        yield Finding(("script",), f"`{job.script}` is outside the folder of this file", hint)
        return
    if files is None:
        return
    names = [name for name in files(str(script.parent)) if name.endswith(".py")]
    if script.name in names:
        return
    found = nearest(script.name, names) or (names[0] if len(names) == 1 else None)
    hint = f"did you mean `{script.parent / found}`?" if found else "create the script, or correct its path"
    yield Finding(("script",), f"there is no file `{job.script}` in the folder of this file", hint)


def command_stands_alone(job: JobConfig, _files: ListFiles | None) -> Iterator[Finding]:
    if job.command is None:
        return
    if job.script:
        yield Finding(("script",), "the command runs instead of the script", "remove the script or the command")
    if job.args:
        yield Finding(
            ("args",), "arguments belong to a script, but the spec has a command", "write the arguments in command"
        )
    if job.mode != "plain":
        default = "" if "mode" in job.model_fields_set else ", the default,"
        message = f"mode `{job.mode}`{default} works only with a script, because it cannot save the state of a command"
        yield Finding(("mode",), message, "write `mode: plain`, or use a script instead of a command")


def batch_divides_among_ranks(job: JobConfig, _files: ListFiles | None) -> Iterator[Finding]:
    batch, world = job.global_batch_size, job.world_size
    if batch is None or batch % world == 0:
        return
    if job.elastic is not None and job.elastic.batch.micro_batch_size is not None:
        return  # no check, because ranks may have different numbers of the global batch's micro-batches
    below = batch // world * world
    values = f"{below} or {below + world}" if below else f"{world}"
    ranks = f"{count(job.nodes, 'node')} x {job.workers_per_node} workers_per_node = {world} ranks"
    yield Finding(
        ("global_batch_size",), f"`{batch}` cannot be divided evenly among all ranks: {ranks}", f"write {values}"
    )


def batch_divides_into_micro_batches(job: JobConfig, _files: ListFiles | None) -> Iterator[Finding]:
    if job.elastic is None or job.global_batch_size is None:
        return
    policy, batch = job.elastic.batch, job.global_batch_size
    sizes: list[tuple[Path, int]] = [
        (("elastic", "batch", "scale_config", index, "nodes"), scale.nodes)
        for index, scale in enumerate(policy.scale_config)
    ]
    if policy.micro_batch_size is not None:
        sizes.append((("elastic", "batch", "micro_batch_size"), job.nodes))
    for path, nodes in sizes:
        try:
            batch_at(policy, nodes, batch)
        except ValueError as error:
            yield Finding(path, str(error), "write a micro_batch_size that divides the batch")


def each_tier_once(job: JobConfig, _files: ListFiles | None) -> Iterator[Finding]:
    seen: dict[str, int] = {}
    for index, tier in enumerate(job.checkpoint.tiers):
        if tier.kind in seen:
            hint = f"remove one of the two; the other is checkpoint.tiers.{seen[tier.kind]}"
            yield Finding(("checkpoint", "tiers", index), f"is a second tier of kind {tier.kind}", hint)
        seen.setdefault(tier.kind, index)


def peer_copies_fit_the_nodes(job: JobConfig, _files: ListFiles | None) -> Iterator[Finding]:
    for index, tier in enumerate(job.checkpoint.tiers):
        if not isinstance(tier, PeerTier) or tier.parity is not None or tier.replicas < job.nodes:
            continue
        most = job.nodes - 1
        hint = f"write at most {most}, or use more nodes" if most else "remove the peer tier, or use more nodes"
        default = "" if "replicas" in tier.model_fields_set else " by default"
        message = f"the number of copies on other nodes is {tier.replicas}{default}, which needs at least "
        message += f"{tier.replicas + 1} nodes, but nodes is {job.nodes}"
        yield Finding(("checkpoint", "tiers", index, "replicas"), message, hint)


def parity_fits_the_nodes(job: JobConfig, _files: ListFiles | None) -> Iterator[Finding]:
    for index, tier in enumerate(job.checkpoint.tiers):
        if not isinstance(tier, PeerTier) or tier.parity is None:
            continue
        path: Path = ("checkpoint", "tiers", index, "parity")
        if job.nodes < tier.parity:
            hint = (
                f"write {job.nodes}, or use more nodes" if job.nodes >= 3 else "use `replicas` instead, or more nodes"
            )
            yield Finding(path, f"a parity group needs {tier.parity} nodes, but nodes is {job.nodes}", hint)
        if job.elastic is not None:
            message = "an elastic job cannot use parity, because parity data is valid only for one number of ranks"
            yield Finding(path, message, "remove parity, and set `replicas`")


def nixl_is_not_encrypted(job: JobConfig, _files: ListFiles | None) -> Iterator[Finding]:
    for index, tier in enumerate(job.checkpoint.tiers):
        if isinstance(tier, PeerTier) and tier.transport == "nixl" and job.network is not None and job.network.tls:
            message = "NIXL does not encrypt, but network.tls requires encryption between memory servers"
            hint = "remove `transport: nixl`; or, if your network already encrypts, remove network.tls"
            yield Finding(("checkpoint", "tiers", index, "transport"), message, hint)


def ranks_can_be_done_without(job: JobConfig, _files: ListFiles | None) -> Iterator[Finding]:
    path: Path = ("restart", "policy")
    if job.restart.policy == "wait":
        if job.restart.samples != "constant":
            message = "has no effect with `policy: wait`, under which healthy ranks wait for missing ranks"
            yield Finding(("restart", "samples"), message, "write `policy: continue`, or remove samples")
        return
    wait = "write `policy: wait`"
    if job.mode != "ours":
        yield Finding(
            path, f"mode {job.mode} restarts all ranks, so none can continue", f"write `mode: ours`, or {wait}"
        )
    if job.elastic is not None:
        message = "`continue` and `elastic` are two different ways to continue with fewer nodes, and exclude each other"
        yield Finding(path, message, f"remove elastic, or {wait}")
    if (copy := job.parallelism.ranks_per_copy) > 1:
        message = f"{copy} ranks share one copy of the model, so every rank is needed for the next step"
        yield Finding(path, message, wait)
    if job.world_size == 1:
        yield Finding(path, "the job has only one rank, so no rank can continue without it", wait)
    if any(isinstance(tier, PeerTier) and tier.parity is not None for tier in job.checkpoint.tiers):
        message = "cannot be combined with parity, whose data is valid only for one number of ranks"
        yield Finding(path, message, f"use `replicas` instead of parity, or {wait}")


def compat_has_our_workers(job: JobConfig, _files: ListFiles | None) -> Iterator[Finding]:
    if job.compat is not None and not job.has_agent:
        message = f"has no effect in mode {job.mode}, which starts the script without this project's agent"
        yield Finding(("compat",), message, "write `mode: ours` or `mode: run`, or remove compat")


def faults_hit_ranks_that_exist(job: JobConfig, _files: ListFiles | None) -> Iterator[Finding]:
    for field in ("faults", "inject"):
        for index, fault in enumerate(getattr(job.chaos, field) if job.chaos else ()):
            if fault.rank is not None and fault.rank >= job.world_size:
                hint = f"the job's ranks are 0 to {job.world_size - 1}"
                yield Finding(("chaos", field, index, "rank"), f"there is no rank {fault.rank}", hint)
            if (node := getattr(fault, "node", None)) is not None and node >= job.nodes:
                hint = f"the job's nodes are 0 to {job.nodes - 1}"
                yield Finding(("chaos", field, index, "node"), f"there is no node {node}", hint)


def own_variables_are_left_alone(job: JobConfig, _files: ListFiles | None) -> Iterator[Finding]:
    for name, value in job.env.items():
        if (setting := SETTINGS.get(name)) is not None:
            form, what, hint = setting
            if not re.fullmatch(form, value):
                yield Finding(("env", name), f"`{value}` is not {what}", hint)
        elif name.startswith("HPX_"):
            message = "variables that start with HPX_ are set by the launcher"
            yield Finding(("env", name), message, f"choose another name; you may set only {', '.join(SETTINGS)}")


def group_names_are_unique(cluster: ClusterConfig, _files: ListFiles | None) -> Iterator[Finding]:
    seen: set[str] = set()
    for index, group in enumerate(cluster.instance_groups):
        if group.name in seen:
            path: Path = ("instance_groups", index, "name")
            yield Finding(
                path, f"another group already has the name `{group.name}`", "give each group a different name"
            )
        seen.add(group.name)


def spares_are_part_of_the_group(cluster: ClusterConfig, _files: ListFiles | None) -> Iterator[Finding]:
    for index, group in enumerate(cluster.instance_groups):
        if group.spares > group.count:
            message = (
                f"{group.spares} spares are more than the group's {group.count} machines, which include the spares"
            )
            hint = f"write at most {group.count}, or raise count"
            yield Finding(("instance_groups", index, "spares"), message, hint)


_WORLD: tuple[Path, ...] = (("nodes",), ("workers_per_node",))
_TIER_KINDS: Path = ("checkpoint", "tiers", "*", "kind")

CHECKS: dict[str, tuple[Check, ...]] = {
    "JobConfig": (
        Check((("script",), ("command",)), script_is_python, "HPX001"),
        Check((("script",), ("command",)), script_is_in_spec_folder, "HPX002"),
        Check((("script",), ("args",), ("command",), ("mode",)), command_stands_alone, "HPX011"),
        Check((("global_batch_size",), *_WORLD), batch_divides_among_ranks, "HPX003"),
        Check((("elastic", "batch"), ("global_batch_size",), ("nodes",)), batch_divides_into_micro_batches, "HPX010"),
        Check((_TIER_KINDS,), each_tier_once, "HPX004"),
        Check((("checkpoint", "tiers", "*", "replicas"), _TIER_KINDS, ("nodes",)), peer_copies_fit_the_nodes, "HPX005"),
        Check(
            (("checkpoint", "tiers", "*", "parity"), _TIER_KINDS, ("nodes",), ("elastic",)),
            parity_fits_the_nodes,
            "HPX012",
        ),
        Check(
            (("checkpoint", "tiers", "*", "transport"), _TIER_KINDS, ("network", "tls")),
            nixl_is_not_encrypted,
            "HPX013",
        ),
        Check(
            (("restart",), ("mode",), ("elastic",), ("parallelism",), ("checkpoint", "tiers"), *_WORLD),
            ranks_can_be_done_without,
            "HPX014",
        ),
        Check((("chaos", "*", "*", "rank"), *_WORLD), faults_hit_ranks_that_exist, "HPX006"),
        Check((("env",),), own_variables_are_left_alone, "HPX007"),
        Check((("compat",), ("mode",)), compat_has_our_workers, "HPX015"),
    ),
    "ClusterConfig": (
        Check((("instance_groups", "*", "name"),), group_names_are_unique, "HPX008"),
        Check(
            (("instance_groups", "*", "spares"), ("instance_groups", "*", "count")),
            spares_are_part_of_the_group,
            "HPX009",
        ),
    ),
}
"""Checks by the name of the model that they check. The keys are names and not classes, so that checks of jobs do not
import the model of clusters."""
