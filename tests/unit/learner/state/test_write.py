"""Why a checkpoint could not be written."""

import re
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from megatron_opd.learner.state.write import explained, one_line


def test_torch_s_reason_is_told_with_the_space_that_is_left(tmp_path: Path) -> None:
    cause = RuntimeError("unexpected pos 704\nvs 598")
    failed = CheckpointException("write", {3: (cause, None), 1: (OSError("first"), None)})
    assert not isinstance(failed, Exception), "what catches Exception would miss it"
    assert re.fullmatch(
        r"OSError: first \(\d+\.\d MB are free there\)", explained(failed, tmp_path)
    )
    assert explained(cause, tmp_path).startswith("RuntimeError: unexpected pos 704 vs 598 (")
    assert one_line(failed) == "OSError: first"
