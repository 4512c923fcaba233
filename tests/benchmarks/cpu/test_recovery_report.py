"""What the recovery benchmark makes of its moments: phases, medians, ratios, and the page of them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from recovery_page import make_document, make_page, make_table, raw_rounds
from recovery_report import (
    LABELS,
    NVRX,
    OURS,
    TORCHFT,
    TORCHRUN,
    Recovery,
    Stamp,
    nvrx_recovery,
    ordinary_step,
    our_recovery,
    phases_between,
    summarize,
    torchft_recovery,
    torchrun_recovery,
)
from recovery_sides import EXAMPLE, Setup

from hyperpod_ext.config.files.load import load
from hyperpod_ext.config.job.job import JobConfig

KILL_T = 100.0
STARTING = ("started", "imported", "group_up", "built")


def stamp(t: float, event: str, **fields: Any) -> Stamp:
    return {"t": t, "event": event, **fields}


def steps(start: float, numbers: range) -> list[Stamp]:
    """Steps of 0.2 s, one after the other."""
    made = []
    for count, step in enumerate(numbers):
        made.append(stamp(start + 0.2 * count, "step_begin", step=step))
        made.append(stamp(start + 0.2 * count + 0.2, "step_end", step=step, loss=9.0 - step))
    return made


@pytest.fixture
def before() -> dict[int, list[Stamp]]:
    """Three steps made and the fourth begun; the killed rank says nothing more."""
    ranks = {rank: [*steps(99.4, range(1, 4)), stamp(100.0, "step_begin", step=4)] for rank in range(4)}
    for rank in (0, 1, 3):
        ranks[rank].append(stamp(100.1 + rank / 100, "exception", error="Connection closed by peer"))
    return ranks


@pytest.fixture
def after() -> dict[int, list[Stamp]]:
    """Rank r starts r hundredths later than rank 0; all go on from step 2 and end with step 5."""
    return {
        rank: [
            *[stamp(101.0 + index + rank / 100, event) for index, event in enumerate(STARTING)],
            stamp(105.0 + rank / 100, "loaded", step=2),
            *steps(105.1, range(3, 6)),
            stamp(106.0, "done", held_out_loss=3.5),
        ]
        for rank in range(4)
    }


def recovery(seconds: float, **fields: Any) -> Recovery:
    """One whose last phases take all of its time."""
    side = fields.pop("side", OURS)
    phases = dict.fromkeys(LABELS[side], 0.0) | {"first_new_step": seconds, list(LABELS[side])[-1]: 0.5}
    made = Recovery(phases, seconds, seconds, seconds + 0.5, 0.2, 0, {1: 5.0, 2: 4.0}, 4.5)
    return replace(made, **fields)


def test_a_phase_ends_when_the_last_rank_has_come_so_far_and_an_exception_with_the_first(before, after):
    found = torchrun_recovery(before, after, KILL_T, killed_step=4)
    assert found.phases == pytest.approx(
        {
            "survivor_exception": 0.10,
            "python_started": 0.93,
            "imported": 1.0,
            "group_up": 1.0,
            "built": 1.0,
            "loaded": 1.0,
            "first_new_step": 0.27,
            "back_past": 0.2,
        }
    )
    assert found.first_new_step == pytest.approx(5.3)
    assert found.past_killed_step == pytest.approx(5.5)
    assert found.since_kill("back_past") == pytest.approx(found.past_killed_step)
    assert found.since_kill("imported") == pytest.approx(2.03)


def test_only_steps_that_every_rank_had_made_are_lost(before, after):
    assert torchrun_recovery(before, after, KILL_T, killed_step=4).steps_lost == 1


def test_losses_are_those_of_the_last_making(before, after):
    after[0] = [entry | {"loss": 1.25} if entry["event"] == "step_end" else entry for entry in after[0]]
    for rank in (1, 2, 3):
        after[rank] = [entry | {"loss": 1.25} if entry["event"] == "step_end" else entry for entry in after[rank]]
    found = torchrun_recovery(before, after, KILL_T, killed_step=4)
    assert found.losses == {1: 8.0, 2: 7.0, 3: 1.25, 4: 1.25, 5: 1.25}
    assert found.held_out_loss == 3.5


def test_survivors_that_the_agent_ended_first_leave_the_phase_unseen(before, after):
    silent = {rank: [entry for entry in stamps if entry["event"] != "exception"] for rank, stamps in before.items()}
    found = torchrun_recovery(silent, after, KILL_T, killed_step=4)
    assert found.phases["survivor_exception"] is None
    assert found.since_kill("survivor_exception") is None
    assert found.phases["python_started"] == pytest.approx(1.03)


def test_a_rank_that_does_not_come_back_is_an_error(before, after):
    after[3] = [entry for entry in after[3] if entry["event"] != "step_end"]
    with pytest.raises(ValueError, match="3 of 4 ranks came to step_end 3"):
        torchrun_recovery(before, after, KILL_T, killed_step=4)


def test_ranks_that_load_different_checkpoints_are_an_error(before, after):
    after[1] = [stamp(105.0, "loaded", step=0) if entry["event"] == "loaded" else entry for entry in after[1]]
    with pytest.raises(ValueError, match=r"different checkpoints.*\[0, 2\]"):
        torchrun_recovery(before, after, KILL_T, killed_step=4)


def test_a_phase_that_went_on_beside_an_earlier_one_costs_nothing():
    moments = {"a": 11.0, "b": 10.5, "c": None, "d": 13.0}
    assert phases_between(moments, 10.0) == {"a": 1.0, "b": 0.0, "c": None, "d": 2.0}


def test_an_ordinary_step_is_one_before_the_kill_and_not_the_first():
    made = {1: (0.0, 9.0), 2: (9.0, 9.2), 3: (9.2, 9.4), 4: (9.4, 9.7), 5: (9.7, 20.0)}
    assert ordinary_step(made, until=5) == pytest.approx(0.2)


def test_of_nvrx_a_phase_begins_when_the_function_is_called_again(before, after):
    for rank, stamps in after.items():
        stamps[:2] = [stamp(102.0 + rank / 100, "called")]
    found = nvrx_recovery(before, after, KILL_T, killed_step=4)
    assert list(found.phases) == list(LABELS[NVRX])
    assert found.phases["called"] == pytest.approx(1.93)
    assert found.all_ranks == found.first_new_step == pytest.approx(5.3)


class TestTorchft:
    """Rank 2 dies in step 4. The others discard it, make it and two more alone, and step 7 with the new process."""

    @pytest.fixture
    def stamps(self) -> dict[int, list[Stamp]]:
        ranks = {rank: [*steps(99.2, range(1, 4)), stamp(99.9, "step_begin", step=4)] for rank in range(4)}
        for rank in (0, 1, 3):
            ranks[rank] += [stamp(101.0 + rank / 100, "discarded", step=4), *steps(101.5, range(4, 8))]
            ranks[rank].append(stamp(103.0, "done", held_out_loss=3.5))
        for its in ranks.values():
            for one in its:
                if one["event"] == "step_end":
                    one["ranks"] = 3 if 4 <= one["step"] <= 6 else 4
        return ranks

    @pytest.fixture
    def again(self) -> list[Stamp]:
        born = [stamp(101.6, "imported"), stamp(101.9, "built")]
        healed = [stamp(102.1, "step_end", step=6, loss=3.0, ranks=3)]
        return [*born, *healed, stamp(102.4, "step_end", step=7, loss=2.0, ranks=4), stamp(103.0, "done")]

    def test_the_first_new_step_is_the_survivors_and_later_one_is_of_all(self, stamps, again):
        found = torchft_recovery(stamps, again, KILL_T, killed_step=4)
        assert list(found.phases) == list(LABELS[TORCHFT])
        assert found.phases == pytest.approx(
            {"discarded": 1.03, "first_new_step": 0.67, "imported": 0.0, "built": 0.2, "all_ranks": 0.5}
        )
        assert found.first_new_step == found.past_killed_step == pytest.approx(1.7)
        assert found.all_ranks == pytest.approx(2.4)
        assert found.ordinary_step == pytest.approx(0.2)
        assert found.losses == {1: 8.0, 2: 7.0, 3: 6.0}

    def test_a_survivor_that_had_the_steps_sum_makes_the_others_skip_it(self, stamps, again):
        stamps[0] = [one for one in stamps[0] if (one["event"], one.get("step")) != ("step_end", 4)]
        assert torchft_recovery(stamps, again, KILL_T, killed_step=4).first_new_step == pytest.approx(1.9)

    def test_a_new_process_that_takes_part_in_nothing_is_an_error(self, stamps, again):
        with pytest.raises(ValueError, match="made no step with all the others"):
            torchft_recovery(stamps, again[:3], KILL_T, killed_step=4)


class TestOurs:
    @pytest.fixture
    def report(self) -> dict[str, Any]:
        phases = {"fault_seen": 0.1, "first_new_step": 0.3}
        recovered = {"resumed_step": 3, "steps_lost": 0, "seconds": 0.4, "phases": phases}
        return {"recoveries": [recovered], "losses": {"1": 5.0, "4": 4.0}, "metrics": {"held_out_loss": 4.5}}

    def test_the_first_new_step_is_the_killed_one(self, report):
        made = {step: (float(step), step + 0.9) for step in range(1, 5)}
        found = our_recovery(report, made, killed_step=4)
        assert (found.first_new_step, found.past_killed_step) == (0.4, 0.4)
        assert found.phases == {"fault_seen": 0.1, "first_new_step": 0.3, "back_past": 0.0}
        assert found.ordinary_step == pytest.approx(0.9)
        assert found.losses == {1: 5.0, 4: 4.0}

    def test_lost_steps_are_counted_until_the_killed_one_is_made(self, report):
        report["recoveries"][0] |= {"resumed_step": 2, "steps_lost": 1}
        made = {1: (1.0, 1.2), 2: (1.2, 1.4), 3: (3.0, 3.2), 4: (3.2, 3.5)}
        found = our_recovery(report, made, killed_step=4)
        assert found.past_killed_step == pytest.approx(0.7)
        assert found.steps_lost == 1

    def test_a_job_without_a_recovery_is_an_error(self, report):
        with pytest.raises(ValueError, match="0 recoveries"):
            our_recovery(report | {"recoveries": []}, {}, killed_step=4)


class TestSummary:
    @pytest.fixture
    def rounds(self) -> list[dict[str, Recovery]]:
        pairs = [(1.0, 8.0), (0.5, 9.0), (0.6, 6.0)]
        return [{OURS: recovery(ours), TORCHRUN: recovery(theirs, side=TORCHRUN)} for ours, theirs in pairs]

    def test_a_ratio_is_the_median_of_the_ratios_of_rounds(self, rounds):
        ratios = summarize(rounds)["ratios"][TORCHRUN]
        assert ratios["first_new_step"] == {"median": 10.0, "rounds": [8.0, 18.0, 10.0]}
        assert ratios["past_killed_step"]["rounds"] == pytest.approx([8.5 / 1.5, 9.5, 6.5 / 1.1], abs=1e-4)
        assert ratios["first_new_step_less_a_step"]["rounds"] == pytest.approx([7.8 / 0.8, 8.8 / 0.3, 14.5], abs=1e-4)

    def test_a_median_is_over_the_rounds_that_saw_the_phase(self, rounds):
        rounds[0][TORCHRUN].phases["survivor_exception"] = None
        rounds[1][TORCHRUN].phases["survivor_exception"] = 0.2
        assert summarize(rounds)["medians"][TORCHRUN]["phases"]["survivor_exception"] == 0.1

    def test_unequal_losses_of_ours_are_told(self, rounds):
        assert list(summarize(rounds)["checks"].values()) == [True, True]
        rounds[1][OURS].losses[2] += 1e-7
        assert list(summarize(rounds)["checks"].values()) == [False, True]

    def test_torchrun_must_train_the_same(self, rounds):
        rounds[2][TORCHRUN].losses[2] *= 1.01
        assert list(summarize(rounds)["checks"].values()) == [True, False]
        del rounds[2][TORCHRUN].losses[2]
        assert list(summarize(rounds)["checks"].values()) == [True, False]

    def test_the_table_says_whether_the_aim_is_met(self, rounds):
        setup = Setup(load(JobConfig, EXAMPLE), 20, 128, 4, 2, 13)
        assert "one step off: NOT met (ratio 14.5, least 9.8)" in make_table(make_document(rounds, setup, {}))
        quick = [{OURS: recovery(0.6), TORCHRUN: recovery(8.2, side=TORCHRUN)}]
        assert "one step off: met (ratio 20.0" in make_table(make_document(quick, setup, {}))

    def test_a_peer_that_failed_in_a_round_is_told_and_its_other_rounds_count(self, rounds):
        rounds[0][NVRX] = recovery(10.0, side=NVRX)
        document = make_document(rounds, Setup(load(JobConfig, EXAMPLE), 20, 128, 4, 2, 13), {TORCHFT: "no wheel"})
        assert list(document["medians"]) == [OURS, TORCHRUN, NVRX]
        assert document["ratios"][NVRX]["first_new_step"] == {"median": 10.0, "rounds": [10.0]}
        assert "not measured: torchft: no wheel" in make_table(document)
        assert "Not measured: no wheel." in make_page(document)

    def test_torchfts_losses_must_be_ours_until_the_kill(self, rounds):
        for one in rounds:
            one[TORCHFT] = recovery(5.0, side=TORCHFT, losses={1: 5.0})
        assert list(summarize(rounds)["checks"].values()) == [True, True, True]
        rounds[1][TORCHFT].losses[1] = 5.1
        assert list(summarize(rounds)["checks"].values()) == [True, True, False]

    def test_what_is_published_names_no_machine_and_no_folder_of_it(self, rounds):
        document = make_document(rounds, Setup(load(JobConfig, EXAMPLE), 20, 128, 4, 2, 13), {})
        words = (json.dumps(document) + make_page(document)).replace('"', " ").split()
        assert [word for word in words if word.startswith(("/", "~"))] == []
        assert raw_rounds(rounds)[1][TORCHRUN]["first_new_step"] == 9.0
