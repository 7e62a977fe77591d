"""Compares the kernel of the seeded draw with SGLang's function, on Triton's interpreter.

python -m tests.support.seeded_job DRAWS

Prints one JSON line a case. DRAWS: of all vocabularies together, at least 1000. Needs
TRITON_INTERPRET=1 from the process's start: Triton's own functions are interpreted or compiled as
they are imported. SGLang's function runs from the text of its file, whose import would take most of
SGLang; numpy makes its hash, in a thousandth of the time of its kernel, with which it is compared.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from sglang_bridge.server import kernels
from sglang_bridge.server.seeded import by_kernel

SHARES = {512: 0.6, 1000: 0.36, 5000: 0.039, 151_936: 0.001}
"""Of the draws, by vocabulary: it fills a block, it does not, it has several, it is Qwen3's."""
AT_ONCE = 2**22
"""Probabilities that are held."""
WHOLE = 2**18
"""Numbers of a program that has whole rows; the interpreter is fast with many."""
WIDE = 5000
LAST, NEARLY_LAST = 2**32 - 1, 2**32 - 100
"""Hashes; float32 takes the second for the first."""
WORDS, STATE, END = (0xCC9E2D51, 0x1B873593), (5, 0xE6546B64), (0x85EBCA6B, 0xC2B2AE35)
Draw = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def state_of(words: Sequence[np.ndarray]) -> np.ndarray:
    """MurmurHash3's state (x86, 32 bits, seed 0) after words of 32 bits."""
    state = np.zeros(1, np.uint32)
    for word in words:
        mixed = _turned(word.astype(np.uint32) * np.uint32(WORDS[0]), 15) * np.uint32(WORDS[1])
        state = _turned(state ^ mixed, 13) * np.uint32(STATE[0]) + np.uint32(STATE[1])
    return state


def hash_of(words: Sequence[np.ndarray]) -> np.ndarray:
    """MurmurHash3 of four words."""
    state = state_of(words) ^ np.uint32(16)
    for shift, factor in zip((16, 13), END, strict=True):
        state = (state ^ (state >> np.uint32(shift))) * np.uint32(factor)
    return state ^ (state >> np.uint32(16))


def word_of(hashed: int, words: Sequence[np.ndarray]) -> np.ndarray:
    """The fourth word that gives this hash after three: every step undone."""
    first, second, third, fourth, fifth = (
        np.uint32(pow(factor, -1, 2**32)) for factor in (*WORDS, STATE[0], *END)
    )
    state = np.full(1, hashed, np.uint32)
    state = (state ^ (state >> np.uint32(16))) * fifth
    state = (state ^ (state >> np.uint32(13)) ^ (state >> np.uint32(26))) * fourth
    state ^= (state >> np.uint32(16)) ^ np.uint32(16)
    mixed = _turned((state - np.uint32(STATE[1])) * third, 19) ^ state_of(words)
    return _turned(mixed * second, 17) * first


def _turned(word: np.ndarray, bits: int) -> np.ndarray:
    return (word << np.uint32(bits)) | (word >> np.uint32(32 - bits))


def words_of(seed_B: np.ndarray, position_B: np.ndarray) -> list[np.ndarray]:
    """The three words before the id's, each [B]."""
    seed_B = seed_B.view(np.uint64)
    return [seed_B & np.uint64(LAST), seed_B >> np.uint64(32), position_B]


def hashed(seed_B: torch.Tensor, position_B: torch.Tensor, id_V: torch.Tensor) -> torch.Tensor:
    """What SGLang's function of this name returns, but float64 [B, V]."""
    words = words_of(seed_B.numpy(), position_B.numpy())
    hash_BV = hash_of([*(word[:, None] for word in words), id_V.numpy()[None, :]])
    return torch.from_numpy(hash_BV.astype(np.float64))


def sglang_file(name: str) -> Path:
    """A file of the installed SGLang."""
    home = importlib.util.find_spec("sglang")
    assert home is not None
    assert home.submodule_search_locations
    return Path(home.submodule_search_locations[0]) / name


def sglang_draw(murmur_hash32: Draw) -> Draw:
    """SGLang's multinomial_with_seed by this hash, not compiled: int64 [B, 1] of log-probs."""
    file = sglang_file("srt/layers/sampler.py")
    (function,) = [
        node
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name == "multinomial_with_seed"
    ]
    function.decorator_list = []
    names: dict[str, Any] = {"torch": torch, "murmur_hash32": murmur_hash32}
    exec(compile(ast.Module([function], []), str(file), "exec"), names)
    return names["multinomial_with_seed"]


