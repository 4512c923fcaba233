"""What sbatch files of others say is in what their spec renders to, or named: compared by this test's own reader."""

from __future__ import annotations

import re

import pytest
from public_jobs import PUBLIC

from hyperpod_ext.errors import ConfigError
from hyperpod_ext.jobs.import_any import import_file
from hyperpod_ext.jobs.slurm.script import job_script

LAUNCHER = {"nnodes", "nproc-per-node", "rdzv-id", "rdzv-backend", "rdzv-endpoint", "rdzv-conf", "node-rank"}
LAUNCHER |= {"master-addr", "master-port", "num-machines", "num-processes", "machine-rank", "main-process-ip"}
LAUNCHER |= {"main-process-port", "standalone", "nproc", "world-size"}
"""The rendered file has them in words of its own; numbers of nodes and workers are compared below."""
SHOWN = {"label", "unbuffered", "cpu-bind", "no-container-mount-home", "container-workdir", "export"}
"""How srun shows output, what the rendered file always says, and what is compared below."""

SMALL = """\
#!/bin/bash
#SBATCH --job-name=tiny --nodes=4
#SBATCH --ntasks=4
#SBATCH --licenses fem:2
set -e
mkdir -p logs "out/two words"
export NCCL_DEBUG=INFO
: "${BATCH:=8}"
if [ "$SLURM_JOB_NUM_NODES" -lt 4 ]; then WIDTH=1
elif [ $SLURM_JOB_NUM_NODES -ge 4 ]; then WIDTH=2
else WIDTH=3; fi
AUTO_RESUME=""
if [ -d "/opt/sagemaker_cluster" ]; then AUTO_RESUME="--auto-resume=1"; fi
srun ${AUTO_RESUME} -l "${NEVER_SET[@]}" torchrun --nproc_per_node=8 --nnodes=$SLURM_JOB_NUM_NODES \\
    /fsx/train.py --batch $BATCH --width $WIDTH --config $(dirname "$0")/a.toml
"""


def test_what_is_known_before_the_job_runs_is_carried() -> None:
    found = import_file(SMALL, "tiny.sbatch")
    job = found.job
    assert (job.nodes, job.workers_per_node, job.slurm.auto_resume, job.working_dir) == (4, 8, True, None)
    assert (job.script, job.args[:4]) == ("/fsx/train.py", ("--batch", "8", "--width", "2"))
    assert job.args[4:] == ("--config", '$(dirname "$0")/a.toml')
    assert job.overlay.slurm.before == ("mkdir -p logs 'out/two words'",)
    assert found.left_out == [
        "tiny.sbatch:8: BATCH: its default '8' is used",
        'tiny.sbatch:14: $(dirname "$0")/a.toml: is evaluated when the job runs, but the spec passes it as text',
    ]


def test_a_folder_that_may_be_missing_ends_no_job_that_went_on_without_it() -> None:
    found = import_file(SMALL.replace("set -e\n", ""), "tiny.sbatch")
    assert found.job.overlay.slurm.before == ("mkdir -p logs 'out/two words' || true",)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ('if [ "$1" = convert ]; then BATCH=4; fi', 'whether `[ "$1" = convert ]` holds is unknown'),
        ("mkdir -p $(hostname)", "mkdir -p $(hostname): is not run: a spec has only the step"),
        ("cd ..; mkdir -p logs", "mkdir -p logs: is not run: a spec has only the step"),
        ("mapfile -t NEVER_SET < more.txt", "words before the launcher: '${NEVER_SET[@]}'"),
    ],
)
def test_what_is_not_known_is_named(line: str, named: str) -> None:
    found = import_file(SMALL.replace('AUTO_RESUME=""\n', f'AUTO_RESUME=""\n{line}\n'), "tiny.sbatch")
    assert named in "\n".join(found.left_out)


def test_an_image_has_a_folder_of_its_own() -> None:
    text = SMALL.replace("srun ", "srun --container-image ./a.sqsh ").replace("/fsx/train.py", "train.py")
    assert any("the folder that the job starts in" in one for one in import_file(text, "tiny.sbatch").left_out)


