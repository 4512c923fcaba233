"""A spec is read as it is written, or every mistake in it is told at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from hyperpod_ext.config.checkpoint import MemoryTier, PeerTier
from hyperpod_ext.config.clusters.cluster import ClusterConfig
from hyperpod_ext.config.files.load import load, load_text, read_text
from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.errors import ConfigError, NotFoundError, Problem


def problems_of(text: str, *overrides: str, files: tuple[str, ...] | None = None) -> list[Problem]:
    listing = None if files is None else (lambda _folder: files)
    with pytest.raises(ConfigError) as caught:
        load_text(JobConfig, text, "job.yaml", overrides, listing)
    return list(caught.value.problems)


def problem_of(text: str, *overrides: str, files: tuple[str, ...] | None = None) -> Problem:
    problems = problems_of(text, *overrides, files=files)
    assert len(problems) == 1, problems
    return problems[0]


GOOD = "name: a\nscript: t.py\n"


def test_a_good_file_becomes_a_typed_config(tmp_path: Path) -> None:
    (tmp_path / "t.py").touch()
    spec = tmp_path / "job.yaml"
    spec.write_text(GOOD + "nodes: 2\ncheckpoint:\n  tiers:\n    - kind: memory\n    - {kind: peer, replicas: 1}\n")
    job = load(JobConfig, spec)
    assert (job.nodes, job.world_size) == (2, 2)
    assert job.checkpoint.tiers == (MemoryTier(), PeerTier(replicas=1))


def test_five_mistakes_are_told_at_once_each_with_line_and_hint() -> None:
    text = """\
name: tiny
script: trian.py
nodez: 2
workers_per_node: "2"
global_batch_size: 15
checkpoint:
  tiers:
    - kind: memry
      every_steps: 0
