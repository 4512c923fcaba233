"""From an sbatch file back to a JobConfig: ours letter for letter, others as far as their options say it. Pure."""

from __future__ import annotations

import re
import shlex
from typing import Any

from pydantic import ValidationError

from hyperpod_ext.config.files.document import dotted
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.errors import ConfigError, Problem
from hyperpod_ext.submit.kubernetes.imports.import_pod import place_script
from hyperpod_ext.submit.slurm.script import NOTE, OWN_OPTIONS, job_script

_SHORT = {"J": "job-name", "N": "nodes", "p": "partition", "q": "qos", "t": "time", "A": "account", "o": "output"}
_TO_SLURM = {"account", "reservation", "constraint", "exclude", "gres"}
_QUIET = OWN_OPTIONS | {"mem", "error"}
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?:(?P<hours>\d+):)?(?P<minutes>\d+)(?::(?P<seconds>\d+))?")


def import_sbatch(text: str, source: str) -> tuple[JobConfig, list[str]]:
    """The job, and the options of the file that a JobConfig cannot say.

    Raises:
        ConfigError: what it says is no valid job; names every field.
    """
    left: list[str] = []
    for line in text.splitlines():
        if line.startswith(NOTE):
            job = _valid(line.removeprefix(NOTE), source)
            if job_script(job) == text:
                return job, []
            left.append("the spec in the file: the file was changed after it was written")
    document: dict[str, Any] = {"mode": "plain", "slurm": {}}
    for name, value in _options(text):
        _take(document, name, value, left)
    _commands(text, document, left)
    document.setdefault("name", "job")
    document.setdefault("script", "train.py")
    place_script(document, left)
    try:
        return JobConfig.model_validate(document, strict=False), left
    except ValidationError as error:
        problems = [Problem(str(one["msg"]), path=dotted(one["loc"]), source=source) for one in error.errors()]
        raise ConfigError(problems) from None


def _valid(note: str, source: str) -> JobConfig:
    try:
        return JobConfig.model_validate_json(note)
    except ValidationError as error:
        raise ConfigError([Problem(f"holds a spec of another version: {error}", source=source)]) from None


def _options(text: str) -> list[tuple[str, str]]:
    found = []
    for line in text.splitlines():
        if line and not line.startswith("#"):
            break
        words = shlex.split(line.removeprefix("#SBATCH"), comments=True) if line.startswith("#SBATCH") else []
        while words:
            word = words.pop(0)
            if word.startswith("--"):
                name, equals, value = word[2:].partition("=")
            else:
                name, equals, value = _SHORT.get(word[1:2], word[1:2]), word[2:], word[2:]
            if not equals and words and not words[0].startswith("-"):
                value = words.pop(0)
            found.append((name, value))
    return found


def _take(document: dict[str, Any], name: str, value: str, left: list[str]) -> None:
    slurm = document["slurm"]
    match name:
        case "job-name":
            document["name"] = re.sub(r"[^a-z0-9-]", "-", value.lower()).strip("-")
        case "nodes":
            document["nodes"] = int(value.partition("-")[0])
        case "partition":
            document.setdefault("scheduling", {})["queue"] = value
        case "qos":
            document.setdefault("scheduling", {})["priority"] = value
        case "time" if (match := _TIME.fullmatch(value)) is not None:
            document["timeouts"] = {"run_s": _seconds(match)}
        case "gpus-per-node" | "gpus-per-task":
            document["workers_per_node"] = int(value.rpartition(":")[2])
        case "cpus-per-task":
            document.setdefault("resources", {})["cpus"] = float(value)
        case "exclusive":
            slurm["exclusive"] = True
        case "requeue" | "no-requeue":
            slurm["requeue"] = name == "requeue"
        case _ if name in _TO_SLURM:
            slurm[name] = value
        case _ if name in _QUIET:
            left.append(f"--{name}={value}: the rendered file sets this itself")
        case _:
            slurm.setdefault("sbatch", {})[name] = value


def _seconds(match: re.Match[str]) -> int:
    """As sbatch counts: 90 is minutes, 1:30 minutes and seconds, 1:30:00 with hours, 2-1 days and hours."""
    days, hours, minutes, seconds = (int(match[name] or 0) for name in ("days", "hours", "minutes", "seconds"))
    if match["days"] is not None and match["hours"] is None:
        return days * 86400 + minutes * 3600 + seconds * 60
    if match["hours"] is not None and match["seconds"] is None:  # minutes:seconds
        return hours * 60 + minutes
    return days * 86400 + hours * 3600 + minutes * 60 + seconds


def _commands(text: str, document: dict[str, Any], left: list[str]) -> None:
    """What srun starts: its image, how many workers, and the script."""
    joined = text.replace("\\\n", " ")
    for line in joined.splitlines():
        if "srun" not in line or line.startswith("#"):
            continue
        document["slurm"]["auto_resume"] = "--auto-resume=1" in line
        if image := re.search(r"--container-image[= ](\S+)", line):
            document["image"] = image[1].strip("'\"")
        if workers := re.search(r"--nproc[-_]per[-_]node[= ](\d+)", line):
            document["workers_per_node"] = int(workers[1])
        if script := re.search(r"(\S+\.py)(.*)$", line):
            document["script"] = script[1]
            document["args"] = tuple(script[2].split())
    left.append("the commands of the file, but for what srun starts")
