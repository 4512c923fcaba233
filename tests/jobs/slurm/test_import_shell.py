"""Shell of sbatch files: what decides numbers and variables is followed, and where it is not, they are not known."""

from __future__ import annotations

import os
import subprocess

import pytest

from hyperpod_ext.errors import ConfigError
from hyperpod_ext.jobs.import_any import import_file
from hyperpod_ext.jobs.imports.report import Imported

pytest.importorskip("tree_sitter_bash")
HEAD = "#!/bin/bash\n#SBATCH --job-name=a --nodes=2"
STEP = 'srun torchrun --nproc_per_node=$N train.py --size "$SIZE"'


def read(*lines: str) -> Imported:
    return import_file(
        "\n".join(["#!/bin/bash", "#SBATCH --job-name=a --nodes=2", "N=8", *lines, STEP, ""]), "a.sbatch"
    )


@pytest.mark.parametrize(
    ("lines", "workers", "size"),
    [
        ("MODEL=7b\ncase $MODEL in 7b) N=4 SIZE=s;; 70b|13b) N=2;; *) exit 1;; esac", 4, "s"),
        ("case x in a) N=2;; *) SIZE=other;; esac", 8, "other"),
        ("N=4 SIZE=s", 4, "s"),
        ("N=4 SIZE=t\nSIZE=s M=3 # more", 4, "s"),
        ("A=1 SIZE=s\necho $A", 8, "s"),
        ("[ -v SLURM_NNODES ] && N=4 SIZE=s", 4, "s"),
        ("SIZE=s; if ! [ -z $SIZE ]; then N=4; fi", 4, "s"),
        ("SIZE=s; test -n $SIZE && N=4 || N=2", 4, "s"),
        ("SIZE=s; [ $SIZE = t ] && N=4 || N=2", 2, "s"),
        ("SIZE=s; if (( SLURM_NNODES > 1 )); then N=4; fi", 4, "s"),
        ("SIZE=s; if [[ $N -eq 8 && $SIZE == s ]]; then N=4; fi", 4, "s"),
        ("SIZE=$(date)\nunset SIZE; SIZE=s", 8, "s"),
        ('SIZE="a \\\n  b"', 8, "a   b"),
        ("mkdir -p x || exit 1; SIZE=s", 8, "s"),
    ],
)
def test_what_is_known_is_followed(lines: str, workers: int, size: str) -> None:
    found = read(lines)
    assert (found.job.workers_per_node, found.job.args) == (workers, ("--size", size))
    assert found.left_out == []


@pytest.mark.parametrize(
    "line",
    [
        "for i in 1 2; do N=$i; done",
        "while read -r N; do :; done < sizes",
        "read N < size",
        "case $UNKNOWN in a) N=1;; esac",
        "for N in 1 2; do :; done",
    ],
)
def test_what_a_loop_sets_is_not_taken_from_before_it(line: str) -> None:
    found = read("SIZE=s", line)
    assert "workers_per_node: is 1, because $N depends on the node" in "\n".join(found.left_out)


def test_exports_are_those_at_the_step() -> None:
    found = read("SIZE=s", "export A=1 B=2", "unset A", "set -o allexport", "C=3", "set +o allexport", "D=4")
    assert (found.job.env, found.left_out) == ({"B": "2", "C": "3"}, [])


def test_a_path_that_the_nodes_have_is_kept() -> None:
    found = read("SIZE=s", "export LD_LIBRARY_PATH=/a:${LD_LIBRARY_PATH:-} NAME=${NAME:-x}")
    assert found.job.slurm.setup == ('export LD_LIBRARY_PATH="/a:${LD_LIBRARY_PATH:-}"',)
    assert found.job.env == {"NAME": "x"}


def test_variables_before_srun_are_the_steps() -> None:
    found = import_file("#!/bin/bash\nC=3 D=4\nA=1 \\\n B=2 srun torchrun t.py $D\n", "a.sbatch")
    assert (found.job.env, found.job.args) == ({"A": "1", "B": "2"}, ("4",))
    found = import_file("#!/bin/bash\nenv A=1 B='x y' srun torchrun t.py\n", "a.sbatch")
    assert (found.job.env, found.job.script) == ({"A": "1", "B": "x y"}, "t.py")


def test_the_words_of_a_value_are_split_around_what_runs_later() -> None:
    found = read(
        "SIZE=s", 'CMD="torchrun --rdzv_endpoint $(hostname -f | head -1):1 --nproc_per_node 4 a.py --b 1"', "srun $CMD"
    )
    assert (found.job.script, found.job.workers_per_node) == ("train.py", 8)  # the last one
    alone = import_file(
        '#!/bin/bash\nCMD="torchrun --rdzv_endpoint $(a | b):1 --nproc_per_node 4 a.py --b"\nsrun $CMD\n', "a.sbatch"
    )
    assert (alone.job.script, alone.job.args, alone.job.workers_per_node) == ("a.py", ("--b",), 4)


