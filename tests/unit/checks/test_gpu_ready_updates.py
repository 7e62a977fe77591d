"""An update that differs from the local layers' is told by what differs."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from checks.gpu.record import PartFailed
from checks.gpu_ready.updates import LIMIT, compared, difference


def test_an_update_that_differs_is_told_by_what_differs(tmp_path: Path):
    exact = {"loss": torch.ones(1), "gradients: a": torch.tensor([1.0, 4.0])}
    for name, found in (
        ("local", exact),
        ("same", exact),
        ("other", exact | {"gradients: a": torch.tensor([1.0, 4.0 + 8e-4])}),
        ("nothing", exact | {"loss": torch.tensor([torch.nan])}),
        ("fewer", {"loss": torch.ones(1)}),
    ):
        (tmp_path / name).mkdir()
        save_file(found, tmp_path / name / "dense.safetensors")
    wanted = tmp_path / "local"
    assert compared(wanted, tmp_path / "same", "dense") == {"loss": 0.0, "gradients": 0.0}
    other = compared(wanted, tmp_path / "other", "dense")
    assert other["loss"] == 0.0
    assert LIMIT < other["gradients"] == pytest.approx(2e-4, rel=1e-2)
    assert compared(wanted, tmp_path / "nothing", "dense")["loss"] == float("inf")
    with pytest.raises(PartFailed, match="dense: other tensors"):
        compared(wanted, tmp_path / "fewer", "dense")
    assert difference(torch.tensor([1e-3]), torch.zeros(1)) == pytest.approx(1e-3)
