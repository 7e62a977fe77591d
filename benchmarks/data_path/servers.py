"""Two fake servers in one process of their own, a student and a teacher: prepared bytes, at once.

    python -m benchmarks.data_path.servers TOKENS IDS ROUTED

Prints its two ports as JSON and serves until its standard input ends. `/counts` tells how many
requests each had and the bytes of their bodies.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from benchmarks.data_path.cases import VOCAB, Case, make_rows
from benchmarks.data_path.replies import CONTENT_TYPE, rollout_reply, score_reply

# requests are named by the run: letters, digits, and what the parts put between them
NAME = re.compile(rb"bench[0-9a-z-]*\.")
LARGEST_REQUEST = 64 << 20
Handler = Callable[[web.Request], Awaitable[web.Response]]


@dataclass
class Role:
    """One server: what it answers work with, by the length of a request's name."""

    make: Callable[[str], bytes]
    prepared: dict[int, bytes] = field(default_factory=dict[int, bytes])
    requests: int = 0
    request_bytes: int = 0
    reply_bytes: int = 0

    def answer(self, body: bytes) -> bytes:
        """Return the reply to a request for work."""
        named = NAME.search(body)
        assert named is not None, body[:200]
        name = named.group()
        self.requests += 1
        self.request_bytes += len(body)
        if len(name) not in self.prepared:
            self.prepared[len(name)] = self.make("@" * len(name))
        reply = self.prepared[len(name)].replace(b"@" * len(name), name, 1)
        self.reply_bytes += len(reply)
        return reply

    async def handle(self, request: web.Request) -> web.Response:
        """Answer a request of any kind."""
        if request.path in STATE:
            return web.json_response(STATE[request.path])
        if request.path == "/counts":
            return web.json_response(
                {
                    "requests": self.requests,
                    "request_bytes": self.request_bytes,
                    "reply_bytes": self.reply_bytes,
                }
            )
        reply = self.answer(await request.read())
        return web.Response(body=reply, content_type=CONTENT_TYPE)


STATE: dict[str, Any] = {
    "/server_info": {
        "tp_size": 1,
        "ep_size": 1,
        "max_total_num_tokens": 1 << 20,
        "enable_deterministic_inference": False,
    },
    "/model_info": {"model_path": "/fake", "weight_version": "0"},
    "/v1/models": {"data": [{"max_model_len": 1 << 20}]},
    "/weights_checker": {
        "ranks": [
            {
                "checksums": {
                    "vocab_size": str(VOCAB),
                    "dtype": "bfloat16",
                    "quantization": "none",
                },
                "parallelism_info": [{"tp_rank": 0}],
            }
        ]
    },
}


async def serve(*handlers: Handler) -> None:
    """Serve with each handler on a port of its own, until standard input ends."""
    ports: list[int] = []
    for handler in handlers:
        app = web.Application(client_max_size=LARGEST_REQUEST)
        app.router.add_route("*", "/{path:.*}", handler)
        # what its client has given up is forgotten
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        ports.append(runner.addresses[0][1])
    sys.stdout.write(json.dumps(ports) + "\n")
    sys.stdout.flush()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


@contextmanager
def serving(*words: str) -> Iterator[list[str]]:
    """Run a module that calls `serve`, with its arguments; yield the addresses of its servers."""
    command = [sys.executable, "-m", *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        ports = json.loads(process.stdout.readline())
        try:
            yield [f"http://127.0.0.1:{port}" for port in ports]
        finally:
            process.stdin.close()


def main(case: Case) -> None:
    """Serve the replies of a case."""
    rows = make_rows(case)
    student = Role(lambda rid: rollout_reply(case, rows, rid))
    teacher = Role(lambda rid: score_reply(case, rows, rid))
    asyncio.run(serve(student.handle, teacher.handle))


if __name__ == "__main__":
    tokens, ids, routed = (int(word) for word in sys.argv[1:])
    main(Case(tokens, ids, bool(routed)))