"""
    found = [
        (problem.line, problem.path, problem.hint) for problem in problems_of(text, files=("train.py", "job.yaml"))
    ]
    assert found == [
        (2, "script", "did you mean `train.py`?"),
        (3, "nodez", "did you mean `nodes`?"),
        (4, "workers_per_node", "write 2 without quotes"),
        (5, "global_batch_size", "write 12 or 16"),
        (8, "checkpoint.tiers.0.kind", "did you mean `memory`? valid: memory, peer, s3, file, disk"),
        (9, "checkpoint.tiers.0.every_steps", "it must be at least 1"),
    ]


@pytest.mark.parametrize(
    ("line", "path", "message", "hint"),
    [
        ('nodes: "two"', "nodes", "must be a whole number, not the text `two`", "write digits only, such as 2"),
        ("nodes: 2.0", "nodes", "must be a whole number, not the number 2.0", "write 2"),
        ("nodes: 1e21", "nodes", "must be a whole number, not the number 1e+21", "at most 100000"),
        ("nodes: 1e9", "nodes", "must be a whole number, not the number 1000000000.0", "at most 100000"),
        ("nodes: 1e5", "nodes", "must be a whole number, not the number 100000.0", "write 100000"),
        ("global_batch_size: 1e21", "global_batch_size", "not the number 1e+21", "write digits only, such as 2"),
        ("nodes: true", "nodes", "not `true`, a true/false value", "write digits only"),
        ("nodes:", "nodes", "not an empty value", "write digits only"),
        ("nodes: 0", "nodes", "`0` is out of range", "it must be at least 1"),
        ("seed: -1", "seed", "`-1` is out of range", "it must be at least 0"),
        ("rendezvous: {port: 70000}", "rendezvous.port", "`70000` is out of range", "it must be at most 65535"),
        ("args: [--lr, 2.50]", "args.1", "must be text, not the number 2.5", 'write "2.50" in quotes'),
        ("args: --steps 40", "args", "must be a list", 'write ["--steps", "40"]'),
        ("args: {a: b}", "args", "must be a list, not a mapping", "write each item"),
        ("env: {A: on, B: 1}", "env.B", "must be text, not the number 1", 'write "1" in quotes'),
        ("env: {1x: a}", "env.1x", "letters, digits and underscores", ""),
        ("env: {a-b: a}", "env.a-b", "the name `a-b` does not have the right form", "for example `A_B`"),
        (
            f"sagemaker: {{tags: {{a: {'x' * 300}}}}}",
            "sagemaker.tags.a",
            "has 300 characters",
            "at most 256 are allowed",
        ),
        ("sagemaker: {tags: {'aws:a': b}}", "sagemaker.tags.aws:a", "are reserved for AWS", ""),
        ("env: [a]", "env", "must be a mapping, not a list", "write one `NAME: value` per line"),
        (
            "checkpoint: 3",
            "checkpoint",
            "must be a mapping, not the number 3",
            "valid: tiers, overlap, when_busy, finish_s, grace_s",
        ),
        ("checkpoint: {tiers: [memory]}", "checkpoint.tiers.0", "must be a mapping", "write `{kind: memory}`"),
        ("checkpoint: {tiers: [{}]}", "checkpoint.tiers.0.kind", "is missing", "add `kind`, one of memory, peer"),
        ("checkpoint: {when_busy: superseed}", "checkpoint.when_busy", "is not a valid value", "`supersede`?"),
        ("checkpoint: {tiers: [{kind: s3, uri: x}]}", "checkpoint.tiers.0.uri", "`x` is not an S3 URI", "s3://bucket"),
        ("checkpoint: {tiers: [{kind: s3}]}", "checkpoint.tiers.0.uri", "is missing: Bucket", "add `uri: s3://"),
        ("chaos: {compare: 'yes'}", "chaos.compare", "must be true or false", "write true without quotes"),
        ("max_restarts: 3", "max_restarts", "is not a known field", "did you mean `restart.max_restarts`?"),
        ("zzz: 3", "zzz", "is not a known field", "valid: name, script, command, args"),
        ("restart: {max_restart: 1}", "restart.max_restart", "is not a known field", "did you mean `max_restarts`?"),
        ("volumes: [{kind: claim, path: /a, claim: a, sub_path: ../x}]", "volumes.0.sub_path", "leaves the", "without"),
        ("volumes: [{path: /fsx, claim: fsx}]", "volumes.0.kind", "is missing", "add `kind: claim`"),
        ("volumes: [{path: /fsx}]", "volumes.0.kind", "is missing", "one of claim, host, scratch, config, secret"),
        ("volumes: [/fsx]", "volumes.0", "must be a mapping", "`{kind: ..., path: /fsx}` with one of the kinds claim,"),
        ("checkpoint: {tiers: [memroy]}", "checkpoint.tiers.0", "must be a mapping", "did you mean `{kind: memory}`?"),
        (
            "checkpoint: {tiers: [s3://bkt/p]}",
            "checkpoint.tiers.0",
            "must be a mapping",
            "write `{kind: s3, uri: s3://bkt/p}`",
        ),
        ("checkpoint: {tiers: [/ck]}", "checkpoint.tiers.0", "must be a mapping", "write `{kind: file, path: /ck}`"),
        ("resources: {gpus: 8}", "resources.gpus", "is not a known field", "did you mean `accelerators`?"),
        ("gpus: 8", "gpus", "is not a known field", "did you mean `resources.accelerators`?"),
        ("hostNetwork: true", "hostNetwork", "not a known field", "did you mean `kubernetes.host_network`?"),
        ("nodeSelector: {a: b}", "nodeSelector", "not a known field", "did you mean `scheduling.node_selector`?"),
        ("secrets: [a]", "secrets", "is not a known field", "did you mean `kubernetes.secret_env`?"),
        ("working_dir: app", "working_dir", "`app` is not an absolute path", "begins with /, such as /app"),
        ("volumes: [{kind: claim, path: x/y, claim: a}]", "volumes.0.path", "absolute", "begins with /, such as /x/y"),
        ("checkpoint: {tiers: [{kind: s3, uri: s3://b/p}]}", "checkpoint.tiers.0.uri", "`b` is", "3 to 63 lower-case"),
        ("checkpoint: {tiers: [{kind: s3, uri: s3://a_b}]}", "checkpoint.tiers.0.uri", "`a_b` is", "digits, dots or"),
        ("checkpoint: {tiers: [{kind: s3, uri: bkt}]}", "checkpoint.tiers.0.uri", "S3 URI", "such as s3://bkt"),
        ("shared_memory_mib: 64Gi", "shared_memory_mib", "not the text `64Gi`", "write 65536, which is 64Gi in MiB"),
        ("shared_memory_mib: 64 GB", "shared_memory_mib", "not the text `64 GB`", "write 61036, which is 64 GB in MiB"),
        ("timeouts: {run_s: 5d}", "timeouts.run_s", "not the text `5d`", "write 432000, which is 5d in seconds"),
        ("timeouts: {run_s: 30 m}", "timeouts.run_s", "the text `30 m`", "write 1800, which is 30 m in seconds"),
        (
            "restart: {lease_s: 1.5h}",
            "restart.lease_s",
            "must be a number",
            "write 5400, which is 1.5h in seconds",
        ),
        ("nodes: 5d", "nodes", "not the text `5d`", "write digits only, such as 2"),
    ],
)
def test_a_mistake_is_explained_with_what_to_write_instead(line: str, path: str, message: str, hint: str) -> None:
    problem = problem_of(GOOD + line + "\n")
    assert (problem.source, problem.line, problem.path) == ("job.yaml", 3, path)
    assert message in problem.message
    assert hint in problem.hint


def test_a_name_that_does_not_fit_gets_one_that_does() -> None:
    problem = problem_of("name: Tiny GPT\nscript: t.py\n")
    assert "lower-case letters, digits and dashes" in problem.message
    assert problem.hint == "for example `tiny-gpt`"


def test_missing_fields_say_what_they_are_for() -> None:
    name, script = problems_of("# nothing yet\n")
    assert (name.path, name.hint) == ("name", "add `name: tiny-gpt`")
    assert "Python file that trains" in script.message


def test_what_is_behind_a_misspelt_name_is_checked_too() -> None:
    paths = [problem.path for problem in problems_of(GOOD + "chekpoint:\n  tiers:\n    - {kind: peer, replica: 0}\n")]
    assert paths == ["chekpoint", "checkpoint.tiers.0.replica", "checkpoint.tiers.0.replicas"]


def test_nothing_is_concluded_from_a_field_that_is_itself_wrong() -> None:
    problems = problems_of(GOOD + "nodes: many\nglobal_batch_size: 15\nchaos: {faults: [{rank: 7, step: 1}]}\n")
    assert [problem.path for problem in problems] == ["nodes"]


def test_cross_checks_run_beside_an_unrelated_mistake() -> None:
    problems = problems_of(GOOD + "nodes: 4\nglobal_batch_size: 15\nseed: x\n")
    assert [problem.path for problem in problems] == ["global_batch_size", "seed"]


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        (
            "global_batch_size: 8\nelastic: {min_nodes: x, step: 1, sizes: [2], batch: {micro_batch_size: 3}}",
            ["elastic.batch.micro_batch_size", "elastic.min_nodes", "elastic.max_nodes", "elastic"],
        ),
        (
            "checkpoint: {tiers: [{kind: file, path: /x, every_steps: 5, every_seconds: 3, keep: 0}, {kind: peer}]}",
            ["checkpoint.tiers.0.keep", "checkpoint.tiers.0", "checkpoint.tiers.1.replicas"],
        ),
        (
            "chaos: {faults: [{rank: 0, node: 1, step: 0}, {rank: 7, step: 1}]}",
            ["chaos.faults.0.step", "chaos.faults.0", "chaos.faults.1.rank"],
        ),
    ],
)
def test_fields_that_contradict_each_other_hide_nothing(text: str, paths: list[str]) -> None:
    problems = problems_of(GOOD + text)
    assert sorted(problem.path for problem in problems) == sorted(paths)
    assert not any(problem.message.startswith("Value error") for problem in problems)


@pytest.mark.parametrize(
    ("text", "line", "hint"),
    [
        (GOOD + "args: [1, 2\nnodes: 2\n", 4, "brackets"),
        (GOOD + "a: b: c\n", 3, "colon in quotes"),
        (GOOD + "env:\n\tA: b\n", 4, "spaces, not tabs"),
        (GOOD + "---\nname: b\n", 3, "one document"),
        ("name: \x07\n", 1, ""),
    ],
)
def test_text_that_is_not_yaml_is_one_problem_with_its_line(text: str, line: int, hint: str) -> None:
    problem = problem_of(text)
    assert problem.line == line
    assert hint in problem.hint


@pytest.mark.parametrize("text", ["- a\n", "just words\n", "3\n"])
def test_a_file_without_fields_is_refused(text: str) -> None:
    assert "must be a mapping" in problems_of(text)[0].message


def test_a_field_written_twice_is_a_problem_at_the_second() -> None:
    problem = problem_of(GOOD + "nodes: 1\nnodes: 2\n")
    assert (problem.line, problem.path) == (4, "nodes")
    assert "line 3" in problem.hint


def test_a_missing_file_suggests_the_nearest_one(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(GOOD)
    with pytest.raises(NotFoundError) as caught:
        load(JobConfig, tmp_path / "jobs.yaml")
    assert str(tmp_path / "job.yaml") in caught.value.hint
    with pytest.raises(NotFoundError, match="hp-ext init"):
        load(JobConfig, tmp_path / "elsewhere" / "x.yaml")


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_bytes(b"name: a\nscript: \xff\xfe\n")
    with pytest.raises(ConfigError, match=r"job\.yaml:2: is not UTF-8 text"):
        load(JobConfig, tmp_path / "job.yaml")
    with pytest.raises(ConfigError, match="is a folder, not a file"):
        load(JobConfig, tmp_path)


def test_a_cluster_is_checked_as_well() -> None:
    text = """\
