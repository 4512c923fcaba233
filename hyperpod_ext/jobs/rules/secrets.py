"""Secrets that the spec holds as text."""

from __future__ import annotations

from collections.abc import Iterator

from hyperpod_ext.config.files.checks import Finding
from hyperpod_ext.config.files.document import dotted
from hyperpod_ext.config.job.secret_variables import secret_arguments, secret_variables
from hyperpod_ext.jobs.rules import KUBERNETES, Context, rule


@rule(
    "HPX174",
    "warning",
    "a secret as text",
    "Everybody who may read the job, its files or the spec reads it too: a pod's variables are shown by `kubectl get`, "
    "those of a training job by DescribeTrainingJob. The copy of the spec in the job has no such variables.",
    "On Kubernetes write kubernetes.secret_env, which names a key of a Secret. Elsewhere read it in the script, from "
    "Secrets Manager or from a file that only you may read.",
)
def secrets_are_no_text(context: Context) -> Iterator[Finding]:
    paths = [*secret_variables(context.job), *secret_arguments(context.job)]
    if not paths:
        return
    names = ", ".join(map(dotted, paths))
    name = paths[0][-1] if paths[0][0] == "env" else "NAME"
    hint = f"write kubernetes.secret_env: [{{name: {name}, secret: NAME-OF-THE-SECRET, key: KEY}}]"
    if not context.may_be(*KUBERNETES):
        hint = "read it in the script, from Secrets Manager or from a file that only you may read"
    message = f"{names} {'looks' if len(paths) == 1 else 'look'} like a secret, and will be readable in the job"
    yield Finding(paths[0], message, hint)
