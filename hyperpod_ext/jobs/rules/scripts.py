"""The script's own code, which is parsed and never executed."""

from __future__ import annotations

import ast
import warnings
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from hyperpod_ext.config.files.checks import Finding
from hyperpod_ext.jobs.rules import Context, rule

_OURS = "hyperpod_ext"
_MOST_BYTES, _MOST_FILES, _DEEPEST = 1 << 20, 50, 3
"""Limits of the files that are read, all together, and of imports from one to the next."""
_TRAINER_LIBRARIES = frozenset({"lightning", "pytorch_lightning", "sentence_transformers", "transformers", "trl"})
_DYNAMIC = frozenset({"__import__", "exec", "import_module", "run_module", "run_path"})
"""Functions that may load any module."""

_RECOVERIES = (
    "deepspeed.elasticity",
    "nvidia_resiliency_ext.fault_tolerance",
    "nvidia_resiliency_ext.inprocess",
    "nvidia_resiliency_ext.ptl_resiliency",
    "torch.distributed.launcher",
    "torch.distributed.run",
    "torchft",
)
"""Modules that restart ranks, or change their number, themselves."""

Code = list[ast.AST]
"""All nodes of a file."""


@rule(
    "HPX176",
    "warning",
    "a script that nothing protects",
    "Mode `ours` saves and restores the steps of a `@resilient` function. The script trains, but neither it nor a "
    "module of its folder imports hyperpod_ext, so no step is saved, and a fault ends the job. A script that leaves "
    "training to an installed package is not judged.",
    "Train in a `@resilient` function, or with an adapter of docs/integrations.md. Or write `mode: run` for a script "
    "that saves and resumes by itself, or `mode: plain` for a job without recovery.",
)
def script_is_protected(context: Context) -> Iterator[Finding]:
    job = context.job
    if job.mode != "ours" or context.script is None:
        return
    read = _read_all(context.script)
    if any(map(_trains, read)) and not any(map(_may_load_ours, read)):
        message = f"`{job.script}` trains without a @resilient function: no step is saved, and a fault ends the job"
        yield Finding(("script",), message, "use @resilient, or write `mode: run` or `mode: plain`")


@rule(
    "HPX177",
    "warning",
    "a script with another recovery",
    "Modes `ours` and `run` replace failed ranks, and open their process groups again. The script, or a module of its "
    "folder, imports a package that does the same. After a fault both would act, and ranks may wait for each other.",
    "Remove that package from the script. Or write `mode: plain`: then only the script's own recovery acts. If the "
    "script uses it elsewhere only: --ignore HPX177.",
)
def script_has_one_recovery(context: Context) -> Iterator[Finding]:
    job = context.job
    if job.mode not in ("ours", "run") or context.script is None:
        return
    names = [name for code in _read_all(context.script) for level, name in _imports(code) if not level]
    found = {module for module in _RECOVERIES for name in names if f"{name}.".startswith(f"{module}.")}
    if found:
        message = f"`{job.script}` imports {', '.join(sorted(found))}: after a fault, it and mode `{job.mode}` both act"
        yield Finding(("script",), message, "remove it from the script, or write `mode: plain`")


def parse_file(file: Path) -> ast.Module | None:
    """Parse a file of at most 1 MiB; None if it is none, or is not Python, which its start reports."""
    text = _text(file, _MOST_BYTES)
    return None if text is None else _module(text)


def _read_all(script: Path) -> list[Code]:
    """Parse the script and the modules that it imports from its folder; empty if one cannot be read within limits."""
    read, left, waiting = dict[Path, Code](), _MOST_BYTES, deque([(script, 0)])
    while waiting:
        file, depth = waiting.popleft()
        if file in read:
            continue
        text = _text(file, left)
        code = None if text is None or depth > _DEEPEST or len(read) == _MOST_FILES else _parse(text)
        if text is None or code is None:
            return []
        read[file], left = code, left - len(text)
        waiting += [(each, depth + 1) for each in _local_imports(code, file, script.parent)]
    return list(read.values())


def _text(file: Path, most: int) -> bytes | None:
    """Return the file's bytes; None if it is not a regular file of at most `most` bytes."""
    try:
        return file.read_bytes() if file.is_file() and file.stat().st_size <= most else None
    except OSError:
        return None


def _parse(text: bytes) -> Code | None:
    """Return all nodes; None if it is not Python."""
    module = _module(text)
    return None if module is None else list(ast.walk(module))


def _module(text: bytes) -> ast.Module | None:
    try:
        with warnings.catch_warnings(action="ignore"):  # of the script's style
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _local_imports(code: Code, file: Path, folder: Path) -> Iterator[Path]:
    """Yield the files below the script's `folder` that the code of `file` imports."""
    for level, name in _imports(code):
        path = file.parents[level - 1] if level else folder
        for part in filter(None, name.split(".")):
            path = path / part
            yield from (each for each in (path.with_suffix(".py"), path / "__init__.py") if each.is_file())


def _imports(code: Code) -> Iterator[tuple[int, str]]:
    """Yield level and name of each import; names that are imported from a module count as modules, too."""
    for node in code:
        if isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.level, f"{node.module or ''}.{alias.name}") for alias in node.names)


def _roots(code: Code) -> set[str]:
    """Return the packages that the code imports."""
    return {name.partition(".")[0] for level, name in _imports(code) if not level}


def _called(code: Code) -> set[str]:
    """Return the names of called functions and methods, without the objects before them."""
    functions = [node.func for node in code if isinstance(node, ast.Call)]
    methods = {each.attr for each in functions if isinstance(each, ast.Attribute)}
    return methods | {each.id for each in functions if isinstance(each, ast.Name)}


def _may_load_ours(code: Code) -> bool:
    return _OURS in _roots(code) or not _DYNAMIC.isdisjoint(_called(code))


def _trains(code: Code) -> bool:
    """Return whether the code has a training loop, or starts that of a library's trainer."""
    called = _called(code)
    if "backward" in called:
        return True
    makes_trainer = any(name.endswith("Trainer") for name in called)
    return makes_trainer and bool(called & {"fit", "train"}) and not _TRAINER_LIBRARIES.isdisjoint(_roots(code))
