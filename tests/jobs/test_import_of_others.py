"""Files as people write them: carried, or carried with each loss named, or refused; never a traceback."""

from __future__ import annotations

import contextlib
import io
import random
from pathlib import Path

import pytest
from command import call_hp_ext
from public_jobs import PUBLIC

from hyperpod_ext.config.job.overlay import KubernetesOverlay
from hyperpod_ext.errors import ConfigError
from hyperpod_ext.jobs.import_any import import_file
from hyperpod_ext.jobs.imports.report import Imported
from hyperpod_ext.jobs.plan import make_plan

TEMPLATE = """\
apiVersion: v1
kind: Service
metadata: {name: store}
---
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {name: tiny, labels: {app: tiny}}
spec:
  elasticPolicy: {rdzvBackend: etcd, minReplicas: 1, maxReplicas: $NUM_NODES}
  pytorchReplicaSpecs:
    Worker:
      replicas: $NUM_NODES
      template:
        spec:
          initContainers: [{name: fetch, image: busybox}]
          containers:
            - name: pytorch
              image: ${IMAGE}
              env:
                - {name: HOME_DIR, value: /data}
                - {name: CACHE, value: $(HOME_DIR)/cache}
                - {name: NODE, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}
              command: [torchrun, --nproc_per_node=8, "--nnodes=$NUM_NODES", /app/train.py, --steps=4]
              volumeMounts: [{name: fsx, mountPath: /data}]
          volumes: [{name: fsx, persistentVolumeClaim: {claimName: fsx-claim}}]
"""


def test_a_template_is_filled_and_each_loss_is_named_with_its_line() -> None:
    found = import_file(TEMPLATE, "tiny.yaml", {"NUM_NODES": "4", "IMAGE": "repo/tiny:1"})
    job = found.job
    assert (job.nodes, job.workers_per_node, job.image) == (4, 8, "repo/tiny:1")
    assert (job.script, job.args) == ("/app/train.py", ("--steps=4",))
    assert job.env == {"HOME_DIR": "/data", "CACHE": "/data/cache"}
    assert [volume.path for volume in job.volumes] == ["/data"]
    assert job.overlay.kubernetes == KubernetesOverlay(job={"spec": {"elasticPolicy": {"rdzvBackend": "etcd"}}})
    assert job.working_dir is None
    assert job.kubernetes.pod == {"initContainers": [{"name": "fetch", "image": "busybox"}]}
    node = {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
    assert job.kubernetes.container == {"env": [node]}
    named = "\n".join(found.left_out)
    assert "initContainers" not in named
    assert "NODE:" not in named
    for part in ("tiny.yaml:1: Service store: is another object of the file",):
        assert part in named, named


def test_what_mounts_a_volume_that_is_not_there_or_breaks_a_promise_stays_named() -> None:
    init = "initContainers: [{name: fetch, image: busybox}]"
    mounting = init.replace("busybox}", "busybox, volumeMounts: [{name: other, mountPath: /data}]}")
    text = TEMPLATE.replace(init, mounting + "\n          hostname: one\n          hostIPC: true")
    found = import_file(text, "tiny.yaml", {"NUM_NODES": "4", "IMAGE": "repo/tiny:1"})
    assert found.job.kubernetes.pod == {"hostIPC": True}
    named = "\n".join(found.left_out)
    assert "tiny.yaml:15: spec.pytorchReplicaSpecs.Worker.template.spec.initContainers" in named
    assert "spec.hostname" in named


def test_affinity_of_both_kinds_is_carried() -> None:
    affinity = "affinity: {podAffinity: {requiredDuringSchedulingIgnoredDuringExecution: [{topologyKey: zone}]}}"
    text = TEMPLATE.replace("          initContainers", f"          {affinity}\n          initContainers")
    found = import_file(text, "tiny.yaml", {"NUM_NODES": "4", "IMAGE": "repo/tiny:1"})
    rule = {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "zone"}]}
    assert found.job.kubernetes.pod["affinity"] == {"podAffinity": rule}
    assert "ffinity" not in "\n".join(found.left_out)


