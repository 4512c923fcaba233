"""Jobs of scripts in an environment of real trainers, with ranks that are killed on the way."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from integrations_env import hp_ext

SCRIPTS = Path(__file__).parents[1] / "integrations"
MEMORY = {"kind": "memory", "every_steps": 1}
AT_ONCE = {"overlap": False, "tiers": [MEMORY]}
"""Policy that copies a step before the next step begins. Without it, a rank that dies while it copies its shard loses a
step."""
KILLS = ("rank=1@step=5", "rank=0@step=11")


def run_killed(
    folder: Path,
    script: str,
    *args: str,
    batch: int,
    kills: tuple[str, ...] = KILLS,
    environment: str = "integrations",
    **options: Any,
) -> dict[str, Any]:
    """The report of a job with two ranks, which was compared with the same job without kills and is equal to it.

    The script may write to the folder that SAMPLES names, which is `folder`. `options`: other keys of the spec."""
    shutil.copy(SCRIPTS / script, folder)
    name = "-".join((Path(script).stem, *args)).replace("_", "-")
    job: dict[str, Any] = {"name": name, "script": script, "args": list(args), "workers_per_node": 2}
    job |= {"global_batch_size": batch, "chaos": {"compare": True}, "env": {"SAMPLES": str(folder)}}
    job |= {"checkpoint": {"tiers": [MEMORY]}} | options
    (folder / "job.json").write_text(json.dumps(job))
    command = [hp_ext(environment), "create-job", "-f", folder / "job.json", "--target", "local", "--wait"]
    command += ["-o", "json", *(word for kill in kills for word in ("--kill", kill))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    seen = [f"rank={each['fault']['rank']}@step={each['fault']['step']}" for each in report["recoveries"]]
    assert seen == list(kills)
    if job["checkpoint"].get("overlap") is False:
        assert report["steps_lost"] == 0
    assert report["loss_equal"]
    assert report["weights_equal"]
    return report


def written(folder: Path) -> list[Any]:
    """All that the ranks wrote to their files `samples-RANK.jsonl`."""
    return [json.loads(line) for path in folder.glob("samples-*.jsonl") for line in path.read_text().splitlines()]
