"""Draws which GPUs of a node a run uses, and for what: the map of `opd check`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from rich.table import Table

from megatron_opd.cli.tables.memory import kernels_here
from megatron_opd.cli.tables.nodes import Memory, node_table
from megatron_opd.config.cluster import LAUNCHED
from megatron_opd.config.roles import section_of
from megatron_opd.config.schema import Config
from megatron_opd.errors import checked
from megatron_opd.inputs.model_facts import RunModels
from megatron_opd.inputs.models import longest_sample
from megatron_opd.launch.gpus import gpus_here
from megatron_opd.launch.parts import LEARNER, gpus_needed
from megatron_opd.launch.placement import Placement, gpu_text, place
from megatron_opd.launch.placing import in_turn, parts_of
from megatron_opd.output import byte_text, new_table
from megatron_opd.sizing.learner import StageMemory, learner_memory, worst_stage
from megatron_opd.sizing.servers import server_memory
from sglang_bridge.gpus import VARIABLE

MOST_ROWS = 32
Process = tuple[str, int]  # section and index


def placement_table(config: Config, models: RunModels, *, elsewhere: bool) -> Table:
    """Return the map of the processes that `opd run` starts. Raises UserError.

    elsewhere: the plan is for another machine, which may have more GPUs than this one. Where this
    one has none, the map is of a node with exactly as many as are needed.
    """
    if config.cluster.type in LAUNCHED:
        return node_table(config, tuple(models.served), _memory(config, models))
    parts, names = parts_of(config, tuple(models.served)), gpus_here()
    turns, share = in_turn(config), config.cluster.share_gpus
    needed = gpus_needed(parts, turns)
    here = bool(names) and not (elsewhere and needed > len(names))
    if not here:
        note = f"this machine has {len(names) or 'no'} GPUs: drawn for one node of {needed}"
        names = tuple(map(str, range(needed)))
    elif any(name != str(index) for index, name in enumerate(names)):
        note = f"GPUs as counted within {VARIABLE}={','.join(names)}"
    else:
        note = f"the {len(names)} GPUs of this machine"
    placement = checked(lambda: place(parts, names, share=share, in_turn=turns))
    table = _map(placement, _memory(config, models), _kept(config, models, turns))
    table.caption = "\n".join(filter(None, [table.caption, note]))  # type: ignore[arg-type]
    return table


def _map(placement: Placement, memory: Memory, kept: Mapping[str, int]) -> Table:
    """Return a row for neighbouring GPUs that the same processes use.

    kept: parts that never work at once, and the bytes that the others keep while one works.
    """
    on_gpu: list[list[Process]] = [[] for _ in placement.names]
    for key, groups in placement.groups.items():
        for index, gpus in enumerate(groups):
            for gpu in gpus:
                on_gpu[gpu].append((key, index))
    table = new_table("GPU placement", ("GPUs", "what runs there", "memory of each"), 2)
    runs = [(list(run), on) for on, run in groupby(range(len(on_gpu)), key=on_gpu.__getitem__)]
    for run, processes in runs[:MOST_ROWS]:
        what = ", ".join(_name(*process, placement) for process in processes) or "free"
        if sum(key in kept for key, _ in processes) > 1:
            what += ", in turn"
        sizes = [memory[key] for key, _ in processes]
        whole = all(is_whole for _, is_whole in sizes)
        size = byte_text(_peak_bytes(processes, memory, kept))
        size += "" if whole else " and KV cache"
        table.add_row(gpu_text(tuple(run)), what, size if processes else "")
    if len(runs) > MOST_ROWS:
        table.caption = f"and {len(runs) - MOST_ROWS} more rows"
    return table


def _peak_bytes(processes: Sequence[Process], memory: Memory, kept: Mapping[str, int]) -> int:
    """Count the bytes that processes of one GPU take at most at once."""
    sizes = {key: memory[key][0] for key, _ in processes}
    in_turn = [key for key in kept if key in sizes]
    beside = sum(sizes[key] for key, _ in processes if key not in kept)
    if len(in_turn) < 2:
        return beside + sum(sizes[key] for key in in_turn)
    return beside + max(sizes[key] + kept[key] for key in in_turn)


def _name(key: str, index: int, placement: Placement) -> str:
    size = len(placement.groups[key][index])
    ranks = f" ({size} ranks)" if size > 1 else ""
    return f"{key}{ranks}" if key == LEARNER else f"{key} server {index}{ranks}"


def _kept(config: Config, models: RunModels, turns: Sequence[str]) -> dict[str, int]:
    """Return how much the other parts that work in turn keep while each of them works."""
    weights = _worst(config, models).weights
    return {key: 0 if key == LEARNER else weights for key in turns}


def _worst(config: Config, models: RunModels) -> StageMemory:
    student = models.student
    longest, kernels = longest_sample(config, student), kernels_here(config)
    return worst_stage(learner_memory(student.spec, config.learner, longest, kernels))


def _memory(config: Config, models: RunModels) -> Memory:
    """Return what the plan says that a process takes of each of its GPUs."""
    found = {LEARNER: (_worst(config, models).total, True)}
    for role, facts in models.served.items():
        planned = server_memory(facts.size, section_of(config, role))
        cache = (planned.kv_tokens or 0) * planned.kv_token_bytes
        found[role] = (planned.weights + cache, planned.kv_tokens is not None)
    return found
