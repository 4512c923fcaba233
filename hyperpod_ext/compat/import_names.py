"""Imports of this project's modules under AWS's names, in the workers of a job with `compat: aws`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from hyperpod_ext.catalog.aws_terms import COMPAT_PAGE, terms
from hyperpod_ext.errors import JobFailedError

_WRAP, _HANDLERS = "checkpointless.wrap", "checkpointless.handlers"
_LOGS, _DATA, _TRAINER = "checkpointless.logs", "checkpointless.data", "checkpointless.trainer"

MODULES: dict[str, dict[str, str]] = {
    "hyperpod_checkpointless_training": {
        "dataloader.config": _DATA,
        "dataloader.encryption.encryption_manager": "",
        "dataloader.mmap_data_module": _DATA,
        "dataloader.skip_dataloader": _DATA,
        "dataloader.utils": _DATA,
        "inprocess.abort": _HANDLERS,
        "inprocess.compose": _HANDLERS,
        "inprocess.finalize": _HANDLERS,
        "inprocess.health_check": _HANDLERS,
        "inprocess.logger": _LOGS,
        "inprocess.tools.memory_tracker": _LOGS,
        "inprocess.tools.startup_overhead_tracer": "",
        "inprocess.train_utils": _WRAP,
        "inprocess.utils": _LOGS,
        "inprocess.wrap": _WRAP,
        "nemo_plugins.callbacks": _TRAINER,
        "nemo_plugins.checkpoint_connector": _TRAINER,
        "nemo_plugins.checkpoint_manager": _WRAP,
        "nemo_plugins.checkpoint_transform_callback": "",
        "nemo_plugins.datamodule_epoch_callback": _TRAINER,
        "nemo_plugins.fault_injection": "",
        "nemo_plugins.megatron_strategy": _TRAINER,
        "nemo_plugins.patches": _WRAP,
        "nemo_plugins.progress_bar_callback": _TRAINER,
        "nemo_plugins.resume": _TRAINER,
    },
    "hyperpod_elastic_agent": {"elastic_event_handler": "elastic"},
}
"""For each of AWS's packages and modules, the module of `hyperpod_ext.compat` that replaces it, or an empty text."""


def module_of(module: str) -> str:
    """Return the module of `hyperpod_ext.compat` that replaces AWS's `module`; empty without a replacement."""
    package, _, name = module.partition(".")
    return MODULES.get(package, {}).get(name, "")


class AwsFinder(MetaPathFinder, Loader):
    """Import finder for the names of AWS's modules and packages, whose contents come from `hyperpod_ext.compat`."""

    def __init__(self) -> None:
        self._modules = {f"{package}.{name}" for package, found in MODULES.items() for name in found}
        parts = [name.split(".") for name in self._modules]
        self._packages = {".".join(each[:count]) for each in parts for count in range(1, len(each))}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        is_package = fullname in self._packages
        return ModuleSpec(fullname, self, is_package=is_package) if is_package or fullname in self._modules else None

    def exec_module(self, module: ModuleType) -> None:
        """Set the module's `__getattr__`, which looks a name up in this project's replacement when the name is used."""
        name, ours = module.__name__, module_of(module.__name__)

        def attribute(wanted: str) -> Any:
            if wanted.startswith("__"):
                raise AttributeError(wanted)
            return _find(name, ours, wanted)

        module.__dict__["__getattr__"] = attribute


def _find(module: str, ours: str, name: str) -> Any:
    """Return this project's replacement for a name in AWS's `module`.

    Args:
        module: AWS's module.
        ours: the module of `hyperpod_ext.compat` that replaces AWS's module; empty without a replacement.
        name: the name to look up in `module`.

    Raises:
        JobFailedError: the name is known but has no replacement; the error's hint has the code to write instead.
        ImportError: the name is not on the page of supported names.
    """
    term = next((one for one in terms() if f"{one.module}.{one.name}" == f"{module}.{name}"), None)
    if term is not None and term.compat == "refused":
        raise JobFailedError(f"{module}.{name} cannot be used with `compat: aws`", hint=term.how)
    found = import_module(f"hyperpod_ext.compat.{ours}") if ours else None
    if name not in getattr(found, "__all__", ()):
        raise ImportError(f"{module}.{name} has no counterpart in hyperpod_ext.compat; {COMPAT_PAGE} lists all names")
    return getattr(found, name)


def install(compat: str) -> None:
    """Make `import` find this project's replacements for AWS's packages, and log the replacement on rank 0.

    Args:
        compat: name of the set of packages, from the job's spec.

    Raises:
        JobFailedError: this version does not know `compat`, or one of the packages was already imported.
    """
    if compat != "aws":
        raise JobFailedError(f"compat: {compat} is unknown to this version", hint="Use a newer image.")
    if imported := sorted(MODULES.keys() & sys.modules.keys()):
        raise JobFailedError(
            f"{imported[0]} was imported before its counterpart in hyperpod_ext.compat could replace it",
            hint=f"Remove {imported[0]} from restart.preload.",
        )
    sys.meta_path.insert(0, AwsFinder())
    if os.environ.get("RANK", "0") == "0":
        names = ", ".join(sorted(MODULES))
        sys.stderr.write(f"hyperpod_ext: compat aws: imports of {names} come from hyperpod_ext.compat\n")
