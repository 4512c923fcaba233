"""`overlay.slurm`: what it makes of the sbatch file, what is refused and where, and that import brings it back."""

from __future__ import annotations

import pytest

from hyperpod_ext.config.files.load import read_text
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.jobs.contract.rank_variables import changes_ranks
from hyperpod_ext.jobs.contract.render import check_shell
from hyperpod_ext.jobs.import_any import import_file
from hyperpod_ext.jobs.plan import find_problems, make_plan

TARGET = "hyperpod-slurm"
SPEC = "name: tiny\nscript: train.py\nnodes: 2\n"


def told(overlay: str) -> list[str]:
    loaded = read_text(JobConfig, f"{SPEC}overlay: {{slurm: {overlay}}}\n", "job.yaml")
    return [str(one) for one in loaded.locate(find_problems(loaded.config, None, TARGET))]


def test_the_file_has_what_the_overlay_says_with_a_mark_and_nothing_less() -> None:
    overlay = "overlay:\n  slurm:\n    sbatch: ['licenses=fem:4', 'extra=\"a b\"']\n"
    overlay += "    srun: {mpi: pmix, label: ''}\n    before: ['mkdir -p /fsx/out']\n"
    job = read_text(JobConfig, SPEC + overlay, "job.yaml").config
    text = make_plan(job, target=TARGET).files["job.sbatch"]
    check_shell("job.sbatch", text)
    plain = make_plan(read_text(JobConfig, SPEC, "job.yaml").config, target=TARGET).files["job.sbatch"]
    added = [line for line in text.splitlines() if line not in plain.splitlines()]
    assert added[:6] == [
        "#SBATCH --licenses=fem:4",
        '#SBATCH --extra="a b"',
        "# from overlay.slurm: #SBATCH --licenses",
        "# from overlay.slurm: #SBATCH --extra",
        "# from overlay.slurm: srun --mpi",
        "# from overlay.slurm: srun --label",
    ]
    assert "mkdir -p /fsx/out" in added
    assert sum("--mpi=pmix --label" in line and line.strip().startswith("srun ") for line in added) == 1
    lost = [line for line in plain.splitlines() if line not in text.splitlines()]
    assert [line.split()[:1] for line in lost] == [["#"], ["srun"]], "the spec's line and the step's are changed alone"
    assert import_file(text, "job.sbatch").job == job


@pytest.mark.parametrize(
    ("overlay", "path"),
    [
        ("{sbatch: ['nodes=4']}", "overlay.slurm.sbatch.0"),
        ("{sbatch: ['mail-type=END --nodes=4']}", "overlay.slurm.sbatch.0"),
        ("{sbatch: ['wait']}", "overlay.slurm.sbatch.0"),
        ("{sbatch: ['mail-type=END', 'requeue']}", "overlay.slurm.sbatch.1"),
        ("{srun: {ntasks: '4'}}", "overlay.slurm.srun.ntasks"),
        ("{srun: {export: NONE}}", "overlay.slurm.srun.export"),
        ("{srun: {container-mount-home: ''}}", "overlay.slurm.srun.container-mount-home"),
        ("{before: ['export MASTER_PORT=1']}", "overlay.slurm.before.0"),
        ("{before: ['rm -f $HOME/x; unset HPX_SECRET_FILE']}", "overlay.slurm.before.0"),
        ("{before: ['echo \"open']}", "overlay.slurm.before"),
    ],
)
def test_what_would_break_the_job_is_refused_with_line_and_path(overlay: str, path: str) -> None:
    (problem,) = told(overlay)
    assert problem.startswith(f"job.yaml:4: {path}"), problem


def test_lines_that_only_read_variables_of_ranks_pass() -> None:
    assert not changes_ranks('echo "$HPX_JOB_DIR" "$RANK" MY_RANK=1')
    assert told("{before: ['echo $SLURM_JOB_ID', 'MY_RANK=1'], srun: {mpi: pmix}}") == []


def test_options_of_srun_are_imported_into_it() -> None:
    text = "#!/bin/bash\n#SBATCH --nodes=2\nsrun --mpi=pmix -l --ntasks=3 --propagate=$LIMITS torchrun /app/train.py\n"
    found = import_file(text, "a.sbatch")
    assert found.job.overlay.slurm.srun == {"mpi": "pmix"}
    named = "\n".join(found.left_out)
    assert "--ntasks=3" in named
    assert "--propagate" in named
    assert "--mpi" not in named


def test_what_keeps_a_job_from_being_submitted_is_refused_everywhere_and_not_imported() -> None:
    loaded = read_text(JobConfig, f"{SPEC}slurm: {{sbatch: {{wait: ''}}}}\n", "job.yaml")
    (problem,) = loaded.locate(find_problems(loaded.config, None, TARGET))
    assert str(problem).startswith("job.yaml:4: slurm.sbatch.wait: --wait would make the submission last"), problem
    found = import_file("#!/bin/sh\n#SBATCH --wait\n#SBATCH --nice=5\nsrun python train.py\n", "job.sbatch")
    assert found.job.slurm.sbatch == {"nice": "5"}
    assert [one for one in found.left_out if one.startswith("job.sbatch:2: --wait: would make")]
