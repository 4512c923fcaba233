"""Compare trainers and scripts through kills: moved to this project, unchanged, and under torchrun.

    python benchmarks/trainers/compare.py                  # all trainers
    python benchmarks/trainers/compare.py --only sft dpo

Each trainer of another library has two scripts, which make 16 steps on two ranks on CPU: `alone/NAME.py`, which saves
every 4 steps, and `ours/NAME.py`, unless there is no adapter. `alone/NAME.py` runs under torchrun and under `hp-ext
run`; each of the two runs has one kill, of rank 1. `ours/NAME.py` runs with two kills, and is compared with a run
without kills. The scripts of examples/19-move (`NAME_before.py` and `NAME.py`) are compared in the same way, also with
three ranks. Exits with 1 if a run fails, or if a moved script loses a step or ends with other losses or weights.
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
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MOVED = ROOT / "examples" / "19-move"
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
    """Environment with the packages; "" for this one."""
    optimizers: int = 1
    """Optimizers that step in each of the trainer's steps."""
    args: tuple[str, ...] = ()
    asynchronous: bool = False
    """Whether the script saves in the background. A kill may then interrupt its newest save."""
    kind: str = "trainer"
    """"trainer", or "script" for a training loop of one's own."""


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
    Trainer(
        "titan3",
        "TorchTitan 0.3",
        ("torchtitan", "torch"),
        ("torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo"),
        environment="titan3",
        optimizers=2,
    ),
    Trainer("deepspeed", "DeepSpeed, ZeRO-2", ("deepspeed",), ("deepspeed",), environment="deepspeed"),
)


def _script(name: str, title: str, *args: str, asynchronous: bool = False) -> Trainer:
    preload = ("torch.distributed.fsdp", "torch.distributed.tensor", "torch.utils.data")
    place = {"batch": 0, "environment": "", "kind": "script"}
    return Trainer(name, title, ("torch",), preload, args=args, asynchronous=asynchronous, **place)


SCRIPTS = (
    _script("nanogpt", "a GPT as in nanoGPT", "--max-iters", "16", "--eval-interval", "4"),
    _script("mingpt", "a trainer class as in minGPT-ddp", "--characters", "2304", "--epochs", "4"),
    _script("epochs", "epochs as in PyTorch's ImageNet example", "--samples", "64", "--epochs", "4"),
    _script("fsdp2", "FSDP2", "--steps", "16"),
    _script("dcp", "FSDP2 with asynchronous DCP", "--steps", "16", asynchronous=True),
    Trainer(
        "clm",
        "Accelerate as in run_clm_no_trainer",
        ("accelerate", "transformers"),
        ("accelerate", "transformers", "transformers.LlamaForCausalLM"),
        batch=0,
        kind="script",
    ),
)


def scripts_of(trainer: Trainer) -> tuple[Path, Path]:
    """Return the script with the trainer's own checkpoints, and the script that was moved to this project."""
    if not trainer.environment:
        return MOVED / f"{trainer.name}_before.py", MOVED / f"{trainer.name}.py"
    return HERE / "alone" / f"{trainer.name}.py", HERE / "ours" / f"{trainer.name}.py"


def changed_lines(before: str, after: str) -> int:
    """Return the number of lines of `after` that `before` lacks, without blank lines and docstrings of one line."""
    added = (line[2:].strip() for line in difflib.ndiff(before.splitlines(), after.splitlines()) if line[:2] == "+ ")
    return sum(1 for line in added if line and not line.startswith('"""'))


def hp_ext_of(trainer: Trainer) -> Path:
    """Return `hp-ext` of the trainer's environment."""
    return install(trainer.environment) if trainer.environment else Path(sys.executable).with_name("hp-ext")


def prepare(trainer: Trainer, script: Path, folder: Path) -> Path:
    """Copy the script and the modules that it imports to `folder`. Returns the script's path there."""
    shutil.copy(HERE / "toy.py", folder)
    if trainer.name in ("titan", "titan3"):
        for name in ("titan_on_cpu.py", "titan_inputs.py", "titan3_config.py"):
            shutil.copy(ROOT / "tests" / "integrations" / name, folder)
        python = install(trainer.environment).with_name("python")
        subprocess.run([python, folder / "titan_inputs.py"], check=True, timeout=200)
    return Path(shutil.copy(script, folder / "train.py"))


def alone_args(trainer: Trainer, folder: Path) -> list[str]:
    """Return the arguments of the script with its own checkpoints."""
    if trainer.environment:
        return []
    saves = ["--save-every", str(SAVE_EVERY)] if trainer.name in ("fsdp2", "dcp") else []
    return [*trainer.args, *saves, "--out", str(folder / "saved")]


