"""Requests to S3: a client without boto3's slow parts, and retries, which are turned off in boto3."""

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
"""First and longest wait between two tries, in seconds. The wait doubles with each try, and is then shortened at
random by up to a half."""


class Requests:
    """Requests to one bucket, with enough connections for `streams` parallel streams."""

    def __init__(self, bucket: str, streams: int) -> None:
        self.bucket, self.client = bucket, _make_client(streams)

    def persist(self, doing: str, attempt: Callable[[], T], call: Call, also: Callable[[], bool] = lambda: False) -> T:
        """Return the result of `attempt()`. While the error of `attempt` may be transient, retry with growing, random
        waits.

        Args:
            doing: verb for error messages, such as "write".
            attempt: makes the request.
            call: deadline and cancellation of the call.
            also: called if the bytes arrived damaged; returns whether the bytes in memory are still right, so that a
                retry makes sense.
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
                call.look()  # raise Cancelled instead of the error of a cancelled body
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
            body.seek(0)  # no longer count the bytes of the failed try as sent
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
        style["addressing_style"] = "path"  # custom endpoints rarely have DNS names for buckets
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
    session = botocore.session.get_session()  # one session per client: sessions are not thread-safe
    session.register_component("data_loader", _models())
    return session.create_client("s3", config=config)


@functools.cache
def _models() -> Any:
    """Return botocore's loader of S3's API model, the same object in the whole process.

    Reading the API model takes four fifths of the time of making a client.
    """
    import botocore.session

    return botocore.session.get_session().get_component("data_loader")


def checksum(data: memoryview | bytes) -> str:
    from awscrt import checksums

    return f"{checksums.crc64nvme(data):016x}"


def base64_of(crc: str) -> str:
    return base64.b64encode(bytes.fromhex(crc)).decode()


def changed(what: str) -> CorruptSnapshotError:
    return CorruptSnapshotError(
        f"{what} was not written: its bytes do not match the CRC64-NVME in the snapshot's manifest",
        hint="The memory changed after its checksum was computed. Earlier checkpoints are untouched.",
    )


def _gave_up(error: Exception, call: Call) -> HyperpodExtError:
    if not isinstance(error, HyperpodExtError):
        return UnreachableError(
            f"Cannot write {call.what}: its bytes arrived damaged in every try", hint="Check the network."
        )
    return UnreachableError(f"{error.message}; tried for {call.deadline_s:g} s", hint=error.hint)
