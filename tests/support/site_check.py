"""Opens every page of the built documentation site in Chromium: 400 and 1600 pixels wide, in light and in dark.

    python tests/support/site_check.py build/docs

A page must not be wider than the window, all images must load, and texts must have the contrast that WCAG 2 requires
(level AA). Prints the findings as JSON.
"""

from __future__ import annotations

import functools
import http.server
import json
import queue
import sys
import threading
from pathlib import Path
from typing import Any

import browser

CHECK = Path(__file__).with_name("site_check.html")
_LIMIT_S = 1200.0


def check(site: Path) -> dict[str, Any]:
    """Return the number of views, and the findings: page, width, scheme, what, detail.

    Raises:
        queue.Empty: the browser did not finish in time.
    """
    pages = sorted(str(page.relative_to(site)) for page in site.rglob("*.html") if page.name != "404.html")
    answers: queue.Queue[dict[str, Any]] = queue.Queue()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            extra = {"/check.html": CHECK.read_bytes(), "/check-pages.json": json.dumps(pages).encode()}
            if self.path not in extra:
                return super().do_GET()
            self.send_response(200)
            self.send_header("Content-Type", "text/html" if self.path.endswith("html") else "application/json")
            self.end_headers()
            self.wfile.write(extra[self.path])

        def do_POST(self) -> None:
            answers.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with browser.running(f"http://127.0.0.1:{server.server_port}/check.html"):
            answer = answers.get(timeout=_LIMIT_S)
        server.shutdown()
    return answer


if __name__ == "__main__":
    browser.require()
    found = check(Path(sys.argv[1]))
    json.dump(found, sys.stdout, indent=1)
    sys.exit(bool(found["findings"]))
