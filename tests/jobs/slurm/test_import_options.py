"""sbatch files in all spellings: options by their letters, steps in shells, and every way that exports a variable."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from hyperpod_ext.errors import ConfigError
from hyperpod_ext.jobs.import_any import import_file
from hyperpod_ext.jobs.plan import find_problems
from hyperpod_ext.jobs.slurm.script import job_script

pytest.importorskip("tree_sitter_bash")
STEP = "srun torchrun --nproc_per_node=8 /fsx/t.py"


def sbatch(*lines: str, options: str = "-N 2") -> str:
    return "\n".join(["#!/bin/bash", f"#SBATCH {options}", *lines, ""])


def test_options_are_known_by_their_letters() -> None:
    found = import_file(sbatch(STEP, options="-N2 -c 12 -w n[1-2] -x n3 -C p5 -d afterok:1 -G 16 -n 2"), "a.sbatch")
    job = found.job
    assert (job.nodes, job.resources.cpus, job.slurm.exclude, job.slurm.constraint) == (2, 12, "n3", "p5")
    assert job.slurm.sbatch == {"nodelist": "n[1-2]", "dependency": "afterok:1", "gpus": "16"}
    assert found.left_out == []
    assert "#SBATCH --cpus-per-task=12\n" in job_script(job)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("partition", "p4,p5"),
        ("qos", "a,b"),
        ("reservation", "r1,r2"),
        ("account", "a/b"),
        ("exclude", "./hosts"),
        ("time", "0"),
    ],
)
def test_a_value_that_no_field_takes_stays_an_option_of_sbatch(option: str, value: str) -> None:
    found = import_file(sbatch(STEP, options=f"-N 2 --{option}={value}"), "a.sbatch")
    assert (found.job.slurm.sbatch, found.left_out) == ({option: value}, [])
    assert f"#SBATCH --{option}={value}\n" in job_script(found.job)


def test_options_that_the_rendered_file_has_its_own_of_are_named() -> None:
    found = import_file(sbatch(STEP, options="--nodes=2-4 --signal=B:USR1@60 --export=ALL,A=1"), "a.sbatch")
    assert (found.job.nodes, found.job.env) == (2, {"A": "1"})
    assert [one.partition(": ")[2].partition(":")[0] for one in found.left_out] == [
        "--nodes=2-4",
        "--signal=B",
        "--export=ALL,A=1",
    ]


def test_a_job_of_several_kinds_of_nodes_is_refused() -> None:
    with pytest.raises(ConfigError, match="several kinds of nodes"):
        import_file(sbatch("#SBATCH hetjob", "#SBATCH -N 1", STEP), "a.sbatch")


@pytest.mark.parametrize(
    "step",
    [
        "srun bash -c 'cd /w && export A=1 && torchrun --nproc_per_node=8 t.py --n $((SLURM_NNODES * 8))'",
        'N="torchrun --nproc_per_node=8"\nexport A=1\nsrun bash -c "cd /w; $N t.py --n 16"',
    ],
)  # fmt: skip
def test_a_step_inside_a_shell_is_read(step: str) -> None:
    job = import_file(sbatch(step), "a.sbatch").job
    assert (job.script, job.args, job.env, job.working_dir) == ("t.py", ("--n", "16"), {"A": "1"}, "/w")
    assert job.workers_per_node == 8


def test_every_way_to_export_is_one() -> None:
    lines = ["declare -x A=1", "B=2; export B", "set -a; C=3; set +a; D=4", f"E=5 {STEP}"]
    assert import_file(sbatch(*lines), "a.sbatch").job.env == {"A": "1", "B": "2", "C": "3", "E": "5"}


def test_processes_of_accelerate_may_be_worked_out() -> None:
    step = "srun accelerate launch --num_processes $((8*SLURM_NNODES)) --num_machines $SLURM_NNODES t.py"
    assert import_file(sbatch(step), "a.sbatch").job.workers_per_node == 8


def test_a_launcher_without_srun_runs_on_one_node() -> None:
    found = import_file(sbatch("torchrun --nproc_per_node=8 /fsx/t.py"), "a.sbatch")
    assert "no srun: the launcher runs only on the first node of the file's job" in "\n".join(found.left_out)


def test_an_environment_that_bash_makes_is_the_steps(tmp_path: Path) -> None:
    activate = tmp_path / "activate"
    activate.write_text("export MADE=\"a 'b' \\$c\"\nfunction odd() { [[ 1 ]]; }\necho said\n")
    found = import_file(sbatch(f"source {activate}", "module load cuda", STEP), "a.sbatch")
    (line,) = found.job.overlay.slurm.before
    done = subprocess.run(["sh", "-euc", f'{line}\nprintf %s "$MADE"'], capture_output=True, text=True, check=True)
    assert done.stdout == "a 'b' $c"
    assert list(find_problems(found.job, None, "hyperpod-slurm")) == []
    assert "module load cuda" in line
