"""`python -m megatron_opd.learner.world ARGUMENTS`: a torchrun that ends with its parent.

Ranks end with torchrun, torchrun with the process that started it (transport/lifetime.py): a run
that is killed with SIGKILL leaves no learner behind.
"""

from __future__ import annotations

import os

from megatron_opd.transport.lifetime import PARENT_VARIABLE, die_with_parent

if __name__ == "__main__":
    die_with_parent()
    os.environ[PARENT_VARIABLE] = str(os.getpid())  # the ranks'
    # seconds of imports, so after the above
    from torch.distributed.run import main

    main()
