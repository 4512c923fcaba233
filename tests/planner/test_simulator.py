"""The simulator: it decides as a real job does, and agrees with the closed forms."""

from __future__ import annotations

import statistics
import subprocess
import sys
from dataclasses import replace

import pytest

from hyperpod_ext.planner.costs import Spread
from hyperpod_ext.planner.estimate import look_ahead
from hyperpod_ext.planner.interval_tuning import Measured, prior_rates, tune
from hyperpod_ext.planner.intervals import best_interval, goodput
from hyperpod_ext.planner.presets import preset
from hyperpod_ext.planner.rates import Rates, published
from hyperpod_ext.planner.recovery_tiers import Recovery, Scenario
from hyperpod_ext.planner.state import FORMATS, size_of
from hyperpod_ext.runtime.membership.escalation import Budgets
from hyperpod_ext.runtime.membership.parity_groups import place_groups
from hyperpod_ext.runtime.membership.placement import place_replicas
from hyperpod_ext.runtime.simulator.engine import Outcome, Simulation, _SimulatedFault
from hyperpod_ext.runtime.simulator.interval import FaultFreeInterval
from hyperpod_ext.runtime.simulator.settings import Simulated, SimulatedTier, simulated

LLAMA = published("llama3-405b")
THREE = {
    "memory": SimulatedTier(2, 0.1, 1, 1),
    "peer": SimulatedTier(5, 0.3, 20, 10),
    "durable": SimulatedTier(40, 1, 60, 30),
}


def job(nodes: int = 16, often: float = 300.0, **more: object) -> Simulated:
    settings: dict[str, object] = {"spares": 8, "tiers": THREE, "step_s": 5.0, "rates": LLAMA.times(often)}
    return Simulated(nodes=nodes, **(settings | more))  # type: ignore[arg-type]


def margin(values: list[float]) -> float:
    """Half the 99 % confidence interval of the mean, for a few dozen values."""
    return 2.7 * statistics.stdev(values) / len(values) ** 0.5


# --- it decides as a real job does ------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sharded", "redundant", "domains", "parity", "no durable tier", "budgets"])
def test_a_part_of_the_ranks_decides_what_all_of_them_would(kind: str) -> None:
    more: dict[str, object] = {
        "sharded": {},
        "redundant": {"redundant": True, "tiers": {"memory": THREE["memory"], "durable": THREE["durable"]}},
        "domains": {"domains": True},
        "parity": {"parity": 5, "domains": True},
        "no durable tier": {"tiers": {"memory": THREE["memory"], "peer": THREE["peer"]}},
        "budgets": {"budgets": Budgets(12, max_node_losses=4)},
    }[kind]  # type: ignore[assignment]
    for seed in range(3):
        settings = job(24, **more)
        part, every_rank = Simulation(settings, seed).run(3), Simulation(settings, seed, every_rank=True).run(3)
        assert part == every_rank
        assert sum(part.faults.values()) > 40
        assert part.relaunches > 0 if kind in ("no durable tier", "budgets") else part.relaunches == 0


def test_each_class_of_failure_comes_back_from_where_it_should() -> None:
    def of(**rates: float) -> Outcome:
        given = {"process": 0.0, "node": 0.0, "correlated": 0.0} | rates
        return Simulation(job(rates=Rates(**given, source="given"), rack_nodes=4), 1).run(5)

    process, node, rack = of(process=1e-6), of(node=1e-6), of(correlated=1e-6)
    assert set(process.fell_back_to) == {"memory"}
    assert set(node.fell_back_to) <= {"peer", "s3"}
    assert node.fell_back_to["peer"] > 9 * node.fell_back_to.get("s3", 0)  # two of a pair at once are rare
    assert rack.fell_back_to["s3"] > 0  # copies that lie in the same rack are gone with it
    assert rack.sources["s3"] > 8 * rack.fell_back_to["s3"]  # of 16; others have that very step in memory
    apart = Simulation(job(rates=Rates(0, 0, 1e-6, "given"), domains=True), 1).run(5)
    assert set(apart.fell_back_to) == {"peer"}
    calm = Simulation(job(redundant=True, rates=Rates(1e-6, 1e-6, 0, "given")), 1).run(5)
    assert calm.lost_steps == 0
    assert set(calm.fell_back_to) <= {"live", "memory"}  # its node may have that very step


def test_where_every_second_went_adds_up() -> None:
    found = Simulation(job(), 3).run(5)
    assert found.kept_s + found.saving_s + found.recovery_s + found.lost_s == pytest.approx(5 * 86400)
    assert found.lost_s > found.lost_steps * 5.0  # and what was done of the step that the fault struck
    assert min(found.kept_s, found.saving_s, found.recovery_s) > 0


