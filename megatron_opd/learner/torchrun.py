"""Runs torchrun so that it ends with its parent: `python -m megatron_opd.learner.torchrun`.

Ranks end with torchrun, torchrun with the process that started it (sglang_bridge/lifetime.py): a
run that is killed with SIGKILL leaves no learner behind. Its store listens on --master-addr alone
(default: loopback, on a free port), and it leaves no directory behind when it ends or is told to.
"""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

from sglang_bridge.lifetime import PARENT_VARIABLE, die_with_parent
from sglang_bridge.ports import free_port

LOOPBACK = "127.0.0.1"


def torchrun(arguments: list[str]) -> None:
    """Run torchrun with its own arguments; without --master-addr the world is this machine's."""
    # seconds of imports
    from torch.distributed.elastic.rendezvous import (
        RendezvousHandler,
        RendezvousParameters,
        static_tcp_rendezvous,
    )
    from torch.distributed.run import main

    from megatron_opd.weight_sync.store import bound_store

    create = static_tcp_rendezvous.create_rdzv_handler

    def create_bound(parameters: RendezvousParameters) -> RendezvousHandler:
        made: Any = create(parameters)
        if made.rank == 0:
            address = made.master_addr, made.master_port
            made._store = bound_store(*address, made.world_size, made.timeout, wait=False)
        return made

    static_tcp_rendezvous.create_rdzv_handler = create_bound
    # left to itself torchrun makes a directory for logs that it does not write, and keeps it
    if not any(argument.startswith("--master-addr=") for argument in arguments):
        arguments = [f"--master-addr={LOOPBACK}", f"--master-port={free_port()}", *arguments]
    with tempfile.TemporaryDirectory(prefix="opd-torchrun-") as unused_logs:
        main(["--log-dir", unused_logs, *arguments])


if __name__ == "__main__":
    die_with_parent()
    os.environ[PARENT_VARIABLE] = str(os.getpid())  # the ranks'
    torchrun(sys.argv[1:])
