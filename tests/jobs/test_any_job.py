"""Any job that Slurm or SageMaker accept renders, and the render is what they take: parsed again, and complete."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import round_trip
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from job_configs import ANY_TEXT, ENV, LABEL, jobs

from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.config.job.runtime import RuntimeConfig
from hyperpod_ext.config.job.sagemaker import SageMaker
from hyperpod_ext.config.job.slurm import Slurm
from hyperpod_ext.jobs.contract.launcher_text import for_torchrun
from hyperpod_ext.jobs.import_any import import_file
from hyperpod_ext.jobs.plan import find_problems, make_plan
from hyperpod_ext.jobs.sagemaker.container import ENV_SPEC
from hyperpod_ext.jobs.sagemaker.request import training_job_request
from hyperpod_ext.jobs.sagemaker.strict import check_request
from hyperpod_ext.runtime.container_sagemaker import join_parts

LINE = ANY_TEXT.filter(lambda text: text and not set("\n\r") & set(text))

SLURM = st.fixed_dictionaries(
    {},
    optional={
        "account": LABEL,
        "constraint": st.sampled_from(["p5", "p5&efa", "[rack1|rack2]"]),
        "exclude": st.sampled_from(["n1", "n[1-3,7]"]),
        "gres": st.just("gpu:8"),
        "exclusive": st.booleans(),
        "container": st.just("pyxis"),
        "auto_resume": st.booleans(),
        "requeue": st.booleans(),
        "python": LINE,
        "setup": st.lists(LINE.map(lambda text: f"true {shlex.quote(text)}"), max_size=2).map(tuple),
        "runs": LINE.filter(lambda text: ":" not in text),
        "sbatch": st.dictionaries(st.sampled_from(["mail-type", "nice"]), st.sampled_from(["", "END"]), max_size=2),
    },
)
SAGEMAKER = st.fixed_dictionaries(
    {
        "role": st.just("arn:aws:iam::123456789012:role/training"),
        "output": st.just("s3://bucket/out/"),
        "region": st.just("us-west-2"),
    },
    optional={
        "code": st.just("s3://bucket/code.tar.gz"),
        "volume_gib": st.integers(1, 16384),
        "keep_alive_s": st.integers(1, 21600),
        "spot": st.booleans(),
        "max_pending_s": st.integers(1800, 2419200),
        "compress_output": st.booleans(),
        "checkpoint_uri": st.just("s3://bucket/sync"),
        "network_isolation": st.booleans(),
        "encrypt_traffic": st.booleans(),
        "profiler": st.booleans(),
        "remote_debug": st.booleans(),
        "infra_check": st.booleans(),
        "install": st.lists(st.sampled_from(["a", "b==1", "c[d,e]>=2"]), max_size=2).map(tuple),
        "tags": st.dictionaries(LABEL, LABEL, max_size=2),
        "secret": LABEL,
    },
)
MORE_ENV = st.dictionaries(ENV, ANY_TEXT, max_size=3)


def for_slurm(job: JobConfig, section: dict[str, object]) -> JobConfig:
    volumes = tuple(volume for volume in job.volumes if volume.kind == "host")
    return job.model_copy(
        update={
            "mode": "plain" if job.mode == "plain" else "ours",
            "elastic": None,
            "node_groups": (),
            "volumes": volumes,
            "slurm": Slurm(**section),
        }
    )


def for_sagemaker(job: JobConfig, section: dict[str, object]) -> JobConfig:
    tiers = tuple(tier for tier in job.checkpoint.tiers if tier.kind != "file")
    args = tuple(text for text in job.args if "\n" not in text)
    return job.model_copy(
        update={
            "mode": "ours",
            "elastic": None,
            "node_groups": (),
            "spares": 0,
            "args": args,
            "checkpoint": job.checkpoint.model_copy(update={"tiers": tiers}),
            "resources": job.resources.model_copy(update={"instance_type": "ml.p5.48xlarge"}),
            "sagemaker": SageMaker(**section),
        }
    )


def slurm_takes(job: JobConfig, folder: Path) -> None:
    """The shell parses it, options stand before the first command, and the node gets settings and environment whole."""
    files = make_plan(job, target="hyperpod-slurm").files
    script = files["job.sbatch"]
    assert f"#SBATCH --nodes={job.nodes + job.spares}\n" in script.partition("\nfirst_host")[0]
    round_trip.goes_round(job, "hyperpod-slurm", dict(files))
    python = shlex.quote(job.slurm.python)
    assert f"exec {python} -m" in script
    # the node's own part, with an interpreter and a folder that are there
    shown = folder / "shown"
    script = script.replace(f"exec {python} -m", f"exec {folder}/show -m").replace(
        f"cd {shlex.quote(job.working_dir or '')}\n", "cd /\n"
    )
    env = {"PATH": "/usr/bin:/bin", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "1"}
    env |= {"SLURM_STEP_NODELIST": "n[1-9]", "HPX_JOB_DIR": str(folder), "HPX_SOURCE_DIR": "/", "SHOWN": str(shown)}
    done = subprocess.run(["sh", "-c", script, "sh", "node"], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + (folder / "0.0/logs/node0.log").read_text()
    arguments, _, variables = shown.read_bytes().rpartition(b"\0\0\n")  # an argument may be the same
    words = [job.script, *job.args]
    seen_words = arguments.decode().split("\0")[-len(words) :]
    assert seen_words == (for_torchrun(words) if job.mode == "plain" else words)
    seen = dict(one.split("=", 1) for one in variables.decode().split("\0") if one)
    assert {name: seen[name] for name in job.env} == job.env
    if job.mode == "ours":
        assert RuntimeConfig.model_validate_json(seen["HPX_RUNTIME"]) == RuntimeConfig.of(job)


def sagemaker_takes(job: JobConfig, _folder: Path) -> None:
    """The service's own model takes it, and the container gets settings and environment whole."""
    files = make_plan(job, target="sagemaker").files
    request = json.loads(files["create_training_job.json"])
    assert check_request("CreateTrainingJob", request) == []
    assert request["Environment"].items() >= job.env.items()
    round_trip.goes_round(job, "sagemaker", dict(files))
    assert all(not name.startswith(ENV_SPEC) for name in job.env)
    for name in [name for name in request["Environment"] if name.startswith(ENV_SPEC)]:
        del request["Environment"][name]  # then what it says is read, and comes to the same request
    again = training_job_request(import_file(json.dumps(request), "request.json").job)
    again["Environment"] = {name: text for name, text in again["Environment"].items() if not name.startswith(ENV_SPEC)}
    assert again == request
    assert RuntimeConfig.model_validate_json(join_parts(request["Environment"])) == RuntimeConfig.of(job)
    assert tuple(request["AlgorithmSpecification"].get("ContainerArguments", ())) == job.args


