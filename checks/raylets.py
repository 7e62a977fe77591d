"""Real Ray clusters on this machine: several raylets over loopback, GPUs that are only counted."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

SETTINGS = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # 127.0.0.1 is an address like any other
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_AUTH_MODE": "disabled",
}
RAYLET: Mapping[str, Any] = {
    "num_cpus": 2,
    "object_store_memory": 80 * 2**20,
    "node_ip_address": "127.0.0.1",
}


@contextmanager
def ray_cluster(
    head: Mapping[str, Any], *nodes: Mapping[str, Any], token: str | None = None
) -> Iterator[Any]:
    """A cluster of a head and other nodes; each is what its raylet gets beside RAYLET.

    token: which the cluster asks for, only for the first cluster of a process; None: it asks none.
    """
    with ExitStack() as stack:
        # the sockets in it have long names, and may not be longer than 107 characters
        directory = Path(tempfile.mkdtemp(prefix="opd-ray-"))
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        (directory / "ray").mkdir()
        environment = os.environ | SETTINGS | {"RAY_TMPDIR": str(directory)}
        environment.pop("RAY_ADDRESS", None)
        if token is not None:
            environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
        stack.enter_context(mock.patch.dict(os.environ, environment, clear=True))
        from ray._private import ray_constants
        from ray.cluster_utils import Cluster

        stack.enter_context(mock.patch.object(ray_constants, "ENABLE_RAY_CLUSTER", False))
        arguments = {"temp_dir": str(directory), "include_dashboard": False, **RAYLET, **head}
        cluster = Cluster(initialize_head=True, head_node_args=arguments)
        stack.callback(cluster.shutdown)
        for node in nodes:
            cluster.add_node(wait=False, **RAYLET | node)
        cluster.wait_for_nodes(120)
        yield cluster
