"""Renders a JobConfig as an sbatch file. Pure."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.config.job.overlay import Overlay
from hyperpod_ext.config.job.runtime import ENV_RUNTIME, RuntimeConfig
from hyperpod_ext.config.job.secret_variables import secrets_last
from hyperpod_ext.errors import HyperpodExtError, Problem
from hyperpod_ext.jobs.contract.launcher_text import RANKED_LINES, without_launcher, words_for_torchrun
from hyperpod_ext.jobs.contract.rank_variables import changed_variable
from hyperpod_ext.jobs.contract.render import check_shell, render
from hyperpod_ext.jobs.contract.spec_annotation import note_text, parse_note

NOTE = "# spec: "
"""Beginning of the line in the rendered file that contains the job's spec, for `hp-ext import`."""
COMMENT = "hyperpod_ext"
"""Comment of the Slurm job, by which hp-ext identifies its own jobs in the queue."""
MORE_NODES = ".nodes"
"""Suffix for the names of Slurm jobs that add nodes to a running job. A job's name in a spec cannot end with this
suffix."""

OWN_OPTIONS = frozenset(
    {"job-name", "nodes", "ntasks-per-node", "ntasks", "output", "open-mode", "comment", "chdir", "array", "export"}
)
"""Options of sbatch that the rendered file sets itself and on which it relies."""

OVERLAY_MARK = "# from overlay.slurm: "
_SET = "is set by hp-ext"
_ONE_AGENT = ("would start more or fewer than one agent on each node", "write `nodes` and `workers_per_node`")
_LOG = ("would move the job's log, which hp-ext could then not find", "read it by `hp-ext logs`")
_NO_JOB = ("would make sbatch submit no job", "remove it")
_VARIABLES = ("would change the job's variables", "write `env`")
REFUSED_OF_BATCH = {
    "job-name": (_SET, "write `name`"),
    "nodes": (_SET, "write `nodes`"),
    "ntasks": _ONE_AGENT,
    "ntasks-per-node": _ONE_AGENT,
    "ntasks-per-core": _ONE_AGENT,
    "ntasks-per-gpu": _ONE_AGENT,
    "ntasks-per-socket": _ONE_AGENT,
    "output": _LOG,
    "open-mode": _LOG,
    "comment": (_SET, "remove it: hp-ext identifies its jobs in the queue by it"),
    "chdir": ("would start the job outside the folder of its files", "submit it from the folder of the script"),
    "array": ("would start many jobs with one submission", "submit each job with a different name"),
    "export": _VARIABLES,
    "export-file": _VARIABLES,
    "get-user-env": _VARIABLES,
    "signal": (_SET, "write `timeouts.run_s` and `checkpoint.grace_s`"),
    "requeue": (_SET, "write `slurm.requeue`"),
    "no-requeue": (_SET, "write `slurm.requeue`"),
    "no-kill": (_SET, "write `spares` or `elastic`"),
    "wrap": ("would replace the file", "write `script` and `args`"),
    "test-only": _NO_JOB,
    "help": _NO_JOB,
    "usage": _NO_JOB,
    "version": _NO_JOB,
    "wait": ("would make the submission last as long as the job", "use `hp-ext wait`"),
    "clusters": ("would submit the job to a cluster where hp-ext does not look for it", "submit it from that cluster"),
}
"""Options of sbatch that an overlay cannot set, each with the reason and a hint."""
NEVER = frozenset({"wrap", "test-only", "help", "usage", "version", "wait", "clusters"})
"""Options of sbatch that the field `slurm.sbatch` cannot set, because sbatch would then not submit the job, or hp-ext
would not find it."""
REFUSED_OF_STEP = {"nodes", "ntasks", "nodelist", "exclude", "relative", "multi-prog", "export", "chdir", "no-kill"}
REFUSED_OF_STEP |= {"ntasks-per-node", "ntasks-per-core", "ntasks-per-gpu", "ntasks-per-socket", "auto-resume"}
REFUSED_OF_STEP |= {"kill-on-bad-exit", "wait", "test-only", "jobid", "container-image", "container-mounts"}
REFUSED_OF_STEP |= {"no-container-mount-home", "container-mount-home", "container-entrypoint", "cpu-bind", "pty"}
"""Options of srun that `overlay.slurm.srun` cannot set, because the rendered step sets these options itself, to start
one agent on each node with the job's files and secret."""

