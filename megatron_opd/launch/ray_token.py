"""Refuses a Ray cluster beyond this machine that takes orders from whoever reaches it.

The cluster is asked without a token, as a stranger would ask: one that answers is open.
"""

from __future__ import annotations

import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlsplit

from megatron_opd.launch.launcher import CannotPlace
from sglang_bridge.listening import is_loopback

ASK_S = 5.0
JOBS = "/api/jobs/"
REMEDY = (
    "make a token with `ray get-auth-token --generate`, copy ~/.ray/auth_token to every machine "
    "and start Ray with RAY_AUTH_MODE=token, or write security.insecure: true"
)
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def require_token(address: str) -> None:
    """Raise CannotPlace where the cluster at HOST:PORT answers a stranger, beyond this machine."""
    if not is_loopback(address.rpartition(":")[0].strip("[]")) and _head_is_open(address):
        raise CannotPlace(
            f"cluster.ray.address must be a Ray cluster with token authentication, got {address}, "
            f"which obeys whoever reaches it: {REMEDY}"
        )


def require_token_of_dashboard(url: str) -> None:
    """Raise CannotPlace where a dashboard answers a stranger, beyond this machine."""
    if not is_loopback(urlsplit(url).hostname or "") and _dashboard_is_open(url):
        raise CannotPlace(
            f"cluster.ray.submit must be a Ray cluster with token authentication, got {url}, "
            f"which runs jobs of whoever reaches it: {REMEDY}"
        )


def _head_is_open(address: str) -> bool:
    """Return whether the head says without a token that it is alive."""
    import grpc
    from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

    messages: Any = gcs_service_pb2  # made at import, unknown to a type checker
    with grpc.insecure_channel(address) as channel:
        head = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)
        try:
            head.CheckAlive(messages.CheckAliveRequest(), timeout=ASK_S)
        except grpc.RpcError as error:
            # one that does not answer at all is for ray.init to name
            return error.code() not in (
                grpc.StatusCode.UNAUTHENTICATED,
                grpc.StatusCode.UNAVAILABLE,
                grpc.StatusCode.DEADLINE_EXCEEDED,
            )
        return True


def _dashboard_is_open(url: str) -> bool:
    """Return whether the dashboard lists jobs without a token."""
    try:
        with _OPENER.open(f"{url.rstrip('/')}{JOBS}", timeout=ASK_S):
            return True
    except (urllib.error.URLError, OSError):
        return False  # refused; one that is not there is for the job's client to name
