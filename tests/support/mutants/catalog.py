"""All mutants, in one table."""

from __future__ import annotations

from mutants import of_cluster, of_decisions, of_snapshots, of_specs, of_storage, of_training
from mutants.table import Mutant

MUTANTS: list[Mutant] = [
    *of_cluster.MUTANTS,
    *of_decisions.MUTANTS,
    *of_snapshots.MUTANTS,
    *of_storage.MUTANTS,
    *of_training.MUTANTS,
    *of_specs.MUTANTS,
]
