"""Detects environment variables and arguments that look like secrets, to keep them out of copies of the spec."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hyperpod_ext.config.job.job import JobConfig

_NAME = re.compile(
    r"^(?!HPX_)(.*_)?(TOKEN|SECRET|(PG)?PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|API_?KEY|ACCESS_?KEY(_ID)?"
    r"|SECRET_?KEY|PRIVATE_?KEY)(_VALUE|_?\d+)?$",
    re.IGNORECASE,
)
"""Pattern for names of variables with secrets. The pattern matches `HF_TOKEN` and `AWS_SECRET_ACCESS_KEY`, but not
`TOKENIZERS_PARALLELISM`, `MAX_TOKENS` or `TOKEN_FILE`.
"""
_VALUE = re.compile(
    r"^(hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|sk-[\w-]{16,}|nvapi-[\w-]{16,}"
    r"|xox[abeprs]-[\w-]{10,}|(AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{30,}|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\..*)$"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----|://[^/\s:@]+:[^/\s@]+@"
)
"""Pattern for values that are secrets: tokens of known services, JSON web tokens, private keys, URLs with a
password."""
_PLAIN = re.compile(r"|-?[\d.]+|true|false|yes|no|none|null|[./~$].*|[a-z0-9]+://.*", re.IGNORECASE)
"""Pattern for values that are no secrets, for any name of the variable: numbers, switches such as `true`, paths,
references to variables, and URLs."""
_ASSIGNED = re.compile(r"[A-Za-z_]\w*=")
_QUOTES = str.maketrans("", "", "'\"")


def looks_secret(name: str, value: str) -> bool:
    """Return whether the variable `name` or its value looks like a token, key or password."""
    named = _NAME.fullmatch(name) is not None and not _PLAIN.fullmatch(value)
    return named or (_VALUE.search(value) is not None and not name.startswith("HPX_"))


def secret_variables(job: JobConfig) -> Iterator[tuple[str | int, ...]]:
    """Yield the path in the spec of each environment variable that looks like a secret."""
    for name, value in job.env.items():
        if looks_secret(name, value):
            yield ("env", name)
    for index, one in enumerate(_overlaid(job)):
        if _is_secret_entry(one):
            yield ("overlay", "kubernetes", "container", "env", index)


def secret_arguments(job: JobConfig) -> Iterator[tuple[str | int, ...]]:
    """Yield the path in the spec of each argument that looks like a secret; for a `command` that is a text, at most one
    path. Options whose names end in `token` are recognised only by their values, because the values of options like
    `--eos-token` are no secrets."""
    for index in _secret_words(job.args):
        yield ("args", index)
    if isinstance(job.command, str):
        if list(_secret_words(job.command.translate(_QUOTES).split())):
            yield ("command",)
    else:
        for index in _secret_words(job.command or ()):
            yield ("command", index)


def _secret_words(words: Sequence[str]) -> Iterator[int]:
    """Yield the index of each word that looks like a secret: the value of an option, of an assignment, or any text."""
    for index, (before, word) in enumerate(zip(("", *words), words, strict=False)):
        assigned = _ASSIGNED.match(word) is not None
        option, equals, value = word.partition("=") if assigned or word.startswith("-") else (before, "=", word)
        name = option.lstrip("-").replace("-", "_") if equals and (assigned or option.startswith("-")) else ""
        named = (assigned or not name.lower().endswith("token")) and looks_secret(name, value)
        if named or _VALUE.search(value):
            yield index


def without_secrets(job: JobConfig) -> JobConfig:
    """Return `job` without the environment variables that look like secrets."""
    if not any(True for _ in secret_variables(job)):
        return job
    overlay = job.overlay
    update: dict[str, Any] = {"env": {name: value for name, value in job.env.items() if not looks_secret(name, value)}}
    if entries := _overlaid(job):
        container = {**overlay.kubernetes.container, "env": [one for one in entries if not _is_secret_entry(one)]}
        kubernetes = overlay.kubernetes.model_copy(update={"container": container})
        update["overlay"] = overlay.model_copy(update={"kubernetes": kubernetes})
    return job.model_copy(update=update)


def with_secrets(job: JobConfig, environment: Mapping[str, str]) -> JobConfig:
    """Return `job` with the secrets that its stored spec lacks.

    Args:
        job: a job that was read from a copy of its spec, without secrets.
        environment: rendered environment of the job, with the secrets.
    """
    missing = {name: value for name, value in environment.items() if name not in job.env and looks_secret(name, value)}
    return job.model_copy(update={"env": {**job.env, **missing}}) if missing else job


def secrets_last(env: Mapping[str, str]) -> dict[str, str]:
    """Return `env` with the secrets last, which is the order in rendered files and in the result of `with_secrets`."""
    return dict(sorted(env.items(), key=lambda item: looks_secret(*item)))


def _overlaid(job: JobConfig) -> list[Any]:
    entries = job.overlay.kubernetes.container.get("env")
    return entries if isinstance(entries, list) else []


def _is_secret_entry(entry: Any) -> bool:
    named = isinstance(entry, dict) and isinstance(entry.get("value"), str)
    return named and looks_secret(str(entry.get("name")), entry["value"])
