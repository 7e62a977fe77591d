"""Selections as a server makes them, from whole distributions, and what it draws them by."""

from collections.abc import Sequence

import numpy as np
import torch

from sglang_bridge.protocol import Selection


def uniform(rows: int, draws: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(rows, draws, dtype=torch.float64, generator=generator)


def select(
    logp_TV: np.ndarray,
    given: Sequence[Sequence[int] | np.ndarray],
    atoms: int,
    draws: int,
    generator: np.random.Generator,
) -> Selection:
    """The likeliest `atoms` ids of every row, `draws` from the rest, and what was given."""
    offsets, ids_N, weight_N, logp_N, given_N = [0], [], [], [], []
    for logp_V, asked in zip(logp_TV, given, strict=True):
        p_V = np.exp(logp_V)
        weights = dict.fromkeys(map(int, asked), 0.0)
        top = np.argsort(-logp_V, kind="stable")[:atoms].tolist()
        weights |= {i: float(p_V[i]) for i in top}
        rest_V = p_V.copy()
        rest_V[top] = 0
        if draws and (mass := rest_V.sum()) > 0:
            for i in generator.choice(len(p_V), draws, p=rest_V / mass).tolist():
                weights[i] = weights.get(i, 0.0) + mass / draws
        row = sorted(weights)
        given_N += [offsets[-1] + row.index(int(i)) for i in asked]
        offsets.append(offsets[-1] + len(row))
        ids_N += row
        weight_N += [weights[i] for i in row]
        logp_N += [logp_V[i] for i in row]
    return Selection(
        offsets_T1=np.array(offsets, np.int64),
        ids_N=np.array(ids_N, np.int32),
        weight_N=np.array(weight_N, np.float32),
        logp_N=np.array(logp_N, np.float32),
        given_N=np.array(given_N, np.int64),
    )
