"""The benchmark of the token store: its verdicts, and a short run of all of it."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from data import make_document, make_tables

ARGS = argparse.Namespace(rounds=2, mtokens=1, mbytes=1)


STORED = "bytes as stored, second epoch, 64 at once"


def measured(**changed: float) -> dict[str, list[dict[str, Any]]]:
    readers = {"documents, Megatron": 1.0, "documents, store": 1.0, "samples, Megatron": 1.0, "samples, store": 1.0}
    readers |= {f"{kind}, Megatron's files by MegatronStore": 1.0 for kind in ("documents", "samples")}
    epochs = {"BPE, decoded": 1.0, "BPE, second epoch": 20.0, "bytes, decoded": 1.0, "bytes as stored, decoded": 1.0}
    epochs |= {f"bytes{how}, second epoch, {n} at once": 20.0 for how in ("", " as stored") for n in (8, 64)}
    memory = {"data": 100.0, "summed PSS": 110.0}
    timed = [
        [{name: {"wall": changed.get(name, rate), "cpu": 2 * rate} for name, rate in part.items()}]
        for part in (readers, epochs)
    ]
    return {"readers": timed[0], "epochs": timed[1], "memory": [{n: changed.get(n, v) for n, v in memory.items()}]}


def test_claims_hold_at_their_bounds() -> None:
    document = make_document(measured(), ARGS)
    assert all(claim["holds"] for claim in document["claims"])
    assert "**does not hold**" not in make_tables(document)


@pytest.mark.parametrize(
    "changed",
    [
        {"documents, store": 0.89},
        {"samples, store": 0.89},
        {"BPE, second epoch": 19.0},
        {STORED: 19.0},
        {"summed PSS": 111.0},
    ],
)
def test_a_claim_that_does_not_hold_is_said(changed: dict[str, float]) -> None:
    document = make_document(measured(**changed), ARGS)
    assert [claim["holds"] for claim in document["claims"]].count(False) == 1
    assert make_tables(document).count("**does not hold**") == 1


@pytest.mark.thorough
def test_a_short_run_measures_every_side(root: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        root / "benchmarks" / "cpu" / "data.py",
        "--rounds",
        "1",
        "--mtokens",
        "2",
        "--mbytes",
        "1",
    ]
    done = subprocess.run([*command, "--out", tmp_path], capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode in (0, 1), done.stderr  # 1: a claim does not hold at this size
    document = json.loads((tmp_path / "data.json").read_text())
    for part in document["tokens_per_s"].values():
        assert all(rate > 0 for one in part.values() for rate in one.values())
    assert "# Token store" in (tmp_path / "data.md").read_text()