def test_the_same_seed_is_the_same_job_and_another_one_is_not() -> None:
    assert Simulation(job(), 7).run(2) == Simulation(job(), 7).run(2)
    assert Simulation(job(), 7).run(2) != Simulation(job(), 8).run(2)


def test_a_job_without_spares_waits_for_a_repair_or_gives_up() -> None:
    rates = Rates(0.0, 2e-6, 0.0, "given")
    waits = Simulation(job(spares=0, rates=rates, repair_s=600.0, node_wait_s=1e9), 5).run(5)
    assert waits.relaunches == 0
    assert waits.recovery_s > 300 * waits.faults["node"]
    impatient = Simulation(job(spares=0, rates=rates, repair_s=600.0, node_wait_s=1.0), 5).run(5)
    assert impatient.relaunches > 0
    assert "no other node joined within 1 s" in impatient.given_up[0]


def test_without_a_durable_tier_a_job_that_gives_up_begins_anew() -> None:
    tiers = {"memory": THREE["memory"]}
    found = Simulation(job(tiers=tiers, rates=Rates(0.0, 1e-6, 0.0, "given")), 2).run(3)
    assert found.relaunches > 0
    assert "fresh" in found.fell_back_to
    assert "No step that all" in found.given_up[0]


class Scripted(Simulation):
    """Faults at these moments instead of drawn ones: when, what, which rank."""

    def __init__(self, settings: Simulated, *script: tuple[float, str, int]) -> None:
        super().__init__(settings, 0)
        self._script = list(script)

    def _next_fault(self, moment: float) -> float:
        return self._script[0][0] if self._script else float("inf")

    def _draw_fault(self, moment: float) -> _SimulatedFault:
        when, kind, rank = self._script.pop(0)
        return _SimulatedFault(when, kind, rank, repair=1e9)  # type: ignore[arg-type]


def test_a_node_and_the_holder_of_its_copies_lost_in_one_recovery_fall_back_to_storage() -> None:
    settings = job()
    (holder,) = place_replicas(dict.fromkeys(range(16), ""), 1)[3]
    one, other = Scripted(settings, (5000.0, "node", 3)), Scripted(settings, (5000.0, "node", 3), (5010.0, "node", 5))
    both = Scripted(settings, (5000.0, "node", 3), (5010.0, "node", holder))
    assert one.run(0.1).fell_back_to == other.run(0.1).fell_back_to == {"peer": 1}
    assert both.run(0.1).fell_back_to == {"s3": 1}
    assert both.outcome.lost_steps > one.outcome.lost_steps


def test_one_node_of_a_parity_group_is_rebuilt_and_for_two_there_is_storage() -> None:
    settings = job(parity=4)
    (group, *_) = place_groups(dict.fromkeys(range(16), ""), 4)
    apart = next(node for node in range(16) if node not in group)

    def after(*script: tuple[float, int]) -> Outcome:
        return Scripted(settings, *((when, "node", node) for when, node in script)).run(0.1)

    assert after((5000.0, group[0]), (5010.0, apart)).fell_back_to == {"parity": 1}
    together = after((5000.0, group[0]), (5010.0, group[2]))
    assert together.fell_back_to == {"s3": 1}
    soon, later = after((5000.0, group[0]), (5045.0, group[2])), after((5000.0, group[0]), (5100.0, group[2]))
    assert soon.fell_back_to == {"parity": 1, "s3": 1}  # the group has no whole step since the first was lost
    assert later.fell_back_to == {"parity": 2}
    again = after((5000.0, group[0]), (5045.0, group[0]))
    assert again.fell_back_to == {"parity": 2}  # the others still have what it was rebuilt from
    one = after((5000.0, group[0]))
    copied = Scripted(job(node_bytes=1e9), (5000.0, "node", group[0])).run(0.1).traffic["to_restore"]
    rebuilt = Scripted(replace(settings, node_bytes=1e9), (5000.0, "node", group[0])).run(0.1).traffic["to_restore"]
    assert rebuilt == 3 * copied
    assert one.lost_steps < together.lost_steps


def test_a_node_that_has_just_come_has_nothing_in_its_memory() -> None:
    """Its process dies before the next snapshot: what helps is the copy on the peer of the node before it."""
    soon = Scripted(job(), (5000.0, "node", 3), (5041.0, "process", 3)).run(0.1)
    later = Scripted(job(), (5000.0, "node", 3), (6000.0, "process", 3)).run(0.1)
    assert soon.fell_back_to == {"peer": 2}
    assert later.fell_back_to == {"peer": 1, "memory": 1}


