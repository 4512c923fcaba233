"""A real S3 for tests: LocalStack in a virtual environment of its own, one server for a whole test run.

Its dependencies do not go together with ours, hence the second environment, `.venv-s3`. `make setup` makes it; where
nobody has, the first test that needs it does (a minute). A machine that cannot install it skips those tests, and says
why; under CI they fail.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import whole_run

from hyperpod_ext.ports import free_port

PINS = Path(__file__).with_name("s3-server-pins.txt")
VENV = PINS.parents[2] / ".venv-s3"
READY = VENV / ".ready"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}
# ends when its first argument, a pipe, can be read to its end: with the test run, even if that is killed. One file a
# key, made under a lock: LocalStack 4.9 may make two where two create-only puts come at once, keep that of the one that
# it refuses, and send that empty one's bytes, none, under the other's length: whoever reads the key waits for ever
START = """
import os, runpy, sys, threading
threading.Thread(target=lambda: (open(sys.argv[1]).read(), os._exit(0)), daemon=True).start()
from localstack.services.s3 import provider
from localstack.services.s3.storage import ephemeral
provider.DEFAULT_S3_TMP_DIR = sys.argv[2]  # its own is one for all users of the machine
store, making = ephemeral.EphemeralS3ObjectStore, threading.Lock()
def open_one(self, bucket, s3_object, mode="r", opened=store.open):
    with making:
        files, key = self._filesystem[bucket]["keys"], self._key_from_s3_object(s3_object)
        if key not in files:
            folder, most = os.path.join(self.root_directory, bucket), ephemeral.S3_MAX_FILE_SIZE_BYTES
            files[key] = ephemeral.LockedSpooledTemporaryFile(dir=folder, max_size=most)
    return opened(self, bucket, s3_object, mode)
store.open = open_one
runpy.run_module("localstack.runtime.main", run_name="__main__")
"""
SETTINGS = {
    "SERVICES": "s3",
    "EAGER_SERVICE_LOADING": "1",
    "ACTIVATE_PRO": "0",
    "DISABLE_EVENTS": "1",
    "DNS_ADDRESS": "0",
    "OVERRIDE_IN_DOCKER": "0",
    "PERSISTENCE": "0",
    "SKIP_SSL_CERT_DOWNLOAD": "1",
}


class UnavailableError(Exception):
    """This machine has no S3 server, and cannot get one."""


def install() -> None:
    """Make `.venv-s3`, unless it is as the pins want it."""
    if READY.exists() and READY.read_text() == PINS.read_text():
        return
    shutil.rmtree(VENV, ignore_errors=True)
    pip = [
        str(VENV / "bin" / "pip"),
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-compile",
        "-r",
        str(PINS),
    ]
    try:
        for command in ([sys.executable, "-m", "venv", str(VENV)], pip):
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
        start()[1].kill()  # byte code and entry points are cached, so that tests do not wait for them
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", "") or str(error)
        raise UnavailableError(f"the S3 test server cannot be installed: {said.strip()[-300:]}") from error
    READY.write_text(PINS.read_text())


def start() -> tuple[str, subprocess.Popen[bytes]]:
    """URL and process of a fresh, empty server."""
    place = Path(tempfile.mkdtemp(prefix="s3-", dir=whole_run.folder()))
    host = f"127.0.0.1:{free_port()}"
    own = {
        "GATEWAY_LISTEN": host,
        "LOCALSTACK_HOST": host,
        "FILESYSTEM_ROOT": str(VENV / "cache"),
        "TMPDIR": str(place),
    }
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "PYTHON"))}
    log = place / "log"
    process = subprocess.Popen(
        [str(VENV / "bin" / "python"), "-c", START, str(whole_run.alive()), str(place / "blobs")],
        env=clean | SETTINGS | own | {"XDG_CACHE_HOME": str(VENV / "cache")},
        stdout=log.open("wb"),
        stderr=subprocess.STDOUT,
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(f"http://{host}/_localstack/health", timeout=1).close()
            return f"http://{host}", process
        except OSError:
            time.sleep(0.05)
    process.kill()
    raise UnavailableError(f"the S3 test server does not start: {log.read_text()[-500:]}")


@cache
def endpoint() -> str:
    """URL of the one server of this test run. Skips the test where there can be none, and fails it under CI."""
    try:
        url: str = whole_run.once("s3-server", lambda: (install(), start()[0])[1])
        return url
    except UnavailableError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


def new_bucket(url: str) -> str:
    """Name of a bucket that nothing else uses."""
    name = f"test-{secrets.token_hex(6)}"
    client(url).create_bucket(Bucket=name)
    return name


@cache
def _models() -> Any:
    """What a client knows of S3, read from its files once: most of what a client costs."""
    import botocore.session

    return botocore.session.get_session().get_component("data_loader")


def client(url: str) -> Any:
    """A plain client, to see what is there with other eyes."""
    import boto3.session
    import botocore.session
    from botocore.config import Config

    session = botocore.session.get_session()
    session.register_component("data_loader", _models())
    return boto3.session.Session(botocore_session=session).client(
        "s3",
        endpoint_url=url,
        aws_access_key_id="test",
        aws_secret_access_key="test",
        region_name="us-east-1",
        config=Config(s3={"addressing_style": "path"}),
    )


if __name__ == "__main__":
    try:
        install()
    except UnavailableError as error:
        raise SystemExit(str(error)) from None
