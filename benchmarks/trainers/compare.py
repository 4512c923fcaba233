"""Compare other libraries' trainers through kills: with our adapters, and under torchrun with their own checkpoints.

    python benchmarks/trainers/compare.py                  # all trainers
    python benchmarks/trainers/compare.py --only sft dpo

Each trainer has two scripts, which make 16 steps on two ranks on CPU: `alone/NAME.py`, which saves every 4 steps, and
`ours/NAME.py`, unless there is no adapter. `alone/NAME.py` runs under torchrun and under `hp-ext run`; each of
the two runs has one kill, of rank 1. `ours/NAME.py` runs with two kills, and is compared with a run without kills.
Exits with 1 if a run fails, or if the run with our adapter loses a step or ends with other losses or weights.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "benchmarks" / "cpu"), str(ROOT / "tests" / "support")]  # for the imports below

from integrations_env import install  # noqa: E402
from publish import RESULTS, publish  # noqa: E402
from recovery_page import describe_machine  # noqa: E402
from recovery_sides import SideError, last_words, running, wait  # noqa: E402

STEPS, SAVE_EVERY, KILL_STEP = 16, 4, 6
KILLS = ("rank=1@step=6", "rank=0@step=11")
MEMORY = {"overlap": False, "tiers": [{"kind": "memory", "every_steps": 1}]}


@dataclass(frozen=True)
class Trainer:
    """A trainer, and the packages that it needs."""

    name: str
    title: str
    packages: tuple[str, ...]
    preload: tuple[str, ...]
    batch: int = 4
    environment: str = "integrations"
    optimizers: int = 1
    """Optimizers that step in each of the trainer's steps."""


TRAINERS = (
    Trainer("hugging_face", "Hugging Face Trainer", ("transformers",), ("transformers.trainer",)),
    Trainer("sft", "TRL, SFT", ("trl",), ("trl.SFTTrainer", "trl.SFTConfig")),
    Trainer("dpo", "TRL, DPO", ("trl",), ("trl.DPOTrainer", "trl.DPOConfig")),
    Trainer("grpo", "TRL, GRPO", ("trl",), ("trl.GRPOTrainer", "trl.GRPOConfig"), batch=8),
    Trainer("lora", "peft, LoRA", ("peft", "transformers"), ("transformers.trainer", "peft")),
    Trainer(
        "diffusion",
        "Accelerate and diffusers",
        ("accelerate", "diffusers"),
        ("accelerate", "diffusers.UNet2DModel", "diffusers.DDPMScheduler"),
        batch=8,
    ),
    Trainer("lightning", "Lightning", ("lightning",), ("lightning",), batch=16),
    Trainer("sentences", "sentence-transformers", ("sentence-transformers",), ("sentence_transformers",)),
    Trainer(
        "titan",
        "TorchTitan",
        ("torchtitan",),
        ("torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo"),
        environment="trainers",
        optimizers=2,
    ),
    Trainer("deepspeed", "DeepSpeed, ZeRO-2", ("deepspeed",), (), environment="deepspeed"),
)


def scripts_of(trainer: Trainer) -> tuple[Path, Path]:
    """Return the script with the trainer's own checkpoints, and the script with our adapter."""
    return HERE / "alone" / f"{trainer.name}.py", HERE / "ours" / f"{trainer.name}.py"


def changed_lines(before: str, after: str) -> int:
    """Return the number of lines of `after` that `before` lacks, without blank lines and docstrings of one line."""
    added = (line[2:].strip() for line in difflib.ndiff(before.splitlines(), after.splitlines()) if line[:2] == "+ ")
    return sum(1 for line in added if line and not line.startswith('"""'))


def prepare(trainer: Trainer, script: Path, folder: Path) -> Path:
    """Copy the script and the modules that it imports to `folder`. Returns the script's path there."""
    shutil.copy(HERE / "toy.py", folder)
    if trainer.name == "titan":
        for name in ("titan_on_cpu.py", "titan_inputs.py"):
            shutil.copy(ROOT / "tests" / "integrations" / name, folder)
        python = install(trainer.environment).with_name("python")
        subprocess.run([python, folder / "titan_inputs.py"], check=True, timeout=200)
    return Path(shutil.copy(script, folder / "train.py"))


