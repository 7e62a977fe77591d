"""Connects this process to a Ray cluster that it is a machine of."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading

from megatron_opd.config.ray import RayConfig
from megatron_opd.launch.launcher import CannotPlace
from megatron_opd.launch.ray_token import require_token

INSTALL = "cluster.type ray needs the package ray[default]==2.60.0: pip install 'megatron-opd[ray]'"
REACH_S = 5.0
# of what Ray prints of other nodes: thirty lines of a lost node's own log
NOISE = {"RAY_DEDUP_LOGS_SKIP_REGEX": "^Raylet is terminated"}


def connect(settings: RayConfig, *, insecure: bool) -> None:
    """Join the cluster as a driver. CannotPlace, in one line: there is none, or it is open.

    insecure: may be open to whoever reaches it.

    Everything that the driver starts ends with it.
    """
    os.environ.update({name: os.environ.get(name, value) for name, value in NOISE.items()})
    try:
        import ray
    except ImportError:
        raise CannotPlace(INSTALL) from None
    before = signal.getsignal(signal.SIGTERM)
    try:
        found = _check_reachable(settings.address)
        if found is not None and not insecure:
            require_token(found)
        logging.getLogger("ray").setLevel(logging.ERROR)  # it warns of threads, at once
        ray.init(address=settings.address, log_to_driver=False, logging_level=logging.ERROR)
    except CannotPlace:
        raise
    except (OSError, RuntimeError, ValueError) as error:  # ConnectionError is an OSError
        raise CannotPlace(_unreachable(settings.address, error)) from None
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)  # Ray's would exit without cleaning up


def _check_reachable(address: str) -> str | None:
    """Return the head's HOST:PORT. OSError: nothing listens: Ray itself would try for minutes."""
    from ray._private.services import canonicalize_bootstrap_address

    found = canonicalize_bootstrap_address(address)
    if found is not None:
        host, _, port = found.rpartition(":")
        with socket.create_connection((host.strip("[]"), int(port)), REACH_S):
            pass
    return found


def _unreachable(address: str, error: Exception) -> str:
    shown = address
    if address == "auto":
        environment = os.environ.get("RAY_ADDRESS")
        shown = f"auto (RAY_ADDRESS={environment})" if environment else "auto"
    why = " ".join(str(error).split())
    return (
        f"cluster.ray.address must be a Ray cluster that this machine belongs to, got {shown}: "
        f"{why}; start one with `ray start`, or name its head"
    )
