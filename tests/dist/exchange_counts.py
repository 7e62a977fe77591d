"""Counts what the collectives of a rank are given, by group and kind."""

from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WHOLE = {
    "_allgather_base_": ("gather", 0),
    "allgather_into_tensor_coalesced_": ("gather", 0),
    "_reduce_scatter_base_": ("scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("scatter", 1),
    "reduce_scatter_": ("scatter", 1),
    "allgather_": ("gather", 0),
    "alltoall_base_": ("all-to-all", 1),
    "allreduce_": ("reduce", 0),
    "send": ("send", 0),
}
"""The kind of each of torch's operations, and which of its arguments holds the whole tensor."""
SEEN = ("recv_", "recv_any_source_", "barrier", "broadcast_")
"""What else a learner calls: the other end of a send, and what is no tensor of a pass."""


class ExchangeCounts(TorchDispatchMode):
    """Adds up [bytes of whole tensors, calls] by group and kind, while it is entered."""

    def __init__(self, groups: dict[str, Any]) -> None:
        super().__init__()
        self._names = {group.group_name: name for name, group in groups.items()}
        self.counts: dict[str, dict[str, list[int]]] = defaultdict(
            lambda: defaultdict(lambda: [0, 0])
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and count it."""
        name = func._schema.name.partition("::")[2]
        if func.namespace == "c10d" and name not in SEEN:
            kind, place = WHOLE[name]
            floats = [t for t in tree_leaves(args[place]) if t.is_floating_point()]
            if floats:  # not shapes, or how many tokens an expert gets
                counted = self.counts[self._group(kind, args)][kind]
                counted[0] += sum(tensor.nbytes for tensor in floats)
                counted[1] += 1
        return func(*args, **(kwargs or {}))

    def _group(self, kind: str, args: Any) -> str:
        """The group's name; of stages, which have several groups, that of all of them."""
        if kind == "send":
            return "pp"
        # before a reduction's kind, which is an object of torch's too
        boxed = next(each for each in args if isinstance(each, torch.ScriptObject))
        return self._names.get(dist.ProcessGroup.unbox(boxed).group_name, "other")


def groups() -> dict[str, Any]:
    """This rank's groups by the names of a plan; of the ranks of each, the first name counts."""
    return {
        "tp": ps.get_tensor_model_parallel_group(),
        "cp": ps.get_context_parallel_group(),
        "pp": ps.get_pipeline_model_parallel_group(),
        "dp x cp": ps.get_data_parallel_group(with_context_parallel=True),
        "ep": ps.get_expert_model_parallel_group(),
        "etp": ps.get_expert_tensor_parallel_group(),
        "expert dp": ps.get_expert_data_parallel_group(),
    }
