"""The HTTP endpoint GET /metrics of a job, in the process that counts the job's events."""

from __future__ import annotations

from collections.abc import Callable

from hyperpod_ext.config.metrics import SUMMARY
from hyperpod_ext.runtime.ipc.http_server import HttpServer, Request, Response
from hyperpod_ext.runtime.metrics.families import CONTENT_TYPE

_LIMIT_S = 5.0
_PLACES = 1024
"""Maximum number of connections that wait for an answer; many clients may connect while this process is busy."""


def metrics_server(
    text: Callable[[], str], summary: Callable[[], str], on_error: Callable[[str], None], places: int = _PLACES
) -> HttpServer:
    """Return an HTTP server for the metrics and the summary of a job, which are computed for each request.

    Args:
        text: returns the metrics, in Prometheus' text format.
        summary: returns the values that `hp-ext top` shows, as JSON.
        on_error: called with a description of an internal error.
    """
    answers = {"/metrics": (text, CONTENT_TYPE), SUMMARY: (summary, "application/json")}

    def respond(request: Request) -> Response:
        if request.method != "GET":
            return Response(405, b"only GET\n", "text/plain")
        if request.path not in answers:
            return Response(404, b"the metrics are at /metrics\n", "text/plain")
        make, kind = answers[request.path]
        return Response(200, make().encode(), kind)

    return HttpServer(respond, on_error, places, _LIMIT_S, keeps=False)
