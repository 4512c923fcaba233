from __future__ import annotations

import json

import pytest
from checkpoint.measure import Bench
from checkpoint.page import make_document, make_page, make_tables, needed
from checkpoint.peers import Environment, read_pins
from checkpoint.report import ALL_FIGURES, judge, summarize, survived
from checkpoint.state import width_for
from checkpoint.systems import OURS, SYSTEMS


def row(what, system, number=0, kind="plain", **found):
    campaign = found.pop("campaign", "saves")
    return {
        "campaign": campaign,
        "what": what,
        "kind": kind,
        "system": system,
        "round": number,
        "load": 0.5,
        **found,
    }


@pytest.fixture
def bench():
    environments = {name: Environment(None, (f"{name}==1",)) for name in ("dlrover", "nvrx", "aws", "clients")}
    made = Bench(list(SYSTEMS.values()), environments, 1 << 20, rounds=3, survivals=3)
    made.states["plain"] = {"nbytes": 1 << 20, "tensors": 592}
    made.rows += [row("blocked", OURS, number, ratio=ratio) for number, ratio in enumerate((1.0, 3.0, 1.1))]
    made.rows += [row("survives", OURS, number, ratio=1.2, survived=number != 2) for number in range(3)]
    return made


class TestReport:
    def test_a_figure_is_the_median_of_the_ratios_of_rounds(self, bench):
        assert summarize(bench.rows)["blocked"][OURS] == {"n": 3, "median": 1.1, "min": 1.0, "max": 3.0}

    def test_a_kind_of_state_counts_only_to_its_own_figure(self):
        found = summarize([row("blocked", OURS, kind="sharded", ratio=2.0)])
        assert found["blocked"] == {}
        assert found["blocked_sharded"][OURS]["median"] == 2.0

    def test_a_target_is_met_missed_or_not_measured(self, bench):
        met = {verdict["figure"]: verdict["met"] for verdict in judge(summarize(bench.rows))}
        assert met["blocked"] is True
        assert met["lost"] is None
        assert judge(summarize([row("blocked", OURS, ratio=1.11)]))[0]["met"] is False

    def test_the_worst_round_is_held_against_the_median(self):
        rows = [row("restore", OURS, number, ratio=ratio) for number, ratio in enumerate((1.0, 1.1, 1.7))]
        (found,) = [verdict for verdict in judge(summarize(rows)) if verdict["figure"] == "restore_worst"]
        assert found["met"] is False
        assert found["measured"] == pytest.approx(1.7 / 1.1)

    def test_time_lost_is_held_against_what_memcpy_loses_in_the_same_run(self):
        rows = [row("lost", OURS, ratio=0.21), row("lost", "memcpy", ratio=0.2)]
        met = {verdict["figure"]: (verdict["met"], verdict.get("measured")) for verdict in judge(summarize(rows))}
        assert met["lost_of_memcpy"] == (True, pytest.approx(1.05))
        rows[1]["ratio"] = -0.01  # it lost nothing: then there is no share of it
        assert {v["figure"]: v["met"] for v in judge(summarize(rows))}["lost_of_memcpy"] is None

    def test_a_drain_is_held_against_the_fastest_client_of_its_round(self):
        rows = [row("drain", name, gb_per_s=speed, cpu_s=cpu) for name, speed, cpu in (
            (OURS, 3.0, 0.1), ("raw PUT", 2.0, 0.1), ("boto3 upload_fileobj", 0.5, 0.4)
        )]  # fmt: skip
        found = summarize([*rows, row("drain", "raw PUT", 1, gb_per_s=99.0, cpu_s=0.1)])
        assert found["drain_speed"][OURS]["median"] == 1.5
        assert found["drain_cpu"][OURS]["median"] == 0.25
        verdicts = {verdict["figure"]: verdict["met"] for verdict in judge(found)}
        assert verdicts["drain_speed"]
        assert verdicts["drain_cpu"]

    def test_a_save_that_did_not_survive_is_counted(self, bench):
        assert survived(bench.rows) == {OURS: (2, 3)}