_PASSED = ("HPX_NODE_RANK", "HPX_RUN_DIR", "HPX_RDZV_ENDPOINT", "HPX_SOURCE_DIR", "HPX_JOB_DIR", "HPX_SECRET_FILE")
_PASSED_ELASTIC = ("HPX_NNODES", "HPX_REJOIN")
_LOOK_S = 20
"""An added node checks once in this number of seconds whether the job still runs."""
_SAVE_S = 5
"""The warning signal is sent checkpoint.grace_s plus this number of seconds before the time limit."""


def job_script(job: JobConfig) -> str:
    """Return the text of `job.sbatch`, the sbatch file of the job."""
    plain = job.mode == "plain"
    own = RANKED_LINES if plain else {ENV_RUNTIME: RuntimeConfig.of(job).model_dump_json()}
    no_python, words = words_for_torchrun(job)
    alone = without_launcher(job)
    elastic = _in_place(job)
    return render(
        "hyperpod_slurm/job.sbatch.j2",
        job=job,
        note=NOTE + note_text(job),
        env={**own, **secrets_last(job.env)},
        options=list(_batch_options(job)),
        step_options=list(_step_options(job)),
        marks=list(_marks(job)),
        before=job.overlay.slurm.before,
        enroot=_container(job) == "enroot",
        mounts=_mounts(job),
        passed=(*_PASSED, *(_PASSED_ELASTIC if elastic else ()), "SLURM_JOB_ID", "SLURM_STEP_ID"),
        port=job.rendezvous.port or "$((20000 + SLURM_JOB_ID % 10000))",
        launcher="none" if alone else "torchrun" if plain else "agent",
        no_python=no_python,
        elastic=elastic,
        warned=_warned(job),
        requeue=job.slurm.requeue and not plain,
        folder=shlex.quote(job.working_dir) if job.working_dir else '"$HPX_SOURCE_DIR"',
        command=words if plain and not alone else job.words,
    )


def spec_in(script: str) -> JobConfig | None:
    """Return the spec in a rendered file; None if the file has no spec, or this version cannot read it."""
    return next((parse_note(line.removeprefix(NOTE)) for line in script.splitlines() if line.startswith(NOTE)), None)


def nodes_script(job: JobConfig, job_id: str, order: str, numbers: Sequence[int], text: str, folder: Path) -> str:
    """Return the text of the sbatch file that adds nodes to a running job for a resize.

    Args:
        job_id: id of the running job.
        order: name of the resize request.
        numbers: node numbers of the added nodes.
        text: content of the resize request.
        folder: folder from which the running job was submitted.
    """
    runs_dir = folder / job.slurm.runs / job.name
    job_dir = runs_dir / job_id
    own = (f"array={','.join(map(str, numbers))}", "nodes=1", "ntasks-per-node=1")
    signal = (f"signal=B:USR1@{_warning_s(job)}",) if job.timeouts.run_s is not None else ()
    outputs = ("output=%x-%A_%a.out", f"comment={COMMENT}:{job_id}")
    return render(
        "hyperpod_slurm/nodes.sbatch.j2",
        job=job,
        id=job_id,
        order=order,
        text=text,
        runs_dir=str(runs_dir),
        job_dir=str(job_dir),
        source_dir=str(folder),
        look_s=_LOOK_S,
        grace_s=_warning_s(job),
        options=[
            f"job-name={job.name}{MORE_NODES}",
            *own,
            *_place_options(job),
            *signal,
            "no-requeue",
            *outputs,
            *_further(job),
        ],
        step_options=[option for option in _step_options(job) if not option.startswith(("nodes=", "ntasks="))],
    )


def problems(job: JobConfig) -> Iterator[Problem]:
    """Yield a problem for each setting of the spec that a job on Slurm cannot have."""
    for name in job.slurm.sbatch:
        if name in OWN_OPTIONS:
            hint = REFUSED_OF_BATCH[name][1]
            yield Problem(f"--{name} {_SET}", path=f"slurm.sbatch.{name}", hint=hint)
        elif name in NEVER:
            why, hint = REFUSED_OF_BATCH[name]
            yield Problem(f"--{name} {why}", path=f"slurm.sbatch.{name}", hint=hint)
    if _container(job) == "enroot" and not (job.image or "").endswith(".sqsh"):
        hint = "create one with `enroot import -o /fsx/train.sqsh docker://...`, or use slurm.container: pyxis"
        yield Problem("enroot starts only squashfs files (.sqsh)", path="image", hint=hint)
    for index, volume in enumerate(job.volumes):
        if volume.kind not in ("host", "scratch"):
            hint = "mount the storage on the nodes, and use a volume of kind host"
            yield Problem(f"volumes of kind {volume.kind} do not exist on Slurm", path=f"volumes.{index}", hint=hint)
        elif volume.kind == "scratch":
            hint = "use a folder of the node: a volume of kind host"
            yield Problem("scratch volumes do not exist on Slurm", path=f"volumes.{index}", hint=hint)
    yield from _unreadable(job.slurm.setup, "slurm.setup")
    yield from _problems_at_limit(job)
    yield from _overlay_problems(job)
    if job.node_groups:
        message = "all nodes of a job on target hyperpod-slurm are equal"
        yield Problem(message, path="node_groups", hint="remove node_groups")


