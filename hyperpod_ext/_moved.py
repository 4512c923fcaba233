"""Old names of modules that have moved. They can be imported for one more version, with a warning of the new place."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec, SourceFileLoader  # importlib.abc would load a dozen modules more
from types import ModuleType

MOVED = {
    "hyperpod_ext.config.cluster": "hyperpod_ext.config.clusters.cluster",
    "hyperpod_ext.config.load": "hyperpod_ext.config.files.load",
    "hyperpod_ext.estimator": "hyperpod_ext.submit.sagemaker.estimator",
    "hyperpod_ext.launch.cdk.jobs": "hyperpod_ext.clusters.cdk.jobs",
    "hyperpod_ext.runtime.printed": "hyperpod_ext.runtime.container_kubernetes",
    "hyperpod_ext.runtime.tiers.managed": "hyperpod_ext.runtime.memory_server.managed_tier.tier",
    "hyperpod_ext.runtime.training_job": "hyperpod_ext.runtime.container_sagemaker",
}
"""Old name of each module and its new one."""
_PACKAGES = {name.rsplit(".", parts)[0] for name in MOVED for parts in range(1, name.count("."))}


class Finder:
    """Asked last: only for what nobody else can find."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in MOVED:
            new = MOVED[fullname]
            message = f"{fullname} has moved: import {new} instead; the old name goes with the next version"
            warnings.warn(message, DeprecationWarning, stacklevel=2)
            return ModuleSpec(fullname, _Alias(fullname, import_module(new)))
        return ModuleSpec(fullname, None, is_package=True) if fullname in _PACKAGES else None


class _Alias(SourceFileLoader):
    """Gives the module that lies at the new place, the same object; `python -m` gets its code."""

    def __init__(self, old: str, module: ModuleType) -> None:
        super().__init__(old, str(module.__file__))
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has put that of the old name there


def install() -> None:
    """Let the old names be found; once."""
    if not any(isinstance(one, Finder) for one in sys.meta_path):
        sys.meta_path.append(Finder())
