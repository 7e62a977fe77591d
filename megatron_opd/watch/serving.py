"""Opens the door of `opd watch`: where it listens, under which names, what a user is told."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlunsplit

from aiohttp import web

from megatron_opd.report.run_files import RunFiles
from megatron_opd.watch.access import Access
from megatron_opd.watch.server import WatchServer
from megatron_opd.watch.watched import Watched
from sglang_bridge.arrivals import Arrivals
from sglang_bridge.doors import counting_logger, doors
from sglang_bridge.listening import EVERY_ADDRESS, is_loopback

logger = logging.getLogger(__name__)

MOST_QUEUED = 4096
"""Connections that the kernel keeps until they are taken; others seem open to who made them."""
MOST_STRANGERS = 256
"""A browser opens six connections; shells allow 1,024 open files."""


class CannotListen(ValueError):
    """Reports in one line why there can be no server at an address."""


async def serve(
    files: RunFiles, listener: socket.socket, host: str, say: Callable[[str], None]
) -> None:
    """Serve one run on a socket that listens, until cancelled. say: tells the user."""
    port = listener.getsockname()[1]
    access = Access(secrets.token_urlsafe(32), known_names(host))
    app = WatchServer(Watched(files)).app(access, port)
    runner = web.AppRunner(app, access_log=None, logger=counting_logger(access.refusals, logger))
    await runner.setup()
    assert runner.server is not None, "setup makes it"
    arrivals = Arrivals(access.refusals, most_strangers=MOST_STRANGERS)
    opened = doors(runner.server, arrivals)
    server = await asyncio.get_running_loop().create_server(opened, sock=listener)
    listener.listen(MOST_QUEUED)  # asyncio opens as many files at once as its own limit says
    try:
        for line in greeting(files.path, host, port, access.token):
            say(line)
        await asyncio.Event().wait()
    finally:
        server.close()
        await runner.cleanup()


def listen(host: str, port: int) -> socket.socket:
    """Open the socket that is served. CannotListen: the address is not to be had."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with contextlib.ExitStack() as undo:
            listener = undo.enter_context(socket.socket(family, kind))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen()
            undo.pop_all()
        return listener
    except OSError as error:
        raise CannotListen(
            f"--host {host} --port {port}: cannot listen there: {error.strerror}; choose another "
            "port, or --port 0 for any that is free"
        ) from None
    except UnicodeError:
        raise CannotListen(f"--host must be an address or a name, got {host!r}") from None


def known_names(host: str) -> frozenset[str]:
    """Return the names by which a browser may ask for this server."""
    names = {"localhost", host.lower()}
    if not is_loopback(host):
        names |= {socket.gethostname().lower(), socket.getfqdn().lower()}
    return frozenset(names)


def greeting(run_dir: Path, host: str, port: int, token: str) -> list[str]:
    """Return what is printed: the address to open, and what else a user should know."""
    name = socket.gethostname() if host in EVERY_ADDRESS else host
    place = f"[{name}]:{port}" if ":" in name else f"{name}:{port}"
    lines = [
        f"watching {run_dir}; Ctrl-C ends this, never the run",
        urlunsplit(("http", place, "/", f"token={token}", "")),
    ]
    if is_loopback(host):
        lines.append(f"from another machine: ssh -L {port}:{place} {socket.gethostname()}")
    else:
        lines.append("whoever has this address can read the run; it is not encrypted")
    return lines
