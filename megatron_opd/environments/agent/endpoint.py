"""Serves the student to agents, as OpenAI's chat completions on loopback.

Invariant: a request is answered for the trajectory whose key it has, and for no other; whatever is
sent, the answer is a completion or an error in OpenAI's shape.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from itertools import count

from aiohttp import web
from aiohttp.typedefs import Handler

from megatron_opd.environments.agent.answers import chunks, completion, model, models
from megatron_opd.environments.agent.call import MODEL, read_call
from megatron_opd.environments.agent.recorder import AgentTrajectory
from megatron_opd.environments.agent.refused import Refused
from sglang_bridge.arrivals import Arrivals
from sglang_bridge.doors import counting_logger, doors, tell_door
from sglang_bridge.listening import bound_socket
from sglang_bridge.refusals import Refusals

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
BODY_S = 60.0
"""Longest time in which the body of a request arrives."""
END_S = 1.0
"""How long answers may still be read once the run ends."""
_PREFIX = "opd"


class AgentEndpoint:
    """Answers requests for trajectories.

    base_url: what clients are given. message_bytes: largest body of a request. sampling: the run's
    settings, by OpenAI's names.
    """

    def __init__(self, base_url: str, message_bytes: int, sampling: Mapping[str, float]) -> None:
        self.base_url, self._most_bytes, self._sampling = base_url, message_bytes, sampling
        self.refusals = Refusals(logger, "by the agents' endpoint")
        self._secret = secrets.token_bytes(32)
        self._numbers, self._names = count(), count()
        self._open: dict[int, AgentTrajectory] = {}

    def app(self) -> web.Application:
        """Make the application."""
        layers = [tell_door, self._in_shape]
        app = web.Application(middlewares=layers, client_max_size=self._most_bytes)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name}", self._model)
        return app

    @contextmanager
    def serving(self, trajectory: AgentTrajectory) -> Iterator[str]:
        """Serve a trajectory meanwhile, to who has the key that this gives."""
        number = next(self._numbers)
        self._open[number] = trajectory
        try:
            yield f"{_PREFIX}-{number}-{self._seal(str(number))}"
        finally:
            del self._open[number]

    def _seal(self, number: str) -> str:
        return hmac.digest(self._secret, number.encode(errors="replace"), "sha256").hex()

    def _trajectory(self, request: web.Request) -> AgentTrajectory:
        """Return the trajectory whose key a request has. Raises Refused."""
        kind, _, key = request.headers.get("Authorization", "").partition(" ")
        prefix, _, rest = key.strip().partition("-")
        number, _, seal = rest.partition("-")
        # the same time for every wrong key
        right = hmac.compare_digest(seal.encode(errors="replace"), self._seal(number).encode())
        if not right or kind.lower() != "bearer" or prefix != _PREFIX:
            self.refusals.add("a request without a key")
            what = "the key is missing or wrong: use the api_key that the function was given"
            raise Refused(what, status=401, code="invalid_api_key")
        found = self._open.get(int(number))
        if found is None:
            what = "the trajectory of this key has ended"
            raise Refused(what, status=410, code="trajectory_ended")
        return found

    @web.middleware
    async def _in_shape(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer errors in OpenAI's shape."""
        try:
            return await handler(request)
        except Refused as error:
            refused = error
        except web.HTTPException as error:
            what = f"{request.method} {request.path}: {error.reason}"
            refused = Refused(what, status=error.status)
        except Exception:
            logger.exception("the agents' endpoint failed")
            refused = Refused("the endpoint failed; the run's log says why", status=500)
        return web.json_response(refused.body, status=refused.status)

    async def _models(self, request: web.Request) -> web.Response:
        self._trajectory(request)
        return web.json_response(models())

    async def _model(self, request: web.Request) -> web.Response:
        self._trajectory(request)
        if request.match_info["name"] != MODEL:
            raise Refused(f"the only model is {MODEL}", status=404, code="model_not_found")
        return web.json_response(model())

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        trajectory = self._trajectory(request)
        try:
            async with asyncio.timeout(BODY_S):
                body = await request.read()
        except TimeoutError:
            raise Refused(f"the body took over {BODY_S:g} s", status=400) from None
        except web.HTTPRequestEntityTooLarge:
            what = f"a body must have at most {self._most_bytes} bytes (environment.message_bytes)"
            raise Refused(what, status=413) from None
        call = read_call(body, self._sampling)
        answer = await trajectory.answer(call)
        name = f"chatcmpl-{next(self._names)}"
        if not call.stream:
            return web.json_response(completion(name, answer))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        with contextlib.suppress(ConnectionError):  # the client has closed the stream
            await response.prepare(request)
            for chunk in chunks(name, answer, usage=call.include_usage):
                await response.write(chunk)
            await response.write_eof()
        return response


@asynccontextmanager
async def agent_endpoint(
    message_bytes: int, sampling: Mapping[str, float]
) -> AsyncIterator[AgentEndpoint]:
    """Serve agents on a free port of loopback. OSError: it cannot listen."""
    with bound_socket(HOST, 0) as listener:
        base_url = f"http://{HOST}:{listener.getsockname()[1]}/v1"
        endpoint = AgentEndpoint(base_url, message_bytes, sampling)
        runner = web.AppRunner(
            endpoint.app(),
            access_log=None,
            logger=counting_logger(endpoint.refusals, logger),
            shutdown_timeout=END_S,
        )
        await runner.setup()
        assert runner.server is not None, "setup makes it"
        opened = doors(runner.server, Arrivals(endpoint.refusals))
        server = await asyncio.get_running_loop().create_server(opened, sock=listener)
        try:
            yield endpoint
        finally:
            server.close()
            await runner.cleanup()
