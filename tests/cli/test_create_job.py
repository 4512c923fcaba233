"""hp-ext create-job, status, logs and cancel, with a stand-in for the agent."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import rich.console
import rich.progress
import yaml
from command import HP_EXT
from command import call_hp_ext as hp_ext
from hyperpod_ext.cli.job.progress import BarProgress, PlainProgress
from hyperpod_ext.cli.report.event_text import EventText
from local_place import LocalPlace
from made_events import entry
from stand_in import write_job
from waiting import until

from hyperpod_ext.jobs import submit as submit_module
from hyperpod_ext.jobs.contract.job_status import JobStatus, StatusUpdate
from hyperpod_ext.jobs.local import store as local_store
from hyperpod_ext.runtime.events.of_training import UNPROTECTED
from hyperpod_ext.runtime.events.report import OWN_LOSS, unseeded_text


def job_file(place: LocalPlace) -> dict[str, object]:
    """The newest submission's spec."""
    newest = sorted((place.home / "local" / "a").glob("0*"))[-1]
    spec: dict[str, object] = json.loads((newest / "job.json").read_text())
    return spec


def test_a_dry_run_shows_the_plan_and_starts_nothing(place: LocalPlace, tmp_path: Path) -> None:
    spec = write_job(tmp_path)
    plan = hp_ext("create-job", "-f", spec, "--dry-run", "-o", "json").json
    assert (plan["name"], plan["target"], plan["world_size"]) == ("a", "local", 2)
    table = hp_ext("create-job", "-f", spec, "--dry-run").stdout
    assert table.startswith("a on local: 2 nodes x 1 worker = 2 ranks\n")
    assert plan["files"]["node.sh"].strip() in table
    assert not place.home.exists()


def test_an_old_run_does_not_go_without_a_word(place: LocalPlace, tmp_path: Path) -> None:
    with local_store.locked("a"):
        for _ in range(local_store.KEPT):
            local_store.create("a").end({"state": "succeeded", "error": None})
    oldest = place.home / "local" / "a" / "0001"
    said = hp_ext("create-job", "-f", write_job(tmp_path), "--wait").stderr
    assert (
        f"note: the old run in {oldest} is removed; the newest {local_store.KEPT} runs of a job name are kept\n" in said
    )
    assert not oldest.exists()


def test_what_is_shown_is_what_is_run(place: LocalPlace, tmp_path: Path) -> None:
    spec = write_job(tmp_path)
    shown = hp_ext("create-job", "-f", spec, "--dry-run", "-o", "json").json["files"]["node.sh"]
    hp_ext("create-job", "-f", spec, "--wait")
    assert (place.home / "local" / "a" / "0001" / "node.sh").read_text() == shown


def test_without_wait_the_handle_comes_back_at_once(place: LocalPlace, tmp_path: Path) -> None:
    spec = write_job(tmp_path, "sleep")
    done = hp_ext("create-job", "-f", spec)
    assert (done.code, done.stdout) == (0, "local://localhost/a\n")
    assert "hp-ext cancel a" in done.stderr
    assert hp_ext("cancel", "local://localhost/a").stdout == "a: cancelled\n"
    assert hp_ext("create-job", "-f", spec, "-o", "name").stdout == "a\n"
    assert hp_ext("cancel", "a", "-o", "json").json["state"] == "cancelled"
    handle = hp_ext("create-job", "-f", spec, "-o", "json").json
    assert handle == {"name": "a", "target": "local", "handle": "local://localhost/a"}
    hp_ext("cancel", "a")
    assert place.leftovers() == []