class TestPage:
    def test_a_system_says_what_it_has_none_of_and_what_failed(self, bench):
        bench.rows.append(row("blocked", "memcpy", ratio=1.0))
        bench.failed(SYSTEMS["nvrx"], "plain, at once", "not installed: no network")
        table = make_tables(make_document(bench, "python benchmarks/cpu/checkpointing.py"))
        costs, uses = table.split("\n\n")[1:3]
        assert "| memcpy | 1.00 (1: 1 to 1) |" in costs
        assert "| memcpy | has none |" in uses
        assert "| hyperpod_ext | 1.20 (3: 1.2 to 1.2) |" in uses
        assert "| NVRx local | failed |" in uses
        assert "NVRx local, plain, at once: not installed: no network" in make_page(make_document(bench, ""))

    def test_what_is_published_names_no_machine_and_no_folder_of_it(self, bench):
        document = make_document(bench, "python benchmarks/cpu/checkpointing.py")
        words = (json.dumps(document) + make_page(document)).replace('"', " ").split()
        assert [word for word in words if word.startswith(("/", "~")) and len(word) > 1] == []

    def test_the_worst_round_stands_in_the_table_of_targets(self, bench):
        bench.rows += [row("restore", OURS, number, ratio=ratio) for number, ratio in enumerate((1.0, 1.1, 1.7))]
        table = make_tables(make_document(bench, "")).split("\n\n")[0]
        line = "| restore in a new process: worst round / median | <= 1.5 x | 1.55 | 3: 1 to 1.7 | **not met** |"
        assert line in table

    def test_every_figure_is_in_a_table(self, bench):
        bench.rows.append(row("drain", "raw PUT", gb_per_s=1.0, cpu_s=1.0))
        tables = make_tables(make_document(bench, ""))
        assert [figure.label for figure in ALL_FIGURES.values() if figure.label not in tables] == []


def test_pins_are_read_by_environment():
    assert read_pins("# why\n\n[one]\na==1\nb==2\n\n[two]\nc==3\n") == {"one": ("a==1", "b==2"), "two": ("c==3",)}


@pytest.mark.parametrize("kind_layers", [8, 12])
def test_a_state_has_at_least_the_size_asked_for(kind_layers):
    width = width_for(64 << 20, kind_layers)
    parameters = kind_layers * (12 * width**2 + 13 * width) + (8192 + 512 + 2) * width
    assert 64 << 20 <= 12 * parameters < 80 << 20


class TestUpdate:
    def test_campaigns_that_were_not_run_stay_as_they_were(self, bench):
        bench.rows.append(row("replicate", OURS, campaign="replicas", lost_ratio=5.0))
        before = json.loads(json.dumps(make_document(bench, "all of it")))
        bench.rows = [row("replicate", OURS, campaign="replicas", lost_ratio=0.5)]
        after = make_document(bench, "some of it", before)
        assert after["medians"]["replica_lost"][OURS]["median"] == 0.5
        assert after["medians"]["blocked"] == before["medians"]["blocked"]
        page = make_page(after)
        assert page.index("all of it") < page.index("some of it")

    def test_systems_that_were_not_asked_stay_as_they_were(self, bench):
        bench.rows.append(row("blocked", "nvrx", ratio=8.0))
        before = json.loads(json.dumps(make_document(bench, "all of it")))
        bench.systems, bench.rows = [SYSTEMS[OURS]], [row("blocked", OURS, ratio=0.5)]
        after = make_document(bench, "ours alone", before)
        assert after["medians"]["blocked"][OURS]["n"] == 1
        assert after["medians"]["blocked"]["nvrx"]["median"] == 8.0
        assert [run["command"] for run in after["runs"]] == ["all of it", "ours alone"]

    def test_a_run_of_which_nothing_is_left_is_not_named(self, bench):
        before = json.loads(json.dumps(make_document(bench, "of old")))
        assert "of old" not in make_page(make_document(bench, "of now", before))


def test_a_run_is_named_as_long_as_something_of_it_is_left():
    whole, drain, saves, firsts = (
        {"campaigns": names} for names in (["drain", "saves"], ["drain"], ["saves"], ["firsts"])
    )
    assert needed([whole, drain]) == [whole, drain]
    assert needed([whole, drain, firsts, saves]) == [drain, firsts, saves]
    assert needed([drain, saves, whole]) == [whole]
