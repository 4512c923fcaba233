"""What was saved comes back, bit for bit, from whichever tier has it, to whatever world size."""

from __future__ import annotations

from pathlib import Path

import pytest
from dcp_job import Job
from waiting import until


def file_tier(job: Job, kind: str = "file") -> dict[str, object]:
    """Every step goes to a directory, and all are kept."""
    stored = {"kind": kind, "path": f"{job.directory}/f", "every_steps": 1, "keep": 9}
    return {"tiers": [{"kind": "memory"}, stored], "when_busy": "wait"}


@pytest.mark.parametrize(("kind", "ranks"), [("plain", 1), ("plain", 2), ("ddp", 2), ("fsdp", 2), ("hsdp", 4)])
def test_state_comes_back_as_it_was_saved(job: Job, kind: str, ranks: int) -> None:
    job.run("round_trip", ranks, kind=kind)


def test_trainers_killed_right_after_the_save_lose_nothing(job: Job, tmp_path: Path) -> None:
    running = job.start("save_and_hang", 2, marker=str(tmp_path))
    until(lambda: all((tmp_path / rank).exists() for rank in ("0", "1")))
    running.kill()
    for loaded in job.run("load", 2, kind="plain"):
        assert loaded == {"latest": 6, "step": 6, "digest": (tmp_path / "0").read_text()}


@pytest.mark.parametrize(
    "tier",
    ["memory", pytest.param("file", marks=pytest.mark.thorough), pytest.param("disk", marks=pytest.mark.thorough)],
)
def test_another_number_of_ranks_goes_on_from_the_same_state(job: Job, tier: str) -> None:
    policy = file_tier(job, tier) if tier != "memory" else None
    digest, step = job.run("save", 4, kind="fsdp", steps=[2], policy=policy, wait_for_upload=True)[0]["2"], 2
    for ranks in (2, 3):
        if tier != "memory":
            job.lose_memory()
        step += 1
        saved = job.run(
            "save",
            ranks,
            kind="fsdp",
            steps=[step],
            policy=policy,
            start_from_newest=True,
            wait_for_upload=tier != "memory",
        )
        assert [each["loaded"] for each in saved] == [digest] * ranks
        digest = saved[0][str(step)]
    if tier != "memory":
        job.lose_memory()
    assert [each["digest"] for each in job.run("load", 1, kind="plain", policy=policy)] == [digest]


def test_states_of_fsdp_load_into_a_plain_model_and_back(job: Job) -> None:
    digest = job.run("save", 2, kind="fsdp", steps=[3])[0]["3"]
    assert [each["digest"] for each in job.run("load", 2, kind="plain")] == [digest] * 2
    digest = job.run("save", 2, kind="plain", steps=[4], start_from_newest=True)[0]["4"]
    assert [each["digest"] for each in job.run("load", 2, kind="fsdp")] == [digest] * 2


def test_a_save_in_a_thread_holds_the_state_of_its_step(job: Job) -> None:
    digests = job.run("save_in_background", 2, steps=[3, 6, 9])[0]
    assert [each["digest"] for each in job.run("load", 2, kind="fsdp")] == [digests["9"]] * 2


def test_step_0_is_a_step_like_any_other(job: Job) -> None:
    digest = job.run("save", 2, kind="plain", steps=[0])[0]["0"]
    assert [each["digest"] for each in job.run("load", 2, kind="plain")] == [digest] * 2
    assert [each["digest"] for each in job.run("load", 2, kind="plain", step=0)] == [digest] * 2


def test_an_older_step_can_be_asked_for_and_training_goes_on_from_there(job: Job) -> None:
    policy = file_tier(job)
    saved = job.run("save", 2, kind="plain", steps=[1, 2, 3, 4], policy=policy, wait_for_upload=True)[0]
    (first, _) = job.run("load", 2, kind="plain", step=1, policy=policy)
    assert first == {"latest": 4, "step": 1, "digest": saved["1"]}
    (text, _) = job.run("load_error", 2, kind="plain", step=9, policy=policy)
    assert "No snapshot of step 9 that all 2 ranks can restore" in text
    assert "Seen: file step 1, file step 2, file step 3, file step 4, memory step" in text


def test_plans_that_torch_caches_are_saved_whole(job: Job) -> None:
    digests = job.run("save_with_cached_plans", 2, steps=[1, 2, 3])[0]
    assert [each["digest"] for each in job.run("load", 2, kind="fsdp")] == [digests["3"]] * 2


@pytest.mark.parametrize(
    ("before", "after"), [((4, True), (2, False)), ((3, False), (4, True)), ((2, False), (3, False))]
)
def test_tensors_cut_one_way_come_back_cut_in_another(
    job: Job, before: tuple[int, bool], after: tuple[int, bool]
) -> None:
    job.run("save_dtensors", before[0], two_dimensions=before[1])
    job.run("load_dtensors", after[0], two_dimensions=after[1])
