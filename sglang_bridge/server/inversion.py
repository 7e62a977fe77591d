"""Makes iid draws by the inverse CDF, from the masses of blocks.

A number finds its block among the blocks' masses, and its id among the ids of that block alone. So
m draws of a row look at k masses and m blocks, not at the vocabulary. Edges are float64: a float32
CDF of 152k ids cannot reach those whose probability falls below its rounding near 1.

Axes: B rows, V vocabulary, M draws, k blocks of a row, v ids of a block.
"""

from __future__ import annotations

from types import ModuleType

import torch

from sglang_bridge.server.masses import Masses, can_use_kernels, kernels
from sglang_bridge.server.sampling import Behaviour


def draw(policy: Behaviour, masses: Masses, uniform_BM: torch.Tensor) -> torch.Tensor:
    """Returns int64 [B, M]: iid ids of policy, whose masses these are.

    uniform_BM: float64 in [0, 1). An id of probability 0 is never returned while its row has any
    mass.
    """
    if not uniform_BM.shape[1]:
        return torch.empty_like(uniform_BM, dtype=torch.int64)
    if masses.width > 1 and can_use_kernels(policy.logits_BV):
        return by_kernel(policy, masses, uniform_BM, kernels())
    edge_Bk = masses.edge_Bk
    target_BM = uniform_BM * edge_Bk[:, -1:]
    block_BM = _found(masses.mass_Bk, edge_Bk, target_BM)
    if masses.width == 1:
        return block_BM
    vocab, width = policy.logits_BV.shape[1], masses.width
    # a last block that is not full is read together with the end of the one before it
    start_BM = (block_BM * width).clamp_(max=vocab - width)
    row_B1 = torch.arange(len(block_BM), device=block_BM.device)[:, None]
    logits_BMv = policy.logits_BV.unfold(1, width, 1)[row_B1, start_BM]
    share_BMv = logits_BMv.float().sub_(masses.top_B1[..., None])
    share_BMv = share_BMv.div_(policy.temperature_B1[..., None]).exp_()
    if vocab % width:
        column_v = torch.arange(width, device=block_BM.device)
        share_BMv.masked_fill_(column_v < (block_BM * width - start_BM)[..., None], 0.0)
    inner_BMv = share_BMv.cumsum(-1, dtype=torch.float64)
    # As a part of the block, whose mass was summed in another order.
    mass_BM = masses.mass_Bk.gather(1, block_BM).double()
    part_BM = (target_BM - (edge_Bk.gather(1, block_BM) - mass_BM)) / mass_BM
    target_BM1 = part_BM[..., None] * inner_BMv[..., -1:]
    return start_BM + _found(share_BMv, inner_BMv, target_BM1).squeeze(-1)


def by_kernel(
    policy: Behaviour, masses: Masses, uniform_BM: torch.Tensor, module: ModuleType
) -> torch.Tensor:
    """Returns the same, by the kernels of `module`."""
    (rows, draws), blocks = uniform_BM.shape, masses.mass_Bk.shape[1]
    ids_BM = torch.empty((rows, draws), dtype=torch.int64, device=uniform_BM.device)
    programs = -(-draws // module.DRAWS)
    if rows:
        module.draw_kernel[(rows * programs,)](
            policy.logits_BV,
            policy.temperature_B1.expand(rows, 1).contiguous(),
            masses.top_B1,
            masses.mass_Bk,
            masses.edge_Bk,
            masses.mass_Bk.argmax(1),
            uniform_BM.contiguous(),
            ids_BM,
            policy.logits_BV.shape[1],
            blocks,
            draws,
            programs,
            BLOCK=masses.width,
            DRAWS=module.DRAWS,
            HALVINGS=blocks.bit_length(),
        )
    return ids_BM


def _found(mass: torch.Tensor, edge: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Returns the index of the item whose share of the cumulative mass holds the target.

    mass, edge: [..., n]; target: [..., m], in [0, last edge). Rounding can leave a target past the
    last edge, and a parallel scan can order two equal edges badly: the heaviest item answers where
    the item found has no mass, an error of the size of that rounding.
    """
    found = torch.searchsorted(edge, target, right=True).clamp_(max=mass.shape[-1] - 1)
    has_mass = mass.gather(-1, found) > 0
    if not mass.is_cuda and has_mass.all():  # a GPU would have to be waited for
        return found
    return torch.where(has_mass, found, mass.argmax(-1, keepdim=True))