def test_wait_ends_with_a_table_and_says_on_stderr_what_happens(place: LocalPlace, tmp_path: Path) -> None:
    spec = write_job(tmp_path, more="chaos: {}\n")
    done = hp_ext("create-job", "-f", spec, "--wait")
    assert done.code == 0
    assert done.stdout.splitlines() == [
        "a: succeeded, 2 steps on 2 ranks",
        "",
        "steps lost                            0",
        "loss equal to the run without faults  yes",
        "weights equal                         yes",
        "",
        "rank 1 on node 1, step 2: killed by SIGKILL (9)",
        "  phase        seconds",
        "  detect         0.004",
        "  abort          0.010",
        "  agree          0.100",
        "  restore        0.020",
        "  first step         -",
        "  --------------------",
        "  total          0.200",
        "continued from step 1 with the state of live peer rank 0; the other ranks kept their processes",
        "",
        "share of time kept      50.0 % (1.0 s of 2.0 s)",
        "where the rest went     start-up 0.5 s, recovery 0.0 s, other 0.5 s",
        "the run without faults  50.0 %",
        "held-out loss           3.0000",
    ]
    assert done.stderr.splitlines() == [
        "starting 2 ranks on 2 nodes",
        "step 1 of 2, loss 5.0000",
        "rank 1 is gone in step 2: killed by SIGKILL (9)",
        "recovered: all ranks continue after step 1",
        "step 2 of 2, loss 5.0000",
        "the job runs again without faults, for comparison",
        "starting 2 ranks on 2 nodes",
        "step 1 of 2, loss 5.0000",
        "step 2 of 2, loss 5.0000",
    ]
    assert place.leftovers() == []


def test_wait_under_json_prints_the_result_and_nothing_else(place: LocalPlace, tmp_path: Path) -> None:
    result = hp_ext("create-job", "-f", write_job(tmp_path, more="chaos: {}\n"), "--wait", "-o", "json").json
    assert (result["loss_equal"], result["weights_equal"]) == (True, True)
    assert (result["steps_lost"], result["goodput"]) == (0, 0.5)
    assert result["recoveries"][0]["phases"]["new_member"] == 0.1
    assert result == json.loads((place.home / "local" / "a" / "0001" / "result.json").read_text())


def test_a_failed_job_exits_7_and_says_why_and_where_to_look(place: LocalPlace, tmp_path: Path) -> None:
    spec = write_job(tmp_path, "fail")
    done = hp_ext("create-job", "-f", spec, "--wait")
    assert done.code == 7
    assert "error: the script raised\nhint: mend it\nlogs: hp-ext logs a" in done.stderr
    done = hp_ext("create-job", "-f", spec, "--wait", "-o", "json")
    assert (done.code, done.json["state"], done.json["error"]["code"]) == (7, "failed", "X")
    shown = hp_ext("status", "a")
    assert (shown.code, "the script raised" in shown.stdout) == (0, True)


def test_follow_shows_the_workers_on_stderr(place: LocalPlace, tmp_path: Path) -> None:
    done = hp_ext("create-job", "-f", write_job(tmp_path), "--follow", "-o", "json")
    assert done.json["state"] == "succeeded"
    assert "rank 1 | worker 1 speaks" in done.stderr


def test_a_wait_that_is_over_exits_8_and_the_job_goes_on(place: LocalPlace, tmp_path: Path) -> None:
    done = hp_ext("create-job", "-f", write_job(tmp_path, "sleep"), "--wait", "--timeout", "0.3", "-o", "json")
    assert (done.code, done.json["error"]["code"]) == (8, "WaitTimeoutError")
    assert "hp-ext status a" in done.stderr
    until(lambda: hp_ext("status", "a", "-o", "json").json["state"] == "running")
    hp_ext("cancel", "a")


def test_a_name_in_use_exits_5(place: LocalPlace, tmp_path: Path) -> None:
    spec = write_job(tmp_path, "sleep")
    hp_ext("create-job", "-f", spec)
    done = hp_ext("create-job", "-f", spec)
    assert (done.code, done.stdout) == (5, "")
    assert "hp-ext cancel a" in done.stderr
    hp_ext("cancel", "a")
    assert hp_ext("cancel", "a").stdout == "a: had ended already (cancelled)\n"


