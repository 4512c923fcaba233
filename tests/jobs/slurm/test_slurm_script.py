"""The sbatch file: what it says, what of a spec it refuses, and that it is right for every spec."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from string import Template
from typing import Any

import pytest

from hyperpod_ext.config.files.load import load
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.config.job.runtime import RuntimeConfig
from hyperpod_ext.errors import UnsupportedError
from hyperpod_ext.jobs.contract.render import check_shell
from hyperpod_ext.jobs.plan import make_plan
from hyperpod_ext.jobs.slurm.script import job_script

TARGET = "hyperpod-slurm"
NASTY = 'it\'s "$HOME" `id` $(id) \\ two\nlines; HPX\n#SBATCH --nodes=9'


def job(**fields: Any) -> JobConfig:
    return JobConfig.model_validate_json(json.dumps({"name": "a", "script": "train.py"} | fields))


def options_of(script: str) -> list[str]:
    """As sbatch reads them: up to the first line that is neither blank nor a comment."""
    found = []
    for line in script.splitlines():
        if line and not line.startswith("#"):
            break
        found += [line.removeprefix("#SBATCH ")] if line.startswith("#SBATCH") else []
    return found


def step_of(script: str) -> str:
    (line,) = [line.strip() for line in script.splitlines() if line.strip().startswith("srun ")]
    return line


def run_node(script: str, folder: Path, **variables: str) -> dict[str, Any]:
    """Run the node's part with an interpreter that only shows what it was given."""
    (folder / "show.py").write_text(
        "import json, os, sys\n"
        "json.dump({'args': sys.argv[1:], 'env': dict(os.environ), 'cwd': os.getcwd()}, open('shown.json', 'w'))\n"
    )
    python = folder / "python3"
    python.write_text(f"""#!/bin/sh\nexec '{shutil.which("python3")}' '{folder}/show.py' "$@"\n""")
    python.chmod(0o755)
    (folder / "job.sbatch").write_text(script)
    env = {
        "PATH": f"{folder}:/usr/bin:/bin",
        "SLURM_PROCID": "1",
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_ID": "17",
        "SLURM_STEP_NODELIST": "ip-10-1-[2,4-7],other",
        "HPX_JOB_DIR": str(folder),
        "HPX_SOURCE_DIR": str(folder),
    } | variables
    done = subprocess.run(["sh", str(folder / "job.sbatch"), "node"], env=env, capture_output=True, text=True)
    log = folder / "0.0" / "logs" / "node1.log"
    assert done.returncode == 0, done.stderr + (log.read_text() if log.exists() else "")
    shown: dict[str, Any] = json.loads((folder / "shown.json").read_text())
    return shown


def test_what_is_rendered_for_the_example_is_what_the_repository_shows(
    golden: Callable[[Path, str], None], root: Path
) -> None:
    example = root / "examples" / "05-slurm"
    spec = load(JobConfig, example / "job.yaml")
    for name, text in make_plan(spec, target=TARGET, source_dir=example).files.items():
        golden(example / "rendered" / TARGET / name, text)


def test_the_first_spec_of_the_readme_renders_for_slurm(root: Path) -> None:
    spec = load(JobConfig, root / "examples" / "01-local" / "job.yaml", ["chaos=null"])
    assert "--auto-resume=1" in step_of(make_plan(spec, target=TARGET).files["job.sbatch"])


def test_a_node_starts_the_agent_with_settings_and_environment_intact(tmp_path: Path) -> None:
    spec = job(nodes=2, workers_per_node=3, args=["--text", NASTY], env={"NASTY": NASTY, "EMPTY": ""})
    shown = run_node(job_script(spec), tmp_path)
    assert shown["args"] == [
        *("-m", "hyperpod_ext.runtime.agent", "--nnodes", "2", "--nproc-per-node", "3", "--node-rank", "1"),
        *("--rdzv-endpoint", "ip-10-1-2:20017", "--", "train.py", "--text", NASTY),
    ]
    assert (shown["env"]["NASTY"], shown["env"]["EMPTY"]) == (NASTY, "")
    assert RuntimeConfig.model_validate_json(shown["env"]["HPX_RUNTIME"]) == RuntimeConfig.of(spec)
    assert shown["env"]["HPX_RUN_DIR"] == f"{tmp_path}/0.0"