def warnings(job: JobConfig) -> Iterator[str]:
    """Yield a warning for each behaviour that may surprise the user."""
    options = job.slurm
    if options.gres and options.auto_resume:
        yield "slurm.gres: after a fault, HyperPod requeues a job with GRES as a whole instead of resuming its step"
    if options.requeue and job.mode == "ours" and not job.checkpoint.durable():
        yield "no durable tier: a job that Slurm requeues after the loss of a node restarts from step 0"
    if job.image is None and job.volumes:
        yield "volumes are ignored without an image: the job uses the nodes' own folders"
    if job.image is None and job.working_dir:
        yield "working_dir is a folder of the nodes, because there is no image"


def _problems_at_limit(job: JobConfig) -> Iterator[Problem]:
    if not job.slurm.requeue_at_limit:
        return
    path = "slurm.requeue_at_limit"
    if job.mode == "plain":
        yield Problem("a job of mode plain is not saved before the time limit", path=path, hint="use mode: ours")
    elif not job.checkpoint.durable():
        hint = "add a tier of kind file or s3"
        yield Problem("without a durable tier, a requeued job would restart from step 0", path=path, hint=hint)
    if job.timeouts.run_s is None:
        yield Problem(
            "has no effect without a time limit", path=path, hint="set timeouts.run_s, the seconds of each start"
        )
    if not job.slurm.requeue:
        yield Problem("contradicts slurm.requeue: false", path=path, hint="remove one of the two fields")


def _in_place(job: JobConfig) -> bool:
    """Return whether nodes may join and leave the job while it runs."""
    return job.elastic is not None and job.mode == "ours"


def _warned(job: JobConfig) -> bool:
    """Return whether Slurm sends the warning signal before the time limit to the batch script, not to each node."""
    return job.timeouts.run_s is not None and job.mode == "ours" and (job.slurm.requeue_at_limit or _in_place(job))


def _warning_s(job: JobConfig) -> int:
    return math.ceil(job.checkpoint.grace_s) + _SAVE_S


def _batch_options(job: JobConfig) -> Iterator[str]:
    yield from (f"job-name={job.name}", f"nodes={job.nodes + job.spares}", "ntasks-per-node=1")
    yield from _place_options(job)
    if job.timeouts.run_s is not None:  # with `B:`, Slurm signals only the batch script
        yield f"signal={'B:USR1' if _warned(job) else 'TERM'}@{_warning_s(job)}"
    yield "requeue" if job.slurm.requeue else "no-requeue"
    if job.spares or job.elastic:
        yield "no-kill"  # the job survives the loss of a node: it has spares or is elastic
    yield from ("output=%x-%j.out", "open-mode=append", f"comment={COMMENT}")
    yield from _further(job)


def _place_options(job: JobConfig) -> Iterator[str]:
    """Yield the options of sbatch that select nodes, resources and queue, and the option with the time limit."""
    slurm, resources = job.slurm, job.resources
    if slurm.exclusive:
        yield "exclusive"
    for name, value in (
        ("partition", job.scheduling.queue),
        ("qos", job.scheduling.priority),
        ("account", slurm.account),
        ("reservation", slurm.reservation),
        ("constraint", slurm.constraint),
        ("exclude", slurm.exclude),
        ("gres", slurm.gres),
        ("cpus-per-task", math.ceil(resources.cpus) if resources.cpus else None),
        ("mem", f"{resources.memory_mib}M" if resources.memory_mib else "0" if slurm.exclusive else None),
        ("time", _time(job.timeouts.run_s)),
    ):
        if value is not None:
            yield f"{name}={value}"


def _further(job: JobConfig) -> Iterator[str]:
    for name, value in job.slurm.sbatch.items():
        yield f"{name}={value}" if value else name
    yield from job.overlay.slurm.sbatch


def _marks(job: JobConfig) -> Iterator[str]:
    """Yield comments that name the parts of the rendered file that come from the overlay."""
    overlay = job.overlay.slurm
    yield from (f"{OVERLAY_MARK}#SBATCH --{_name(line)}" for line in overlay.sbatch)
    yield from (f"{OVERLAY_MARK}srun --{name}" for name in overlay.srun)
    if overlay.before:
        yield f"{OVERLAY_MARK}lines before the step"


