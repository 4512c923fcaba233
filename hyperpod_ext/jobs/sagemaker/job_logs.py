"""Reads the output of a training job from CloudWatch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

from hyperpod_ext.errors import NotFoundError
from hyperpod_ext.jobs.sagemaker.client import call, client

_LOG_GROUP = "/aws/sagemaker/TrainingJobs"
_STREAM_TIME = re.compile(r"-\d+$")
"""Pattern of the time at the end of a stream's name, such as `algo-1-1700000000`."""


class JobLogs:
    """Reader of a job's log streams in CloudWatch. Each stream is read from the position where the last read ended."""

    def __init__(self, region: str, job_name: str) -> None:
        self._service, self._job_name = client("logs", region), job_name
        self._tokens: dict[str, str] = {}

    def new_lines(self) -> Iterator[str]:
        """Yield the lines that were added since the last call, each prefixed with the name of its node."""
        for stream in self._streams():
            while True:
                token = {"nextToken": self._tokens[stream]} if stream in self._tokens else {}
                page = call(f"GetLogEvents {stream}", partial(self._page, stream, token))
                self._tokens[stream] = page["nextForwardToken"]
                node = _STREAM_TIME.sub("", stream.partition("/")[2])
                yield from (f"{node} | {event['message']}" for event in page["events"])
                if not page["events"]:
                    break

    def _page(self, stream: str, token: dict[str, str]) -> Any:
        return self._service.get_log_events(logGroupName=_LOG_GROUP, logStreamName=stream, startFromHead=True, **token)

    def _streams(self) -> list[str]:
        """Return the name of the log stream of each node."""
        found: list[str] = []
        request = {"logGroupName": _LOG_GROUP, "logStreamNamePrefix": f"{self._job_name}/"}
        while True:
            try:
                page = call(
                    f"DescribeLogStreams {self._job_name}", partial(self._service.describe_log_streams, **request)
                )
            except NotFoundError:
                return []  # no output yet: the first job that prints creates the log group
            found += [stream["logStreamName"] for stream in page["logStreams"]]
            if "nextToken" not in page:
                return sorted(found)
            request = request | {"nextToken": page["nextToken"]}