@pytest.mark.parametrize("moment", ["at once", "running"])
def test_ctrl_c_cancels_and_leaves_nothing(place: LocalPlace, tmp_path: Path, moment: str) -> None:
    command = [HP_EXT, "create-job", "-f", str(write_job(tmp_path, "sleep")), "--wait", "-o", "json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wanted = 1 if moment == "at once" else 6  # keeper, engine, two agents and a child of each
    until(lambda: len(place.processes()) >= wanted)
    os.kill(process.pid, signal.SIGINT)
    stdout, stderr = process.communicate(timeout=100)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    assert moment == "at once" or json.loads(stdout)["error"]["exit_code"] == 130
    assert hp_ext("status", "a", "-o", "json").json["state"] == "cancelled"
    assert place.leftovers() == []


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_before_the_job_is_watched_cancels_it_and_says_so(
    place: LocalPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signum: signal.Signals
) -> None:
    submit = submit_module.submit
    before = signal.signal(signal.SIGTERM, lambda *_: pytest.fail("the command would end here, and the job go on"))

    def interrupted(plan: Any) -> Any:
        handle = submit(plan)
        os.kill(os.getpid(), signum)
        return handle

    monkeypatch.setattr(submit_module, "submit", interrupted)
    done = hp_ext("create-job", "-f", write_job(tmp_path, "sleep"), "--wait", "-o", "json")
    signal.signal(signal.SIGTERM, before)
    assert done.code == done.json["error"]["exit_code"] == 130
    assert "no process of the job is running" in done.json["error"]["message"]
    assert hp_ext("status", "a", "-o", "json").json["state"] == "cancelled"


def test_ctrl_c_that_python_ignores_cancels_the_job_all_the_same(
    place: LocalPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a handler raises in `__del__`, or in a callback of an import, nobody gets."""

    class Interrupting:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    sent: list[bool] = []
    show = PlainProgress.show

    def interrupted(progress: PlainProgress, update: StatusUpdate) -> None:
        show(progress, update)
        if not sent:
            sent.append(True)
            Interrupting()

    monkeypatch.setattr(PlainProgress, "show", interrupted)
    monkeypatch.setattr("sys.unraisablehook", lambda _: None)
    done = hp_ext("create-job", "-f", write_job(tmp_path, "sleep"), "--wait", "--timeout", "20", "-o", "json")
    assert (sent, done.code) == ([True], 130)
    assert hp_ext("status", "a", "-o", "json").json["state"] == "cancelled"


def test_kill_replaces_the_faults_of_the_spec_and_no_kill_removes_them(place: LocalPlace, tmp_path: Path) -> None:
    spec = write_job(tmp_path, more="chaos: {faults: [{rank: 1, step: 5}], compare: false}\n")
    hp_ext("create-job", "-f", spec, "--wait", "--kill", "rank=0@step=2", "--kill", "rank=1@step=1")
    assert job_file(place)["chaos"] == {
        "faults": [
            {"kind": "kill", "rank": 0, "node": None, "step": 2},
            {"kind": "kill", "rank": 1, "node": None, "step": 1},
        ],
        "inject": [],
        "compare": False,
        "on_clusters": False,
    }
    hp_ext("create-job", "-f", spec, "--wait", "--no-kill")
    assert job_file(place)["chaos"] == {"faults": [], "inject": [], "compare": False, "on_clusters": False}


def test_kill_adds_a_rehearsal_to_a_spec_without_one(place: LocalPlace, tmp_path: Path) -> None:
    spec = write_job(tmp_path)
    result = hp_ext("create-job", "-f", spec, "--wait", "--kill", "rank=0@step=2", "-o", "json").json
    assert result["loss_equal"] is True
    hp_ext("create-job", "-f", spec, "--wait", "--no-kill")
    assert job_file(place)["chaos"] is None


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        (["--kill", "rank=9@step=1"], 3, "--kill rank=9@step=1: chaos.faults.0.rank: there is no rank 9"),
        (["--kill", "node=9@step=1"], 3, "--kill node=9@step=1: chaos.faults.0.node: there is no node 9"),
        (["--kill", "9@1"], 2, "rank=2@step=13"),
        (["--kill", "rank=0@step=1", "--no-kill"], 2, "cannot be used together"),
        (["--set", "nodes=x"], 3, "--set nodes=x: nodes"),
        (["--set", "checkpoint.tiers=[{kind: tape}]"], 3, "checkpoint.tiers.0"),
    ],
)
def test_mistakes_in_options_are_told_before_anything_starts(
    place: LocalPlace, tmp_path: Path, options: list[str], code: int, text: str
) -> None:
    done = hp_ext("create-job", "-f", write_job(tmp_path), *options)
    assert (done.code, done.stdout) == (code, "")
    assert text in done.stderr
    assert not place.home.exists()


def test_warnings_go_to_stderr(place: LocalPlace, tmp_path: Path) -> None:
    done = hp_ext("create-job", "-f", write_job(tmp_path, more="image: torch:2.13\n"), "--dry-run", "-o", "json")
    assert "warning: image is ignored on local" in done.stderr
    assert len(done.json["warnings"]) == 1


def test_on_a_terminal_a_bar_moves_and_events_stay_above_it(place: LocalPlace, tmp_path: Path) -> None:
    leader, follower = os.openpty()
    command = [HP_EXT, "create-job", "-f", str(write_job(tmp_path, more="chaos: {}\n")), "--wait", "-o", "json"]
    environ = os.environ | {"TERM": "xterm", "COLUMNS": "100"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=follower, text=True, env=environ)
    os.close(follower)
    shown = b""
    try:
        while chunk := os.read(leader, 65536):
            shown += chunk
    except OSError:  # how a terminal says that nobody writes any more
        pass
    os.close(leader)
    assert process.stdout is not None
    assert json.loads(process.stdout.read())["state"] == "succeeded"
    assert process.wait() == 0
    for text in ("training", "undisturbed", "2/2", "killed by SIGKILL (9)", "recovered"):
        assert text in shown.decode(), text


def test_each_run_has_its_bar_though_both_end_between_two_looks() -> None:
    steps = [{"run": run} | entry(1.0, "step", step=2, of=2) for run in ("main", "undisturbed")]
    with rich.progress.Progress(console=rich.console.Console(file=io.StringIO())) as bar:
        BarProgress(bar).show(StatusUpdate(JobStatus("a", "local://localhost/a", "comparing"), tuple(steps)))
        assert [(task.description, task.completed) for task in bar.tasks] == [("training", 2), ("undisturbed", 2)]


def test_status_lists_jobs_and_suggests_names(place: LocalPlace, tmp_path: Path) -> None:
    assert hp_ext("status").stdout == ""
    assert hp_ext("status", "-o", "json").json == []
    spec = write_job(tmp_path)
    hp_ext("create-job", "-f", spec, "--set", "name=tiny-gpt", "--wait")
    head, row = hp_ext("status").stdout.splitlines()
    assert head.split() == ["NAME", "STATE", "STEP", "SUBMITTED", "URL"]
    assert row.split()[:3] == ["tiny-gpt", "succeeded", "2/2"]
    assert yaml.safe_load(hp_ext("status", "local://localhost/tiny-gpt", "-o", "yaml").stdout)["step"] == 2
    for command in ("status", "logs", "cancel"):
        done = hp_ext(command, "tiny-gtp")
        assert done.code == 6
        assert "did you mean `tiny-gpt`?" in done.stderr


def test_logs_come_with_the_rank_before_each_line(place: LocalPlace, tmp_path: Path) -> None:
    hp_ext("create-job", "-f", write_job(tmp_path), "--wait")
    assert hp_ext("logs", "a").stdout == "rank 0 | worker 0 speaks\nrank 1 | worker 1 speaks\n"
    assert hp_ext("logs", "a", "--rank", "1", "--follow").stdout == "rank 1 | worker 1 speaks\n"
    assert hp_ext("logs", "a", "--rank", "2").code == 6


def test_while_the_last_step_comes_home_it_is_told_how_far_it_is() -> None:
    left = {"tier": "/d/j", "arrived": False, "newest_step": 10, "left_ranks": [0], "left_bytes": 3 << 20, "error": ""}
    sent, there = left | {"left_ranks": [], "left_bytes": 0}, left | {"arrived": True}
    main = {"run": "main"}
    way = main | entry(1.0, "uploading", node=1, save_id="g1-s13", seconds_left=58.0)
    story = EventText()
    assert story.tell(main | entry(0.0, "final_save", step=13)) == ["step 13 goes to the durable tiers"]
    assert story.tell(main | entry(0.0, "final_save", step=None)) == []
    assert story.tell(way | {"tiers": [left, there]}) == [
        "node 1 uploads its part to /d/j, for at most 58 s: 3.0 MiB are left"
    ]
    assert story.tell(way | {"tiers": [sent]}) == [
        "node 1 uploads its part to /d/j, for at most 58 s: all bytes are sent"
    ]


def test_what_no_snapshot_holds_is_told_while_the_job_runs() -> None:
    told = {"t": 1.0, "event": "unsaved", "generation": 1, "rank": 0, "run": "main"}
    told |= {"objects": ["mean (float)", "losses (list)"], "descriptive": ["losses (list)"]}
    assert EventText().tell(told) == ["changes between steps, but is in no snapshot: mean (float)"]
    assert EventText().tell(told | {"objects": ["losses (list)"]}) == []
    unseeded = {"objects": [], "unseeded": ["rows (DataLoader)"]}
    assert EventText().tell(told | unseeded) == [unseeded_text(["rows (DataLoader)"])]


def test_saves_that_are_set_aside_are_shown() -> None:
    event = entry(1.0, "saves_set_aside", rank=1, step=5, paths=["/s/a.pt", "/s/b.pt"]) | {"run": "main"}
    said = "step 5 is the newest that all ranks have saved, so rank 1 has set /s/a.pt and 1 more aside"
    assert EventText().tell(event) == [said]
    said = "no step was saved by all ranks, so rank 1 has set /s/a.pt aside"
    assert EventText().tell(event | {"step": 0, "paths": ["/s/a.pt"]}) == [said]


def test_unprotected_training_on_two_nodes_is_warned_of_once() -> None:
    story, step = EventText(), entry(1.0, "unprotected_step", rank=0, node=0) | {"run": "main"}
    assert story.tell(step) == [f"warning: rank 0 makes an optimizer step, but {UNPROTECTED}"]
    assert story.tell(step | {"rank": 8, "node": 1}) == []


def test_a_job_that_resumes_an_earlier_run_says_from_where_before_its_first_step() -> None:
    main, story = {"run": "main"}, EventText()
    go = main | entry(1.0, "go", step=4)
    assert EventText().tell(go | {"step": 0}) == []
    assert EventText().tell(go) == ["resumes an earlier run of this name after step 4, from memory"]
    said = "resumes an earlier run of this name after step 4, from the checkpoint s3://b/a/step-000000004-g000001"
    assert story.tell(go | {"checkpoint": "s3://b/a/step-000000004-g000001"}) == [said]
    assert story.tell(go) == []


def test_losses_that_ranks_log_differently_are_told_once() -> None:
    story = EventText()
    made = [
        {"run": "main"} | entry(1.0, "step", generation=1, rank=rank, step=step, began=0.5, loss=loss)
        for step, rank, loss in [(1, 0, 0.5), (1, 1, 0.5), (2, 0, 0.25), (3, 0, 0.2), (2, 1, 0.75), (3, 1, 0.7)]
    ]
    told = [story.tell(each) for each in made]
    assert told == [[], [], [], [], [f"warning: {OWN_LOSS}"], []]


def test_a_move_is_told_by_the_nodes_that_it_is_between() -> None:
    main, story = {"run": "main", "order": "a", "nodes": 2, "of": 2}, EventText()
    begun = entry(1.0, "resize_begun", leaving=[1], joining=[2])
    assert story.tell(begun | main) == ["the ranks of node 1 will move to node 2"]
    fields = {"world_size": 2, "local_share": 1.0, "step": 7, "pause_s": 0.25, "pids_kept": True, "generation": 2}
    moved = ["continues with a spare in place of a node after step 7, 0.25 s without a step"]
    assert story.tell(entry(2.0, "resized", **fields, cause="move") | main) == moved
    resized = ["continues with 3 nodes instead of 2 after step 7, 0.25 s without a step"]
    assert story.tell(entry(2.0, "resized", **fields, cause="order") | main | {"nodes": 3}) == resized
    grows = entry(1.0, "resize_begun", leaving=[], joining=[2])
    assert story.tell(grows | main | {"nodes": 3}) == ["resizing from 2 to 3 nodes"]
