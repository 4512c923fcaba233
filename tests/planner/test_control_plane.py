"""What the control plane takes by the number of nodes: the benchmark's figures, and what goes on from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hyperpod_ext.planner import control_plane
from hyperpod_ext.planner.recovery_tiers import Recovery

BENCHMARK = Path(__file__).parents[2] / "docs" / "benchmarks" / "control-plane.json"


def test_the_figures_are_those_of_the_benchmark() -> None:
    """Within what two runs of it differ: it may be made again without the planner."""
    measured = {row["nodes"]: row for row in json.loads(BENCHMARK.read_text())["rows"]}
    assert [row.nodes for row in control_plane.MEASURED] == sorted(measured)
    for row in control_plane.MEASURED:
        assert row.fault_s == pytest.approx(measured[row.nodes]["fault_cpu_s"], rel=0.5)
        assert row.start_s == pytest.approx(measured[row.nodes]["start_cpu_s"], rel=0.5)


def test_between_and_above_the_measured_it_goes_on() -> None:
    faults = [control_plane.at(nodes).fault_s for nodes in (1, 16, 40, 64, 2047, 2048, 2049, 4096, 16384)]
    assert faults == sorted(faults)
    assert faults[1] < faults[2] < faults[3]
    assert control_plane.at(4096).fault_s == pytest.approx(2 * 12 / 11 * control_plane.at(2048).fault_s)


def test_a_recovery_of_many_nodes_takes_longer() -> None:
    assumed, few, many = Recovery(), Recovery.at(16), Recovery.at(2048)
    assert assumed.process < few.process < many.process < assumed.process + 0.5
    assert many.node - few.node == pytest.approx(many.process - few.process)
    assert few.job < many.job
