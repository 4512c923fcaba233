"""hp-ext report: files of a run that were copied from somewhere, two runs beside one another, and the page."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import browser
import numpy as np
import pytest
from command import call_hp_ext as hp_ext
from hyperpod_ext.cli.report.report import why_it_differs
from made_events import entry
from report_figures import check_figures

from hyperpod_ext.jobs.contract import records
from hyperpod_ext.jobs.slurm.client import SlurmJob
from hyperpod_ext.runtime.events.of_training import is_sampled

Event = dict[str, Any]
HOSTILE = "ValueError: </script><img src=x onerror=alert(1)> & 'quoted' \"twice\""


def _step(t: float, rank: int, step: int, began: float, generation: int = 1, **fields: Any) -> Event:
    loss = 3.0 / step + rank
    return entry(t, "step", rank=rank, step=step, began=began, generation=generation, **{"loss": loss, **fields})


def _run(cause: str = HOSTILE) -> list[Event]:
    """Two ranks, three steps, and a fault in the third."""
    return [
        entry(100.0, "job_started", world_size=2, nodes=1),
        *(entry(101.0, "joined", rank=rank, pid=rank) for rank in (0, 1)),
        entry(101.0, "generation", generation=1, step=0),
        *(entry(101.5, "restored", rank=rank, source="fresh") for rank in (0, 1)),
        *(entry(102.0, "begun", rank=rank, step=0, generation=1) for rank in (0, 1)),
        *(_step(103.0, rank, 1, 102.0, checkpoint_s=0.25) for rank in (0, 1)),
        *(_step(104.0, rank, 2, 103.0, data_s=0.125) for rank in (0, 1)),
        entry(104.1, "copying", tier="/d", node=0, newest_step=1, failed=0, skipped=0, last_error=None),
        entry(104.2, "copying", tier="/d", node=0, newest_step=2, failed=0, skipped=0, last_error=None),
        entry(104.5, "injected", rank=1, kind="exception", step=3),
        entry(104.75, "fault", rank=1, node=0, step=3, cause=cause, died=False, phase="forward"),
        *(entry(105.25, "aborted", rank=rank, step=2) for rank in (0, 1)),
        *(entry(105.5, "joined", rank=rank, pid=rank) for rank in (0, 1)),
        entry(105.75, "generation", generation=2, step=2),
        *(entry(106.0, "groups_open", rank=rank) for rank in (0, 1)),
        entry(106.5, "go", step=2),
        *(entry(106.5, "restored", rank=rank, source="self", bytes_local=3 << 20) for rank in (0, 1)),
        *(entry(107.0, "begun", rank=rank, step=2, generation=2) for rank in (0, 1)),
        *(_step(108.0, rank, 3, 107.0, generation=2) for rank in (0, 1)),
        *(entry(108.0, "done", rank=rank, digest="d") for rank in (0, 1)),
        entry(110.0, "job_ended", state="succeeded"),
    ]


def _write(file: Path, events: list[Event], more: str = "") -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(event) + "\n" for event in events) + more)
    return file


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return _write(tmp_path / "run" / "events.jsonl", _run())


def _no_constant(text: str) -> Any:
    raise AssertionError(f"{text} in JSON")


def test_a_log_alone_is_enough(log: Path) -> None:
    done = hp_ext("report", log, "-o", "json")
    result = json.loads(done.stdout, parse_constant=_no_constant)
    assert (done.code, result["name"], result["state"], result["steps"]) == (0, "run", "succeeded", 3)
    assert [sum(seconds.values()) for seconds in result["phases"].values()] == pytest.approx([10.0, 10.0])
    assert hp_ext("report", log.parent, "-o", "json").json == result
    text = hp_ext("report", log).stdout
    assert re.search(r"each rank's time, on average +start-up 20.0 %, data 1.2 %, step", text)


@pytest.mark.parametrize(
    ("weights", "differs_by_rank", "what", "hint"),
    [
        (True, ["loss"], "ranks log different losses", "Pass the same number to run.log on every rank"),
        (None, ["loss"], "ranks log different losses", "Pass the same number to run.log on every rank"),
        (True, [], "the weights are equal, but the logged losses differ", "Do not pass values to run.log"),
        (False, ["loss"], "its steps do not repeat exactly", "Build models inside run.keep"),
        (False, [], "its steps do not repeat exactly", "Build models inside run.keep"),
    ],
)
def test_why_a_job_differs_from_its_undisturbed_run(
    weights: bool | None, differs_by_rank: list[str], what: str, hint: str
) -> None:
    result = {"loss_equal": False, "weights_equal": weights, "differs_by_rank": differs_by_rank}
    found = why_it_differs(result)
    assert found is not None
    assert (what in found[0], hint in found[1]) == (True, True), found
    if "loss" not in differs_by_rank or weights is False:
        named = why_it_differs(result | {"in_no_snapshot": ["mean (float)", "rows (generator)"]})
        assert named is not None
        assert named[0].endswith("; mean (float), rows (generator) changed between steps, but is in no snapshot")
        assert "run.restore" in named[1]
    assert why_it_differs(result | {"loss_equal": True, "weights_equal": True}) is None
    assert why_it_differs({"loss_equal": None, "weights_equal": None}) is None


def test_a_job_that_went_on_without_a_rank_differs_for_that_reason() -> None:
    differs = "the same samples, but gradients were summed in another order: weights differ in their last digits"
    result = {"loss_equal": None, "weights_equal": False, "continued": [{"differs": ""}, {"differs": differs}]}
    found = why_it_differs(result)
    assert found is not None
    assert differs in found[0]
    assert "reproducible=True" in found[1]
    assert "do not repeat" in why_it_differs(result | {"continued": [{"differs": ""}]})[0]  # type: ignore[index]


def test_advice_names_the_figure_it_follows_from(log: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = hp_ext("report", log, "-o", "json", "--page", page, "--usd-per-hour", "7200")
    slow, waited = done.json["advice"][:1], [each for each in done.json["advice"] if each["rule"] == "checkpoint-wait"]
    assert slow[0]["text"].startswith("3.50 s per recovery, 43 % of it in `first step`")
    assert (slow[0]["gain_s"], slow[0]["gain_usd"]) == (1.5, 3.0)
    assert waited[0]["text"].startswith("Each rank waited 0.25 s (2 %) for snapshots")
    shown = page.read_text()
    assert "3.50 s per recovery" in shown
    assert '<data data-key="advice.0.gain_usd" value="3.0">3.00</data>' in shown
    assert "what to change:\n- 3.50 s" in hp_ext("report", log).stdout
    assert "before its first step, such as compiling. [up to 1.50 s]" in hp_ext("report", log).stdout
    assert "[up to 1.50 s, $3.00]" in hp_ext("report", log, "--usd-per-hour", "7200").stdout
    assert hp_ext("report", log, "--usd-per-hour", "0").code == 2


def test_without_a_fault_no_recovery_is_advised_on(log: Path, tmp_path: Path) -> None:
    _write(log, [event for event in _run()[:10] if event["event"] != "step"])
    (startup,) = hp_ext("report", log, "-o", "json").json["advice"]
    assert startup["text"].startswith("Each rank waited 2.00 s (100 %) before the first step")
    assert startup["gain_s"] == 0.0


def test_where_nothing_is_to_be_changed_it_is_said(log: Path, tmp_path: Path) -> None:
    events = [entry(0.0, "job_started", world_size=1, nodes=1), entry(0.1, "joined", rank=0, pid=1)]
    events += [entry(0.2, "begun", rank=0, step=0, generation=1)]
    events += [_step(1.0 + step, 0, step, float(step)) for step in range(1, 9)]
    page = tmp_path / "page.html"
    done = hp_ext("report", _write(log, events), "--page", page)
    for said in (done.stdout, page.read_text()):
        assert "Nothing: no figure of this run suggests a change." in said


def test_a_report_is_read_before_the_log_beside_it(log: Path) -> None:
    result = hp_ext("report", log, "-o", "json").json
    (log.parent / "report.json").write_text(json.dumps(result | {"name": "told", "goodput": 0.25}))
    again = hp_ext("report", log.parent, "-o", "json").json
    assert (again["name"], again["goodput"]) == ("told", 0.25)


def test_a_line_that_was_cut_off_is_left_out_and_told(log: Path) -> None:
    whole = hp_ext("report", log, "-o", "json").json
    _write(log, _run(), more='{"t": 111.0, "event": "st')
    done = hp_ext("report", log, "-o", "json")
    assert (done.code, done.json) == (0, whole)
    assert "the last line is cut off" in done.stderr


@pytest.mark.parametrize("count", [1, 2, 6, 12, 20])
def test_a_job_that_was_cut_short_has_a_report_and_a_page(tmp_path: Path, count: int) -> None:
    log = _write(tmp_path / "run" / "events.jsonl", _run()[:count])
    page = tmp_path / "page.html"
    done = hp_ext("report", log, "-o", "json", "--page", page)
    assert done.code == 0, done.stderr
    assert json.loads(done.stdout, parse_constant=_no_constant)["state"] == "unfinished"
    assert not re.search(r"\b(nan|NaN|inf|None)\b", page.read_text())


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("events.jsonl", "", "contains no event"),
        ("events.jsonl", '{"t": 1.0, "event"\n{"t": 2.0, "event": "step"}\n', "is not an event"),
        ("events.jsonl", '{"t": 1.0, "event": "step"}\n', "is not an event: step: field `generation` is missing"),
        ("report.json", '{"state": "succ', "is not JSON"),
        ("report.json", "[1, 2]", "is not a JSON object"),
    ],
)
def test_a_file_that_is_no_run_is_one_error(tmp_path: Path, name: str, text: str, told: str) -> None:
    (tmp_path / name).write_text(text)
    done = hp_ext("report", tmp_path / name)
    assert (done.code, done.stdout) == (3, "")
    assert told in done.stderr
    assert name in done.stderr


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("steps", "3", "steps: must be a whole number"),
        ("steps", 10**400, "steps: "),
        ("recoveries", {"a": 1}, "recoveries: must be a list"),
        ("losses", {"one": 1.0}, "losses.one: the name `one` does not have the right form"),
        ("losses", {"1": "low"}, "losses.1: must be a number"),
        ("goodput", 1e308, "goodput: `1e+308` is out of range"),
        ("over_time", {"part_s": 1.0, "shares": {"step": [1.0], "data": []}}, "have different lengths"),
        ("state", None, "state: must be text"),
    ],
)
def test_a_report_with_a_wrong_field_is_an_error_that_names_it(log: Path, field: str, value: Any, told: str) -> None:
    report = hp_ext("report", log, "-o", "json").json
    file = log.with_name("report.json")
    file.write_text(json.dumps(report | {field: value}))
    done = hp_ext("report", file)
    assert (done.code, done.stdout) == (3, "")
    assert str(file) in done.stderr
    assert told in done.stderr
    assert "name a report.json or result.json of hp-ext" in done.stderr


def test_a_report_of_a_later_version_may_have_more_fields(log: Path) -> None:
    report = hp_ext("report", log, "-o", "json").json
    log.with_name("report.json").write_text(json.dumps(report | {"later": {"a": 1}, "faults": []}))
    assert hp_ext("report", log.with_name("report.json")).code == 0


WRONG = ("x\x1b[31m", 10**400, -1, 1.5, 1e308, [], [1], {}, {"a": 1}, None, True)


def _places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield at
    inner = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, below in inner:
        yield from _places(below, (*at, key))


def _changed(value: Any, at: tuple[Any, ...], wrong: Any) -> Any:
    if not at:
        return wrong
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[at[0]] = _changed(value[at[0]], at[1:], wrong)
    return copy


def test_a_report_with_any_value_anywhere_is_shown_or_refused(log: Path, tmp_path: Path) -> None:
    report = hp_ext("report", log, "-o", "json").json
    places = list(_places(report))
    rng = random.Random(1)
    file, page = tmp_path / "report.json", tmp_path / "page.html"
    codes = set()
    for _ in range(400):
        file.write_text(json.dumps(_changed(report, rng.choice(places), rng.choice(WRONG))))
        done = hp_ext("report", file, *rng.choice([("-o", "json"), ("--page", page)]))
        codes.add(done.code)
    assert codes == {0, 3}


def test_what_is_not_there_is_told(tmp_path: Path) -> None:
    assert "has no result.json" in hp_ext("report", tmp_path).stderr
    done = hp_ext("report", tmp_path / "no.jsonl")
    assert (done.code, "there is no file" in done.stderr) == (6, True)


@pytest.mark.parametrize(("loss", "equal", "told"), [(3.0, True, "yes"), (3.5, False, "NO")])
def test_another_run_is_put_beside(log: Path, tmp_path: Path, loss: float, equal: bool, told: str) -> None:
    events = [event for event in _run() if event["event"] not in ("injected", "fault", "aborted")]
    for event in events:
        if event["event"] == "step" and event["step"] == 1 and event["rank"] == 0:
            event["loss"] = loss
    other = _write(tmp_path / "undisturbed" / "events.jsonl", events)
    page = tmp_path / "page.html"
    done = hp_ext("report", log, "--beside", other, "-o", "json", "--page", page)
    assert done.json["loss_equal"] is equal
    assert done.json["undisturbed"]["losses"]["1"] == loss
    assert re.search(f"loss equal to the run without faults +{told}", hp_ext("report", log, "--beside", other).stdout)
    lines = re.findall(r'class="line (?:undisturbed|own)" points="([^"]+)"', page.read_text())
    assert (len(lines), lines[0] == lines[1]) == (2, equal)


def _many(ranks: int, killed: int, slow: int) -> list[Event]:
    """Two steps of many ranks, a kill in the second, and the second again; one rank waits for its data and its state.
    Of ranks that are not sampled, the log has what the coordinator writes of every rank."""
    sampled = [rank for rank in range(ranks) if is_sampled(rank)]

    def restored(rank: int) -> float:
        return 113.5 + rank / 10**4 + 0.5 * (rank == slow)

    def data_s(rank: int) -> float:
        return 0.75 if rank == slow else 0.01 + rank / 10**4

    return [
        entry(100.0, "job_started", world_size=ranks, nodes=ranks),
        *(entry(101.0, "joined", rank=rank, pid=rank) for rank in range(ranks)),
        entry(101.0, "generation", generation=1, step=0),
        *(entry(109.0, "restored", rank=rank, source="fresh") for rank in range(ranks)),
        *(entry(110.0, "begun", rank=rank, step=0, generation=1) for rank in range(ranks)),
        *(_step(111.0, rank, 1, 110.0, loss=None, data_s=data_s(rank)) for rank in sampled),
        entry(111.5, "killed", rank=killed, node=killed, step=2),
        entry(111.75, "fault", rank=killed, node=killed, step=2, cause="killed by SIGKILL (9)", died=True),
        *(entry(112.0, "aborted", rank=rank, step=1) for rank in sampled if rank != killed),
        *(entry(112.0, "joined", rank=rank, pid=rank) for rank in sampled if rank != killed),
        entry(113.0, "joined", rank=killed, pid=ranks),
        entry(113.0, "generation", generation=2, step=1),
        *(entry(113.25, "groups_open", rank=rank) for rank in sampled),
        *(entry(restored(rank), "restored", rank=rank, source="self") for rank in range(ranks)),
        entry(114.5, "go", step=1),
        *(entry(114.75, "begun", rank=rank, step=1, generation=2) for rank in range(ranks)),
        *(_step(116.0, rank, 2, 114.75, 2, loss=None) for rank in sampled),
        *(entry(116.0, "done", rank=rank, digest="d") for rank in range(ranks)),
        entry(120.0, "job_ended", state="succeeded"),
    ]


def _rows(page: str, heading: str) -> list[str]:
    """First cells of the table below a heading."""
    return re.findall(r"<tr><td>([^<]+)</td>", page.partition(f"<h2>{heading}</h2>")[2].partition("<h2>")[0])


def _lanes(page: str) -> list[str]:
    """Names of the ranks in the chart of a recovery."""
    return re.findall(r'text-anchor="start">([^<]+)</text>', page.partition("<h2>What failed</h2>")[2])


@pytest.mark.parametrize(("ranks", "killed", "slow"), [(64, 37, 5), (1024, 701, 516)])
def test_the_page_of_many_ranks_shows_the_failed_the_slowest_the_median_and_the_spread(
    tmp_path: Path, ranks: int, killed: int, slow: int
) -> None:
    page = tmp_path / "page.html"
    log = _write(tmp_path / "run" / "events.jsonl", _many(ranks, killed, slow))
    result = hp_ext("report", log, "-o", "json", "--page", page).json
    (recovery,), text = result["recoveries"], page.read_text()
    sampled = [rank for rank in range(ranks) if is_sampled(rank)]
    assert set(map(int, recovery["timeline"])) == {killed, *sampled}
    assert [*result["phases"]] == [str(rank) for rank in sampled], "not of a rank whose steps are not logged"
    of_killed = recovery["timeline"][str(killed)]
    assert [of_killed[0], of_killed[-1][0]] == [["detect", 0.0, 0.25], "first_step"]
    assert sum(seconds for _, _, seconds in of_killed) == pytest.approx(recovery["seconds"])
    others = [rank for rank in sampled if rank not in (killed, slow)]
    median = [slow, *reversed(others)][(len(others) + 1) // 2]  # a higher rank restores later
    assert _lanes(text) == [
        f"rank {killed}, failed",
        f"rank {slow}, slowest",
        f"rank {median}, median",
        "rank 0, fastest",
    ]
    spread = r"other ranks had restored their state after 2\.00 s to 2\.5\d s, median 2\.0\d s\."
    assert re.search(f"{len(others) + 1} {spread}", text)
    rows = _rows(text, "Who was slow")
    assert (rows[0], [row.partition(", ")[2] for row in rows[1:3]]) == (f"rank {slow}, slowest", ["median", "fastest"])
    assert rows[3:] == ["spread"]
    assert f"The JSON has all {len(sampled)} ranks whose steps are logged" in text
    assert "No step told its loss" in text


def test_the_page_of_a_few_ranks_shows_each_with_the_failed_and_the_slow_ones_first(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    hp_ext("report", _write(tmp_path / "run" / "events.jsonl", _many(4, killed=2, slow=3)), "--page", page)
    text = page.read_text()
    assert _lanes(text) == ["rank 2, failed", "rank 3, slowest", "rank 1", "rank 0, fastest"]
    assert _rows(text, "Who was slow") == ["rank 3, slowest", "rank 2", "rank 1", "rank 0, fastest", "spread"]


def test_the_page_answers_one_question_after_the_other_and_its_claim_comes_first(log: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    hp_ext("report", log, "--beside", log, "--page", page)
    text = page.read_text()
    headings = re.findall("<h2>(.*?)</h2>", text)
    assert headings[:4] == ["What failed", "What it cost", "Who was slow", "What to change"]
    claim = re.sub(r"<[^>]+>|\s+", " ", text.partition("</h1>")[2].partition("</p>")[0])
    said = ["0 steps lost", "weights equal to the run without faults", "loss equal to the run without faults"]
    assert [re.sub(" +", " ", claim).find(each) >= 0 for each in said] == [True] * 3, claim
    printed = hp_ext("report", log).stdout
    assert printed.index("steps lost") < printed.index("rank 1 on node 0")


def test_phases_have_one_name_in_tables_and_charts(log: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    hp_ext("report", log, "--page", page)
    text = page.read_text()
    failed = text.partition("<h2>What failed</h2>")[2].partition("<h2>")[0]
    keys = set(re.findall(r'class="key"><i class="p-\w+"></i>([^<]+)</span>', failed))
    assert set(re.findall("<th>([^<]+)</th>", failed)) - {"continued from step"} <= keys
    assert {"detect", "abort", "agree", "rebuild", "restore", "first step"} <= keys
    printed = hp_ext("report", log).stdout
    assert set(re.findall(r"^  ([a-z ]+?) +[\d.]+$", printed, re.M)) - {"total"} <= keys


def test_time_axes_begin_at_the_first_step_with_the_start_up_next_to_them(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    log = _write(tmp_path / "run" / "events.jsonl", _many(4, killed=2, slow=3))
    seconds = hp_ext("report", log, "-o", "json", "--page", page).json["seconds"]
    chart = page.read_text().partition("<h2>What it cost</h2>")[2].partition("</figure>")[0]
    assert (seconds["startup"], seconds["wall"]) == (10.0, 20.0)
    assert "seconds since the first step" in chart
    assert re.findall(r'text-anchor="middle">(\d+)<', chart) == ["0", "2", "4", "6", "8", "10"]
    assert 'class="p-startup"' not in chart.partition("<svg")[2]
    assert "The time axis begins at the first step, 10.0 s after the start of the job." in page.read_text()


def test_numbers_on_the_page_have_three_digits(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    events = _many(4, killed=2, slow=3)
    events[-1]["t"] = 20_000.0
    hp_ext("report", _write(tmp_path / "run" / "events.jsonl", events), "--page", page)
    seen = re.findall(r"<data[^>]*>([^<]+)</data>", page.read_text())
    assert "332 min" in seen, "19,900 s"
    assert [text for text in seen if len(re.sub(r"^0\.|\D", "", text)) > 3] == []


@pytest.mark.slow
@pytest.mark.thorough  # installs a browser
def test_the_browser_shows_the_figures_of_the_json(log: Path, tmp_path: Path) -> None:
    browser.require()
    page = tmp_path / "page.html"
    result = hp_ext("report", log, "--beside", log, "-o", "json", "--page", page).json
    assert "<img" not in page.read_text(), "what a fault says is text, not a page"
    opened = browser.open_page(page)
    assert opened.console == []
    assert not re.search(r"""(src|href)=["'](?!data:)""", opened.dom), "the page needs nothing else"
    check_figures(opened.data(), result)
    assert len(opened.data()) >= 45


