"""Changes how SGLang starts its processes, sockets and routes; call before its run_server()."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import tempfile
from collections.abc import Awaitable, Callable
from typing import Any

import torch
import torch.distributed

from sglang_bridge.errors import BridgeError
from sglang_bridge.listening import bound_socket

Encode = Callable[[dict[str, Any]], bytes]
"""Makes a reply's body of what SGLang's /generate would answer as JSON."""


def preload() -> None:
    """Imports SGLang's server and puts the hooks in place, in the order in which a server does."""
    from sglang.launch_server import run_server  # noqa: F401
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.entrypoints import http_server  # noqa: F401
    from sglang.srt.managers import detokenizer_manager, scheduler  # noqa: F401


def fork_workers() -> None:
    """Makes schedulers and detokenizer forks of this process; call before SGLang's run_server().

    SGLang spawns interpreters that import everything anew: a third of the CPU time of a start
    remains, and half of the memory. Not where CUDA is, which no fork survives. They are started
    before SGLang has threads or sockets in this process; nothing here may compute beforehand, for
    the threads of a used OpenMP pool are lost in a fork.
    """
    from sglang.srt.entrypoints import engine

    set_envs = engine._set_envs_and_config

    def set_envs_and_fork(*args: Any, **kwargs: Any) -> None:
        set_envs(*args, **kwargs)  # sets "spawn"
        # a collection writes to the header of every object that it may free: the forks would soon
        # have a copy each of what was imported, 0.35 GB more for a server
        gc.collect()
        gc.freeze()
        multiprocessing.set_start_method("fork", force=True)

    engine._set_envs_and_config = set_envs_and_fork


def hide_keys() -> None:
    """Keeps API keys out of logs and /server_info; call before SGLang's run_server().

    SGLang writes its resolved arguments to the log when it starts, keys included.
    """
    from sglang.srt.server_args import ServerArgs

    resolved = ServerArgs.resolved_dict

    def without_keys(self: Any) -> dict[str, Any]:
        shown = resolved(self)
        hidden = {name: "hidden" for name in ("api_key", "admin_api_key") if shown.get(name)}
        return shown | hidden

    ServerArgs.resolved_dict = without_keys


def keep_files_in(directory: str) -> None:
    """Keeps this server's sockets in `directory`; call before SGLang's run_server().

    Its shared memory is named after the directory. SGLang removes neither when it is killed.
    """
    from sglang.srt.server_args import PortArgs

    make = PortArgs.init_new

    def make_inside(*args: Any, **kwargs: Any) -> Any:
        usual, tempfile.tempdir = tempfile.tempdir, directory
        try:
            ports = make(*args, **kwargs)
        finally:
            tempfile.tempdir = usual
        ports.instance_id = os.path.basename(directory)
        return ports

    PortArgs.init_new = staticmethod(make_inside)


def bind_stores() -> None:
    """Makes torch's stores listen on the host they are named by, and not on every interface.

    It covers rendezvous by tcp:// and env://, and every store that SGLang makes itself.
    """
    # by name: the package holds a function called as the module
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    rendezvous.TCPStore = BoundStore
    setattr(torch.distributed, "TCPStore", BoundStore)  # noqa: B010  (its stubs do not export it)


class BoundStore(torch.distributed.TCPStore):  # pyright: ignore[reportPrivateImportUsage]
    """Binds a TCPStore's server to `host_name`; without one given, torch binds to all."""

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        **options: Any,
    ) -> None:
        if is_master and options.get("master_listen_fd") is None:
            with bound_socket(host_name, port) as listener:
                port = listener.getsockname()[1]
                options["master_listen_fd"] = listener.detach()  # the store closes it
        super().__init__(host_name, port, world_size, is_master, **options)


def add_route(
    path: str,
    media_type: str,
    read: Callable[[bytes], tuple[dict[str, Any], Encode]],
    most_bytes: int,
) -> None:
    """Adds a route that generates; call in the process that serves HTTP, before it serves.

    read: makes of a body of at most `most_bytes` the arguments of GenerateReqInput, and what
    encodes the answer to them; a ValueError is answered with 400. Keys are checked as for every
    route of SGLang's.
    """
    from sglang.srt.entrypoints import http_server
    from sglang.srt.managers.io_struct import GenerateReqInput
    from starlette.responses import Response

    async def generate(request: Any) -> Any:
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > most_bytes:
                return Response(f"a body of more than {most_bytes} bytes", status_code=413)
        try:
            arguments, encode = read(bytes(body))
            asked = GenerateReqInput(**arguments)
            manager: Any = http_server.get_global_state().tokenizer_manager
            answer = await anext(manager.generate_request(asked, request))
        except ValueError as error:
            return http_server._create_error_response(error)
        try:
            return Response(encode(answer), media_type=media_type)
        except BridgeError as error:
            return reply(str(error), 500)

    add_own_route(path, generate, "POST")


def add_own_route(path: str, answer: Callable[[Any], Awaitable[Any]], method: str) -> None:
    """Adds a route; call in the process that serves HTTP, before run_server()."""
    from sglang.srt.entrypoints import http_server

    http_server.app.router.add_route(path, answer, methods=[method])


def add_guard(guard: type[Any], **settings: Any) -> None:
    """Puts ASGI middleware before SGLang's application; call before run_server().

    The check of API keys, which SGLang adds later, comes before it.
    """
    from sglang.srt.entrypoints import http_server

    http_server.app.add_middleware(guard, **settings)


def is_starting() -> bool:
    """Returns whether this server has not sampled its own first token yet.

    Not is_ready(), which is also false of a paused server, or one that a probe found unhealthy.
    """
    from sglang.srt.entrypoints import http_server
    from sglang.srt.managers.tokenizer_manager import ServerStatus

    state: Any = http_server.get_global_state()
    return state is None or state.tokenizer_manager.server_status == ServerStatus.Starting


def is_control(scope: Any) -> bool:
    """Returns whether a request is for a route that SGLang keeps for administrators.

    All that change a server's state are, and some that only ask (/weights_checker).
    """
    from sglang.srt.entrypoints import http_server
    from sglang.srt.utils import auth

    level = auth._get_auth_level_from_app_and_scope(http_server.app, scope)
    return level != auth.AuthLevel.NORMAL


def reply(text: str, status: int) -> Any:
    """Returns an answer of plain text."""
    from starlette.responses import PlainTextResponse

    return PlainTextResponse(text, status_code=status)
