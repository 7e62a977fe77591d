"""`python -m megatron_opd.learner.world ARGUMENTS`: a torchrun that ends with its parent.

Ranks end with torchrun, torchrun with the process that started it (transport/lifetime.py): a run
that is killed with SIGKILL leaves no learner behind. Its store listens on --master-addr alone.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from megatron_opd.transport.lifetime import PARENT_VARIABLE, die_with_parent


def torchrun(arguments: list[str]) -> None:
    """Run torchrun with its own arguments, on one machine."""
    # seconds of imports
    from torch.distributed.elastic.rendezvous import (
        RendezvousHandler,
        RendezvousParameters,
        static_tcp_rendezvous,
    )
    from torch.distributed.run import main

    from megatron_opd.transport.store import bound_store

    create = static_tcp_rendezvous.create_rdzv_handler

    def create_bound(parameters: RendezvousParameters) -> RendezvousHandler:
        made: Any = create(parameters)
        address = made.master_addr, made.master_port
        made._store = bound_store(*address, made.world_size, made.timeout, wait=False)
        return made

    static_tcp_rendezvous.create_rdzv_handler = create_bound
    main(arguments)


if __name__ == "__main__":
    die_with_parent()
    os.environ[PARENT_VARIABLE] = str(os.getpid())  # the ranks'
    torchrun(sys.argv[1:])
