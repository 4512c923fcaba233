"""Names of sbatch's options: facts of its manual, without the dashes."""

from __future__ import annotations

from pathlib import Path

SOURCE = "manual of sbatch, Slurm 22.05.8"
DATED = "2026-11-25"
NAMES = tuple(Path(__file__).with_name("sbatch-options.txt").read_text().split())