def sglang_hash() -> ModuleType:
    """SGLang's module with the kernel of its hash."""
    file = sglang_file("kernels/ops/sampling/murmur_hash.py")
    spec = importlib.util.spec_from_file_location("murmur_hash", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def hashes() -> dict[str, Any]:
    """SGLang's own kernel of the hash beside numpy's, of seeds of either sign."""
    seed_B, position_B = torch.tensor([0, -1, 2**62 + 5, -(2**63)]), torch.tensor([0, 1, 99, 2**31])
    id_V = torch.arange(WIDE)
    found_BV = torch.empty((4, WIDE), dtype=torch.uint32)
    sglang_hash().murmur_hash32_kernel[(4, -(-WIDE // 1024))](
        seed_B, position_B, id_V, found_BV, 4, WIDE, BLOCK_SIZE=1024
    )
    different = found_BV.double() != hashed(seed_B, position_B, id_V)
    return {"case": "hashes", "draws": different.numel(), "different": int(different.sum())}


def compared(
    case: str,
    probs_BV: torch.Tensor,
    seed_B: torch.Tensor,
    position_B: torch.Tensor,
    tile: int | None = None,
) -> dict[str, Any]:
    """Draws of the kernel beside SGLang's. impossible: of an id without mass, where some have it.

    in_float32: what differs where numbers are float32, as a control.
    """
    logp_BV = probs_BV.log()
    exact_B = sglang_draw(hashed)(logp_BV, seed_B, position_B)[:, 0]
    ours_B = by_kernel(probs_BV, seed_B, position_B, kernels, tile)
    mass_B = probs_BV.sum(1)
    share_B = probs_BV.gather(1, ours_B[:, None])[:, 0]
    u_BV = hashed(seed_B, position_B, torch.arange(probs_BV.shape[1])).float().div_(LAST)
    narrow_B = u_BV.log_().neg_().log_().neg_().add_(logp_BV).argmax(1)
    return {
        "case": case,
        "draws": len(exact_B),
        "different": int((ours_B != exact_B).sum()),
        "impossible": int(((share_B == 0) & (mass_B > 0)).sum()),
        "in_float32": int((narrow_B != exact_B).sum()),
    }


def probabilities(rows: int, vocab: int) -> torch.Tensor:
    """Flat ones, likely ones and certain ones; of every fifth row a tenth of the ids is left."""
    generator = torch.Generator().manual_seed(vocab)
    scale_B = torch.tensor([0.1, 1.0, 3.0, 10.0]).repeat(-(-rows // 4))[:rows]
    logits_BV = torch.randn(rows, vocab, generator=generator).mul_(scale_B[:, None])
    probs_BV = logits_BV.softmax(1)
    probs_BV[::5] *= torch.rand(probs_BV[::5].shape, generator=generator) < 0.1
    return probs_BV


def ordinary(vocab: int, draws: int) -> dict[str, Any]:
    """So many draws of one vocabulary, of the same rows again and again with other seeds."""
    generator, started = np.random.default_rng(vocab), time.perf_counter()
    probs_BV = probabilities(min(draws, max(1, AT_ONCE // vocab)), vocab)
    found: dict[str, Any] = {}
    for first in range(0, draws, len(probs_BV)):
        rows = min(len(probs_BV), draws - first)
        seed_B = generator.integers(-(2**63), 2**63, rows)
        position_B = generator.integers(0, 10**5, rows)
        each = torch.from_numpy(seed_B), torch.from_numpy(position_B)
        row = compared(f"vocabulary {vocab}", probs_BV[:rows], *each, WHOLE)
        found = row | {
            name: value + found.get(name, 0) for name, value in row.items() if name != "case"
        }
    return found | {"seconds": round(time.perf_counter() - started, 1)}


def odd(tile: int | None) -> Iterator[dict[str, Any]]:
    """Ties (of nothing, of infinities, of NaN), and the ends of the hash.

    No two ids of a row have one hash. Rows are parts of longer ones. tile: None: as a GPU has it,
    several blocks a row.
    """
    base_V = probabilities(1, WIDE)[0]
    rows: dict[str, torch.Tensor] = {}
    for name in ("nothing", "one id", "two infinities", "two NaN", "NaN after infinity", "all NaN"):
        rows[name] = base_V.clone()
    rows["nothing"][:] = 0
    rows["one id"][:-1] = 0
    rows["two infinities"][[1500, 4200]] = torch.inf
    rows["two NaN"][[3000, 4000]] = torch.nan
    rows["NaN after infinity"][1500], rows["NaN after infinity"][3000] = torch.inf, torch.nan
    rows["all NaN"][:] = torch.nan
    rows["unlikely all"] = base_V * 1e-30
    seed_B = torch.arange(len(rows)) - 3
    wide_BV = torch.zeros(len(rows), WIDE + 24)
    wide_BV[:, :WIDE] = torch.stack([*rows.values()])
    position_B = torch.full_like(seed_B, 17)
    yield compared(", ".join(rows), wide_BV[:, :WIDE], seed_B, position_B, tile)
    for wanted in (0, NEARLY_LAST, LAST):
        seeds = np.arange(2**22)
        ids = word_of(wanted, words_of(seeds, np.full(1, 17)))
        seed, at = next((s, i) for s, i in zip(seeds[ids < WIDE], ids[ids < WIDE], strict=True))
        given = torch.tensor([seed]), torch.tensor([17])
        assert float(hashed(*given, torch.tensor([int(at)]))) == wanted
        for share in (0.0, 1e-12, 1e-9, 1e-8, 1e-7, 1.0):
            probs_V = torch.zeros_like(base_V) if share == 1 else base_V.clone()
            probs_V[int(at)] = share
            yield compared(f"hash {wanted}, p {share:g}", probs_V[None], *given, tile)


def main() -> None:
    """Print the rows."""
    assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1"
    draws = int(sys.argv[1])
    np.seterr(divide="ignore")  # log 0 is what is wanted
    rows = [hashes(), *odd(None), *odd(WHOLE)]
    for row in rows:
        sys.stdout.write(f"{json.dumps(row)}\n")
    for vocab, share in SHARES.items():
        sys.stdout.write(f"{json.dumps(ordinary(vocab, round(share * draws)))}\n")


if __name__ == "__main__":
    main()
