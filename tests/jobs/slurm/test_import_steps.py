"""Steps of sbatch files: those without a Python file are carried as a command, or refused with the reason."""

from __future__ import annotations

import pytest

from hyperpod_ext.errors import ConfigError
from hyperpod_ext.jobs.import_any import import_file
from hyperpod_ext.jobs.imports.report import Imported
from hyperpod_ext.jobs.plan import make_plan
from hyperpod_ext.jobs.slurm.script import job_script

pytest.importorskip("tree_sitter_bash")
HEAD = "#!/bin/bash\n#SBATCH --job-name=a --nodes=2\n"


def read(*lines: str) -> Imported:
    return import_file(HEAD + "\n".join(lines) + "\n", "a.sbatch")


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("srun --mpi=pmix -N2 -n 2 ./perf -b 8 'x y'", ["./perf", "-b", "8", "x y"]),
        ("srun -lu bash -c 'run.sh $HOST'", ["bash", "-c", "run.sh $HOST"]),
        ('srun bash -c "run.sh \\$HOST $SLURM_JOB_ID"', ["bash", "-c", "run.sh $HOST $SLURM_JOB_ID"]),
        ("srun --auto-resume=1 bash -c 'a \"'\"$SIZE\"'\" $HOST'", ["bash", "-c", 'a "7" $HOST']),
        ("srun --pty python3 -m package.bench --size $SIZE", ["python3", "-m", "package.bench", "--size", "7"]),
    ],
)
def test_one_task_on_each_node_is_a_command(line: str, command: list[str]) -> None:
    found = read("SIZE=7", "export A=1", line)
    assert found.job.words == command
    assert (found.job.mode, found.job.workers_per_node, found.job.nodes, found.job.env) == ("plain", 1, 2, {"A": "1"})
    assert found.job.slurm.auto_resume == ("auto-resume" in line)
    assert [one for one in found.left_out if "pty" not in one] == []


