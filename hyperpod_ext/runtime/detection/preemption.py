"""Notices that this node will be preempted: from EC2 for a Spot instance, or by a file.

EC2's instance metadata is read with a token (IMDSv2). As in AWS's own tools, AWS_EC2_METADATA_SERVICE_ENDPOINT sets
another endpoint, and AWS_EC2_METADATA_DISABLED=true turns the metadata off.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from hyperpod_ext.config.elastic import Notices

_ENDPOINT = "http://169.254.169.254"
_VENDOR = Path("/sys/class/dmi/id/sys_vendor")
_TOKEN, _ACTION = "/latest/api/token", "/latest/meta-data/spot/instance-action"
_TOKEN_S = 21_600
_TIMEOUT_S = 2.0
_LONGEST = 4096
_PAUSE_S = 60.0
"""Time in seconds to wait after the metadata could not be read. The wait is long, because in a container the metadata
may never be reachable."""


@dataclass(frozen=True, slots=True)
class PreemptionNotice:
    """Announcement that this node will be preempted."""

    cause: str
    seconds_left: float | None = None
    """Time in seconds until the preemption; None if unknown."""


class Metadata:
    """Access to EC2's instance metadata at `endpoint`."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint.rstrip("/")
        # use no proxy, because the metadata endpoint is on this machine
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._token = ""

    def spot_action(self) -> str | None:
        """Return the text in which EC2 announces an interruption; None if no interruption is announced.

        Raises:
            OSError: the metadata cannot be read.
        """
        if not self._token:
            lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_S)}
            self._token = self._ask("PUT", _TOKEN, lifetime)
        try:
            return self._ask("GET", _ACTION, {"X-aws-ec2-metadata-token": self._token})
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            self._token = ""  # request a new token: the old one may have expired
            raise

    def _ask(self, method: str, path: str, headers: dict[str, str]) -> str:
        try:
            request = urllib.request.Request(self._endpoint + path, method=method, headers=headers)
            with self._opener.open(request, timeout=_TIMEOUT_S) as answer:
                return str(answer.read(_LONGEST).decode(errors="replace"))
        except (ValueError, http.client.HTTPException) as error:  # the endpoint is not a URL, or does not speak HTTP
            raise OSError(f"{self._endpoint}: {error}") from error


def read_action(text: str, now: datetime) -> PreemptionNotice:
    """Parse EC2's announcement, such as `{"action": "terminate", "time": "2026-11-21T08:22:00Z"}`. Pure.

    A text that cannot be parsed also counts as a notice, because EC2 returns a text only if there is a notice.
    """
    try:
        action_json = json.loads(text)
        action, at = str(action_json["action"]), datetime.fromisoformat(str(action_json["time"]))
        return PreemptionNotice(f"EC2 will {action} this Spot instance"[:80], round((at - now).total_seconds(), 1))
    except (ValueError, KeyError, TypeError):
        return PreemptionNotice("EC2 gives notice of an interruption")


def is_ec2() -> bool:
    """Return whether this machine is an EC2 instance, according to its firmware."""
    try:
        return "Amazon EC2" in _VENDOR.read_text()
    except OSError:
        return False


def metadata_of(notices: Notices) -> Metadata | None:
    """Return the metadata to poll for notices; None if no metadata should be polled."""
    forbidden = os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true"
    if notices.ec2 is False or (notices.ec2 is None and (forbidden or not is_ec2())):
        return None
    return Metadata(os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") or _ENDPOINT)


async def watch(
    notices: Notices,
    metadata: Metadata | None,
    take: Callable[[PreemptionNotice], bool],
    unheard: Callable[[str], None],
) -> None:
    """Poll the metadata and the file until a notice is accepted.

    Args:
        take: receives a notice. If `take` returns False, `take` receives the notice again later.
        unheard: receives the reason when the metadata cannot be read any more.
    """
    file = notices.file
    failures, again_at = 0, 0.0
    while metadata is not None or file is not None:
        # look for the file in a thread, because its disk may hang
        there = file is not None and await asyncio.to_thread(os.path.exists, file)
        notice = PreemptionNotice(f"{file} says so") if there else None
        if metadata is not None and notice is None and time.monotonic() >= again_at:
            try:
                answer = await asyncio.to_thread(metadata.spot_action)
                notice = None if answer is None else read_action(answer, datetime.now(UTC))
                failures = 0
            except OSError as error:
                failures += 1
                if failures == 2:  # do not report the first failure, because perhaps only the token has expired
                    unheard(str(error))
                if failures > 1:
                    again_at = time.monotonic() + _PAUSE_S
        if notice is not None and take(notice):
            return
        await asyncio.sleep(notices.every_s)