def test_a_variable_that_nothing_sets_is_named_and_can_be_given() -> None:
    branch = 'if [ ! -z $IMAGE ]; then\n    NEVER_SET=(--container-image $IMAGE)\nfi\nAUTO_RESUME=""\n'
    text = SMALL.replace('AUTO_RESUME=""\n', branch)
    found = import_file(text, "tiny.sbatch")
    assert found.job.image is None
    assert "tiny.sbatch:12: IMAGE: not set in the file: assumed to be empty (set it with --set IMAGE=VALUE" in (
        "\n".join(found.left_out)
    )
    found = import_file(text, "tiny.sbatch", {"IMAGE": "/fsx/a.sqsh", "BATCH": "32"})
    assert (found.job.image, found.job.args[1]) == ("/fsx/a.sqsh", "32")


@pytest.mark.skipif(not PUBLIC.is_dir(), reason=f"published files are not in the repository: {PUBLIC} is not here")
def test_public_files_lose_nothing_without_a_word() -> None:
    lost, read = [], 0
    for file in sorted((PUBLIC / "slurm").iterdir()):
        try:
            found = import_file(text := file.read_text(), file.name)
        except ConfigError:
            continue
        read += 1
        lost += [f"{file.name}: {one}" for one in unnamed(text, job_script(found.job), "\n".join(found.left_out))]
    assert read >= 25
    assert lost == []


def unnamed(original: str, rendered: str, named: str) -> list[str]:
    """What `original` says by its letters, and neither the rendered file nor the list of losses has."""
    text = original.replace("\\\n", " ")
    lines = [re.sub(r"(^|\s)#.*", "", line) for line in text.splitlines() if not line.startswith("#SBATCH")]
    body = "\n".join(lines)
    flags = {one.replace("_", "-") for one in re.findall(r"(?<![\w-])--([a-zA-Z][\w-]*)", _run(body, named))}
    said = {one.replace("_", "-") for one in re.findall(r"--([a-zA-Z][\w-]*)", rendered + named)}
    found = [f"--{one}" for one in sorted(flags - said - LAUNCHER - SHOWN)]
    if "container-workdir" in flags and not re.search(r"^    cd (/|'/)", rendered, re.MULTILINE):
        found.append("--container-workdir")
    for name in set(re.findall(r"^\s*export\s+(\w+)=", body, re.MULTILINE)):
        if not re.search(rf"\bexport {name}=", rendered) and not re.search(rf"\b{name}\b", named):
            found.append(f"export {name}")
    for name in set(re.findall(r"^#SBATCH\s+--([a-z-]+)", text, re.MULTILINE)) - {"nodes", "ntasks", "job-name"}:
        if f"#SBATCH --{name}" not in rendered and f"--{name}" not in named:
            found.append(f"#SBATCH --{name}")
    for pattern, ours in (
        (r"^#SBATCH\s+(?:--nodes[= ]|-N ?)(\d+)\s*(?:#.*)?$", r"#SBATCH --nodes=(\d+)"),
        (r"--nproc[_-]per[_-]node[= ](\d+)", r"--nproc-per-node (\d+)"),
        (r"--auto-resume=(\d)", r"--auto-resume=(\d)"),
    ):
        theirs, now = set(re.findall(pattern, text, re.MULTILINE)), set(re.findall(ours, rendered))
        if theirs and not now <= theirs | ({"0"} if "auto" in pattern else set()):
            found.append(f"{pattern}: {theirs} there, {now} here")
        if theirs and not now:
            found.append(f"{pattern}: {theirs} there, nothing here")
    return found


def _run(body: str, named: str) -> str:
    """`body` without the branches that the list of losses names, arrays that nothing uses then, and `$(...)`."""
    taken_as_no = re.findall(r"whether `(.*?)` holds", named)
    taken_as_no += re.findall(r"(\w+): (?:not set in the file|its default '' is used)", named)
    for condition in taken_as_no:
        body = re.sub(rf"\bif [^\n]*{re.escape(condition)}.*?\n\s*(?=else|elif|fi\b)", "", body, flags=re.DOTALL)
    body = re.sub(r"\$\([^()]*\)", "", body)
    for name, array in re.findall(r"\n((?:declare -a )?\w+=\()(.*?)\n\s*\)", body, re.DOTALL):
        variable = name.removeprefix("declare -a ").removesuffix("=(")
        if f"${{{variable}[" not in body:
            body = body.replace(array, "")
    return body