Fit = Callable[[JobConfig, dict[str, object]], JobConfig]
Takes = Callable[[JobConfig, Path], None]
TARGETS: dict[str, tuple[st.SearchStrategy[dict[str, object]], Fit, Takes]] = {
    "hyperpod-slurm": (SLURM, for_slurm, slurm_takes),
    "sagemaker": (SAGEMAKER, for_sagemaker, sagemaker_takes),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    show = tmp_path / "show"
    show.write_text('#!/bin/sh\n{ printf "%s\\0" "$@" | head -c -1; printf "\\0\\0\\n"; env -0; } >"$SHOWN"\n')
    show.chmod(0o755)
    return tmp_path


def count_accepted(target: str, folder: Path, examples: int) -> int:
    section, fit, takes = TARGETS[target]
    accepted = 0

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(job=jobs(), options=section, env=MORE_ENV)
    def check(job: JobConfig, options: dict[str, object], env: dict[str, str]) -> None:
        nonlocal accepted
        wanted = fit(job.model_copy(update={"env": env}), options)
        if not find_problems(wanted, None, target):
            takes(wanted, folder)
            accepted += 1

    check()
    return accepted


@pytest.mark.parametrize("target", TARGETS)
def test_any_job_is_rendered_and_read_back(target: str, folder: Path) -> None:
    assert count_accepted(target, folder, 60) >= 20


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("jobs", [250, pytest.param(1000, marks=pytest.mark.soak)])
def test_many_jobs_are_rendered_and_read_back(target: str, jobs: int, folder: Path) -> None:
    accepted = count_accepted(target, folder, jobs * 13 // 10)
    print(f"{target}: {accepted} jobs rendered and read back")
    assert accepted >= jobs
