"""`python -m megatron_opd.learner.world ARGUMENTS`: a torchrun that ends with its parent.

Ranks end with torchrun (lifetime.py), torchrun with the process that started it: a run that is
killed with SIGKILL leaves no learner behind.
"""

from __future__ import annotations

from torch.distributed.run import main

from megatron_opd.learner.lifetime import die_with_parent

if __name__ == "__main__":
    die_with_parent()
    main()
