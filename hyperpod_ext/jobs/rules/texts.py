"""Rules of the arguments and environment variables of the job's processes."""

from __future__ import annotations

from collections.abc import Iterator

from hyperpod_ext.config.files.checks import Finding
from hyperpod_ext.config.files.document import Path, dotted
from hyperpod_ext.config.job.secret_variables import secret_arguments, secret_variables
from hyperpod_ext.jobs.contract.rank_variables import is_of_ranks, refusal
from hyperpod_ext.jobs.rules import KUBERNETES, Context, rule


@rule(
    "HPX174",
    "warning",
    "a secret as plain text",
    "Every user who can read the job, its files or the spec can read the secret: `kubectl get` shows a pod's "
    "variables, DescribeTrainingJob those of a training job. The copy of the spec in the job does not contain such "
    "variables.",
    "On Kubernetes use kubernetes.secret_env, which names a key of a Secret. On other targets, read the secret in "
    "the script, from Secrets Manager or from a file that only you can read.",
)
def secrets_are_no_text(context: Context) -> Iterator[Finding]:
    paths = [*secret_variables(context.job), *secret_arguments(context.job)]
    if not paths:
        return
    names = ", ".join(map(dotted, paths))
    name = paths[0][-1] if paths[0][0] == "env" else "NAME"
    hint = f"write kubernetes.secret_env: [{{name: {name}, secret: NAME-OF-THE-SECRET, key: KEY}}]"
    if not context.may_be(*KUBERNETES):
        hint = "read the secret in the script, from Secrets Manager or from a file that only you can read"
    found = "looks like a secret, but is" if len(paths) == 1 else f"{names} look like secrets, but are"
    message = f"{found} visible to everybody who can read the job"
    yield Finding(paths[0], message, hint)


@rule(
    "HPX160",
    "error",
    "a variable that identifies ranks",
    "The launcher sets RANK, WORLD_SIZE, MASTER_ADDR and the like for each process. A value in the spec would be "
    "lost, or give all ranks the same identity.",
    "Remove the variable. To set the port of the first node, use rendezvous.port.",
    reads=("env", "kubernetes.secret_env"),
)
def variables_of_ranks_are_left_alone(context: Context) -> Iterator[Finding]:
    named: list[tuple[Path, str]] = [(("env", name), name) for name in context.job.env]
    secrets = enumerate(context.job.kubernetes.secret_env)
    named += [(("kubernetes", "secret_env", index, "name"), entry.name) for index, entry in secrets]
    for path, name in named:
        if is_of_ranks(name) and not name.startswith("HPX_"):  # HPX007 and HPX150 report names that start with HPX_
            hint = "write rendezvous.port" if name == "MASTER_PORT" else "remove it, or choose another name"
            yield Finding(path, refusal(name), hint)


@rule(
    "HPX152",
    "error",
    "a NUL character in an argument or variable",
    "A NUL character ends an argument or variable of a process. The rest of the text would be lost.",
    "Remove the character.",
    reads=("args", "command", "env", "script"),
)
def text_has_no_nul(context: Context) -> Iterator[Finding]:
    job = context.job
    texts: list[tuple[Path, str]] = [(("args", index), text) for index, text in enumerate(job.args)]
    texts += [(("env", name), text) for name, text in job.env.items()]
    texts += [(("command",), "".join(job.command or ())), (("script",), job.script)]
    for path, text in texts:
        if "\0" in text:
            yield Finding(path, "contains a NUL character", "remove it")
