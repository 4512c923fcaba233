"""`python3 -m hyperpod_ext.runtime.container_sagemaker [args]`: one node of a SageMaker training job, as its container.

Reads what SageMaker puts below /opt/ml, gets the script and the job's secret, and starts our agent. What the workers
print goes to the container's own output too, which is what CloudWatch keeps; the cause of a failure goes where
SageMaker looks for it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

from hyperpod_ext.config.job.runtime import ENV_RUNTIME, RuntimeConfig, take_variable
from hyperpod_ext.errors import HyperpodExtError, UnreachableError
from hyperpod_ext.files import make_private_folder
from hyperpod_ext.processes import die_with_parent
from hyperpod_ext.runtime.container_kubernetes import wait_printing
from hyperpod_ext.runtime.ipc.environment import ENV_RUN_DIR, ENV_SECRET_FILE
from hyperpod_ext.runtime.storage.open import open_store

ENV_SECRET_ID = "HPX_SECRET_ID"
PORT = 29400
ARCHIVE = "sourcedir.tar.gz"
_MOST_CODE = 1 << 30
_MOST_CAUSE = 1024
"""Characters of a cause that SageMaker keeps."""


def main() -> None:
    root = Path(os.environ.get("HPX_ML_ROOT", "/opt/ml"))
    if "AWS_REGION" in os.environ:  # what SageMaker sets; boto3 reads the other one
        os.environ.setdefault("AWS_DEFAULT_REGION", os.environ["AWS_REGION"])
    try:
        code = _run(root, sys.argv[1:], os.environ)
    except HyperpodExtError as error:
        print(f"hyperpod_ext: {error}", file=sys.stderr)  # noqa: T201  (CloudWatch keeps what is printed)
        _tell_cause(root, str(error))
        code = error.exit_code
    sys.exit(code)


def _run(root: Path, arguments: list[str], environ: MutableMapping[str, str]) -> int:
    runtime = join_parts(environ)
    config = RuntimeConfig.from_json(runtime)
    hosts, here = place_of(json.loads((root / "input/config/resourceconfig.json").read_text()))
    if len(hosts) != config.nodes:
        raise HyperpodExtError(f"the job has {len(hosts)} nodes; {ENV_RUNTIME} says {config.nodes}")
    script, folder = _fetch_code(root)
    run_dir = root / "output" / "data" / "hpx-run"
    make_private_folder(run_dir / "logs")
    env = {**environ, ENV_RUNTIME: runtime, ENV_RUN_DIR: str(run_dir)}
    with tempfile.TemporaryDirectory(prefix="hpx-") as private:
        if name := environ.get(ENV_SECRET_ID):
            env[ENV_SECRET_FILE] = str(_fetch_secret(name, Path(private) / "secret"))
        flags = ["--nnodes", str(config.nodes), "--nproc-per-node", str(config.workers_per_node)]
        flags += ["--node-rank", str(here), "--rdzv-endpoint", f"{hosts[0]}:{PORT}", "--keep-events"]
        command = [sys.executable, "-m", "hyperpod_ext.runtime.agent", *flags, "--", script, *arguments]
        us = os.getpid()
        agent = subprocess.Popen(
            command,
            env=env,
            cwd=folder,
            preexec_fn=lambda: die_with_parent(us, signal.SIGTERM),  # no threads here that it could meet
        )
        code = wait_printing(agent, run_dir / "logs")
    if code != 0:
        _tell_cause(root, _cause(run_dir, code))
    return code


def join_parts(environ: Mapping[str, str]) -> str:
    """The runtime's settings; SageMaker's variables have 512 characters at most, so they may come in parts."""
    settings = take_variable(dict(environ), ENV_RUNTIME)
    if settings is None:
        raise HyperpodExtError(f"{ENV_RUNTIME} is not set", hint="was the job made by hyperpod_ext's own helpers?")
    return settings


def place_of(resources: Mapping[str, Any]) -> tuple[list[str], int]:
    """All hosts in the order that every node sees, and which of them this is."""
    hosts = sorted(resources["hosts"], key=lambda host: (len(host), host))  # algo-2 before algo-10
    return hosts, hosts.index(resources["current_host"])


def _fetch_code(root: Path) -> tuple[str, Path]:
    """Name of the script, and the folder it is in."""
    given = json.loads((root / "input/config/hyperparameters.json").read_text())
    values = {name: json.loads(value) for name, value in given.items() if name.startswith("sagemaker_")}
    channel = root / "input/data/code"
    archive, folder = channel / ARCHIVE, root / "code"
    where = str(values.get("sagemaker_submit_directory", ""))
    make_private_folder(folder)
    if archive.is_file():
        data = archive.read_bytes()
    elif channel.is_dir():
        return os.environ.get("HPX_SCRIPT") or str(values["sagemaker_program"]), channel
    else:
        place, _, name = where.rpartition("/")
        data = open_store(place).get(name, _MOST_CODE)
        archive = folder / ARCHIVE
        archive.write_bytes(data)
    _unpack(archive, folder)
    return str(values["sagemaker_program"]), folder


def _unpack(archive: Path, folder: Path) -> None:
    """Files, folders and links of `archive` into `folder`; nothing lies or leads outside of it, and no devices.

    Raises:
        HyperpodExtError: a member is something else, or would lie or lead elsewhere.
    """
    inside = folder.resolve()
    with tarfile.open(archive) as opened:
        # takes rights away that are too wide, too; Python has it from 3.11.4 on
        opened.extraction_filter = getattr(tarfile, "data_filter", lambda member, _path: member)
        for member in opened:
            place = inside / member.name
            leads = place.parent / member.linkname if member.issym() else inside / member.linkname
            kind = member.isfile() or member.isdir() or member.issym() or member.islnk()
            if not (kind and place.resolve().is_relative_to(inside) and leads.resolve().is_relative_to(inside)):
                raise HyperpodExtError(
                    f"{archive.name}: {member.name!r} is no file or folder inside of the code's folder",
                    hint="pack only files, folders, and links between them",
                )
            opened.extract(member, inside)


def _fetch_secret(name: str, file: Path) -> Path:
    """The job's secret, in a file that only this user may read."""
    import boto3
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        answer = boto3.client("secretsmanager").get_secret_value(SecretId=name)
    except (BotoCoreError, ClientError) as error:
        hint = "the job's role needs secretsmanager:GetSecretValue for it"
        if isinstance(error, ClientError) and error.response["Error"]["Code"] == "ResourceNotFoundException":
            hint = "`hp-ext create-job` and `estimator_kwargs(job)` create it; with other tools: "
            hint += f'aws secretsmanager create-secret --name {name} --secret-string "$(openssl rand -hex 32)"'
        raise UnreachableError(f"the job's secret {name} cannot be read: {error}", hint=hint) from error
    file.touch(mode=0o600)
    file.write_text(answer["SecretString"])
    return file


def _cause(run_dir: Path, code: int) -> str:
    try:
        error = json.loads((run_dir / "report.json").read_text())["error"] or {}
    except (FileNotFoundError, json.JSONDecodeError):  # only the first node writes one
        error = {}
    return str(error.get("message") or f"the agent ended with exit code {code}")


def _tell_cause(root: Path, cause: str) -> None:
    file = root / "output" / "failure"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(cause[:_MOST_CAUSE])


if __name__ == "__main__":
    main()
