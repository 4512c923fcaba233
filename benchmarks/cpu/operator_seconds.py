"""What each fault costs on pods of HyperPod EKS under our agent and under AWS's `hyperpodrun`, in one run.

`make bench-operator`, or with `ARGS='--rounds 1 --only exception "kill -9"'`: 2 pods x 2 ranks, a spare where one is
needed, a stand-in for the operator that asks every 50 ms, every process started as on a machine that runs nothing yet.
A fault's seconds are from the last step before it to the first new one, less the median step before it; what training
comes to is compared each time. `hyperpodrun` runs with `--inprocess-restart` and our fork server, as `hp-ext` renders
it; for another number of nodes without the flag, as the operator's elastic policy wants it. `hyperpodrun alone` is
AWS's, with nothing of ours between it and the script.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "tests" / "support"))

import hyperpod_operator as operators  # noqa: E402
import launched  # noqa: E402
from hyperpodrun_env import hyperpodrun  # noqa: E402
from operator_page import ALONE, LAUNCHERS, OURS, UNTIL_START, gaps_of, make_document, make_page, make_table  # noqa: E402
from publish import RESULTS, publish  # noqa: E402
from random_pods import Kill, pods  # noqa: E402

from hyperpod_ext.ports import free_port  # noqa: E402

HANG = {"floor_s": 0.25, "factor": 4.0}
"""How soon our agent takes a rank for hanging: steps take 0.05 s."""
FAULT_STEP = 12
RULE = {"name": "steps", "logPattern": "step [0-9]+.*", "expectedRecurringFrequencyInSeconds": 1}
"""How AWS's agent finds one: a line in each whole second, the least that a rule can say."""
ELASTIC = HERE.parents[1] / "tests" / "faults" / "elastic_bitwise.py"
SIZES, ELASTIC_STEPS = (2, 3, 1), 400
RESTARTED_AFTER_S = 1.0


def kill(what: str, which: int, delay_s: float = 0.0, *, beside: bool = False) -> Kill:
    return Kill(what, which, FAULT_STEP, delay_s, beside, comes_back=False)


FAULTS: dict[str, dict[str, Any]] = {
    "exception": {"fault": {"what": "exception", "rank": 2, "step": FAULT_STEP}},
    "kill -9": {"kills": [kill("rank", 2)]},
    "hang": {"fault": {"what": "sleeps", "rank": 2, "step": FAULT_STEP, "dies": -1}},
    "lost pod": {"kills": [kill("pod", 1)], "spares": 1},
    "lost first pod": {"kills": [kill("pod", 0)], "spares": 1},
    "lost pod, `policy: continue`": {"kills": [kill("pod", 1)], "spares": 1, "continues": True},
    "lost first pod, `policy: continue`": {"kills": [kill("pod", 0)], "spares": 1, "continues": True},
    f"kill -9, operator gone for {RESTARTED_AFTER_S:g} s": {
        "kills": [kill("operator", 0, RESTARTED_AFTER_S / 2), kill("rank", 2, beside=True)]
    },
}


def faulted(launcher: str, name: str) -> tuple[dict[str, float], dict[str, Any]]:
    """Seconds of one fault, with those until the operator's `/start` where all wait for that; what the job came to."""
    its = FAULTS[name]
    hang = {"enabled": name == "hang", **HANG}
    rules = [RULE] if name == "hang" and launcher != OURS else []
    more = {"fault": its.get("fault", {}), "hang": hang, "log_rules": rules, "continues": its.get("continues", False)}
    with pods(launcher, quiet=True, replenished=False, **more) as running:
        running.run(its.get("kills", []), spares=its.get("spares", 0))
        report, events = running.report(), running.events()
    steps = [event for event in events if event["event"] == "step"]
    seconds = {launcher: max(gaps_of(steps, "generation"))}
    if launcher == OURS and its.get("spares") and not more["continues"]:
        before = max(event["t"] for event in steps if event["generation"] == 1)
        starts = [event["t"] for event in events if event["event"] == "operator_asked" and event["call"] == "/start"]
        seconds[UNTIL_START] = min(t for t in starts if t > before) - before
    parts = ("losses",) if more["continues"] else ("losses", "weights", "metrics")
    return seconds, {part: report[part] for part in parts}


