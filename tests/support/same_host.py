"""Members of a group that share memory, as threads of one process."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from torch.distributed import ProcessGroupGloo

from sglang_bridge.weights.same_host import find_lanes
from tests.support.receiving import CPU, gloo_groups


def side_by_side(*calls: Callable[[], object]) -> None:
    """All at once; the first failure is raised."""
    with ThreadPoolExecutor(len(calls)) as threads:
        for done in [threads.submit(call) for call in calls]:
            done.result(timeout=60)


def groups_with_lanes(size: int, senders: int, timeout_s: float = 30) -> list[ProcessGroupGloo]:
    """All members of a new group, of which the first ones send and the others receive."""
    groups = gloo_groups(size, timeout_s)
    side_by_side(
        *(
            lambda g=g, s=rank < senders: find_lanes(g, CPU, sends=s, receives=not s)
            for rank, g in enumerate(groups)
        )
    )
    return groups