@pytest.mark.slow
@pytest.mark.thorough  # installs a browser
@pytest.mark.parametrize(("dark", "background"), [(False, (255, 255, 255)), (True, (20, 24, 29))])
def test_the_page_is_as_light_or_dark_as_its_reader(
    log: Path, tmp_path: Path, dark: bool, background: tuple[int, int, int]
) -> None:
    from matplotlib.image import imread

    browser.require()
    page, picture = tmp_path / "page.html", tmp_path / "page.png"
    hp_ext("report", log, "--page", page)
    browser.photograph(page, picture, dark=dark)
    pixels = (imread(picture)[..., :3] * 255).round().astype("uint8")
    assert tuple(pixels[3, 3]) == background
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 30, "the charts are drawn"


@pytest.mark.slow
@pytest.mark.thorough  # installs a browser
def test_an_error_in_the_console_is_noticed(tmp_path: Path) -> None:
    browser.require()
    page = tmp_path / "page.html"
    page.write_text(
        "<script>nowhere()</script><data data-key='a' value='1'>1</data><img src='http://example.invalid/'>"
    )
    opened = browser.open_page(page)
    assert any("nowhere is not defined" in line for line in opened.console), opened
    assert opened.data() == {"a": ("1", "1")}


def test_a_job_of_slurm_that_left_no_report_is_told_from_its_event_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All its nodes were killed at once: Slurm saw how it ended, the event log what began it."""
    monkeypatch.setenv("HPX_HOME", str(tmp_path / "home"))
    record = {"id": "7", "cluster": "c", "folder": str(tmp_path), "runs": "runs", "world_size": 2, "submitted_at": "?"}
    records.remember("hyperpod-slurm", "a", record)
    killed = SlurmJob("7", "NODE_FAIL", "2026-01-01T00:00:00", None, "")
    monkeypatch.setattr("hyperpod_ext.jobs.slurm.client.find", lambda job_id: killed)
    job = tmp_path / "runs" / "a" / "7"
    _write(job / "0.0" / "events.jsonl", _run()[:12])
    lost = entry(105.0, "node_lost", node=1, cause="the connection to its agent closed")
    second = [event | {"step": event["step"] + 3} if "step" in event else event for event in _run()[:13]]
    _write(job / "0.1" / "events.jsonl", [*second, lost])
    done = hp_ext("report", "hyperpod-slurm://c/a", "-o", "json")
    result = done.json
    assert (result["state"], result["world_size"], result["steps"], result["starts"]) == ("failed", 2, 5, 2)
    assert sorted(result["losses"]) == ["1", "2", "4", "5"]
    assert result["error"]["message"].startswith(
        "node 1 was lost: the connection to its agent closed. Then: job 7 is NODE_"
    )
    assert "node 1 was lost" in hp_ext("report", "hyperpod-slurm://c/a").stdout


def test_a_log_that_ends_in_a_fault_has_it_as_the_last_word(log: Path) -> None:
    _write(log, _run("killed by SIGKILL (9)")[:16])
    result = hp_ext("report", log, "-o", "json").json
    assert (result["state"], result["error"]["message"]) == (
        "unfinished",
        "rank 1 on node 0, step 3 (forward): killed by SIGKILL (9)",
    )
    assert hp_ext("report", log).stdout.rstrip().endswith("the logs of the ranks have more details")
