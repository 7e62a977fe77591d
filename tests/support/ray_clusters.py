"""Real Ray clusters on this machine: several raylets, made-up GPUs, loopback alone."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

SETTINGS = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # 127.0.0.1 is an address like any other
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_AUTH_MODE": "disabled",
}
SMALL = {"num_cpus": 2, "object_store_memory": 80 * 2**20, "node_ip_address": "127.0.0.1"}


@contextmanager
def ray_cluster(*gpus: int, dashboard: bool = False) -> Iterator[Any]:
    """A cluster whose head has no GPU, and whose other nodes have as many as given."""
    # pytest's own directories are too long for the sockets in it
    directory = Path(tempfile.mkdtemp(prefix="opd-ray-"))
    (directory / "ray").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**SETTINGS, "RAY_TMPDIR": str(directory)}.items():
            patch.setenv(name, value)
        patch.delenv("RAY_ADDRESS", raising=False)
        from ray._private import ray_constants
        from ray.cluster_utils import Cluster

        patch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", False)
        head = SMALL | {"temp_dir": str(directory), "include_dashboard": dashboard}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            for count in gpus:
                cluster.add_node(wait=False, num_gpus=count, **SMALL)
            cluster.wait_for_nodes(120)
            yield cluster
        finally:
            cluster.shutdown()
            shutil.rmtree(directory, ignore_errors=True)
