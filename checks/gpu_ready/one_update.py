"""The cases of updates.py on one kind of layers.

    python -m checks.gpu_ready.one_update local|engine PLACE

Results go to PLACE/KIND/CASE and PLACE/planted/CONTROL. A process of its own: which layers there
are is decided at import. Each rank of a case is forked from it, and what that patches stays there.
Without a GPU the learner leaves TransformerEngine out, unless it is imported first, as by_torch.py
does.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from checks.gpu_ready.cases import ADAM, CASES, CONTROLS, Case, control_name
from megatron_opd.config.estimator import Estimator
from megatron_opd.config.kernels import Kernels
from megatron_opd.config.learner import LearnerConfig
from megatron_opd.records.types import Batch
from sglang_bridge.ports import free_port

LAYERS, EXPERTS, CHOSEN = 2, 4, 2  # of the tiny Qwen3-MoE
TIMEOUT_S = 120
"""Of a case's collectives and of its ranks: a hang."""


@dataclass(frozen=True)
class Given:
    """A model and its batches, by what they say of their routing."""

    path: Path
    batches: dict[str, Batch]


def figures_of(case: Case, given: Given, *, engine: bool) -> dict[str, torch.Tensor]:
    """Log-probs, loss, gradients and their norm of one update, and weights and log-probs after."""
    from checks.gpu_ready.results import results_of
    from megatron_opd.learner.learner import MegatronLearner
    from tests.dist.jobs import share

    learner = MegatronLearner(given.path, config_of(case, engine=engine), updates=2, seed=1)
    assert learner.world.kernels.engine == engine
    mine = share(given.batches[case.replays], learner, Estimator())
    found = {"log-probs": _logp(learner.score(mine, 1.0, replay=case.replays).logp_T)}
    metrics = learner.train(mine, Estimator(), 1.0)
    found["loss"] = torch.tensor([metrics.loss])
    found["gradient norm"] = torch.tensor([metrics.grad_norm])
    found |= results_of(learner)
    found["log-probs after"] = _logp(learner.score(mine, 1.0, replay=case.replays).logp_T)
    return found


def config_of(case: Case, *, engine: bool) -> LearnerConfig:
    """The learner's settings of a case on one kind of layers."""
    basis = {"dtype": "float32", "threads": 1, "timeout_s": TIMEOUT_S, "optimizer": ADAM}
    given: dict[str, Any] = basis | dict(case.learner)
    if engine:
        # fused where a case says so, as numbers are then compared with those of it unfused
        unfused = {"moe_permute_fusion": False} if case.model == "moe" else {}
        given["megatron"] = unfused | given.get("megatron", {}) | case.engine
        given["optimizer"] = given["optimizer"] | case.optimizer
    return LearnerConfig.model_validate(given)


def _logp(packed: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(packed), dtype=torch.float32)


def given_of(path: Path) -> Given:
    """Make the batches of a model."""
    from tests.dist.caches import (
        make_batch,
        random_experts,
        random_gates,
        with_experts,
        with_gates,
    )
    from tests.support.models import VOCAB_SIZE

    batch = make_batch(path, samples=6, seed=3, vocab=VOCAB_SIZE)
    routed = with_experts(batch, random_experts(batch, 5, (LAYERS, EXPERTS, CHOSEN)))
    weighed = with_gates(routed, random_gates(batch, 6, (LAYERS, CHOSEN)))
    return Given(path, {"off": batch, "experts": routed, "gates": weighed})


def rank_of(
    case: Case, given: Given, out: Path, variables: dict[str, str], fault: str | None, engine: bool
) -> None:
    """Compute a case as one rank. Ends the process with 1 where it cannot."""
    os.environ.update(variables)
    rank = variables["RANK"]
    from megatron_opd.learner import attention

    computed: dict[str, int] = {}
    try:
        if engine:
            from checks.gpu_ready import by_torch, calls, planted
            from megatron_opd.learner import world

            by_torch.install(adam=case.adam)
            if fault is not None:
                planted.FAULTS[fault]()
            computed = calls.CALLS
            world.choose_kernels = lambda cuda: Kernels(True, True, ())
        else:
            # segment by segment, as by_torch.py does: a padded call rounds otherwise
            attention.MAX_PADDING_WASTE = 0.0
        save_file(figures_of(case, given, engine=engine), out / f"{rank}.safetensors")
        if rank == "0":
            (out / "calls.json").write_text(json.dumps(computed), encoding="utf-8")
        dist.destroy_process_group()
    except Exception as error:  # noqa: BLE001  # whatever it is, the record shall show it
        traceback.print_exc()
        print(f"{out.name}, rank {rank}: {type(error).__name__}: {error}", flush=True)
        os._exit(1)


def run_case(case: Case, given: Given, out: Path, fault: str | None, *, engine: bool) -> None:
    """Compute a case on all its ranks; a rank that fails ends this process."""
    out.mkdir(parents=True)
    began_s, context, port = time.monotonic(), multiprocessing.get_context("fork"), free_port()
    world = {
        "WORLD_SIZE": str(case.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    ranks = [
        context.Process(
            target=rank_of,
            args=(
                case,
                given,
                out,
                world | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                fault,
                engine,
            ),
            daemon=True,
        )
        for rank in range(case.ranks)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(TIMEOUT_S)
    if any(rank.exitcode != 0 for rank in ranks):
        sys.exit(f"{out.name}: exit codes {[rank.exitcode for rank in ranks]}")
    print(f"{out.name}: {time.monotonic() - began_s:.1f} s", flush=True)


def main() -> None:
    """Entry point."""
    kind, place = sys.argv[1], Path(sys.argv[2])
    engine = kind != "local"
    if engine:
        from checks.gpu_ready import planted  # noqa: F401  # pyright: ignore[reportUnusedImport]
    # all that ranks need, before they are forked; no thread of torch may run then
    import tests.dist.jobs  # noqa: F401  # pyright: ignore[reportUnusedImport]
    from tests.support.models import tiny_qwen3, tiny_qwen3_moe

    models = {
        "dense": given_of(tiny_qwen3(place / f"{kind} dense")),
        "moe": given_of(tiny_qwen3_moe(place / f"{kind} moe")),
    }
    for name, case in CASES.items():
        if engine or case.local:
            run_case(case, models[case.model], place / kind / name, None, engine=engine)
    for fault, name in CONTROLS if engine else ():
        out = place / "planted" / control_name(fault, name)
        run_case(CASES[name], models[CASES[name].model], out, fault, engine=True)


if __name__ == "__main__":
    main()
