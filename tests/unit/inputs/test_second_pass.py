"""Another program scores a few passages, or it is said why none does."""

import asyncio
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatron_opd.config.servers import ServerConfig
from megatron_opd.inputs import second_pass
from megatron_opd.inputs.second_pass import RESERVE_BYTES, SecondPass, dtype_that_fits
from megatron_opd.learner import reference
from sglang_bridge.protocol import ScoreRequest
from tests.support.models import tiny_qwen2, tiny_qwen3_moe

PASSAGES = tuple(
    ScoreRequest(
        rid="r",
        input_ids=np.array(ids),
        runs=runs,
        offsets_T1=np.array([0, 2, 3, 6]),
        ids_N=np.array([5, 9, 0, 3, 2, 1]),
        temperature=0.7,
        exact=True,
    )
    for runs, ids in (
        (((2, 5),), [7, 8, 9, 10, 11]),
        (((1, 2), (4, 6)), [3, 500, 2, 1, 7, 9]),
    )
)


def scored(model: Path, **more: Any) -> SecondPass:
    section = ServerConfig.model_validate({"model": str(model), **more})
    return asyncio.run(second_pass.second_pass(section, PASSAGES))


def oracle(model: Path) -> list[list[float]]:
    """Token by token, from transformers' logits of each prefix."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    found: list[list[float]] = []
    for each in PASSAGES:
        found.append([])
        sampled = [place for start, stop in each.runs for place in range(start, stop)]
        for row, place in enumerate(sampled):
            prefix = torch.tensor([[*each.input_ids[:place]]])
            with torch.no_grad():
                logits = loaded(prefix).logits[0, -1].double() / each.temperature
            ids = each.ids_N[each.offsets_T1[row] : each.offsets_T1[row + 1]]
            found[-1] += logits.log_softmax(-1)[torch.tensor(ids)].tolist()
    return found


def test_transformers_scores_in_a_process_of_its_own(tmp_path: Path):
    model = tiny_qwen3_moe(tmp_path / "model", tie_word_embeddings=True)
    found = scored(model)
    assert (found.by, found.why, found.dtype) == ("transformers", "", "float32")
    np.testing.assert_allclose(found.logp, oracle(model), atol=2e-5)


def test_the_learners_model_scores_where_transformers_does_not(tmp_path: Path):
    model = tiny_qwen2(tmp_path / "model")
    code = "from megatron_opd.learner import reference as r; del r.PASSES['transformers']; r.main()"
    done = subprocess.run(
        [sys.executable, "-c", code, str(model), "float32", "0.7"],
        input=json.dumps([second_pass._as_json(each) for each in PASSAGES]),
        capture_output=True,
        text=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["by"] == "the learner's model", found
    np.testing.assert_allclose(found["logp"], oracle(model), atol=2e-5)


def test_nothing_is_made_up_for_a_tensor_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """transformers itself would fill it with random numbers."""
    model = tiny_qwen2(tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    lost = "model.layers.1.self_attn.k_proj.weight"
    kept = {name: tensor for name, tensor in tensors.items() if name != lost}
    save_file(kept, model / "model.safetensors", {"format": "pt"})
    for name, run in reference.PASSES.items():
        with pytest.raises(ValueError, match=lost):
            run(model, torch.float32, [second_pass._as_json(each) for each in PASSAGES])
        monkeypatch.setitem(reference.PASSES, name, refuses)
    asked = json.dumps([second_pass._as_json(each) for each in PASSAGES])
    monkeypatch.setattr(sys, "stdin", io.StringIO(asked))
    monkeypatch.setattr(sys, "argv", ["reference", str(model), "float32", "1.0"])
    reference.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found == {"by": None, "why": "transformers: no; the learner's model: no"}


def refuses(*_: Any) -> list[torch.Tensor]:
    raise ValueError("no")


def test_a_model_that_does_not_fit_is_left_out_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model = tiny_qwen2(tmp_path / "model")
    numbers = sum(tensor.numel() for tensor in load_file(model / "model.safetensors").values())
    for size, dtype in ((4, "float32"), (2, "bfloat16")):
        free = int((numbers * size + RESERVE_BYTES) / second_pass.MEMORY_SHARE) + 10
        assert dtype_that_fits(model, free) == dtype
    monkeypatch.setattr(second_pass, "free_bytes", lambda: RESERVE_BYTES)
    found = scored(model)
    assert found.by is None
    assert "need more than 70% of the 2.1 GB of free memory" in found.why
    assert psutil.virtual_memory().available > RESERVE_BYTES


def test_a_pass_ends_in_time_with_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = tiny_qwen2(tmp_path / "model")
    monkeypatch.setattr(second_pass, "LIMIT_S", 0.05)
    before = set(psutil.Process().children())  # other tests' may live on
    assert scored(model) == SecondPass(None, "it took more than 0.05 s")
    assert set(psutil.Process().children()) <= before


def test_a_server_that_is_given_another_configuration_has_no_second_pass(tmp_path: Path):
    override = ["--json-model-override-args", "{}"]
    found = scored(tmp_path, extra_args=override)
    assert found == SecondPass(None, "extra_args change the model that is served")


def test_a_process_that_fails_has_scored_nothing_and_takes_no_part_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It must not join the run's ranks, take a GPU, nor ask a hub."""
    model = tiny_qwen2(tmp_path / "model")
    program = tmp_path / "program"
    program.write_text(f'#!/bin/sh\nenv > {tmp_path}/env\necho "{{}}"\nexit 3\n')
    program.chmod(0o755)
    for key in second_pass.OURS:
        monkeypatch.setenv(key, "1")
    monkeypatch.setattr(second_pass.sys, "executable", str(program))
    assert scored(model) == SecondPass(None, "its process ended with status 3")
    env = (tmp_path / "env").read_text().splitlines()
    assert {"CUDA_VISIBLE_DEVICES=", "HF_HUB_OFFLINE=1"} <= set(env)
    assert not {line.partition("=")[0] for line in env} & {*second_pass.OURS}


def test_free_memory_is_what_is_available():
    with open("/proc/meminfo", encoding="ascii") as lines:
        total = int(next(lines).split()[1]) * 1024
    available = psutil.virtual_memory().available
    assert abs(second_pass.free_bytes() - available) < abs(second_pass.free_bytes() - total)