def _name(line: str) -> str:
    return line.partition("=")[0]


def _is_one_word(line: str) -> bool:
    """Return whether sbatch reads the line, an option in the overlay, as exactly one option."""
    try:
        return len(shlex.split(line, comments=True)) == 1 and not line.endswith("\\")
    except ValueError:
        return False


def _overlay_problems(job: JobConfig) -> Iterator[Problem]:
    """Yield a problem for each part of the overlay that would break the job, or that repeats a field of the spec."""
    overlay, path = job.overlay.slurm, "overlay.slurm"
    plain = job.model_copy(update={"overlay": Overlay()})
    present = {_name(option) for option in _batch_options(plain)}
    for index, line in enumerate(overlay.sbatch):
        name, at = _name(line), f"{path}.sbatch.{index}"
        if name in REFUSED_OF_BATCH:
            why, hint = REFUSED_OF_BATCH[name]
            yield Problem(f"--{name} {why}", path=at, hint=hint)
        elif not _is_one_word(line):
            hint = "write each option as a separate entry, and a value with spaces in double quotes"
            yield Problem(f"sbatch would not read `{line}` as one option", path=at, hint=hint)
        elif name in present:
            yield Problem(
                f"--{name} is already set by a field of the spec",
                path=at,
                hint="change that field of the spec, or remove this line",
            )
    present = {_name(option) for option in _step_options(plain)}
    for name in overlay.srun:
        if name in REFUSED_OF_STEP | present:
            message = f"--{name} would change the srun step in which hp-ext starts one agent on each node"
            yield Problem(message, path=f"{path}.srun.{name}", hint="remove it")
    for index, line in enumerate(overlay.before):
        if (changed := changed_variable(line)) is not None:
            message = f"would change {changed}, which the launcher sets"
            yield Problem(message, path=f"{path}.before.{index}", hint="remove this change")
    yield from _unreadable(overlay.before, f"{path}.before")


def _unreadable(lines: Sequence[str], path: str) -> Iterator[Problem]:
    if not lines:
        return
    try:
        check_shell(path, "\n".join(lines) + "\n")
    except HyperpodExtError:
        hint = "check each entry for unclosed quotes and blocks"
        yield Problem("sh cannot parse these lines", path=path, hint=hint)


def _step_options(job: JobConfig) -> Iterator[str]:
    if job.slurm.auto_resume:
        yield "auto-resume=1"
    if _in_place(job):
        yield from ('nodes="$nodes"', 'ntasks="$nodes"')
    if job.spares or job.elastic:
        yield "no-kill"
    # In mode `plain`, srun must end the other tasks after a task has failed, because workers of torchrun may wait for
    # ever. In modes other than `plain`, agents end by themselves when another task fails.
    yield f"kill-on-bad-exit={int(job.mode == 'plain')}"
    yield "cpu-bind=none"
    for name, value in job.overlay.slurm.srun.items():
        yield f"{name}={shlex.quote(value)}" if value else name
    if _container(job) == "pyxis":
        yield f"container-image={shlex.quote(job.image or '')}"
        yield f"container-mounts={','.join(_mounts(job))}"
        yield "no-container-mount-home"


def _container(job: JobConfig) -> str | None:
    return job.slurm.container if job.image else None


def _mounts(job: JobConfig) -> list[str]:
    """Return the container's mounts as words `FROM:TO` for the shell.

    Mounts of the job's own folders come first, then mounts of the spec's `volumes`.
    """
    own = ['"$HPX_SOURCE_DIR:$HPX_SOURCE_DIR"', '"$HPX_RUNS_DIR:$HPX_RUNS_DIR"']
    volumes = [volume for volume in job.volumes if volume.kind == "host"]
    disks = [tier.mounted for tier in job.checkpoint.durable() if tier.on_node and tier.mounted]
    disks = [path for path in disks if not any(PurePosixPath(path).is_relative_to(v.path) for v in volumes)]
    own += [shlex.quote(f"{path}:{path}") for path in disks]
    return own + [shlex.quote(f"{v.host_path}:{v.path}{':ro' if v.read_only else ''}") for v in volumes]


def _time(seconds: int | None) -> str | None:
    """Return a number of seconds as a time limit for sbatch, rounded up to minutes; None if there is no limit."""
    if seconds is None:
        return None
    minutes = math.ceil(seconds / 60)
    return f"{minutes // 1440}-{minutes // 60 % 24:02d}:{minutes % 60:02d}:00"
