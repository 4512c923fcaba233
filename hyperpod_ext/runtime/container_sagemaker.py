"""`python3 -m hyperpod_ext.runtime.container_sagemaker [args]`: one node of a SageMaker training job, as its container.

This module reads SageMaker's settings below /opt/ml, downloads the script and the job's secret, and starts our agent.
This module also copies the workers' output to the container's output, which CloudWatch keeps. If the job fails, this
module writes the cause to the file `output/failure`, which SageMaker reads.
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
"""Largest size of the archive of the script's code, in bytes."""
_MOST_CAUSE = 1024
"""Number of characters that SageMaker keeps of the cause of a failure."""


def main() -> None:
    root = Path(os.environ.get("HPX_ML_ROOT", "/opt/ml"))
    if "AWS_REGION" in os.environ:  # SageMaker sets AWS_REGION, but boto3 reads AWS_DEFAULT_REGION
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
        raise HyperpodExtError(f"SageMaker started {len(hosts)} nodes, but {ENV_RUNTIME} is for {config.nodes}")
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
            preexec_fn=lambda: die_with_parent(us, signal.SIGTERM),  # `preexec_fn` is safe in a process with one thread
        )
        code = wait_printing(agent, run_dir / "logs")
    if code != 0:
        _tell_cause(root, _cause(run_dir, code))
    return code


def join_parts(environ: Mapping[str, str]) -> str:
    """Return the runtime's settings, joined from several environment variables if need be.

    SageMaker limits an environment variable to 512 characters.
    """
    settings = take_variable(dict(environ), ENV_RUNTIME)
    if settings is None:
        raise HyperpodExtError(f"{ENV_RUNTIME} is not set", hint="use `hp-ext create-job` or `estimator_kwargs`")
    return settings


def place_of(resources: Mapping[str, Any]) -> tuple[list[str], int]:
    """Return all hosts, in an order that is the same on every node, and the index of this host among them."""
    hosts = sorted(resources["hosts"], key=lambda host: (len(host), host))  # sort algo-2 before algo-10
    return hosts, hosts.index(resources["current_host"])


def _fetch_code(root: Path) -> tuple[str, Path]:
    """Return the name of the training script and its folder, after unpacking the code if it is an archive."""
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
    """Extract the files, folders and links of `archive` into `folder`.

    Raises:
        HyperpodExtError: a member of the archive is of another kind, such as a device, or its path or its link's target
            is outside of `folder`.
    """
    inside = folder.resolve()
    with tarfile.open(archive) as opened:
        # tarfile.data_filter (in Python 3.11.4 and later) also removes write permissions of group and others
        opened.extraction_filter = getattr(tarfile, "data_filter", lambda member, _path: member)
        for member in opened:
            place = inside / member.name
            leads = place.parent / member.linkname if member.issym() else inside / member.linkname
            kind = member.isfile() or member.isdir() or member.issym() or member.islnk()
            if not (kind and place.resolve().is_relative_to(inside) and leads.resolve().is_relative_to(inside)):
                raise HyperpodExtError(
                    f"{archive.name}: {member.name!r} is not a file or folder inside the code's folder",
                    hint="pack only files, folders, and links between them",
                )
            opened.extract(member, inside)


def _fetch_secret(name: str, file: Path) -> Path:
    """Write the job's secret to `file`, which only this user may read, and return `file`."""
    import boto3
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        answer = boto3.client("secretsmanager").get_secret_value(SecretId=name)
    except (BotoCoreError, ClientError) as error:
        hint = "allow secretsmanager:GetSecretValue for this secret in the job's role"
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
    except (FileNotFoundError, json.JSONDecodeError):  # only the first node writes report.json
        error = {}
    return str(error.get("message") or f"the agent ended with exit code {code}")


def _tell_cause(root: Path, cause: str) -> None:
    file = root / "output" / "failure"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(cause[:_MOST_CAUSE])


if __name__ == "__main__":
    main()
