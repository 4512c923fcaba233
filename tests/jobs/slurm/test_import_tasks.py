"""sbatch files whose tasks share a node: the rendered file's one task has all that they had, or the report says so."""

from __future__ import annotations

import pytest

from hyperpod_ext.jobs.import_any import import_file
from hyperpod_ext.jobs.imports.report import Imported
from hyperpod_ext.jobs.plan import make_plan
from hyperpod_ext.jobs.slurm.script import job_script

pytest.importorskip("tree_sitter_bash")
TRAIN = "srun python train.py --lr 1e-4"


def read(options: str, *lines: str) -> Imported:
    head = [f"#SBATCH {one}" for one in options.splitlines()]
    return import_file("\n".join(["#!/bin/bash", *head, *(lines or (TRAIN,)), ""]), "a.sbatch")


@pytest.mark.parametrize(
    ("options", "cpus", "sbatch"),
    [
        ("--nodes=2 --ntasks-per-node=8 --cpus-per-task=12 --mem-per-cpu=4G", 96, {"mem-per-cpu": "4G"}),
        ("-N 2 -n 16 -c 12", 96, {}),
        ("-N 2 --ntasks-per-node=8 --gpus-per-task=1", 8, {"gpus-per-task": "8"}),
        ("-N 2 --ntasks-per-node=8 --exclusive --gpus-per-task=a100:1", None, {"gpus-per-task": "a100:8"}),
        ("-N 2 --ntasks-per-node=4 --tres-per-task=cpu:12,gres/gpu:2", None, {"tres-per-task": "cpu:48,gres/gpu:8"}),
        ("-N 2 --gpus-per-node=8 --ntasks-per-gpu=1 -c 12", 96, {"gpus-per-node": "8"}),
        ("-N 2 --gpus=16 --gpus-per-task=1 -c 12", 96, {"gpus": "16", "gpus-per-task": "8"}),
        ("-N 2 --ntasks-per-node=1 --cpus-per-task=96 --gpus-per-task=8", 96, {"gpus-per-task": "8"}),
    ],
)
def test_the_one_task_of_a_node_gets_what_all_of_its_tasks_had(
    options: str, cpus: int | None, sbatch: dict[str, str]
) -> None:
    job = read(options).job
    assert (job.nodes, job.resources.cpus, job.slurm.sbatch) == (2, cpus, sbatch)
    assert cpus is None or f"#SBATCH --cpus-per-task={cpus}\n" in job_script(job)


def test_options_of_srun_are_counted_in_the_same_way() -> None:
    found = read("-N 2 --exclusive", "srun --ntasks-per-node=8 -c 12 --gpus-per-task=1 --gpu-bind=single:1 python t.py")
    assert (found.job.workers_per_node, found.job.nodes) == (8, 2)
    assert found.job.overlay.slurm.srun == {"cpus-per-task": "96", "gpus-per-task": "8"}
    assert "a.sbatch:3: srun --gpu-bind=single:1: one task per node starts the workers" in found.left_out


def test_variables_of_a_task_keep_the_values_of_the_file() -> None:
    job = read("-N 2 --ntasks-per-node=8 -c 12", "export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK", TRAIN).job
    assert job.env == {"OMP_NUM_THREADS": "12"}


def test_a_script_of_many_tasks_is_told_that_the_launcher_sets_its_ranks() -> None:
    assert "must read RANK or LOCAL_RANK" in "\n".join(read("-N 2 --ntasks-per-node=8").left_out)


@pytest.mark.parametrize("options", ["--nodes=1 --ntasks=1", "--ntasks=1", "-N1"])
def test_a_step_on_fewer_nodes_trains_on_those(options: str) -> None:
    found = read("-N 2", f"srun {options} torchrun --nproc-per-node=8 train.py")
    assert (found.job.nodes, found.job.workers_per_node) == (1, 8)
    assert "the step runs on 1 of the file's 2 nodes" in found.left_out[0]


def test_a_container_of_sbatch_is_the_image() -> None:
    options = "--nodes=1\n--container-image=/img/a.sqsh\n--container-mounts=/d:/d,/e:/f:ro\n--container-name=x"
    found = read(options, "torchrun --nproc_per_node=8 train.py")
    job = found.job
    assert (job.image, job.slurm.sbatch, job.overlay.slurm.srun) == ("/img/a.sqsh", {}, {"container-name": "x"})
    assert [(one.host_path, one.path, one.read_only) for one in job.volumes if one.kind == "host"] == [
        ("/d", "/d", False),
        ("/e", "/f", True),
    ]
    stronger = read(options, "srun --container-image=/img/b.sqsh torchrun --nproc_per_node=8 train.py")
    assert stronger.job.image == "/img/b.sqsh"