name: research
region: us-west-2
instance_groups:
  - {name: a, instance_type: ml.p5.48xlarge, count: 2, spares: 3}
  - {name: a, instance_type: p5, count: 2}
"""
    with pytest.raises(ConfigError) as caught:
        load_text(ClusterConfig, text)
    assert [(problem.line, problem.path) for problem in caught.value.problems] == [
        (4, "instance_groups.0.spares"),
        (5, "instance_groups.1.instance_type"),
        (5, "instance_groups.1.name"),
    ]


def test_problems_found_later_can_be_given_their_line() -> None:
    loaded = read_text(JobConfig, GOOD + "checkpoint:\n  tiers:\n    - kind: peer\nnodes: 2\n", "job.yaml")
    peer, image = loaded.locate([Problem("no", path="checkpoint.tiers.0"), Problem("no", path="image")])
    assert (peer.source, peer.line) == ("job.yaml", 5)
    assert (image.source, image.line) == ("job.yaml", 1)


def test_keys_with_dots_have_their_line() -> None:
    text = GOOD + "scheduling:\n  node_selector:\n    a: x\n    node.kubernetes.io/instance-type: ml.p5.48xlarge\n"
    path = "scheduling.node_selector.node.kubernetes.io/instance-type"
    loaded = read_text(JobConfig, text, "job.yaml")
    found = loaded.locate([Problem("no", path=path), Problem("no", path=f"{path}.below")])
    assert [problem.line for problem in found] == [len(text.splitlines())] * 2
    changed = read_text(JobConfig, text, "job.yaml", [f"{path}=ml.p4d.24xlarge"]).config
    assert changed.scheduling.node_selector["node.kubernetes.io/instance-type"] == "ml.p4d.24xlarge"
