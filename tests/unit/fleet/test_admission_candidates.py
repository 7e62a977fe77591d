"""A server that would join is another model, or does not answer as the run asks: one line."""

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_opd.data.end_tokens import Ending
from megatron_opd.errors import UserError
from megatron_opd.fleet import admission as admission_module
from megatron_opd.fleet.admission import check_candidate, require_tensors
from megatron_opd.models.spec import ModelSpec, read_model_spec
from megatron_opd.weight_sync.holdings import server_holdings
from sglang_bridge.errors import BadReply, RequestAborted
from sglang_bridge.protocol import RolloutRequest, ScoreRequest, ServerInfo, WeightPiece
from tests.support.config_files import minimal
from tests.support.models import tiny_qwen3, tiny_qwen3_moe

URL, OTHER = "http://new:1", "http://there:1"
INFO = ServerInfo(URL, "m", 512, 64, 1, 1, 0, "float32", 100, False)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {"moe": tiny_qwen3_moe(root / "moe"), "dense": tiny_qwen3(root / "dense")}


def pieces_of(spec: ModelSpec, tp: int = 1, ep: int = 1) -> list[WeightPiece]:
    return [
        WeightPiece(rank, held.name, held.dim, held.start, held.length, "float32", "")
        for held in server_holdings(spec, tp, ep)
        for rank in held.ranks
    ]


class Server:
    """A server that holds these pieces, or gives all ids this log-prob. asked: to sample."""

    def __init__(
        self,
        url: str,
        pieces: list[WeightPiece],
        failure: Exception | None = None,
        logp: float = -6.0,
    ):
        self.url, self._pieces, self._failure, self._logp = url, pieces, failure, logp
        self.asked: list[RolloutRequest] = []

    async def weight_pieces(self) -> list[WeightPiece]:
        return self._pieces

    async def score(self, request: ScoreRequest) -> Any:
        assert request.exact
        assert len(set(np.asarray(request.ids_N).tolist())) > 50, (
            "a passage that tells models apart"
        )
        return SimpleNamespace(logp_N=np.full(len(request.ids_N), self._logp, np.float32))

    async def generate(self, request: RolloutRequest) -> Any:
        self.asked.append(request)
        if self._failure is not None:
            raise self._failure
        return SimpleNamespace(
            output_ids_T=[7], draws=object(), spans=((0, 0, 1),), finish_reason="length",
            url=self.url, experts_XLk=None, gates_XLk=None,
        )  # fmt: skip


def check(
    models: dict[str, Path],
    server: Server,
    role: str = "student",
    there: list[Server] | None = None,
    info: ServerInfo = INFO,
    **sections: Any,
) -> None:
    student, teacher = (
        {"model": str(models["moe"])},
        {"model": str(models["dense"]), "dtype": "float32"},
    )
    config = minimal(student=student, teacher=teacher, scoring={"guard": "off"}, **sections)
    student = SimpleNamespace(vocab_size=512)
    prepared: Any = SimpleNamespace(
        student=student, vocab_sizes={"teacher": 512}, ending=Ending((1,))
    )
    fleet: Any = SimpleNamespace(clients=tuple(there or ()))
    client: Any = server
    asyncio.run(check_candidate(config, prepared, role, fleet, client, info))


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (2, 2)])
def test_a_server_of_the_same_model_fits_however_it_is_cut(
    models: dict[str, Path], tp: int, ep: int
):
    spec = read_model_spec(models["moe"])
    server = Server(URL, pieces_of(spec, tp, ep))
    check(models, server, info=replace(INFO, tp_size=tp, ep_size=ep))
    (request,) = server.asked
    assert (request.max_new_tokens, request.num_draws > 0) == (1, True), "as the run samples"


def test_another_model_is_refused(models: dict[str, Path]):
    dense = read_model_spec(models["dense"])
    with pytest.raises(UserError, match=f"^{URL} serves another model: .*, the run's no rows$"):
        check(models, Server(URL, pieces_of(dense)))
    spec = read_model_spec(models["moe"])
    pieces = [
        replace(p, length=p.length + 1) if p.hf_name == "model.norm.weight" else p
        for p in pieces_of(spec)
    ]
    with pytest.raises(UserError) as caught:
        require_tensors(INFO, spec, pieces, None)
    size = spec.hidden_size
    assert str(caught.value) == (
        f"{URL} serves another model: model.norm.weight has {size + 1} rows, the run's {size} rows"
    )


@pytest.mark.parametrize(("type", "fits"), [("shards", False), ("broadcast", True)])
def test_slices_other_than_planned_are_for_broadcast_alone(
    models: dict[str, Path], type: str, fits: bool
):
    spec = read_model_spec(models["moe"])
    name = "model.layers.0.self_attn.o_proj.weight"
    pieces = []
    for piece in pieces_of(spec):
        half = piece.length // 2
        if piece.hf_name == name:
            pieces.append(replace(piece, length=half))
            piece = replace(piece, start=half, length=piece.length - half)
        pieces.append(piece)
    if fits:
        check(models, Server(URL, pieces), weight_sync={"type": type})
        return
    with pytest.raises(UserError, match=f"^{URL} .*use weight_sync.type: broadcast"):
        check(models, Server(URL, pieces), weight_sync={"type": type})


def test_a_student_that_cannot_sample_as_the_run_does_is_refused(models: dict[str, Path]):
    pieces = pieces_of(read_model_spec(models["moe"]))
    failure = BadReply(f"{URL}: no experts")
    with pytest.raises(BadReply, match="no experts"):
        check(models, Server(URL, pieces, failure))
    aborted = RequestAborted("queue full")
    with pytest.raises(UserError, match=f"^{URL} does not sample: .*queue full"):
        check(models, Server(URL, pieces, aborted))


@pytest.mark.parametrize(("logp", "fits"), [(-6.0005, True), (-6.01, False), (np.nan, False)])
def test_a_teacher_must_score_as_the_others_do(models: dict[str, Path], logp: float, fits: bool):
    """In float32, where 1e-3 nats are allowed; no name of its tensors is asked for."""
    there, new = Server(OTHER, []), Server(URL, [], logp=logp)
    check(models, new, "teacher")  # nobody to compare with
    if fits:
        check(models, new, "teacher", [there])
        return
    with pytest.raises(UserError, match=f"^{URL} serves another model than {OTHER}: .* nats"):
        check(models, new, "teacher", [there])


def test_a_teacher_is_probed_as_before_the_run(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
):
    asked: list[Any] = []

    async def probe(config: Any, prepared: Any, servers: Any, *, second: bool) -> list[str]:
        assert not second
        asked.append(servers)
        raise UserError("teacher answers nonsense")

    monkeypatch.setattr(admission_module, "check_teachers", probe)
    server = Server(URL, [])
    with pytest.raises(UserError, match="nonsense"):
        check(models, server, "teacher")
    assert asked == [{"teacher": [server]}]
