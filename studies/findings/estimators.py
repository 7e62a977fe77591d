"""The estimators that the studies compare: what each sets of examples/wordy/wordy.yaml.

One optimizer step uses a quarter of a batch, as in AsyncOPD's Table 3. `path` is the sampled token
alone: one-sample Monte Carlo. Not named here is what the file has: reverse KL on the sampled token,
A computed anew by the learner, no clip, the full ratio of learner to sampler.
"""

from __future__ import annotations

Overrides = dict[str, str]

CLIP = "trust: {type: clip, low: 0.2, high: 0.2}"
PROX = "{type: importance, prox: true}"
FLIPPED = '{type: "studies.findings.flipped:FlippedReverseKl"}'


def mc(m: int) -> Overrides:
    """M draws of the sampler at every position."""
    return {"support": f"{{type: mc, m: {m}}}"}


def top(k: int) -> Overrides:
    """The sampler's k likeliest ids, reweighted, both distributions over their sums on the set."""
    return {
        "objective": "{type: reverse_kl, outside: renormalise}",
        "support": f"{{type: topk, k: {k}}}",
    }


def atoms(k: int, m: int) -> Overrides:
    """The sampler's k likeliest ids exactly, and thin draws of m from the rest."""
    return {"support": f"{{type: atoms_tail, k: {k}, m: {m}, thin: true}}"}


ESTIMATORS: dict[str, Overrides] = {
    # the surrogates (Fig. 3): which A, and clipped or not
    "theta": {},
    "theta_clip": {"objective": f"{{type: reverse_kl, {CLIP}}}"},
    "old": {"objective": "{type: reverse_kl, advantage: rollout}"},
    "old_clip": {"objective": f"{{type: reverse_kl, advantage: rollout, {CLIP}}}"},
    # those of asynchronous RL (Fig. 4), with the sampler's A as there
    "decoupled": {
        "objective": f"{{type: reverse_kl, advantage: rollout, {CLIP}}}",
        "correction": PROX,
    },
    # with the cap of 5 that AReaL puts on the sampler's ratio: tokens beyond it are left out
    "decoupled_cap5": {
        "objective": f"{{type: reverse_kl, advantage: rollout, {CLIP}}}",
        "correction": "{type: masked, min_ratio: 0.0, max_ratio: 5.0, prox: true}",
    },
    # M2PO by its Algorithm 1; as its authors' code has it, with the threshold of their scripts; and
    # with a tighter one and the smallest clip that the code has a default for
    "m2po": {"objective": "{type: reverse_kl, advantage: rollout, trust: {type: m2}}"},
    "m2po_code": {
        "objective": "{type: reverse_kl, advantage: rollout, trust: {type: m2, moment: capped}}"
    },
    "m2po_clip": {
        "objective": "{type: reverse_kl, advantage: rollout, trust: {type: m2, moment: capped, "
        "threshold: 0.01, least_low: 0.3, least_high: 0.5}}"
    },
    # the direction of the divergence (Fig. 2)
    "forward_top16": {
        "objective": "{type: forward_kl}",
        "support": "{type: teacher_topk, k: 16}",
    },
    # stale sets (Fig. 6), all distributions over their sums on the set: RW weighs by p in place of
    # the sampler's probability
    "top16": top(16) | {"correction": "{type: none}"},
    "top16_rw": top(16),
    # draws (Fig. 7), and draws without the ratio (Fig. 10)
    "mc4": mc(4),
    "mc16": mc(16),
    "mc64": mc(64),
    "theta_no_is": {"correction": "{type: none}"},
    "mc16_no_is": mc(16) | {"correction": "{type: none}"},
    # ours; 2 atoms have the bytes of 64 draws, 4 atoms those of the 7 likeliest ids
    "atoms2_thin4": atoms(2, 4),
    "atoms4_thin64": atoms(4, 64),
    "top7_rw": top(7),
    "exact": {"support": "{type: exact}"},
    # what bounds the ratio of 64 draws
    "mc64_tis2": mc(64) | {"correction": "{type: truncated, max_ratio: 2.0}"},
    # the control
    "flipped": {"objective": FLIPPED},
}
