"""Runs the kernels that sum blocks and draw beside torch's operations, on Triton's interpreter.

python -m tests.support.masses_job

Prints one JSON line a case. Needs TRITON_INTERPRET=1 from the process's start: Triton's own
functions are interpreted or compiled as they are imported.
"""

import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch

from sglang_bridge.server import inversion, kernels, masses
from sglang_bridge.server.inversion import draw
from sglang_bridge.server.masses import BLOCK, Masses, masses_of
from sglang_bridge.server.sampling import behaviour

# just over the vocabulary that is summed by ids; a block that is not full; a program that is not
VOCABS = (4097, 4096 + BLOCK, 49 * BLOCK + 1)
TYPES = (torch.float32, torch.bfloat16, torch.float16)


def cases() -> Iterator[tuple[str, torch.Tensor]]:
    """Named logits of three rows."""
    for vocab in VOCABS:
        for dtype in TYPES:
            generator = torch.Generator().manual_seed(vocab)
            logits = 3 * torch.randn(3, vocab, generator=generator)
            yield f"{vocab} {str(dtype).removeprefix('torch.')}", logits.to(dtype)
    given = torch.randn(3, 5000, generator=torch.Generator().manual_seed(5))
    yield "far from 0", given + 1e4
    yield "steep", 3e3 * given
    gone = given.clone()
    gone[0, : 20 * BLOCK] = gone[0, ::2] = gone[0, -300:] = -torch.inf
    gone[1, 1:] = -torch.inf
    gone[2] = -torch.inf
    yield "impossible ids", gone
    late = given.clone()
    late[:, -BLOCK:] += 20  # the last block has 8 ids
    yield "mass at the end", late
    broken = given.clone()
    broken[1, 4321] = torch.nan
    yield "nan", broken


def measured(name: str, logits: torch.Tensor) -> dict[str, Any]:
    """How far the kernel is from float64, and whether draws and torch's operations agree.

    Also what numbers get that lie, as rounding could leave a target, beyond what there is.
    """
    temperature = torch.tensor([[0.7], [1.0], [2.5]])
    policy = behaviour(logits, temperature)
    theirs = masses_of(policy)
    top, mass = masses.by_kernel(logits, temperature, kernels)
    ours = Masses(mass, mass.cumsum(1, dtype=torch.float64), BLOCK, top, temperature)
    numbers = torch.rand(3, 97, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    beyond = torch.tensor([-1e-9, 1.0], dtype=torch.float64).expand(3, -1)
    exact = (logits.double() / temperature).logsumexp(1, keepdim=True)
    found = top / temperature.double() + ours.norm.total_B1.log()
    finite = exact.isfinite()
    wrong = (found - exact)[finite].abs() / exact[finite].abs().clamp(min=1)
    every = inversion.by_kernel(policy, ours, torch.cat([numbers, beyond], dim=1), kernels)
    ids = every[:, :97]
    alone = masses.by_kernel(logits[1:2], temperature[1:2], kernels)
    return {
        "case": name,
        "shape": list(mass.shape) == list(theirs.mass_Bk.shape),
        "wrong": float(wrong.max()),
        "undefined": found[:, 0].isfinite().logical_not().tolist(),
        "same_draws": float((ids == draw(policy, theirs, numbers))[finite[:, 0]].double().mean()),
        "possible": bool(logits.gather(1, every)[finite[:, 0]].isfinite().all()),
        "alone": torch.equal(alone[1], mass[1:2]) or name == "nan",
        "same_top": torch.equal(top.nan_to_num(), theirs.top_B1.nan_to_num()),
    }


def main() -> None:
    """Print the rows."""
    assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1"
    for name, logits in cases():
        sys.stdout.write(f"{json.dumps(measured(name, logits))}\n")


if __name__ == "__main__":
    main()
