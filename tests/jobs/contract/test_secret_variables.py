"""Variables that look like secrets: warned of once, in no copy of the spec, and read back from the file."""

from __future__ import annotations

import json

import pytest
from training_jobs import spec as training_job

from hyperpod_ext.config.job.job import JobConfig
from hyperpod_ext.config.job.secret_variables import looks_secret, secret_arguments
from hyperpod_ext.jobs.contract.targets import TARGETS
from hyperpod_ext.jobs.import_any import import_file
from hyperpod_ext.jobs.plan import find_warnings, make_plan

TOKEN = "hf_abcdefghijklmnopqrstuvwxyz012345"
SECRETS = {
    "HF_TOKEN": TOKEN,
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "aws_secret_access_key": "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
    "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE",
    "MY_VALUE": "ghp_0123456789abcdefghijABCDEFGHIJ012345",
    "DATABASE": "postgresql://me:hunter2@db.example.com/x",
    "DB_PASSWORD": "hunter2",
    "BEARER": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U",
}
HARMLESS = {
    "TOKENIZERS_PARALLELISM": "false",
    "MAX_TOKENS": "4096",
    "TOKEN": "17",
    "HF_TOKEN_PATH": "/run/secrets/token",
    "AWS_WEB_IDENTITY_TOKEN_FILE": "/var/run/token",
    "SECRET_NAME": "my-secret",
    "PASSWORD": "$FROM_ELSEWHERE",
    "HF_HOME": "/fsx/hf",
    "ENDPOINT": "https://example.com:8080/x",
    "NCCL_DEBUG": "WARN",
    "S3": "s3://bucket/key@2",
}


@pytest.mark.parametrize("name", SECRETS)
def test_tokens_keys_and_passwords_are_known_by_name_or_form(name: str) -> None:
    assert looks_secret(name, SECRETS[name])


@pytest.mark.parametrize("name", HARMLESS)
def test_numbers_paths_and_references_are_none(name: str) -> None:
    assert not looks_secret(name, HARMLESS[name])


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("--hf-token", TOKEN), [1]),
        (("--lr", "1e-4", "--db-password=hunter2"), [2]),
        (("--dsn", "postgresql://me:hunter2@db.example.com/x"), [1]),
        (("--wandb-api-key", "0123456789abcdef", "--api-key", "$FROM_ELSEWHERE"), [1]),
        (("--eos-token", "</s>", "--seed-token=7", "--tokenizer", "gpt2", "train", "password"), []),
        (("--password-file", "/run/password", "--secret-key", "no"), []),
    ],
)
def test_arguments_that_are_secrets_are_warned_of(words: tuple[str, ...], found: list[int]) -> None:
    asked = job("local", args=list(words)).model_copy(update={"env": {}})
    warned = [one.path for one in find_warnings(asked, None, "local") if one.rule == "HPX174"]
    assert list(secret_arguments(asked)) == [("args", index) for index in found]
    assert warned == [f"args.{index}" for index in found[:1]]


@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("python train.py --seed 1", []),
        (f"HF_TOKEN={TOKEN} python train.py", [("command",)]),
        ("exec env DB_PASSWORD='hunter2' ./train.sh", [("command",)]),
        ("python train.py --db-password hunter2 --dsn postgresql://me:hunter2@db/x", [("command",)]),
        (["env", "DB_PASSWORD=hunter2", "HF_TOKEN=$FROM_ELSEWHERE", "./train.sh", "--api-key", TOKEN], [1, 5]),
    ],
)
def test_words_of_a_command_that_are_secrets_are_warned_of(command: str | list[str], found: list[object]) -> None:
    asked = JobConfig(name="a", command=command, mode="plain")
    assert list(secret_arguments(asked)) == [one if isinstance(one, tuple) else ("command", one) for one in found]


@pytest.mark.parametrize("command", ["./train.sh 4", ["./train.sh", "4"]])
def test_a_command_is_written_without_a_warning(command: str | list[str], recwarn: pytest.WarningsRecorder) -> None:
    asked = JobConfig(name="a", command=command, mode="plain")
    assert JobConfig.model_validate_json(asked.model_dump_json()) == asked
    assert not recwarn.list


def job(target: str, **fields: object) -> JobConfig:
    env = {"FIRST": "1", **SECRETS, "LAST": "2"}
    return JobConfig.model_validate_json(json.dumps(training_job(env=env, nodes=2, **fields)))


@pytest.mark.parametrize("target", TARGETS)
def test_one_warning_names_them_all(target: str) -> None:
    (found,) = (one for one in find_warnings(job(target), None, target) if one.rule == "HPX174")
    assert all(f"env.{name}" in found.message for name in SECRETS)
    assert "FIRST" not in found.message
    assert ("kubernetes.secret_env" in found.hint) == (target in ("hyperpod-eks", "kubeflow"))


@pytest.mark.parametrize("target", [one for one in TARGETS if one != "local"])
def test_each_is_rendered_once_and_imported_again(target: str) -> None:
    asked = job(target)
    for text in make_plan(asked, target=target).files.values():
        assert text.count(TOKEN) <= (2 if target == "kubeflow" else 1), "once in each pod template"
    name, text = list(make_plan(asked, target=target).files.items())[-1]
    assert text.count(TOKEN) >= 1
    found = import_file(text, name)
    assert (found.left_out, found.job) == ([], asked)


def test_a_literal_in_the_overlay_is_left_out_of_the_copy_too() -> None:
    overlay = {
        "kubernetes": {"container": {"env": [{"name": "HF_TOKEN", "value": TOKEN}, {"name": "A", "value": "b"}]}}
    }
    asked = JobConfig.model_validate_json(json.dumps(training_job(overlay=overlay)))
    text = make_plan(asked, target="hyperpod-eks").files["job.yaml"]
    assert text.count(TOKEN) == 1
    (found,) = (one for one in find_warnings(asked, None, "hyperpod-eks") if one.rule == "HPX174")
    assert found.path == "overlay.kubernetes.container.env.0"
