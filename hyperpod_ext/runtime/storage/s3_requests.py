"""Requests to S3: the client without boto3's slow parts, and the retries, which boto3 does not make."""

from __future__ import annotations

import base64
import functools
import os
import random
from collections.abc import Callable
from typing import Any, TypeVar

from hyperpod_ext.errors import ConfigError, CorruptSnapshotError, HyperpodExtError, Problem, UnreachableError
from hyperpod_ext.runtime.storage.object_store import Cancelled
from hyperpod_ext.runtime.storage.s3_errors import ShortError, WrongChecksumError, judge
from hyperpod_ext.runtime.storage.transfer import Body, Call

T = TypeVar("T")
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.2, 20.0
"""First and longest wait between two tries; each wait is up to twice the one before."""


class Requests:
    """Requests to one bucket, over connections for `streams` streams."""

    def __init__(self, bucket: str, streams: int) -> None:
        self.bucket, self.client = bucket, _make_client(streams)

    def persist(self, doing: str, attempt: Callable[[], T], call: Call, also: Callable[[], bool] = lambda: False) -> T:
        """Return `attempt()`, retried with rising, random waits while the fault may be transient.

        `also`: returns whether to retry bytes that arrived damaged, because they were right when sent.
        """
        wait_s = _FIRST_WAIT_S
        while True:
            call.look()
            try:
                answer = attempt()
                call.progress()
                return answer
            except (Cancelled, HyperpodExtError, ShortError):
                raise
            except Exception as error:
                call.look()  # a cancelled body looks like a failed request
                meaning = judge(error, doing, call.what, self.bucket)
            spoilt = isinstance(meaning.error, WrongChecksumError) and also()
            if not (meaning.passes or spoilt):
                raise meaning.error
            if call.seconds_left() <= 0:
                call.gave_up = True
                raise _gave_up(meaning.error, call)
            call.sleep(min(wait_s, call.seconds_left() + 0.01) * random.uniform(0.5, 1.0))
            wait_s = min(wait_s * 2, _LONGEST_WAIT_S)

    def send(self, request: Callable[..., Any], data: memoryview, call: Call, **options: Any) -> Any:
        body = Body(data, call)
        try:
            return request(Bucket=self.bucket, Body=body, **options)
        except BaseException:
            body.seek(0)  # subtracts the counted bytes
            raise


def _make_client(streams: int) -> Any:
    try:
        import botocore.session
        from botocore.config import Config
    except ImportError:
        problem = Problem("the s3 tier needs boto3", hint="pip install 'hyperpod-ext[s3]'")
        raise ConfigError([problem]) from None
    style: dict[str, Any] = {"payload_signing_enabled": False}
    if os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"):
        style["addressing_style"] = "path"  # such endpoints rarely have a DNS name per bucket
    config = Config(
        s3=style,
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        retries={"total_max_attempts": 1, "mode": "standard"},
        connect_timeout=5,
        read_timeout=30,
        max_pool_connections=max(64, streams),
        tcp_keepalive=True,
    )
    session = botocore.session.get_session()  # its own session: sessions are not thread-safe
    session.register_component("data_loader", _models())
    return session.create_client("s3", config=config)


@functools.cache
def _models() -> Any:
    """Return botocore's loader of S3's API model, once a process: reading it is four fifths of a client's cost."""
    import botocore.session

    return botocore.session.get_session().get_component("data_loader")


def checksum(data: memoryview | bytes) -> str:
    from awscrt import checksums

    return f"{checksums.crc64nvme(data):016x}"


def base64_of(crc: str) -> str:
    return base64.b64encode(bytes.fromhex(crc)).decode()


def changed(what: str) -> CorruptSnapshotError:
    return CorruptSnapshotError(
        f"{what} was not written: its bytes do not match the CRC64-NVME they were sealed with",
        hint="The memory changed after it was sealed; earlier checkpoints are untouched.",
    )


def _gave_up(error: Exception, call: Call) -> HyperpodExtError:
    if not isinstance(error, HyperpodExtError):
        return UnreachableError(
            f"Cannot write {call.what}: its bytes arrive damaged each time", hint="Check the network."
        )
    return UnreachableError(f"{error.message}; tried for {call.deadline_s:g} s", hint=error.hint)
