"""Replacements for the names of AWS's package `hyperpod_checkpointless_training`, each imported at its first use."""

from __future__ import annotations

from hyperpod_ext.catalog.aws_terms import terms
from hyperpod_ext.compat.import_names import module_of
from hyperpod_ext.lazy import loader

_MODULES = {
    term.name: f".{module.removeprefix('checkpointless.')}"
    for term in terms()
    if term.compat != "refused" and (module := module_of(term.module)).startswith("checkpointless.")
}

__all__ = sorted(_MODULES)

__getattr__ = loader(__name__, _MODULES)