def test_the_port_of_the_file_is_kept_and_other_variables_of_ranks_are_named() -> None:
    found = read("export MASTER_PORT=29500 WORLD_SIZE=16", "export MASTER_ADDR=$(hostname)", "srun ./bench")
    assert (found.job.rendezvous.port, found.job.env) == (29500, {})
    assert not found.job.slurm.setup
    named = "\n".join(found.left_out)
    assert "export MASTER_PORT: is now rendezvous.port" in named
    assert "export WORLD_SIZE=16: the rendered file sets it" in named
    assert 'export MASTER_ADDR="$(hostname)": the rendered file sets it' in named


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (["srun --ntasks-per-node=8 ./all_reduce"], "./all_reduce` starts 8 tasks on each node"),
        (["srun -n 16 ./all_reduce"], "`srun -n 16 ./all_reduce` starts 8 tasks on each node"),
        (["srun -N 1 ./a"], "`srun -N 1 ./a` has --nodes=1, but a spec's command starts once on each of the 2 nodes"),
        (["srun -w node1 ./a"], "`srun -w node1 ./a` has --nodelist"),
        (["srun ./a", "srun ./b"], "none of the 2 steps (srun ./a; srun ./b) starts a Python file, and a spec"),
        (["mpirun -n 16 ./all_reduce"], "mpirun starts all processes from the first node"),
        (["docker build -t a ."], "only commands for the first node: docker build"),
        (
            ["srun ./a", "for i in 1 2; do srun python t.py; done"],
            "a step is in a statement that import cannot follow, such as a loop: for i in 1 2",
        ),
        (
            ["run() { srun python t.py; }", "for i in 1; do run; done"],
            "a step is in a statement that import cannot follow",
        ),
        (
            ["srun accelerate launch --num_machines 2 $FILE"],
            "$FILE, which the sbatch file does not set (set it with --set FILE=",
        ),
        (["srun"], "starts no Python file"),
    ],
)
def test_what_a_command_is_not_is_refused_with_the_reason(lines: list[str], why: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read(*lines)
    assert why in str(refused.value)


def test_a_module_is_started_by_the_launcher_as_a_file_is() -> None:
    found = read("srun /fsx/venv/bin/torchrun --nproc_per_node=8 --nnodes=2 -m package.train --lr 1")
    assert found.job.words == ["/fsx/venv/bin/python", "-m", "package.train", "--lr", "1"]
    assert (found.job.workers_per_node, found.job.slurm.python) == (8, "/fsx/venv/bin/python")
    assert "--nproc-per-node 8" in job_script(found.job)
    assert "--no-python" in job_script(found.job)
    assert found.left_out == []


@pytest.mark.parametrize(
    ("launcher", "python"),
    [
        ("torchrun", "python3"),
        ("./pt/bin/torchrun", "./pt/bin/python"),
        ("python -m torch.distributed.run", "python"),
        ("/opt/venv/bin/python3.11 -u -m torch.distributed.launch", "/opt/venv/bin/python3.11"),
    ],
)
def test_the_environment_of_the_launcher_is_kept(launcher: str, python: str) -> None:
    found = read(f"srun {launcher} --nproc_per_node=8 train.py")
    assert (found.job.slurm.python, found.left_out) == (python, [])


def test_a_launcher_that_names_no_number_is_not_given_one_in_silence() -> None:
    head = HEAD + "#SBATCH --gpus-per-node=8\n"
    assert import_file(head + "srun torchrun train.py\n", "a.sbatch").job.workers_per_node == 1
    found = import_file(head + "srun deepspeed train.py\n", "a.sbatch")
    assert "workers_per_node: is 8, because the command of deepspeed does not set it" in "\n".join(found.left_out)


def test_options_of_the_interpreter_are_named() -> None:
    assert "options of the interpreter: -O -X dev" in "\n".join(read("srun python -O -u -X dev train.py").left_out)


def test_processes_of_accelerate_are_those_of_its_machines() -> None:
    found = read("srun --nodes=1 --nodelist=$ONE accelerate launch --num_processes 4 --num_machines 1 t.py")
    assert (found.job.nodes, found.job.workers_per_node) == (2, 4)
    assert "the launcher's 1 nodes: --nodes=2 takes precedence" in "\n".join(found.left_out)


def test_nodes_are_counted_by_tasks_as_slurm_does() -> None:
    text = "#!/bin/bash\n#SBATCH -n 16 {}\nsrun python t.py\n"
    found = import_file(text.format("--ntasks-per-node=8"), "a.sbatch")
    assert (found.job.nodes, found.job.workers_per_node) == (2, 8)
    found = import_file(text.format(""), "a.sbatch")
    assert found.job.nodes == 1
    assert "a.sbatch:2: nodes: the file sets 16 tasks and no nodes" in "\n".join(found.left_out)


def test_tasks_of_the_step_are_its_processes() -> None:
    assert read("srun -n 16 python train.py").job.workers_per_node == 8


def test_an_earlier_step_is_a_line_before_the_step() -> None:
    found = read("set -e", "export A='x y'", "srun --ntasks-per-node=1 bash prepare.sh", "srun torchrun t.py")
    assert found.job.overlay.slurm.before == ("env 'A=x y' srun --ntasks-per-node=1 bash prepare.sh",)
    assert found.left_out == []


@pytest.mark.parametrize("first", ["srun ./a &", 'srun ./a "$UNKNOWN"', "srun ./a $(hostname)"])
def test_an_earlier_step_that_is_not_known_or_runs_beside_is_named(first: str) -> None:
    found = read(first, "srun torchrun t.py")
    assert found.job.overlay.slurm.before == ()
    assert "a spec has one step, which is on line 4" in "\n".join(found.left_out)


def test_what_a_spec_says_of_restarts_is_what_the_launcher_did() -> None:
    assert read("srun torchrun t.py").job.restart.max_restarts == 0
    assert read("srun torchrun --max_restarts=3 t.py").job.restart.max_restarts == 3


def test_a_script_elsewhere_is_rendered() -> None:
    assert (
        "/fsx/train.py"
        in make_plan(read("srun torchrun /fsx/train.py").job, target="hyperpod-slurm").files["job.sbatch"]
    )


def test_nodes_that_the_step_alone_names_are_the_jobs() -> None:
    assert import_file("#!/bin/bash\nsrun -N 4 torchrun --nproc_per_node=8 t.py\n", "a.sbatch").job.nodes == 4


def test_a_second_step_of_a_line_is_not_lost() -> None:
    named = "\n".join(read("srun torchrun t.py; srun torchrun u.py --x").left_out)
    assert "srun torchrun t.py: a spec has one step" in named


def test_a_file_of_one_node_needs_no_srun() -> None:
    head = "#!/bin/bash\n#SBATCH --nodes={}\n"
    found = import_file(head.format(1) + "python prepare.py\npython train.py --lr 1\n", "a.sbatch")
    assert (found.job.script, found.job.args, found.job.world_size) == ("train.py", ("--lr", "1"), 1)
    assert "python prepare.py: is not run: a spec has only the step" in "\n".join(found.left_out)
    with pytest.raises(ConfigError, match=r"python train\.py runs only on the first of 2 nodes"):
        import_file(head.format(2) + "python train.py\n", "a.sbatch")


def test_a_module_in_each_task_is_a_command_for_each_worker() -> None:
    found = read("srun --ntasks-per-node=8 --cpu_bind=v python -u -m package.train --lr 1")
    assert (found.job.words, found.job.workers_per_node) == (["python", "-m", "package.train", "--lr", "1"], 8)
    assert not any("cpu" in one or "ntasks" in one for one in found.left_out)


def test_options_and_placeholders_of_a_template_are_filled() -> None:
    text = (
        "#!/bin/bash\n#SBATCH --nodes=$NODES\n#SBATCH --partition={{ queue }}\nsrun torchrun {{ script }} --n $NODES\n"
    )
    values = {"NODES": "4", "queue": "dev", "script": "t.py"}
    found = import_file(text, "a.sbatch", values)
    assert (found.job.nodes, found.job.scheduling.queue, found.job.script) == (4, "dev", "t.py")
    assert (found.job.args, found.left_out) == (("--n", "4"), [])
    with pytest.raises(ConfigError, match=r"a.sbatch:3: queue: the template needs a value for queue"):
        import_file(text, "a.sbatch", {"NODES": "4"})


def test_the_environment_of_conda_is_made_with_its_functions() -> None:
    (line,) = read('eval "$(conda shell.bash hook)"', "conda activate a", "srun torchrun t.py").job.overlay.slurm.before
    assert line.index("conda shell.bash hook") < line.index("conda activate a")
