"""A gateway in front of a server that passes everything on, but for one path."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Answer = tuple[int, str, bytes]
"""Status, content type and body."""
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@contextmanager
def gateway(target: str, path: str, fault: Callable[[], Answer | None]) -> Iterator[str]:
    """The url of a gateway to `target`; `fault` answers what is asked of `path`, None: nothing."""

    class Handler(BaseHTTPRequestHandler):
        def _pass(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            answer = fault() if self.path == path else self._asked(body)
            if answer is None:
                self.connection.close()
                return
            status, kind, said = answer
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        do_GET = do_POST = _pass

        def _asked(self, body: bytes) -> Answer:
            kept = {k: v for k, v in self.headers.items() if k in ("Content-Type", "Authorization")}
            request = urllib.request.Request(
                f"{target}{self.path}", body or None, kept, method=self.command
            )
            try:
                with _OPENER.open(request) as reply:
                    return reply.status, reply.headers.get("Content-Type", ""), reply.read()
            except urllib.error.HTTPError as error:
                return error.code, error.headers.get("Content-Type", ""), error.read()

        def log_message(self, *_: object) -> None:
            """It keeps none."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