def run_alone(trainer: Trainer, folder: Path) -> dict[str, Any]:
    """Run the script with the trainer's own checkpoints under torchrun, and kill rank 1 once.

    Returns:
        "seconds" from the kill to the end of the first new step on all ranks, and "steps_lost".

    Raises:
        SideError: the script has failed or has not resumed from its checkpoint.
    """
    script = prepare(trainer, scripts_of(trainer)[0], folder)
    python = install(trainer.environment).with_name("python")
    torchrun = [str(python), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = {"STAMPS": str(folder), "OUT": str(folder / "out"), "KILL": f"1@{KILL_STEP * trainer.optimizers}"}
    with running([*torchrun, "--max-restarts", "3", str(HERE / "stamped.py"), str(script)], folder, env) as process:
        wait(process, folder)
    return read_stamps(folder, trainer.optimizers)


def read_stamps(folder: Path, optimizers: int = 1) -> dict[str, Any]:
    """Return what `run_alone` returns, from the files that stamped.py has written to `folder`."""
    attempts = {
        (rank, attempt): [json.loads(line) for line in file.read_text().splitlines()]
        for rank in (0, 1)
        for attempt in (0, 1)
        if (file := folder / f"rank{rank}.attempt{attempt}.jsonl").exists()
    }
    if len(attempts) != 4 or list(folder.glob("*.attempt2.jsonl")):
        raise SideError(f"expected one restart of two ranks, found the files of {sorted(attempts)}")
    if attempts[1, 0][-1]["event"] != "kill":
        raise SideError(f"rank 1 ended before it was killed\n{last_words(folder)}")
    killed = attempts[1, 0][-1]["t"]
    resumed = {STEPS - attempts[rank, 1][-1]["step"] // optimizers for rank in (0, 1)}
    if resumed != {KILL_STEP // SAVE_EVERY * SAVE_EVERY}:
        raise SideError(f"the ranks resumed after the steps {sorted(resumed)}, not from the newest checkpoint")
    first = max(attempts[rank, 1][optimizers - 1]["t"] for rank in (0, 1))
    return {"seconds": round(first - killed, 2), "steps_lost": KILL_STEP - min(resumed)}


def run_ours(trainer: Trainer, folder: Path) -> dict[str, Any]:
    """Run the script with our adapter through two kills, and compare the run with a run without kills.

    Returns:
        "seconds" of each recovery, "steps_lost", "loss_equal" and "weights_equal".

    Raises:
        SideError: the job has failed, or has other faults than the two kills.
    """
    prepare(trainer, scripts_of(trainer)[1], folder)
    job: dict[str, Any] = {"name": trainer.name.replace("_", "-"), "script": "train.py", "workers_per_node": 2}
    job |= {"global_batch_size": trainer.batch, "chaos": {"compare": True}, "checkpoint": MEMORY}
    job |= {"env": {"OUT": str(folder / "out")}, "restart": {"preload": ["torch", *trainer.preload]}}
    (folder / "job.json").write_text(json.dumps(job))
    command = [str(install(trainer.environment)), "create-job", "-f", str(folder / "job.json"), "--target", "local"]
    command += ["--wait", "-o", "json", *(word for kill in KILLS for word in ("--kill", kill))]
    with running(command, folder, {"HPX_HOME": str(folder / "home")}) as process:
        wait(process, folder)
    report = json.loads((folder / "stdout").read_text())
    kills = tuple(f"rank={each['fault']['rank']}@step={each['fault']['step']}" for each in report["recoveries"])
    if kills != KILLS:
        raise SideError(f"the report has the faults {kills}, not {KILLS}")
    seconds = [round(each["seconds"], 2) for each in report["recoveries"]]
    return {"seconds": seconds} | {name: report[name] for name in ("steps_lost", "loss_equal", "weights_equal")}


def run_unchanged(trainer: Trainer, folder: Path) -> dict[str, Any]:
    """Run the script with the trainer's own checkpoints under `hp-ext run`, and kill rank 1 once.

    Returns:
        As `run_alone`.

    Raises:
        SideError: the job has failed, or has another fault than the kill.
    """
    script = prepare(trainer, scripts_of(trainer)[0], folder)
    command = [str(install(trainer.environment)), "run", "--workers", "2", "--kill", f"rank=1@step={KILL_STEP + 1}"]
    env = {"HPX_HOME": str(folder / "home"), "OUT": str(folder / "out")}
    with running([*command, "-o", "json", str(script)], folder, env) as process:
        wait(process, folder)
    recoveries = json.loads((folder / "stdout").read_text())["recoveries"]
    if len(recoveries) != 1:
        raise SideError(f"the report has {len(recoveries)} recoveries, not 1")
    return {"seconds": round(recoveries[0]["seconds"], 2), "steps_lost": recoveries[0]["steps_lost"]}


def measure(trainer: Trainer) -> dict[str, Any]:
    """Return the row of a trainer."""
    alone, ours = scripts_of(trainer)
    code = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
    python = install(trainer.environment).with_name("python")
    versions = subprocess.run([python, "-c", code, *trainer.packages], capture_output=True, text=True, check=True)
    row: dict[str, Any] = {"title": trainer.title, "load_average": round(os.getloadavg()[0], 1)}
    sides: dict[str, Callable[[Trainer, Path], dict[str, Any]]] = {"run": run_unchanged, "torchrun": run_alone}
    if ours.exists():
        row["changed_lines"] = changed_lines(alone.read_text(), ours.read_text())
        sides = {"ours": run_ours, **sides}
    row["versions"] = dict(zip(trainer.packages, versions.stdout.split(), strict=True))
    for side, run in sides.items():
        with tempfile.TemporaryDirectory(prefix="trainer-") as folder:
            start = time.monotonic()
            try:
                row[side] = run(trainer, Path(folder))
            except (SideError, subprocess.SubprocessError, LookupError, ValueError) as error:
                row[side] = {"error": str(error)}
        print(f"{trainer.name}, {side}, {time.monotonic() - start:.0f} s: {row[side]}", file=sys.stderr)
    return row


def is_good(row: dict[str, Any]) -> bool:
    """Return whether all runs succeeded, and the run with our adapter lost and changed nothing."""
    sides = [row[side] for side in ("ours", "run", "torchrun") if side in row]
    if any("error" in each for each in sides):
        return False
    ours = row.get("ours", {})
    return bool(ours.get("loss_equal", True) and ours.get("weights_equal", True) and ours.get("steps_lost", 0) == 0)


def page(document: dict[str, Any]) -> str:
    """Return the page docs/benchmarks/trainers.md."""
    rows, machine = document["trainers"], document["machine"]
    loads = [row["load_average"] for row in rows.values()]
    lines = [
        "# Other libraries' trainers",
        "",
        f"Each trainer makes {STEPS} steps on two ranks, on CPU with gloo. With our adapter, two ranks are killed with "
        f"`kill -9` (`{KILLS[0]}`, `{KILLS[1]}`), and the losses and weights are compared, bit for bit, with a run "
        f"without kills. Under torchrun, the trainer saves its own checkpoint every {SAVE_EVERY} steps, and rank 1 is "
        f"killed after step {KILL_STEP}; `hp-ext run` runs the same script without a change. Seconds count from the "
        "kill to the end of the first new step. The scripts of torchrun are in "
        "[alone](../../benchmarks/trainers/alone), the scripts with our adapter in "
        "[ours](../../benchmarks/trainers/ours). The column `lines` has the number of new and changed lines. "
        "Under `hp-ext run`, the steps since the newest *recorded* checkpoint count as lost. Lightning's checkpoints "
        "are not recorded ([run.md](../run.md#recorded-saves-and-loads)), although the script resumes from them.",
        "",
        "| trainer | version | lines | equal | steps lost | seconds | `hp-ext run`: steps lost, seconds | "
        "torchrun: steps lost, seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows.values():
        versions = ", ".join(f"{name} {number}" for name, number in row["versions"].items())
        cells = [row["title"], versions, *_cells_of_ours(row)]
        for other in (row["run"], row["torchrun"]):
            cells.append("failed" if "error" in other else f"{other['steps_lost']}, {other['seconds']:.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        f"{machine['cores']} cores ({machine['cpu']}), load average {min(loads)} to {max(loads)}, Python "
        f"{machine['python']}, torch {machine['torch']}, one round: `make test-trainers`.",
        "",
    ]
    return "\n".join(lines)


def _cells_of_ours(row: dict[str, Any]) -> list[str]:
    """Return the cells of the run with our adapter: changed lines, equal, steps lost, seconds."""
    if "ours" not in row:
        return ["no adapter", "", "", ""]
    ours = row["ours"]
    if "error" in ours:
        return [str(row["changed_lines"]), "failed", "", ""]
    equal = "yes" if ours["loss_equal"] and ours["weights_equal"] else "no"
    seconds = " and ".join(f"{each:.2f}" for each in ours["seconds"])
    return [str(row["changed_lines"]), equal, str(ours["steps_lost"]), seconds]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=[each.name for each in TRAINERS], help="run only these trainers")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results; other rows in it are kept")
    args = parser.parse_args()
    chosen = [each for each in TRAINERS if not args.only or each.name in args.only]
    for environment in sorted({each.environment for each in chosen}):
        install(environment)
    measured = {each.name: measure(each) for each in chosen}
    file = args.out / "trainers.json"
    rows = (json.loads(file.read_text())["trainers"] if file.exists() else {}) | measured
    rows = {each.name: rows[each.name] for each in TRAINERS if each.name in rows}
    document = {"about": "other libraries' trainers through kills", "machine": describe_machine(), "trainers": rows}
    publish(args.out, "trainers", document, page(document))
    print(page(document))
    bad = [name for name, row in measured.items() if not is_good(row)]
    if bad:
        print(f"failed: {', '.join(bad)}. The lines above have the reasons.", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