@pytest.mark.parametrize("line", ["source $V/bin/activate", '[ -f /v/bin/activate ] && source "${V}/bin/activate"'])
def test_an_environment_whose_path_is_known_is_made(line: str) -> None:
    before = read("SIZE=s", "V=/v", line).job.overlay.slurm.before
    assert len(before) == 1
    assert "/v/bin/activate" in before[0] or "${V}" not in before[0]


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        ("if [ -f /a ]; then\n  export A=1\n  B=2\nfi", "A, B: set under a condition that is assumed to be false"),
        ('if [ -n "$IMAGE" ]; then\n  export A=1\nfi', "A: set under a condition that is assumed to be false"),
        ("for i in 1; do\n  export A=$i\ndone", "for i in 1; do (exports A): is not run"),
    ],
)
def test_what_is_not_run_is_named_with_what_it_would_set(lines: str, named: str) -> None:
    assert named in "\n".join(read("SIZE=s", lines).left_out)


def test_dollars_of_other_programs_are_no_arguments_of_the_file() -> None:
    found = read("SIZE=s", "export A=$(ip route | awk '{print $5}')")
    assert found.job.slurm.setup == ("export A=\"$(ip route | awk '{print $5}')\"",)
    assert not any("$5: an argument" in one for one in found.left_out)


def test_a_function_is_followed_where_it_is_called() -> None:
    lines = ['say() { export A="$1" B="$2"; }', "never() { export C=1; }", "say 1 'x y'"]
    found = read("SIZE=s", *lines)
    assert (found.job.env, found.left_out) == ({"A": "1", "B": "x y"}, [])
    run = ["run() {", 'srun --nodelist=$NODE composer --nproc 8 --node_rank $1 t.py "${@}"', "}"]
    loop = ["for ((R=1; R<2; R++)); do", "NODE=${NODES[$R]}; run $R &", "done", "NODE=${NODES[0]}; run 0"]
    found = import_file("\n".join([HEAD, *run, *loop]), "a.sbatch")
    assert (found.job.script, found.job.workers_per_node, found.job.nodes) == ("t.py", 8, 2)
    assert "for ((R=1; R<2; R++)); do: is not run: a spec has only the step" in "\n".join(found.left_out)
    assert "srun --nodelist=" in "\n".join(found.left_out)


def test_arguments_of_the_file_are_named_and_can_be_given() -> None:
    line = 'srun torchrun t.py --data $1/$2 "$@"'
    found = import_file(f"{HEAD}\n{line}\n", "a.sbatch")
    assert found.job.args == ("--data", "/")
    for name in ("$1", "$2", "$@"):
        assert f"{name}: a" in "\n".join(found.left_out)
    found = import_file(f"{HEAD}\n{line}\n", "a.sbatch", {"1": "/fsx", "2": "c4"})
    assert found.job.args == ("--data", "/fsx/c4")


@pytest.mark.parametrize(
    ("lines", "values", "args"),
    [
        (["cd /fsx/a", "cd ../b"], {}, ("/fsx/b", "/fsx/b/t", "/fsx")),
        (["cd sub"], {"PWD": "/fsx"}, ("/fsx/sub", "/fsx/sub/t", "/fsx")),
        (["(cd /x && make)"], {"PWD": "/fsx/a"}, ("/fsx/a", "/fsx/a/t", "/fsx")),
        (['cd "${SLURM_SUBMIT_DIR}"'], {}, ("$(pwd)", "$PWD/t", '$(dirname "$PWD")')),
        (["cd $SLURM_SUBMIT_DIR"], {"PWD": "/fsx/a"}, ("/fsx/a", "/fsx/a/t", "/fsx")),
    ],
)
def test_the_folder_that_the_file_is_in_is_followed(lines: list[str], values: dict[str, str], args: object) -> None:
    last = 'srun torchrun t.py $(pwd) "$PWD/t" $(dirname "$PWD")'
    found = import_file("\n".join([HEAD, *lines, last]), "a.sbatch", values)
    assert found.job.args == args
    assert found.job.working_dir == (args[0] if lines[0].startswith(("cd /", "cd sub")) else None)  # type: ignore[index]
    assert not any("cd " in one for one in found.left_out)
    assert any("--set PWD=" in one for one in found.left_out) == ("$(pwd)" in args)  # type: ignore[operator]


def test_a_folder_that_is_not_known_is_named() -> None:
    named = "\n".join(read("SIZE=s", "cd $UNKNOWN/src").left_out)
    assert "cd $UNKNOWN/src: is not run: a spec has only the step" in named


