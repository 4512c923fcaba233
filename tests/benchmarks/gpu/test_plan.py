"""The plan around the experiments, with tiny ones: what is run, ended, left out, kept and shown."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import catalog
import machine
import plan
import pytest
import record
import runner
from lane import Lane, lane_of
from waiting import until

ROOT = Path(__file__).resolve().parents[3]
HERE = ROOT / "benchmarks" / "gpu"
MODULES = {
    "good": """
        import os
        from pathlib import Path
        from results import Figure
        def run(lane):
            with Path(os.environ["RUN_LOG"]).open("a") as log:
                log.write("good\\n")
            return {"speed": Figure(2.5, "GB/s"), "ranks": Figure(4)}
        """,
    "wrong": """
        def run(lane):
            print("before it")
            raise ValueError("sums differ")
        """,
    "slow": """
        from results import FailedError, Figure
        def abort(lane):
            raise FailedError("the abort took 9 s", {"abort": Figure(9.0, "s")})
        """,
    "absent": """
        from results import NotRunError
        def run(lane):
            raise NotRunError("torch has no reconfigure")
        """,
    "dead": """
        import os
        def run(lane):
            os.kill(os.getpid(), 9)
        """,
    "hangs": """
        import os, subprocess, sys, time
        from pathlib import Path
        def run(lane):
            sleep = [sys.executable, "-c", "import time; time.sleep(1000)"]
            others = [subprocess.Popen(sleep), subprocess.Popen(sleep, start_new_session=True)]
            Path(os.environ["PIDS"]).write_text(" ".join(str(pid) for pid in [os.getpid(), *(o.pid for o in others)]))
            time.sleep(1000)
        """,
}
PROGRAM = """
import sys
import catalog, machine, plan, runner
catalog.PLAN = tuple(catalog.Experiment(*one) for one in {experiments})
machine.has_gpu = lambda: {gpu}
runner._machine = lambda: {{"torch": "2.13.0+cpu", "NCCL": "none"}}
sys.exit(plan.main(sys.argv[1:]))
"""


class Command:
    """Runs plan.py with these tiny experiments: name, module and limit."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out = folder, folder / "out"
        self.pids, self.log = folder / "pids", folder / "log"
        for name, source in MODULES.items():
            lines = source.strip("\n").splitlines()
            (folder / f"{name}.py").write_text("\n".join(line[8:] for line in lines) + "\n")

    def start(self, *experiments: tuple[str, str, float], arguments: str = "", gpu: bool = False) -> Any:
        """A process; `--fake gloo` and `--out` are among its arguments."""
        table = [(name, f"{module} | it", "all well", module, limit) for name, module, limit in experiments]
        root = HERE.parents[1]
        path = os.pathsep.join(map(str, [HERE, root, self.folder]))
        more = {"PYTHONPATH": path, "PIDS": str(self.pids), "RUN_LOG": str(self.log), "TMPDIR": str(self.folder)}
        return subprocess.Popen(
            [
                sys.executable,
                "-c",
                PROGRAM.format(experiments=table, gpu=gpu),
                "--out",
                str(self.out),
                *arguments.split(),
            ],
            env=os.environ | more,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *experiments: tuple[str, str, float], arguments: str = "--fake gloo") -> tuple[int, str]:
        process = self.start(*experiments, arguments=arguments)
        output, errors = process.communicate(timeout=100)
        assert "Traceback" not in errors, errors
        return process.returncode, output + errors

    def results(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = json.loads((self.out / "results.json").read_text())["experiments"]
        return found

    def outcomes(self) -> dict[str, str]:
        return {name: f"{one['outcome']}: {one['reason']}" for name, one in self.results().items()}


@pytest.fixture
def command(tmp_path: Path) -> Command:
    return Command(tmp_path)


def test_without_a_gpu_one_line_says_so(command: Command) -> None:
    code, output = command.run(("E1", "good", 10), arguments="")
    assert (code, output) == (0, f"{plan.NO_GPU}\n")
    assert not command.out.exists()


def test_each_outcome_is_recorded_with_its_reason(command: Command) -> None:
    code, output = command.run(
        ("E1", "wrong", 60), ("E2", "good", 60), ("E3", "absent", 60), ("E4", "dead", 60), ("E5", "slow:abort", 60)
    )
    assert code == 1
    assert command.outcomes() == {
        "E1": "failed: ValueError: sums differ",
        "E2": "passed: ",
        "E3": "not run: torch has no reconfigure",
        "E4": "failed: it was ended by SIGKILL",
        "E5": "failed: the abort took 9 s",
    }
    wrong, good = command.results()["E1"], command.results()["E2"]
    assert command.results()["E5"]["figures"] == {"abort": {"value": 9.0, "unit": "s"}}
    assert wrong["output"][0] == "before it"
    assert wrong["output"][-1] == "ValueError: sums differ"
    assert good["figures"] == {"speed": {"value": 2.5, "unit": "GB/s"}, "ranks": {"value": 4, "unit": ""}}
    assert "E2 (good | it): passed (fake)\n    speed: 2.5 GB/s\n    ranks: 4\n" in output
    assert "    | ValueError: sums differ\n" in output


def test_what_does_not_fit_into_the_limit_is_left_for_the_next_command(command: Command) -> None:
    experiments = ("E1", "good", 60), ("E2", "good", 1000), ("E3", "good", 60)
    code, output = command.run(*experiments, arguments="--fake gloo --limit-s 500")
    assert code == 0
    assert command.outcomes() == {"E1": "passed: ", "E2": "not run: no time left", "E3": "passed: "}
    assert "E2 (good | it): not run: no time left\n" in output
    command.run(*experiments, arguments="--fake gloo --limit-s 2000")
    assert command.outcomes()["E2"] == "passed: "
    assert command.log.read_text() == "good\n" * 3, "what was run once is not run again"
    command.run(*experiments, arguments="--fake gloo --limit-s 2000 --only E3")
    assert command.log.read_text() == "good\n" * 4, "but where it is asked for by name"


def test_of_an_experiment_that_hangs_no_process_is_left(command: Command) -> None:
    code, _ = command.run(("E1", "hangs", 1), ("E2", "good", 60))
    assert code == 1
    assert command.outcomes() == {"E1": "failed: no result within its 5 s", "E2": "passed: "}
    assert [pid for pid in command.pids.read_text().split() if is_running(pid)] == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_plan_that_is_killed_leaves_what_it_found(command: Command, number: signal.Signals) -> None:
    experiments = ("E1", "good", 60), ("E2", "hangs", 60), ("E3", "good", 60)
    process = command.start(*experiments, arguments="--fake gloo --limit-s 500")
    with ended(process, command):
        until(lambda: command.pids.exists() and len(command.pids.read_text().split()) == 3)
        process.send_signal(number)
        process.wait(60)
        assert command.outcomes() == {
            "E1": "passed: ",
            "E2": "not run: the plan ended while it ran",
            "E3": "not run: not reached",
        }
        first = command.pids.read_text().split()[0]
        until(lambda: not is_running(first), "the experiment outlived its plan")
    good = tuple((name, "good", limit) for name, _, limit in experiments)
    assert command.run(*good, arguments="--fake gloo --limit-s 500")[0] == 0
    assert command.outcomes() == {"E1": "passed: ", "E2": "passed: ", "E3": "passed: "}


def test_the_page_has_what_the_json_has(command: Command) -> None:
    command.run(("E1", "wrong", 60), ("E2", "good", 60), ("E3", "absent", 60))
    page = (command.out / "results.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if re.match(r"\| E\d", line)]
    raw = command.results()
    assert [row[0] for row in rows] == list(raw)
    for name, shows, expected, outcome, *figures, took in rows:
        one = raw[name]
        assert (shows, expected) == (one["shows"].replace("|", "/"), one["expected"])
        assert outcome.replace(" (fake)", "") == one["outcome"] + (f": {one['reason']}" if one["reason"] else "")
        texts = [f"{key}: {figure['value']} {figure['unit']}".rstrip() for key, figure in one["figures"].items()]
        assert "".join(figures).strip(" |") == "; ".join(texts)
        assert took == f"{one['seconds']:.0f} s"
    assert "- torch: 2.13.0+cpu\n" in page
    assert "\n## E1 failed\n" in page
    assert "ValueError: sums differ\n```" in page


def test_results_of_a_gpu_and_of_the_fake_are_not_mixed(command: Command) -> None:
    command.run(("E1", "good", 60))
    process = command.start(("E1", "good", 60), gpu=True)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 2
    assert errors == f"{command.out} has results of lane fake; name another folder with --out\n"


def test_an_unknown_name_is_refused(command: Command) -> None:
    code, output = command.run(("E1", "good", 60), ("E2", "good", 60), arguments="--only E1,E7")
    assert code == 2
    assert "no experiment E7; there are E1, E2" in output


def test_wheels_that_a_job_needs_are_named_with_a_command_that_brings_them() -> None:
    assert machine.missing_wheels() == [], "they are here"
    command = machine.how_to_bring(["annotated-types", "awscrt", "pydantic", "pydantic-core", "typing-inspection"])
    assert command.startswith("pip download --only-binary=:all: ")
    assert command.endswith(" -d wheels awscrt pydantic"), "pydantic brings those of its own, in the versions that fit"
    assert machine.how_to_bring(["cffi", "cryptography", "pycparser"]).endswith(" -d wheels cryptography")


def test_without_pydantic_the_product_is_left_out_and_the_rest_imports(tmp_path: Path, root: Path) -> None:
    absent = ["annotated_types", "awscrt", "pydantic", "pydantic_core", "typing_inspection", "numpy", "yaml", "click"]
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({absent}))\n")
    names = ", ".join(["plan", "runner", "rank", "experiment", *sorted({module_of(one) for one in catalog.PLAN})])
    program = f"import {names}\ntry:\n    product.ddp(None)\nexcept product.NotRunError as why:\n    print(why)"
    folders = [tmp_path, HERE, HERE / "experiments", root, ROOT / "tests" / "support", HERE.parent / "cpu"]
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("no annotated-types, awscrt, click, numpy, pydantic, pydantic-core, PyYAML")
    assert "bring wheels: pip download --only-binary=:all: " in done.stdout


def test_a_failed_experiment_shows_what_the_driver_said_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "dmesg"
    program.write_text(
        "#!/bin/sh\ncat <<'EOF'\n[    3.429888] NVRM: an earlier word\n[ 1234.500000] NVRM: Xid (PCI:0000:00:06): 13\n"
        "[ 1234.600000] of another\nEOF\n"
    )
    program.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert runner._of_driver(1000.0) == ["[ 1234.500000] NVRM: Xid (PCI:0000:00:06): 13"]
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert runner._of_driver(1000.0) == []


def test_ranks_share_a_gpu_as_nodes_or_as_ranks_of_one() -> None:
    old, new = {"torch": "2.11.0+cu130", "NCCL": "2.28.9"}, {"torch": "2.15.0+cu132", "NCCL": "2.30.7"}
    assert lane_of(old, fake=False, shared=True) == Lane("hostid", (2, 11, 0), (2, 28, 9))
    lanes = [lane_of(new, fake=False, shared=shared) for shared in (False, True)]
    assert [lane.name for lane in lanes] == ["hostid", "multi-rank"]
    of_node, of_gpu = (lane.environment(3) for lane in lanes)
    assert (of_node["NCCL_HOSTID"], "NCCL_HOSTID" in of_gpu) == ("rank3", False)
    assert of_gpu["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert of_node["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in lanes[0].environment(3, recovery=False)
    assert Lane.from_json(lanes[1].to_json()) == lanes[1]


def test_each_process_of_a_job_counts_as_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE / "one_gpu"))
    monkeypatch.setenv("NCCL_HOSTID", "inherited")
    # a line in one write: two processes share the pipe
    program = (
        "import os; child = os.fork(); os.write(1, os.environ['NCCL_HOSTID'].encode() + b'\\n'); child and os.wait()"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert len(set(printed.split()) - {"inherited"}) == 2


def test_the_documentation_has_what_each_experiment_found(golden_part: Callable[[str, str, str], None]) -> None:
    golden_part("docs/gpu.md", "experiments", record.outcomes(catalog.PLAN, record.recorded()))
    golden_part("docs/gpu.md", "figures", record.figures(catalog.PLAN, record.recorded()))


def test_what_was_run_again_replaces_what_was_known_of_that_torch() -> None:
    def run(torch: str, **outcomes: str) -> record.Run:
        of = {
            name: {"outcome": outcome, "reason": "", "figures": {}, "seconds": 1} for name, outcome in outcomes.items()
        }
        return {"machine": {"torch": torch, "NCCL": "2"}, "experiments": of}

    known = record.merged([], run("2.15.0", E1="passed", E2="failed"))
    known = record.merged(known, run("2.9.1", E1="failed"))
    known = record.merged(known, run("2.15.0", E1="not run", E2="passed"))
    assert [one["machine"]["torch"] for one in known] == ["2.9.1", "2.15.0"]
    assert {name: one["outcome"] for name, one in known[1]["experiments"].items()} == {"E1": "passed", "E2": "passed"}


def test_results_of_no_gpu_are_not_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "results.json"
    file.write_text(json.dumps({"lane": "fake", "machine": {"torch": "2.15.0"}, "experiments": {}}))
    with pytest.raises(SystemExit):
        record.main([str(file)])
    assert "it says nothing of a GPU" in capsys.readouterr().err
    for text in ("{", '{"lane": "GPU"}', "[]"):
        file.write_text(text)
        with pytest.raises(SystemExit):
            record.main([str(file)])
        assert f"{file} is no results.json" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        record.main([str(tmp_path / "none")])
    assert "cannot be read: No such file" in capsys.readouterr().err


def test_names_and_limits_of_the_plan_fit_a_command() -> None:
    assert len({one.name for one in catalog.PLAN}) == len(catalog.PLAN)
    assert max(one.limit_s for one in catalog.PLAN) <= 300
    assert [one.name for one in catalog.PLAN if not (HERE / "experiments" / f"{module_of(one)}.py").exists()] == []


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_the_whole_plan_passes_on_cpu(tmp_path: Path) -> None:
    program = [sys.executable, str(HERE / "plan.py"), "--fake", "gloo", "--limit-s", "100000", "--out", str(tmp_path)]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + (tmp_path / "results.md").read_text()
    raw = json.loads((tmp_path / "results.json").read_text())["experiments"]
    left_out = {name: one["reason"] for name, one in raw.items() if one["outcome"] != "passed"}
    assert "aborts by itself" in left_out.pop("E12"), "gloo does not"
    assert not left_out or (list(left_out) == ["E3"] and "has no reconfigure" in left_out["E3"])
    assert len(list(tmp_path.iterdir())) == 2


def module_of(one: catalog.Experiment) -> str:
    return one.module.partition(":")[0]


def is_running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@contextlib.contextmanager
def ended(process: Any, command: Command) -> Iterator[None]:
    """Neither the process nor what its experiment started outlives the block."""
    try:
        yield
    finally:
        process.kill()
        process.communicate()
        for pid in command.pids.read_text().split() if command.pids.exists() else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