def run_alone(trainer: Trainer, folder: Path) -> dict[str, Any]:
    """Run the script with the trainer's own checkpoints under torchrun, and kill rank 1 once.

    Returns:
        "seconds" from the kill to the end of the first new step on all ranks, and "steps_lost".

    Raises:
        SideError: the script has failed or has not resumed from its checkpoint.
    """
    script = prepare(trainer, scripts_of(trainer)[0], folder)
    python = hp_ext_of(trainer).with_name("python")
    torchrun = [str(python), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = {"STAMPS": str(folder), "OUT": str(folder / "out"), "KILL": f"1@{KILL_STEP * trainer.optimizers}"}
    words = [str(script), *alone_args(trainer, folder)]
    with running([*torchrun, "--max-restarts", "3", str(HERE / "stamped.py"), *words], folder, env) as process:
        wait(process, folder)
    return read_stamps(folder, trainer)


def read_stamps(folder: Path, trainer: Trainer) -> dict[str, Any]:
    """Return what `run_alone` returns, from the files that stamped.py has written to `folder`."""
    optimizers = trainer.optimizers
    attempts = {
        (rank, attempt): [json.loads(line) for line in file.read_text().splitlines()]
        for rank in (0, 1)
        for attempt in (0, 1)
        if (file := folder / f"rank{rank}.attempt{attempt}.jsonl").exists()
    }
    # gloo may abort a rank after its last step, at the end of the process; the third attempt then makes no step
    if len(attempts) != 4 or any(file.stat().st_size for file in folder.glob("*.attempt2.jsonl")):
        raise SideError(f"expected one restart of two ranks, found the files of {sorted(attempts)}")
    if attempts[1, 0][-1]["event"] != "kill":
        raise SideError(f"rank 1 ended before it was killed\n{last_words(folder)}")
    killed = attempts[1, 0][-1]["t"]
    resumed = {STEPS - attempts[rank, 1][-1]["step"] // optimizers for rank in (0, 1)}
    if resumed != {KILL_STEP // SAVE_EVERY * SAVE_EVERY} and not (trainer.asynchronous and resumed == {0}):
        raise SideError(f"the ranks resumed after the steps {sorted(resumed)}, not from the newest checkpoint")
    first = max(attempts[rank, 1][optimizers - 1]["t"] for rank in (0, 1))
    return {"seconds": round(first - killed, 2), "steps_lost": KILL_STEP - min(resumed)}


def run_ours(trainer: Trainer, folder: Path, ranks: int = 2) -> dict[str, Any]:
    """Run the moved script through two kills, and compare the run with a run without kills.

    Returns:
        "seconds" of each recovery, "steps_lost", "loss_equal" and "weights_equal".

    Raises:
        SideError: the job has failed, or has other faults than the two kills.
    """
    prepare(trainer, scripts_of(trainer)[1], folder)
    job: dict[str, Any] = {"name": trainer.name.replace("_", "-"), "script": "train.py", "workers_per_node": ranks}
    job |= {"args": list(trainer.args), "chaos": {"compare": True}, "checkpoint": MEMORY}
    job |= {"global_batch_size": trainer.batch} if trainer.batch else {}
    job |= {"env": {"OUT": str(folder / "out")}, "restart": {"preload": ["torch", *trainer.preload]}}
    (folder / "job.json").write_text(json.dumps(job))
    command = [str(hp_ext_of(trainer)), "create-job", "-f", str(folder / "job.json"), "--target", "local"]
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
    command = [str(hp_ext_of(trainer)), "run", "--workers", "2", "--kill", f"rank=1@step={KILL_STEP + 1}"]
    env = {"HPX_HOME": str(folder / "home"), "OUT": str(folder / "out")}
    words = ["-o", "json", str(script), *alone_args(trainer, folder)]
    with running([*command, *words], folder, env) as process:
        wait(process, folder)
    recoveries = json.loads((folder / "stdout").read_text())["recoveries"]
    if len(recoveries) != 1:
        raise SideError(f"the report has {len(recoveries)} recoveries, not 1")
    return {"seconds": round(recoveries[0]["seconds"], 2), "steps_lost": recoveries[0]["steps_lost"]}


def measure(trainer: Trainer) -> dict[str, Any]:
    """Return the row of a trainer."""
    alone, ours = scripts_of(trainer)
    code = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
    python = hp_ext_of(trainer).with_name("python")
    versions = subprocess.run([python, "-c", code, *trainer.packages], capture_output=True, text=True, check=True)
    row: dict[str, Any] = {"title": trainer.title, "load_average": round(os.getloadavg()[0], 1)}
    sides: dict[str, Callable[[Trainer, Path], dict[str, Any]]] = {"run": run_unchanged, "torchrun": run_alone}
    if ours.exists():
        row["changed_lines"] = changed_lines(alone.read_text(), ours.read_text())
        sides = {"ours": run_ours, **sides}
    if trainer.kind == "script":
        sides["ours_on_3"] = partial(run_ours, ranks=3)
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


def is_equal(run: dict[str, Any]) -> bool:
    """Return whether weights and losses were those of the run without kills. `loss_equal` is None without losses."""
    return "error" not in run and run["weights_equal"] is True and run["loss_equal"] is not False


def is_good(row: dict[str, Any]) -> bool:
    """Return whether all runs succeeded, and the run with our adapter lost and changed nothing."""
    sides = [row[side] for side in ("ours", "ours_on_3", "run", "torchrun") if side in row]
    if any("error" in each for each in sides):
        return False
    moved = [row[side] for side in ("ours", "ours_on_3") if side in row]
    return all(is_equal(each) and each["steps_lost"] == 0 for each in moved)


def page(document: dict[str, Any]) -> str:
    """Return the page docs/benchmarks/trainers.md."""
    rows, machine = document["trainers"], document["machine"]
    loads = [row["load_average"] for row in rows.values()]
    lines = [
        "# Other libraries' trainers, and scripts",
        "",
        f"Each trainer makes {STEPS} steps on two ranks, on CPU with gloo. With our adapter, two ranks are killed with "
        f"`kill -9` (`{KILLS[0]}`, `{KILLS[1]}`), and the losses and weights are compared, bit for bit, with a run "
        f"without kills. Under torchrun, the trainer saves its own checkpoint every {SAVE_EVERY} steps, and rank 1 is "
        f"killed after step {KILL_STEP}; `hp-ext run` runs the same script without a change. Seconds count from the "
        "kill to the end of the first new step. The scripts of torchrun are in "
        "[alone](../../benchmarks/trainers/alone), the scripts with our adapter in "
        "[ours](../../benchmarks/trainers/ours). The column `lines` has the number of new and changed lines in the "
        "script with our adapter. "
        "Under `hp-ext run`, the steps since the newest *recorded* checkpoint count as lost. Lightning's checkpoints "
        "are not recorded ([run.md](../run.md#recorded-saves-and-loads)), although the script resumes from them.",
        "",
        *_table(rows, "trainer", "trainer", {"ours": "equal"}),
        "",
        "## Scripts with a training loop of their own",
        "",
        "The first five scripts are shown in [Move your script](../move-your-script.md). The scripts with our "
        "adapter also run with three ranks, through the same two kills.",
        "",
        *_table(rows, "script", "script", {"ours": "equal on 2 ranks", "ours_on_3": "equal on 3 ranks"}),
        "",
        f"{machine['cores']} cores ({machine['cpu']}), load average {min(loads)} to {max(loads)}, Python "
        f"{machine['python']}, torch {machine['torch']}, one round: `make test-trainers`.",
        "",
    ]
    return "\n".join(lines)


def _table(rows: dict[str, dict[str, Any]], kind: str, first: str, sides: dict[str, str]) -> list[str]:
    """Return the lines of the table of a kind.

    Args:
        sides: for each side of which a column says whether the run was equal, the heading of the column.
    """
    head = [first, "version", "lines", *sides.values(), "steps lost", "seconds"]
    head += ["`hp-ext run`: steps lost, seconds", "torchrun: steps lost, seconds"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, row in rows.items():
        if KINDS[name] != kind:
            continue
        versions = ", ".join(f"{package} {number}" for package, number in row["versions"].items())
        cells = [row["title"], versions, *_cells_of_ours(row, sides)]
        for other in (row["run"], row["torchrun"]):
            cells.append("failed" if "error" in other else f"{other['steps_lost']}, {other['seconds']:.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _cells_of_ours(row: dict[str, Any], sides: Iterable[str]) -> list[str]:
    """Return the cells of the moved script: changed lines, equal on each side, steps lost, seconds."""
    if "ours" not in row:
        return ["no adapter", *("" for _ in sides), "", ""]
    runs = [row[side] for side in sides]
    cells = [str(row["changed_lines"])]
    for run in runs:
        cells.append("failed" if "error" in run else "yes" if is_equal(run) else "no")
    if "error" in runs[0]:
        return [*cells, "", ""]
    return [*cells, str(runs[0]["steps_lost"]), " and ".join(f"{each:.2f}" for each in runs[0]["seconds"])]


KINDS = {each.name: each.kind for each in (*TRAINERS, *SCRIPTS)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(KINDS), help="run only these trainers")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results; other rows in it are kept")
    args = parser.parse_args()
    chosen = [each for each in (*TRAINERS, *SCRIPTS) if not args.only or each.name in args.only]
    for environment in sorted({each.environment for each in chosen} - {""}):
        install(environment)
    measured = {each.name: measure(each) for each in chosen}
    file = args.out / "trainers.json"
    rows = (json.loads(file.read_text())["trainers"] if file.exists() else {}) | measured
    rows = {each.name: rows[each.name] for each in (*TRAINERS, *SCRIPTS) if each.name in rows}
    document = {"about": "other libraries' trainers through kills", "machine": describe_machine(), "trainers": rows}
    publish(args.out, "trainers", document, page(document))
    print(page(document))
    bad = [name for name, row in measured.items() if not is_good(row)]
    if bad:
        print(f"failed: {', '.join(bad)}. The lines above have the reasons.", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