def test_placeholders_without_a_value_are_refused_by_name() -> None:
    with pytest.raises(ConfigError) as refused:
        import_file(TEMPLATE, "tiny.yaml", {"IMAGE": "a"})
    assert "tiny.yaml:12" in str(refused.value)
    assert "--set NUM_NODES=VALUE" in str(refused.value)
    assert "IMAGE" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kind: InferenceService\n", "an inference service"),
        ("kind: Job\n", "data preparation or a test (Job), and no target supports this kind"),
        ("kind: MPIJob\n", "a job whose workers mpirun starts (MPIJob), and no target supports this kind"),
        ("kind: Job\napiVersion: batch.volcano.sh/v1alpha1\n", "a job of Volcano"),
        ("kind: Kustomization\n", "kubectl kustomize DIR | hp-ext import -"),
        (TEMPLATE.replace("command: [torchrun", "args: [--a").replace("/app/train.py, ", ""), "own program gets the"),
        ("kind: PyTorchJob\nmetadata: {name: {{ NAME }}}\n", "needs a value for NAME"),
        ("kind: PyTorchJob\nspec: [1]\n", "must be a mapping"),
        ("kind: PyTorchJob\nspec: {pytorchReplicaSpecs: {Worker: {}, Other: [1]}}\n", "must be a mapping"),
        ("kind: PyTorchJob\nspec: {pytorchReplicaSpecs: {Worker: {replicas: many}}}\n", "must be a whole number"),
        (TEMPLATE.replace("torchrun, --nproc_per_node=8", "mpirun"), "starts no Python file"),
        ("trainer: {num_nodes: 4}\n", "recipe"),
        ("a: &a [*a]\n", "itself"),
        ("", "contains no training job"),
        ("[" * 3000, "3000"),
    ],
)
def test_what_is_no_job_is_refused_with_the_reason(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        import_file(text, "file", {"NUM_NODES": "2", "IMAGE": "a"})
    assert said == "3000" or said in str(refused.value)


def job_of(command: str, more: str = "") -> Imported:
    """Two nodes of a job whose container starts `command`."""
    container = f"{{name: pytorch, image: repo/a, command: {command}{more}}}"
    worker = f"Worker: {{replicas: 2, template: {{spec: {{containers: [{container}]}}}}}}"
    return import_file(
        f"kind: PyTorchJob\nmetadata: {{name: a}}\nspec: {{pytorchReplicaSpecs: {{{worker}}}}}\n", "a.yaml"
    )


@pytest.mark.parametrize(
    ("script", "named"),
    [
        ("cd /a && make && torchrun t.py || sleep 60", "|| sleep 60: runs only if the command before it fails"),
        (
            "if [ $RANK = 0 ]; then python /prep.py; fi; torchrun t.py",
            "assumed to be false, so `python /prep.py` is not run",
        ),
        ("torchrun --log_dir=/l t.py", "a.yaml:3: --log-dir=/l of torchrun"),
    ],
)
def test_what_a_shell_would_do_besides_is_named(script: str, named: str) -> None:
    assert named in "\n".join(job_of(f'[sh, -c, "{script}"]').left_out)


def test_arguments_of_functions_and_of_env_are_carried() -> None:
    job = job_of('[bash, -c, "t() { torchrun --nproc_per_node=$1 t.py \\"${@:2}\\"; }; t 4 --a \'b c\'"]').job
    assert (job.workers_per_node, job.args) == (4, ("--a", "b c"))
    found = job_of("[env, A=1, torchrun, --nproc_per_node=4, t.py]")
    assert (found.job.env, found.left_out) == ({"A": "1"}, [])


def test_a_command_that_starts_processes_of_its_own_has_the_operators_number() -> None:
    found = job_of("[bash, /code/train.sh]")
    assert (found.job.words, found.left_out) == (["bash", "/code/train.sh"], [])
    assert "nprocPerNode: auto" in make_plan(found.job, target="kubeflow").files["job.yaml"].replace('"', "")


def test_an_image_that_the_file_does_not_name_is_named() -> None:
    text = "kind: TrainJob\nmetadata: {name: a}\nspec:\n  runtimeRef: {name: b, kind: ClusterTrainingRuntime}\n"
    found = import_file(f"{text}  trainer: {{numProcPerNode: 4, command: [torchrun, /t.py]}}\n", "a.yaml")
    named = "\n".join(found.left_out)
    assert "a.yaml:1: image: the file has no image" in named
    assert "runtimeRef" not in named


def test_where_pods_differ_is_said_once() -> None:
    worker = "{replicas: 1, template: {spec: {containers: [{name: a, image: b, command: [torchrun, /t.py]%s}]}}}"
    text = "kind: PyTorchJob\nmetadata: {name: a}\nspec:\n  pytorchReplicaSpecs:\n"
    text += f"    Master: {worker % ''}\n    Worker: {worker % ', env: [{name: A, value: x}]'}\n"
    (said,) = [one for one in import_file(text, "a.yaml").left_out if "env" in one]
    assert "a.yaml:6: " in said
    assert "container env A is not in Master" in said


@pytest.mark.parametrize(
    ("action", "source", "command"),
    [
        ("{{- .Values.name }}", "a.yaml", "helm template NAME CHART | hp-ext import -"),
        ("{{ quote .Values.name }}", "-", "helm template NAME CHART |"),
        ('{{ printf "%s-x" (lower $job.name) }}', "a.yaml", "helm template NAME CHART |"),
        ("{{$job.name}}", "a b/templates/a.yaml", "helm template NAME 'a b' --show-only templates/a.yaml |"),
        ('{{- define "more" }}a', "templates/a.yaml", "helm template NAME . --show-only templates/a.yaml |"),
        ("{{- /* a name */ -}}a", "a.yaml", "helm template NAME CHART |"),
    ],
)
def test_a_template_of_helm_is_refused_with_the_command_that_renders_it(action: str, source: str, command: str) -> None:
    with pytest.raises(ConfigError) as refused:
        import_file(f"kind: PyTorchJob\nmetadata: {{name: {action}}}\n", source)
    assert str(refused.value).startswith(f"{source}:2: belongs to a Helm chart")
    assert command in str(refused.value)


def test_a_chart_is_refused_and_what_helm_makes_of_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "chart").mkdir()
    (tmp_path / "chart" / "Chart.yaml").write_text("name: tiny\n")
    refused = call_hp_ext("import", "chart", cwd=tmp_path)
    assert refused.code == 3
    assert "helm template NAME chart | hp-ext import -" in refused.stderr
    rendered = "---\n# Source: tiny/templates/job.yaml\n" + TEMPLATE.replace("$NUM_NODES", "2").replace("${IMAGE}", "a")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(rendered.encode())))
    done = call_hp_ext("import", "-", "-o", "json", cwd=tmp_path)
    assert (done.code, done.json["job"]["nodes"]) == (0, 2)


