"""What Slurm's commands say, as values and as errors; with commands of our own where a real Slurm says it rarely."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hyperpod_ext.errors import ConfigError, NotFoundError, UnknownOutcomeError, UnreachableError
from hyperpod_ext.jobs.slurm import client
from hyperpod_ext.jobs.slurm.runs import newest_step


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of commands that a test writes."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr("time.sleep", lambda _seconds: None)
    return tmp_path


def write(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("line", "state", "ended"),
    [
        ("7|PENDING|2026-11-21T10:00:00|N/A|Resources", "starting", None),
        ("7|RUNNING|2026-11-21T10:00:00|2027-11-21T10:00:00|None", "running", None),
        ("7|COMPLETING|2026-11-21T10:00:00|2026-11-21T10:01:00|None", "running", None),
        ("7|COMPLETED|2026-11-21T10:00:00|2026-11-21T10:01:00|None", "succeeded", "2026-11-21T10:01:00"),
        ("7|NODE_FAIL|2026-11-21T10:00:00|2026-11-21T10:01:00|NodeDown", "failed", "2026-11-21T10:01:00"),
        ("7|FAILED|2026-11-21T10:00:00|2026-11-21T10:01:00|a|b", "failed", "2026-11-21T10:01:00"),
    ],
)
def test_lines_of_squeue(line: str, state: str, ended: str | None) -> None:
    job = client.parse_queue(line)
    assert (job.our_state, job.ended_at) == (state, ended)


@pytest.mark.parametrize(
    ("line", "state"),
    [
        ("7|CANCELLED by 0|2026-11-21T10:00:00|2026-11-21T10:01:00", "cancelled"),
        ("7|COMPLETED|2026-11-21T10:00:00|2026-11-21T10:01:00", "succeeded"),
        ("7|OUT_OF_MEMORY|2026-11-21T10:00:00|2026-11-21T10:01:00", "failed"),
        ("7|TIMEOUT|2026-11-21T10:00:00|Unknown", "failed"),
    ],
)
def test_lines_of_sacct(line: str, state: str) -> None:
    assert client.parse_accounting(line).our_state == state


def test_a_job_that_left_the_queue_is_in_the_accounting(slurm: Path) -> None:
    write(slurm, "squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    write(slurm, "sacct", "echo '7|CANCELLED by 0|2026-11-21T10:00:00|2026-11-21T10:01:00'")
    assert client.find("7").our_state == "cancelled"
    write(slurm, "sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    with pytest.raises(NotFoundError, match="no longer lists job 7"):
        client.find("7")


def test_a_controller_that_is_busy_is_asked_again_and_a_submission_is_not(slurm: Path) -> None:
    busy = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
    write(
        slurm,
        "squeue",
        f'echo x >>{slurm}/asked; [ "$(wc -l <{slurm}/asked)" -gt 2 ] || {{ echo "{busy}" >&2; exit 1; }}',
    )
    assert client.active_job("a") is None
    assert (slurm / "asked").read_text() == "x\n" * 3
    write(slurm, "sbatch", f'echo x >>{slurm}/sent; echo "sbatch: error: {busy}" >&2; exit 1')
    with pytest.raises(UnreachableError, match="Unable to contact"):
        client.submit("#!/bin/sh\n", slurm)
    assert (slurm / "sent").read_text() == "x\n"


LOST = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"


@pytest.mark.parametrize("squeue", ["%F", "%F after two looks"])
def test_a_job_that_was_queued_before_the_answer_was_lost_is_the_one_submitted(slurm: Path, squeue: str) -> None:
    later = 3 if "after" in squeue else 1
    counted = f'echo x >>{slurm}/asked; echo 6; [ "$(wc -l <{slurm}/asked)" -le {later} ] || printf "7\n9\n"'
    write(slurm, "squeue", counted)
    known = f'*"script 9"*) cat {slurm}/sent;; *config) echo ClusterName = c;; *) echo no'
    write(slurm, "scontrol", f'case "$*" in {known}; esac')
    write(slurm, "sbatch", f'cat >{slurm}/sent; echo "{LOST}" >&2; exit 1')
    assert client.submit("#!/bin/sh\necho a\n", slurm) == ("9", "c")


@pytest.mark.parametrize(
    ("scontrol", "words"),
    [("echo '#!/bin/sh of another'", "no new job with this script"), ("echo denied >&2; exit 1", "denied")],
)
def test_a_lost_answer_of_sbatch_that_cannot_be_cleared_up_says_so(slurm: Path, scontrol: str, words: str) -> None:
    write(slurm, "squeue", f"test -e {slurm}/sent && echo 7; true")
    write(slurm, "scontrol", scontrol)
    write(slurm, "sbatch", f'cat >{slurm}/sent; echo "{LOST}" >&2; exit 1')
    with pytest.raises(UnknownOutcomeError) as caught:
        client.submit("#!/bin/sh\n", slurm)
    assert words in str(caught.value)


def test_variables_of_this_shell_do_not_reach_the_job(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(slurm, "squeue", "true")
    write(slurm, "sbatch", f"env >{slurm}/env; cat >{slurm}/script; pwd >{slurm}/pwd; echo '17;research'")
    write(slurm, "scontrol", "echo 'ClusterName             = research'")
    monkeypatch.setenv("HPX_RUNTIME", "x")
    monkeypatch.setenv("SBATCH_PARTITION", "other")
    monkeypatch.setenv("SLURM_JOB_ID", "3")
    assert client.submit("#!/bin/sh\n", slurm) == ("17", "research")
    assert (slurm / "script").read_text() == "#!/bin/sh\n"
    assert (slurm / "pwd").read_text().strip() == str(slurm)
    variables = (slurm / "env").read_text()
    assert not {"HPX_RUNTIME", "SBATCH_PARTITION", "SLURM_JOB_ID"} & {
        v.partition("=")[0] for v in variables.splitlines()
    }


def test_a_machine_with_slurms_commands_but_without_a_cluster_is_unreachable() -> None:
    said = "squeue: fatal: Could not establish a configuration source"
    assert isinstance(client.explain("squeue", said), UnreachableError)


@pytest.mark.parametrize(
    ("said", "path"),
    [
        ("Batch job submission failed: Invalid account or account/partition combination specified", "slurm.account"),
        ("Batch job submission failed: Invalid qos specification", "scheduling.priority"),
        ("invalid partition specified: nope", "scheduling.queue"),
        ("Batch job submission failed: Node count specification invalid", "nodes"),
        ("Batch job submission failed: Requested node configuration is not available", "resources"),
        ("sbatch: unrecognized option '--auto-resume=1'", "slurm"),
    ],
)
def test_what_slurm_refuses_names_the_field(said: str, path: str) -> None:
    error = client.explain("sbatch", f"sbatch: error: {said}")
    assert isinstance(error, ConfigError)
    assert [problem.path for problem in error.problems] == [path]


def test_the_newest_step_is_found_before_a_long_end_of_the_log(tmp_path: Path) -> None:
    for start, step in (("0.0", 10), ("0.1", 500)):
        (tmp_path / start).mkdir()
        lines = [{"event": "step", "t": 1.0, "rank": 0, "step": step, "generation": 1, "loss": 1.0, "took": 1.0}]
        lines += [
            {"event": "joined", "t": 2.0, "node": node, "why": "x" * 400} for node in range(500 if step > 10 else 0)
        ]
        (tmp_path / start / "events.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert newest_step(tmp_path)["step"] == 500