class Watched(Simulation):
    """Nobody may hold what is newer than the step that a job goes on from: real memory servers drop it, too."""

    resumed = 0

    def _resume(self, step: int, counts: dict[str, int], moment: float, ready: float) -> float:
        assert all(held.step <= step for log in self._memory._log.values() for held in log)
        self.resumed += 1
        return super()._resume(step, counts, moment, ready)


def test_what_a_recovery_gives_up_is_held_by_nobody_after_it() -> None:
    for budgets in (Budgets(1000, max_node_losses=1000), Budgets(12, max_node_losses=4)):  # the job is started again
        simulation = Watched(job(rates=Rates(1e-5, 3e-4, 1e-6, "given"), rack_nodes=2, budgets=budgets), 248)
        outcome = simulation.run(0.3)
        assert simulation.resumed > 20
        assert outcome.fell_back_to["s3"] > 2
        assert (outcome.relaunches > 0) is (budgets.max_restarts == 12)


# --- it agrees with the closed forms ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "latency"),
    [
        (85, 15.0),
        *(
            pytest.param(*one, marks=pytest.mark.thorough)
            for one in ((20, 0.0), (20, 15.0), (85, 0.0), (300, 0.0), (300, 15.0))
        ),
    ],
)
def test_one_tier_is_what_the_closed_form_says(steps: int, latency: float) -> None:
    mtbf, cost = 3600.0, 1.0
    one = {"durable": SimulatedTier(steps, cost, latency, 5.0)}
    settings = job(
        1, rates=Rates(1 / mtbf, 0, 0, "given"), tiers=one, step_s=1.0, recovery=Recovery(30, 30, 100), spares=0
    )
    found = [Simulation(settings, seed).run(10).goodput for seed in range(24)]
    expected = goodput(steps, cost, mtbf, latency=latency, restart=35.0)
    assert statistics.mean(found) == pytest.approx(expected, abs=margin(found))
    assert margin(found) < 0.004