def test_a_folder_is_counted(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(TEMPLATE)
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "values.env").write_text("export NUM_NODES=4 IMAGE=repo/tiny:1 # of the team\n")
    done = call_hp_ext("import", ".", "--env-file", "values.env", "-o", "json", cwd=tmp_path)
    assert done.code == 0
    assert {name: done.json[name] for name in ("files", "carried", "named", "refused")} == {
        "files": 3,
        "carried": 0,
        "named": 1,
        "refused": 2,
    }


@pytest.mark.parametrize("file", sorted(PUBLIC.rglob("*__*")), ids=lambda file: file.name)
def test_a_published_file_is_imported_or_refused(file: Path) -> None:
    with contextlib.suppress(ConfigError):
        import_file(file.read_text(encoding="utf-8"), file.name)


SBATCH = """\
#!/bin/bash
#SBATCH -N 2 --ntasks-per-node=1
#SBATCH --job-name=tiny # a comment
#SBATCH --gpus-per-node=8 --exclusive
export NCCL_DEBUG=INFO FI_PROVIDER=efa
export HEAD=$(hostname)
: "${IMAGE:=/fsx/tiny.sqsh}"
GPUS=${GPUS:-8}
declare -a ARGS=(--container-image $IMAGE --container-mounts /fsx:/fsx,/data:/in:ro)
declare -a RUN=(
    --nproc_per_node=$GPUS   # of each node
    --nnodes=$SLURM_JOB_NUM_NODES
)
cat > config.json <<EOF
{"steps": 4}
EOF
RESUME=""
if [ -d "/opt/sagemaker_cluster" ]; then
    RESUME="--auto-resume=1"
fi
srun ${RESUME} -l --mpi=pmix "${ARGS[@]}" python -m torch.distributed.run "${RUN[@]}" /app/train.py --name 'two words'
"""


def test_shell_is_read_as_the_shell_reads_it() -> None:
    pytest.importorskip("tree_sitter_bash")
    found = import_file(SBATCH, "tiny.sbatch")
    job = found.job
    assert (job.nodes, job.workers_per_node, job.image) == (2, 8, "/fsx/tiny.sqsh")
    assert (job.script, job.args) == ("/app/train.py", ("--name", "two words"))
    assert job.env == {"NCCL_DEBUG": "INFO", "FI_PROVIDER": "efa"}
    assert job.slurm.setup == ('export HEAD="$(hostname)"',)
    assert job.slurm.auto_resume
    assert [(volume.path, volume.read_only) for volume in job.volumes if volume.kind == "host"] == [
        ("/fsx", False),
        ("/in", True),
    ]
    named = "\n".join(found.left_out)
    for part in (
        "tiny.sbatch:8: GPUS: its default '8' is used",
        "cat > config.json",
    ):
        assert part in named, named
    assert job.overlay.slurm.srun == {"mpi": "pmix"}