def _script(name: str) -> str:
    """What jobs with that fault have in common."""
    return "bitwise" if FAULTS[name].get("continues") else "faults"


def resized(launcher: str) -> tuple[dict[str, float], dict[str, Any]]:
    """Seconds of each change of the number of nodes, and what the job came to."""
    with tempfile.TemporaryDirectory(prefix="k", dir="/tmp") as name:
        folder = Path(name)
        ours = launcher == OURS
        job = launched.Launched(folder / "job", steps=ELASTIC_STEPS)
        env = job.elastic_env(SIZES[0], **({"elastic": {"min_nodes": 1, "max_nodes": 3}} if ours else {}))
        port, nodes = free_port() + 10, str(SIZES[0])
        if ours:
            command = ["--nnodes", nodes, "--nproc-per-node", "1", "--rdzv-port", str(port + 1), "--", str(ELASTIC)]
        else:
            shape = ["--nnodes", nodes, "--nproc-per-node", "1", "--tee", "3", "--redirect", "3"]
            front = [] if launcher == ALONE else ["-m", "hyperpod_ext.runtime.prefork"]
            command = [str(hyperpodrun()), *shape, "--server-log-level", "warning", *front, str(ELASTIC)]
            env |= {"NNODES": nodes}
        kind = operators.OurPod if ours else operators.Pod
        places = [kind(place, folder / f"p{place}", command, port, env) for place in range(max(SIZES))]
        left = dict(zip((20, 60), SIZES[1:], strict=True))

        def steps() -> list[dict[str, Any]]:
            events = operators_events(job, ours=ours)
            return [event for event in events if event["event"] == "step" and event["rank"] == 0]

        def each_poll(operator: operators.Operator, _status: Any) -> None:
            made = steps()
            settled = made and made[-1]["world"] == operator.nodes
            for after in [after for after in left if settled and made[-1]["step"] >= after]:
                operator.resize(left.pop(after))
            if settled and not left:
                (job.folder / "hurry").touch()

        operator = operators.Operator(places, nodes=SIZES[0], each_poll=each_poll)
        try:
            operator.run()
            made = steps()
        finally:
            for pod in places:
                pod.kill()
    names = [f"resize {before} -> {after}" for before, after in pairwise(SIZES)]
    gaps = dict(zip(names, gaps_of(made, "world"), strict=True))
    return gaps, {"losses": {event["step"]: event["loss"] for event in made}}


def operators_events(job: launched.Launched, *, ours: bool) -> list[dict[str, Any]]:
    """Of all ranks, in the order of time."""
    return launched.events_in(job.folder / "events.jsonl") if ours else job.events()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="how often each is done; medians are shown")
    parser.add_argument("--only", nargs="*", choices=[*FAULTS, "resize"], help="of these alone; writes no page")
    parser.add_argument("--launchers", nargs="*", choices=LAUNCHERS, default=LAUNCHERS, help="under these alone")
    parser.add_argument("--add", action="store_true", help="to the rounds that the page has, of the same machine")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    os.environ["HPX_TEST_COLD"] = "1"
    wanted = arguments.only or [*FAULTS, "resize"]
    kept = arguments.out / "operator.json"
    before = json.loads(kept.read_text())["rounds"] if arguments.add and kept.exists() else {}
    seconds: dict[str, dict[str, list[float]]] = before
    came_to: dict[str, list[Any]] = {}
    for number in range(arguments.rounds):
        for name in wanted:
            for launcher in arguments.launchers:
                if name == "resize":
                    gaps, result = resized(launcher)
                    found = {what: {launcher: gap} for what, gap in gaps.items()}
                else:
                    its, result = faulted(launcher, name)
                    found = {name: its}
                came_to.setdefault("resize" if name == "resize" else _script(name), []).append(result)
                for what, by in found.items():
                    for who, gap in by.items():
                        seconds.setdefault(what, {}).setdefault(who, []).append(gap)
                print(f"round {number + 1}, {launcher}: {found}", file=sys.stderr, flush=True)
    equal = all(result == results[0] for results in came_to.values() for result in results)
    document = make_document(seconds, equal, f"python benchmarks/cpu/operator_seconds.py --rounds {arguments.rounds}")
    print(make_table(document))
    if arguments.only is None:
        publish(arguments.out, "operator", document, make_page(document))
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
