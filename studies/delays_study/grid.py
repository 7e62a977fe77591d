"""The runs of the study: five kinds of delays, three methods, with CPPO-KL and without."""

from __future__ import annotations

from pathlib import Path

from studies.grid.trials import Trial

CONFIG = Path("examples/rewards/gepo.yaml")  # model, data and optimizer; the loss is set below
SEEDS = (1, 2, 3)
METHODS = ("grpo", "gspo", "gepo")
LARGEST_DELAY = 64
LOW_S, HIGH_S = 60, 1800
SIZE = {
    "run.max_steps": "96",
    "buffer.batch_size": "32",
    # at the examples' 2e-4, 64 updates on what version 0 sampled leave no student to compare
    "learner.optimizer.lr": "5.0e-5",
    "evaluation.problems": "64",
    "evaluation.samples": "2",
    "evaluation.every": "16",
    "evaluation.blocks": "true",
    "checkpoint.export_hf": "false",
    "student.base_port": "21800",  # below the range from which the system hands out ports
    "student.startup_timeout_s": "180",
    "metrics": "{tensorboard: false, trace: false, progress: false}",
}
COMMON = {
    "objective.advantage": "group_mean",
    "objective.trust": "{type: clip, low: 0.2, high: 0.2}",
    "correction": "{type: importance}",
    "reduction": "{type: sequence_mean}",
}
ONLINE, CONSTANT = "online", "constant"
DRAWN = ("lognormal", "weibull", "exponential")
STALE = (CONSTANT, *DRAWN)
KL, NO_KL, PUBLISHED = "kl", "no_kl", "kl_published"
PENALTIES = {
    KL: {"objective.kl": "{coefficient: 0.005, to: sampler}"},
    NO_KL: {"objective.kl": "null"},
    PUBLISHED: {"objective.kl": "{coefficient: 0.005, to: sampler, estimator: k3_unweighted}"},
}
"""CPPO-KL as it is sound on the sampler's tokens, none, and CPPO-KL as GEPO's code has it."""


def setting(delay: str, penalty: str) -> str:
    """Names what is done to the rollouts and the loss of a run besides its method."""
    return f"{delay}_{penalty}"


SYNC = setting(ONLINE, NO_KL)


def trial(delay: str, penalty: str, method: str, seed: int) -> Trial:
    """One run."""
    held = {
        "schedule.type": "controlled",
        "schedule.max_staleness": "0" if delay == ONLINE else str(LARGEST_DELAY),
    }
    if delay in DRAWN:
        held["schedule.delays"] = f"{{type: {delay}, low_s: {LOW_S}, high_s: {HIGH_S}}}"
    loss = {"objective": f"{{type: {method}}}"} | COMMON | PENALTIES[penalty]
    return Trial(setting(delay, penalty), method, seed, CONFIG, SIZE | held | loss)


def trials() -> list[Trial]:
    """The grid, in the order in which it is run: most telling first."""
    papers = [(CONSTANT, KL), ("lognormal", KL), (ONLINE, NO_KL), ("weibull", KL)]
    papers.append(("exponential", KL))
    bare = [(delay, NO_KL) for delay in (CONSTANT, *DRAWN)]
    published = [(CONSTANT, PUBLISHED)]
    return [
        trial(delay, penalty, method, seed)
        for part in ([*papers, *bare], published)
        for seed in SEEDS
        for delay, penalty in part
        for method in METHODS
    ]
