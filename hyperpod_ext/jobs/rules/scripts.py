"""Rules of the code of the user's script."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from hyperpod_ext.catalog.aws_terms import packages
from hyperpod_ext.config.files.checks import Finding
from hyperpod_ext.jobs.rules import Context, rule
from hyperpod_ext.jobs.rules.script_code import Code, imports

_OURS = "hyperpod_ext"
_TRAINER_LIBRARIES = frozenset({"lightning", "pytorch_lightning", "sentence_transformers", "transformers", "trl"})
_DYNAMIC = frozenset({"__import__", "exec", "import_module", "run_module", "run_path"})
"""Functions that may import any module: the imports of code that calls one of these functions are unknown."""

_RECOVERIES = (
    "deepspeed.elasticity",
    "nvidia_resiliency_ext.fault_tolerance",
    "nvidia_resiliency_ext.inprocess",
    "nvidia_resiliency_ext.ptl_resiliency",
    "torch.distributed.launcher",
    "torch.distributed.run",
    "torchft",
)
"""Modules of other libraries that restart ranks or change the number of ranks."""


@rule(
    "HPX176",
    "warning",
    "a script without recovery",
    "Mode `ours` saves and restores the steps of a `@resilient` function. The script trains, but neither the script "
    "nor a module of its folder imports hyperpod_ext, so no step is saved, and a fault ends the job. The rule does "
    "not check installed packages.",
    "Train in a `@resilient` function, or with an adapter of docs/integrations.md. Or write `mode: run` for a script "
    "that saves and resumes by itself, or `mode: plain` for a job without recovery.",
)
def script_is_protected(context: Context) -> Iterator[Finding]:
    job, read = context.job, context.script_code
    replaced = packages() if job.compat else frozenset()
    protects = any(_may_load_ours(code) or _roots(code) & replaced for code in read)
    if job.mode == "ours" and any(map(_trains, read)) and not protects:
        message = f"`{job.script}` trains without a @resilient function: no step is saved, and a fault ends the job"
        yield Finding(("script",), message, "use @resilient, or write `mode: run` or `mode: plain`")


@rule(
    "HPX177",
    "warning",
    "a script with another recovery",
    "Modes `ours` and `run` replace failed ranks, and create their process groups again. The script, or a module of "
    "its folder, imports a package that does the same. After a fault, the mode and the package would both act, and "
    "ranks may wait for each other.",
    "Remove the package from the script. Or write `mode: plain`, with which only the script's own recovery acts. If "
    "the script uses the package for something else: --ignore HPX177.",
)
def script_has_one_recovery(context: Context) -> Iterator[Finding]:
    job = context.job
    imported = [name for code in context.script_code for level, name in imports(code) if not level]
    found = {module for module in _RECOVERIES for name in imported if f"{name}.".startswith(f"{module}.")}
    if found and job.mode in ("ours", "run"):
        names = ", ".join(sorted(found))
        message = f"`{job.script}` imports {names}, whose recovery conflicts with mode `{job.mode}`"
        yield Finding(("script",), message, "remove the import, or write `mode: plain` in the job")


def _roots(code: Code) -> set[str]:
    """Return the top-level packages that the code imports."""
    return {name.partition(".")[0] for level, name in imports(code) if not level}


def _called(code: Code) -> set[str]:
    """Return the names of the functions and methods that the code calls, such as `step` for `optimizer.step()`."""
    functions = [node.func for node in code if isinstance(node, ast.Call)]
    methods = {each.attr for each in functions if isinstance(each, ast.Attribute)}
    return methods | {each.id for each in functions if isinstance(each, ast.Name)}


def _may_load_ours(code: Code) -> bool:
    return _OURS in _roots(code) or not _DYNAMIC.isdisjoint(_called(code))


def _trains(code: Code) -> bool:
    """Return whether the code calls `backward` or runs the trainer of a library."""
    called = _called(code)
    if "backward" in called:
        return True
    makes_trainer = any(name.endswith("Trainer") for name in called)
    return makes_trainer and bool(called & {"fit", "train"}) and not _TRAINER_LIBRARIES.isdisjoint(_roots(code))