@pytest.mark.slow
@pytest.mark.thorough
def test_the_best_interval_is_the_simulators_best() -> None:
    """Its own optimum lies where the closed form has it: half and double are worse by more than chance."""
    best = round(best_interval(1.0, 1800.0))

    def kept(steps: int) -> list[float]:
        one = {"durable": SimulatedTier(steps, 1.0, 0.0, 5.0)}
        settings = job(
            1, rates=Rates(1 / 1800.0, 0, 0, ""), tiers=one, step_s=1.0, recovery=Recovery(9, 9, 9), spares=0
        )
        return [Simulation(settings, seed).run(30).goodput for seed in range(8)]

    here, half, double = kept(best), kept(best // 2), kept(best * 2)
    for other in (half, double):
        gains = [a - b for a, b in zip(here, other, strict=True)]
        assert statistics.mean(gains) > margin(gains)


def planned(nodes: int = 64, often: float = 20.0) -> Scenario:
    nbytes = size_of(preset("llama3-70b"), FORMATS["mixed"]).nbytes
    rates = LLAMA.of_job(nodes).times(often)
    return Scenario(Spread(nbytes, nodes, 8, nodes * 8), 5.0, rates, frozenset({"memory", "peer", "durable"}))


def test_three_tiers_are_what_the_planner_expects() -> None:
    """The planner's product over tiers is exact to first order: within half a percentage point here."""
    scenario = planned()
    estimate = look_ahead(scenario)
    found = [Simulation(simulated(scenario, estimate.every(), spares=8), seed).run(20).goodput for seed in range(8)]
    assert statistics.mean(found) == pytest.approx(estimate.goodput, abs=0.005 + margin(found))


@pytest.mark.parametrize("spares", [0, 1, 3])
def test_waits_for_nodes_beyond_the_spares_are_what_the_planner_expects(spares: int) -> None:
    scenario = replace(planned(often=5.0), spares=spares, repair_s=3600.0)
    estimate = look_ahead(scenario)
    found = [Simulation(simulated(scenario, estimate.every()), seed).run(60).goodput for seed in range(6)]
    lost = 1 - statistics.mean(found)
    assert 1 - estimate.goodput == pytest.approx(lost, rel=0.12, abs=margin(found))
    unlimited = look_ahead(replace(scenario, spares=None))
    assert unlimited.goodput > estimate.goodput


def test_parity_is_what_the_planner_expects_on_numbers_of_nodes_that_do_not_come_out_even() -> None:
    scenario = replace(planned(nodes=261), parity=8)
    estimate = look_ahead(scenario)
    found = Simulation(simulated(scenario, estimate.every(), spares=16), 0).run(15)
    assert found.goodput == pytest.approx(estimate.goodput, abs=0.01)
    assert found.fell_back_to["parity"] > 9 * found.fell_back_to.get("s3", 0)


def test_three_tiers_of_a_large_job_are_what_the_planner_expects() -> None:
    """Racks fail there each day, and hardly ever have a node together with its copies."""
    nbytes = size_of(preset("llama3.1-405b"), FORMATS["mixed"]).nbytes
    rates, tiers = LLAMA.of_job(4096).times(3), frozenset({"memory", "peer", "durable"})
    scenario = Scenario(Spread(nbytes, 4096, 8, 4096 * 8), 10.0, rates, tiers)
    estimate = look_ahead(scenario)
    found = Simulation(simulated(scenario, estimate.every(), spares=80), 0).run(15)
    assert found.faults["correlated"] > 40
    assert found.goodput == pytest.approx(estimate.goodput, abs=0.005)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("often", [5.0, 15.0, 45.0])
def test_auto_beats_half_and_double_over_a_month(often: float) -> None:
    """Seeds are shared, so that the same failures strike all three."""
    scenario = planned(often=often)
    best = look_ahead(scenario).every()

    def kept(factor: float) -> list[float]:
        every = {kind: max(1, round(factor * steps)) for kind, steps in best.items()}
        return [Simulation(simulated(scenario, every, spares=8), seed).run(30).goodput for seed in range(10)]

    auto = kept(1.0)
    for factor in (0.5, 2.0):
        gains = [a - b for a, b in zip(auto, kept(factor), strict=True)]
        assert statistics.mean(gains) > 0
        assert statistics.mean(gains) > margin(gains) / 2


@pytest.mark.parametrize("often", [5.0, 20.0, 80.0])
def test_a_job_that_retunes_itself_comes_to_the_best_interval(often: float) -> None:
    """From a bad start, and a prior that is 5 to 80 times too low, by what it sees of its own failures alone."""
    rate, blocked = LLAMA.of_job(64).total * often, 1.0
    best, interval, seen = best_interval(blocked, 1 / rate), 40.0, 0
    for day in range(1, 31):
        settings = job(
            1,
            rates=Rates(rate, 0, 0, ""),
            tiers={"durable": SimulatedTier(max(1, round(interval / 5)), blocked, 4.0)},
            spares=0,
        )
        seen += sum(Simulation(settings, day).run(1).faults.values())
        interval = tune(interval, Measured(day * 86400.0, seen, blocked, 4.0), prior_rates(64).total)
    assert interval == pytest.approx(best, rel=0.25)
    assert goodput(interval, blocked, 1 / rate) > max(
        goodput(factor * best, blocked, 1 / rate) for factor in (0.5, 2.0)
    )


# --- arithmetic instead of events -------------------------------------------------------------------


def test_a_stretch_is_what_one_event_a_step_would_give() -> None:
    tiers = {"memory": SimulatedTier(2, 0.25, 1.0), "durable": SimulatedTier(6, 1.0, 23.0)}
    stretch = FaultFreeInterval(100.0, 7, 3, 1.5, tiers)
    now, ends, arrived = 100.0, {7: 100.0}, []
    free_at = 0.0
    for step in range(8, 60):
        now += 1.5 + 0.25 * (step % 2 == 0) + 1.0 * (step % 6 == 0)
        ends[step] = now
        if step % 6 == 0 and now >= free_at - 1e-9:
            free_at = now + 23.0
            arrived.append((step, free_at))
    assert all(stretch.ends(step) == pytest.approx(moment) for step, moment in ends.items())
    for moment in (100.0, 101.0, 118.3, 150.0, 177.7):
        assert stretch.newest(moment) == max(step for step, end in ends.items() if end <= moment)
        safe = [step for step, ready in arrived if ready <= moment]
        assert [held.step for held in stretch.held("durable", moment, 3)] == safe[::-1][:3]


def test_nothing_to_simulate_is_said() -> None:
    for change in ({"nodes": 0}, {"step_s": 0.0}, {"rack_nodes": 0}):
        with pytest.raises(ValueError, match="nothing to simulate"):
            replace(job(), **change)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="every_steps must be 1 or more"):
        SimulatedTier(0)


# --- size -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_week_of_16384_nodes() -> None:
    settings = job(16384, often=1.0, spares=320)
    assert sum(Simulation(settings, 0).run(7).faults.values()) > 350


def test_it_loads_no_torch() -> None:
    code = "import sys, hyperpod_ext.runtime.simulator.engine; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"