@pytest.mark.parametrize("text", ["#!/bin/bash\n", "#SBATCH\n\n#SBATCH -N x\nsrun\n", "#!\nmpirun ./a\n"])
def test_shell_that_trains_nothing_is_refused(text: str) -> None:
    pytest.importorskip("tree_sitter_bash")
    with pytest.raises(ConfigError):
        import_file(text, "file.sbatch")


def test_a_file_with_broken_lines_is_imported_or_refused() -> None:
    pytest.importorskip("tree_sitter_bash")
    chance = random.Random(7)
    broken = [":", ": []", ": {}", ": 3", ": x", ": null", ": [a]", "=", "=(", ": -1"]
    for text in (TEMPLATE, SBATCH):
        for _round in range(150):
            lines = text.splitlines()
            for _line in range(chance.randint(1, 3)):
                at = chance.randrange(len(lines))
                lines[at] = lines[at].partition(":")[0] + chance.choice(broken)
            with contextlib.suppress(ConfigError):
                import_file("\n".join(lines), "file", {"NUM_NODES": "2", "IMAGE": "a"})


JINJA = """\
kind: PyTorchJob
metadata: {name: {{ NAME }}}
spec:
  pytorchReplicaSpecs:
    Worker:
      replicas: {{ NODES | default(2) }}
      template: {spec: {containers: [{name: a, image: repo/a, command: [torchrun, --nproc_per_node=8, /t.py], env: [
{% for name in ["A", "B"] %}{name: {{ name }}, value: x{{ loop.index }}},{% endfor %}
{% if DEBUG is defined %}{name: D, value: "1"}{% endif %}]}]}}
"""


def test_a_template_of_jinja_is_filled_and_its_defaults_are_named() -> None:
    found = import_file(JINJA, "a.yaml", {"NAME": "a"})
    assert (found.job.name, found.job.nodes, found.job.env) == ("a", 2, {"A": "x1", "B": "x2"})
    assert [one.partition(": has no value")[0] for one in found.left_out] == ["a.yaml:9: DEBUG", "a.yaml:6: NODES"]
    found = import_file(JINJA, "a.yaml", {"NAME": "a", "NODES": 4, "DEBUG": 1})
    assert (found.job.nodes, found.job.env["D"], found.left_out) == (4, "1", [])
    with pytest.raises(ConfigError, match=r"a.yaml:2: NAME: the template needs a value for NAME"):
        import_file(JINJA, "a.yaml")


@pytest.mark.parametrize(
    "text",
    [
        '{{ "a" * 10**10 }}',
        "{{ 9**9**9**9 }}",
        '{{ "%99999999999d"|format(1) }}',
        '{{ "a".ljust(10**10) }}',
        '{% set a = "aa" %}{% set a = a ~ a %}',
        "{% for i in range(9) %}{% for j in range(9) %}{% for k in range(9) %}{% endfor %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(999) %}{% for j in range(999) %}0123456789{% endfor %}{% endfor %}",
        "{% macro a() %}{% endmacro %}",
        '{% include "/etc/passwd" %}',
    ],
)
def test_a_template_that_is_a_bomb_or_a_program_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"more than|import does not support"):
        import_file(f"kind: PyTorchJob\na: {text}\n", "a.yaml")


def test_a_type_of_node_that_is_none_of_sagemakers_stays_a_label() -> None:
    spec = "spec: {nodeSelector: {node.kubernetes.io/instance-type: g5.8xlarge}, "
    text = (
        "kind: PyTorchJob\nmetadata: {name: a}\nspec: {pytorchReplicaSpecs: {Worker: {restartPolicy: Never, template: {"
    )
    text += spec + "containers: [{name: a, image: b, command: [torchrun, --nproc_per_node=1, /t.py]}]}}}}}\n"
    found = import_file(text, "a.yaml")
    assert found.job.scheduling.node_selector == {"node.kubernetes.io/instance-type": "g5.8xlarge"}
    assert (found.job.relaunch.max_times, found.left_out) == (0, [])