@pytest.mark.parametrize(
    ("line", "args"),
    [
        ('srun bash -c "torchrun t.py ${ARGS[*]}"', ("--model", "llama")),
        ('srun bash -c "torchrun t.py ${ARGS[@]}"', ("--model",)),  # bash gives the second to the shell itself
        ('srun torchrun t.py "x${ARGS[@]}y"', ("x--model", "llamay")),
        ('srun torchrun t.py "${ARGS[@]}" "${NONE[@]}" "x${NONE[@]}"', ("--model", "llama", "x")),
        ('ARGS+=(7b)\nARGS[1]=gpt\nsrun torchrun t.py "${ARGS[@]}"', ("--model", "gpt", "7b")),
        ("srun bash -c 'torchrun t.py ${ARGS[*]}'", ()),  # the shell of the step has no such array
    ],
)
def test_an_array_in_a_text_is_kept(line: str, args: tuple[str, ...]) -> None:
    assert read("-N 2", "ARGS=(--model llama)", line).job.args == args


@pytest.mark.parametrize("index", ["$I", "7"])
def test_an_array_with_an_item_at_an_unknown_place_is_not_known(index: str) -> None:
    found = read("-N 2", "A=(1 2)", f"A[{index}]=x", 'srun torchrun t.py "${A[0]}"')
    assert "${A[0]}: is evaluated when the job runs" in "\n".join(found.left_out)


@pytest.mark.parametrize(
    ("lines", "parts"),
    [
        (["source ~/conda/etc/profile.d/conda.sh", "conda activate llm"], ["source ~/conda", "conda activate llm >&2"]),
        (["conda activate llm"], ['eval "$(conda shell.bash hook)"', "conda activate llm >&2 || exit 1"]),
        (["module load anaconda3", "conda activate llm"], ["module load anaconda3 >&2; conda activate llm"]),
        (["source $HOME/venv/bin/activate"], ["source $HOME/venv/bin/activate >&2 || exit 1"]),
        (["E=llm", "conda activate $E 2>/dev/null"], ["conda activate"]),
    ],
)
def test_an_environment_is_made_as_the_file_makes_it_or_the_job_ends(lines: list[str], parts: list[str]) -> None:
    found = read("-N 2", *lines, "srun torchrun train.py")
    (line,) = found.job.overlay.slurm.before
    for part in parts:
        assert part in line
    assert found.left_out == []
    assert line.endswith(') || exit 1; eval "$made"')
    make_plan(found.job, target="hyperpod-slurm")


def test_a_login_shell_has_the_environment_of_its_profile() -> None:
    text = "#!/bin/bash -l\n#SBATCH -N 2\nconda activate llm\nsrun torchrun train.py\n"
    (line,) = import_file(text, "a.sbatch").job.overlay.slurm.before
    assert line.startswith("made=$(bash -lc 'conda activate llm")


def test_an_environment_that_depends_on_a_value_of_the_nodes_is_named() -> None:
    found = read("-N 2", "V=$(ls -d /venv*)", "source $V/bin/activate", "srun torchrun train.py")
    assert found.job.overlay.slurm.before == ()
    assert "source $V/bin/activate: is not run: a spec has only the step" in "\n".join(found.left_out)


def test_statements_that_change_nothing_of_the_spec_are_noted_with_their_line() -> None:
    lines = ["set -x", "UNREAD=1", "READ=2", 'echo "$READ"', "never() { export A=1; }", "srun torchrun t.py --n $READ"]
    found = read("-N 2\n-N 2\n--ntasks-per-node=1", *lines)
    assert found.left_out == []
    said = [one.partition(": is not carried")[0] for one in found.notes if "not carried" in one]
    assert said == [f"a.sbatch:{line}: {text}" for line, text in ((5, "set -x"), (6, "UNREAD=1"))] + [
        'a.sbatch:8: echo "$READ"',
        "a.sbatch:9: export A=1",
    ]
    assert "a.sbatch:2: --nodes=2: is overridden on line 3" in found.notes