@pytest.mark.parametrize(
    ("lines", "word", "value"),
    [
        ("C=/fsx/a/llama.yaml", "${C##*/}", "llama.yaml"),
        ("C=/fsx/a/llama.yaml", "${C%/*}", "/fsx/a"),
        ("C=a.b.c", "${C%%.*}${C#*.}", "ab.c"),
        ("C=llama", "${C^^}-${C:1:2}-${#C}-${C//l/L}-${C/l/L}", "LLAMA-la-5-LLama-Llama"),
        ("C=(a b c)", "${C[1]}${#C[@]}", "b3"),
        ("C=/a/b.yaml", "$(basename $C .yaml)", "b"),
        ("C=$( [ -d /opt/sagemaker_cluster ] && echo yes )", "$C", "yes"),
        ("read -r -d '' C <<END\none $N\\\n two\nEND", "$C", "one 8 two"),
        ("C=$(cat <<'END'\n$N\nEND\n)", "$C", "$N"),
        ("A=x", "$SLURM_JOB_NAME", "a"),
    ],
)
def test_values_are_changed_as_the_shell_changes_them(lines: str, word: str, value: str) -> None:
    script = f'{HEAD}\nN=8\n{lines}\nsrun torchrun t.py "{word}"\n'
    assert import_file(script, "a.sbatch").job.args == (value,)
    known = {"SLURM_JOB_NAME": "a", "PATH": os.environ["PATH"]}
    made = lines.replace("[ -d /opt/sagemaker_cluster ]", "[ 1 ]")
    done = subprocess.run(["bash", "-c", f'N=8\n{made}\nprintf %s "{word}"'], env=known, capture_output=True, text=True)
    assert done.stdout.rstrip("\n") == value


@pytest.mark.parametrize("word", ["${C##*/}", "${C[0]}", "${#C}", "${C^^}"])
def test_a_value_that_is_not_known_is_not_changed(word: str) -> None:
    found = import_file(f"{HEAD}\nC=$(hostname)\nsrun torchrun t.py {word}\n", "a.sbatch")
    assert found.job.args == (word,)
    assert f"{word}: is evaluated when the job runs" in "\n".join(found.left_out)


@pytest.mark.parametrize("word", ["/data/*.bin", "{1,2}", "~/data", "a{1..3}", '"a b"*'])
def test_words_that_the_shell_makes_others_of_are_named(word: str) -> None:
    found = import_file(f"{HEAD}\nsrun torchrun t.py {word}\n", "a.sbatch")
    assert any("the shell would expand it" in one for one in found.left_out)
    quoted = import_file(f"{HEAD}\nsrun torchrun t.py '{word.replace(chr(34), '')}'\n", "a.sbatch")
    assert quoted.left_out == []


@pytest.mark.parametrize(
    "lines",
    [
        'CMD="srun torchrun --nproc_per_node=4 t.py --a 1"\neval "$CMD"',
        'RUN=srun\nL="torchrun --nproc_per_node=4 --rdzv_endpoint $(hostname | head -1)"\neval $RUN $L t.py --a 1',
        "srun torchrun --nproc_per_node=4 `# on each node` \\\n  t.py `# the script` --a 1",
        "nohup srun torchrun --nproc_per_node=4 t.py --a 1",
        "GPUS=$(nvidia-smi -L | wc -l)\n#\nsrun torchrun --nproc_per_node=$GPUS t.py --a 1",
        "srun torchrun --nproc_per_node=gpu t.py --a 1",
    ],
)
def test_a_step_is_found_in_all_its_forms(lines: str) -> None:
    found = import_file(f"{HEAD} --gres=gpu:4\n{lines}\n", "a.sbatch")
    assert (found.job.script, found.job.args, found.job.workers_per_node) == ("t.py", ("--a", "1"), 4)


@pytest.mark.parametrize(
    "lines",
    [
        "on() { [ -d /opt/sagemaker_cluster ]; }\nif on; then R=--auto-resume=1; fi",
        'R=$( [ -d /opt/sagemaker_cluster ] && echo "--auto-resume=1" )',
        '[[ -d /opt/sagemaker_cluster ]] && R="--auto-resume=1" || R=""',
        'R=--auto-resume=1\nif [ ! -d "/opt/sagemaker_cluster" ]; then R=""; fi',
        "if test -d /opt/sagemaker_cluster\nthen R=(--auto-resume 1)\nfi",
    ],
)
def test_auto_resume_is_kept_under_every_test_for_hyperpod(lines: str) -> None:
    found = import_file(f"{HEAD}\n{lines}\nsrun ${{R[@]}} torchrun t.py\n", "a.sbatch")
    assert (found.job.slurm.auto_resume, found.left_out) == (True, [])


def test_a_file_of_variables_is_exported_where_the_file_exports_all() -> None:
    (before,) = read("SIZE=s", "set -a; source ./a.env; set +a").job.overlay.slurm.before
    assert "set -a; source ./a.env >&2; set +a" in before
    assert read("SIZE=s", "A=$SLURM_NTASKS", "export A").job.env == {"A": "2"}


CALLS = "".join(f"f{at}() {{ {f'f{at + 1};' * 20} }}\n" for at in range(8)) + "f8() { A=1; }\nf0\n"


@pytest.mark.parametrize(
    "line",
    ["A=$A$A\n" * 60, "A=($A $A)\n" * 60, CALLS, "B=" + "${C:-" * 3000 + "}" * 3000 + "\n"],
)
def test_a_value_that_grows_without_bound_is_refused(line: str) -> None:
    with pytest.raises(ConfigError, match=r"has over 100000 characters|nested too deeply"):
        import_file(f"{HEAD}\nA=x\n{line}srun torchrun t.py $A\n", "a.sbatch")