def test_what_is_in_the_environment_never_becomes_an_option() -> None:
    script = job_script(job(env={"NASTY": NASTY}, args=[NASTY]))
    assert "#SBATCH --nodes=9" in script
    assert options_of(script) == options_of(job_script(job()))


def test_setup_lines_run_before_the_job_and_stop_it_when_they_fail(tmp_path: Path) -> None:
    shown = run_node(job_script(job(slurm={"setup": ["SEEN=yes", "export SEEN"]})), tmp_path)
    assert shown["env"]["SEEN"] == "yes"
    with pytest.raises(AssertionError):
        run_node(job_script(job(slurm={"setup": ["false"]})), tmp_path)


def test_mode_plain_starts_torchrun(tmp_path: Path) -> None:
    shown = run_node(job_script(job(mode="plain", nodes=2, rendezvous={"port": 29500})), tmp_path)
    assert shown["args"][:2] == ["-m", "torch.distributed.run"]
    assert "ip-10-1-2:29500" in shown["args"]
    assert "HPX_RUNTIME" not in shown["env"]
    assert shown["env"]["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] == "rank ${rank} | "


def test_arguments_with_dollars_pass_torchrun_as_they_were_written(tmp_path: Path) -> None:
    text = ["$A", "${local_rank}", "$$"]
    plain = run_node(job_script(job(mode="plain", args=text)), tmp_path)["args"]
    assert [Template(word).safe_substitute(local_rank="0") for word in plain[-3:]] == text
    assert run_node(job_script(job(args=text)), tmp_path)["args"][-3:] == text


HOST_LISTS = {
    "hpx1": "hpx1",
    "a,b,c": "a",
    "ip-10-1-[2,4-7],other": "ip-10-1-2",
    "n[007-012]": "n007",
    "n[3,1]x": "n3x",
    "other,n[1-2]": "other",
    "rack[1-2]node[03-04]": "rack1node03",
    "a[1-2],b[1-2]": "a1",
}


@pytest.mark.parametrize(("hosts", "first"), HOST_LISTS.items())
def test_the_first_host_of_a_list_is_found_without_slurm(tmp_path: Path, hosts: str, first: str) -> None:
    shown = run_node(job_script(job(nodes=2)), tmp_path, SLURM_STEP_NODELIST=hosts)
    assert shown["env"]["HPX_RDZV_ENDPOINT"] == f"{first}:20017"


def test_every_field_that_slurm_has_becomes_its_option() -> None:
    spec = job(
        nodes=4,
        spares=1,
        resources={"cpus": 7.5, "memory_mib": 1000},
        scheduling={"queue": "dev", "priority": "high"},
        timeouts={"run_s": 90061},
        checkpoint={"tiers": [{"kind": "file", "path": "/fsx"}], "grace_s": 30.0},
        slurm={
            "account": "team",
            "reservation": "r",
            "constraint": "p5&efa",
            "exclude": "n[1-2]",
            "gres": "gpu:8",
            "requeue": False,
            "sbatch": {"mail-type": "END", "contiguous": ""},
        },
    )
    assert options_of(job_script(spec)) == [
        *("--job-name=a", "--nodes=5", "--ntasks-per-node=1", "--exclusive", "--partition=dev", "--qos=high"),
        *("--account=team", "--reservation=r", "--constraint=p5&efa", "--exclude=n[1-2]", "--gres=gpu:8"),
        *("--cpus-per-task=8", "--mem=1000M", "--time=1-01:02:00", "--signal=TERM@35", "--no-requeue", "--no-kill"),
        *("--output=%x-%j.out", "--open-mode=append", "--comment=hyperpod_ext", "--mail-type=END", "--contiguous"),
    ]
    assert "--auto-resume" not in step_of(job_script(job(slurm={"auto_resume": False})))


def test_containers_see_the_folders_of_the_job_and_the_volumes() -> None:
    volume = {"kind": "host", "host_path": "/fsx", "path": "/data", "read_only": True}
    step = step_of(job_script(job(image="a b.sqsh", volumes=[volume])))
    assert "--container-image='a b.sqsh'" in step
    own = '"$HPX_SOURCE_DIR:$HPX_SOURCE_DIR","$HPX_RUNS_DIR:$HPX_RUNS_DIR"'
    assert f"--container-mounts={own},/fsx:/data:ro " in step


def test_containers_see_the_folder_of_a_tier_on_the_nodes_disk() -> None:
    tiers = [{"kind": "memory"}, {"kind": "disk", "path": "/opt/dlami/nvme/ck"}]
    disk = {"checkpoint": {"tiers": tiers}, "image": "a.sqsh"}
    assert ",/opt/dlami/nvme/ck:/opt/dlami/nvme/ck " in step_of(job_script(job(**disk)))
    volume = {"kind": "host", "host_path": "/opt/dlami/nvme", "path": "/opt/dlami/nvme"}
    assert "nvme/ck" not in step_of(job_script(job(**disk, volumes=[volume])))


def test_enroot_starts_the_same_file_inside_the_image(tmp_path: Path) -> None:
    enroot = tmp_path / "enroot"
    enroot.write_text(
        '#!/bin/sh\nprintf "%s\\n" "$@" >"$HPX_JOB_DIR/enroot.args"\nexec sh "$HPX_JOB_DIR/job.sbatch" inside\n'
    )
    enroot.chmod(0o755)
    spec = job(image="/fsx/it's.sqsh", slurm={"container": "enroot"})
    shown = run_node(job_script(spec), tmp_path, HPX_RUNS_DIR=str(tmp_path))
    arguments = (tmp_path / "enroot.args").read_text().splitlines()
    assert arguments[-4:] == ["/fsx/it's.sqsh", "sh", f"{tmp_path}/job.sbatch", "inside"]
    assert {"HPX_NODE_RANK", "HPX_SECRET_FILE", "SLURM_JOB_ID", f"{tmp_path}:{tmp_path}"} <= set(arguments)
    assert shown["args"][-1] == "train.py"


REFUSED = {
    "slurm.sbatch.nodes": {"slurm": {"sbatch": {"nodes": "3"}}},
    "image": {"image": "repo/image:1", "slurm": {"container": "enroot"}},
    "volumes.0": {"volumes": [{"kind": "claim", "path": "/a", "claim": "b"}]},
    "node_groups": {"node_groups": [{"name": "a", "nodes": 1}]},
    "mode": {"mode": "aws-checkpointless"},
    "slurm.setup": {"slurm": {"setup": ["echo ok", "echo it's ready"]}},
    "chaos": {"chaos": {"faults": [{"rank": 0, "step": 1}]}},
}


@pytest.mark.parametrize(("path", "fields"), REFUSED.items())
def test_what_slurm_cannot_do_is_refused_with_its_field(path: str, fields: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError) as caught:
        make_plan(job(**fields), target=TARGET)
    assert path in [problem.path for problem in caught.value.problems]
    assert all(problem.hint for problem in caught.value.problems)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"slurm": {"gres": "gpu:8"}}, "requeues a job with GRES"),
        ({}, "restarts from step 0"),
        ({"volumes": [{"kind": "host", "host_path": "/a", "path": "/b"}]}, "volumes are ignored"),
    ],
)
def test_what_will_be_otherwise_is_said(fields: dict[str, Any], said: str) -> None:
    assert said in "\n".join(make_plan(job(**fields), target=TARGET).warnings)


def test_an_elastic_job_outlives_the_loss_of_a_node() -> None:
    step = step_of(script := job_script(job(nodes=2, elastic={"min_nodes": 1, "max_nodes": 2})))
    assert {"--nodes=2", "--no-kill"} <= set(options_of(script))
    assert "--no-kill" in step.split()
    assert '"elastic":{"min_nodes":1,"max_nodes":2' in script


def test_spares_are_further_nodes_and_the_loss_of_one_ends_nothing() -> None:
    step = step_of(script := job_script(job(nodes=2, spares=1)))
    assert {"--nodes=3", "--no-kill"} <= set(options_of(script))
    assert {"--no-kill", "--kill-on-bad-exit=0"} <= set(step.split())
    check_shell("job.sbatch", script)
