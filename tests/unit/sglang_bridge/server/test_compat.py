"""Each touch of SGLang's internals still fits the installed SGLang."""

import importlib
import importlib.metadata
import inspect
import multiprocessing
import os
import pkgutil
import re
import socket
import tempfile
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt import runtime_context

from megatron_opd.launch.specs import ON_GPUS
from sglang_bridge import wire
from sglang_bridge.ports import free_port
from sglang_bridge.server import option_rules, options
from sglang_bridge.server.compat import batches, hooks, ranks, startup
from sglang_bridge.server.entry import offer_standins
from sglang_bridge.server.spec import ENABLED_VARIABLE
from tests.support.sockets import listening, open_to_others
from tools import sglang_options

ENGINE = "sglang.srt.entrypoints.engine"

offer_standins()


def resolve(target: str):
    return pkgutil.resolve_name(target)


def parameters_of(target: str) -> list[str]:
    return list(inspect.signature(inspect.unwrap(resolve(target))).parameters)


def test_the_supported_version_is_installed():
    hooks.require_supported_version()


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hooks, "version", lambda name: "0.6.0")
    with pytest.raises(RuntimeError, match=r"supports sglang 0\.5\.23, found 0\.6\.0"):
        hooks.require_supported_version()


def test_the_table_is_of_the_installed_sglang():
    """Here, and not beside other tests of options: these import SGLang anyway, in seconds."""
    assert sglang_options.table() == options.TABLE.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "target",
    [*hooks.TARGETS, *hooks.GATE_TARGETS, *hooks.CPU_TARGETS, *hooks.CUDA_TARGETS],
)
def test_every_hooked_function_exists(target: str):
    assert callable(resolve(target))


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (hooks.FORWARD, ["self", "batch"]),
        (hooks.CHECK_WEIGHTS, ["self", "action"]),
        (hooks.VALIDATE, ["self", "obj", "input_ids"]),
        (hooks.NATIVE_EXPERTS, ["layer", "x", "topk_output"]),
        (hooks.EXPERT_CHOICE, ["topk_ids", "topk_weights"]),
        (hooks.EXPERT_CAPTURE, ["topk_config", "layer_id", "topk_ids"]),
        (hooks.INPUT_LOGPROBS, ["self", "pruned_states"]),
        (hooks.BUILD_LOCK, ["scope"]),
    ],
)
def test_the_arguments_we_rely_on(target: str, expected: list[str]):
    assert parameters_of(target)[: len(expected)] == expected


def test_memory_is_released_as_sglang_does_it():
    """What sglang_bridge/server/memory.py asks of SGLang, by name."""
    from sglang.srt.constants import GPU_MEMORY_ALL_TYPES
    from sglang.srt.managers.scheduler_components import weight_updater

    for what in ("Release", "Resume"):
        assert ranks.memory_request(what, ("kv_cache",)).tags == ["kv_cache"]
    assert {*wire.MEMORY_TAGS} < {*GPU_MEMORY_ALL_TYPES}
    updater = weight_updater.SchedulerWeightUpdaterManager
    assert {"offload_tags", "memory_saver_adapter", "is_fully_idle"} <= {*updater.__slots__}
    for name in ("release_memory_occupation", "resume_memory_occupation"):
        assert list(inspect.signature(getattr(updater, name)).parameters) == ["self", "recv_req"]


def test_logits_are_asked_for_by_keyword():
    from sglang.srt.layers.logits_processor import LogitsProcessor

    assert "get_logits_fn" in parameters_of(hooks.INPUT_LOGPROBS)
    assert "get_logits_fn=self._get_logits" in inspect.getsource(LogitsProcessor)


def test_missing_hooks_stop_the_server(monkeypatch: pytest.MonkeyPatch):
    from sglang.srt.plugins.hook_registry import HookRegistry

    monkeypatch.setattr(HookRegistry, "_patched", set(hooks.TARGETS))
    hooks.require_hooks_in_place()
    monkeypatch.setattr(HookRegistry, "_patched", set(hooks.TARGETS) - {hooks.FORWARD})
    with pytest.raises(RuntimeError, match=r"not hooked: .*forward_batch_generation"):
        hooks.require_hooks_in_place()


def test_hook_kinds_exist(monkeypatch: pytest.MonkeyPatch):
    from sglang.srt.plugins.hook_registry import HookRegistry

    registered = []
    monkeypatch.setattr(HookRegistry, "register", lambda *args: registered.append(args))
    for kind in ("before", "after", "around", "replace"):
        hooks.hook("a.b", print, kind)
    assert [kind.value for _, _, kind in registered] == ["before", "after", "around", "replace"]


def test_workers_are_forked_whatever_sglang_set(monkeypatch: pytest.MonkeyPatch):
    from sglang.srt.entrypoints import engine

    launch = inspect.getsource(engine.Engine._launch_subprocesses)
    order = ["_set_envs_and_config(", "_launch_scheduler_processes(", "_launch_detokenizer_"]
    assert sorted(order, key=launch.index) == order
    before, seen = multiprocessing.get_start_method(), []

    def spawning(*args: object) -> None:
        seen.append(args)
        multiprocessing.set_start_method("spawn", force=True)

    monkeypatch.setattr(engine, "_set_envs_and_config", spawning)
    try:
        startup.fork_workers()
        engine._set_envs_and_config("arguments")
        assert seen == [("arguments",)]
        assert multiprocessing.get_start_method() == "fork"
    finally:
        multiprocessing.set_start_method(before, force=True)


def test_a_store_is_bound_to_its_host(monkeypatch: pytest.MonkeyPatch):
    """Through torch's own rendezvous, as SGLang's init_process_group makes it."""
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    monkeypatch.setattr(torch.distributed, "TCPStore", torch.distributed.TCPStore)
    monkeypatch.setattr(rendezvous, "TCPStore", rendezvous.TCPStore)
    before, port = open_to_others(os.getpid()), free_port()
    url = f"tcp://127.0.0.1:{port}"
    wide, _, _ = next(rendezvous.rendezvous(url, 0, 1))
    assert port in {p for _, p, _ in open_to_others(os.getpid())}, "torch's own is on every one"
    del wide
    startup.bind_stores()
    startup.bind_stores()  # in a fork of a process that has done so
    store, _, _ = next(rendezvous.rendezvous(f"tcp://127.0.0.1:{free_port()}", 0, 1))
    assert open_to_others(os.getpid()) == before
    bound = {(ip, port) for ip, port, _ in listening(os.getpid())}
    assert ("127.0.0.1", store.port) in bound
    peer = torch.distributed.TCPStore("127.0.0.1", store.port, is_master=False)
    peer.set("key", "value")
    assert store.get("key") == b"value"


def test_a_taken_port_is_an_error_of_the_store(monkeypatch: pytest.MonkeyPatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(OSError, match="in use"):
            startup.BoundStore("127.0.0.1", taken.getsockname()[1], 1, True)


def test_keys_are_not_shown(monkeypatch: pytest.MonkeyPatch):
    from sglang.srt.entrypoints import engine
    from sglang.srt.server_args import ServerArgs

    assert "resolved_dict()" in inspect.getsource(engine._server_args_for_logging)
    keys = {"api_key": "hunter2", "admin_api_key": None, "host": "h"}
    monkeypatch.setattr(ServerArgs, "resolved_dict", lambda self: dict(keys))
    startup.hide_keys()
    shown = ServerArgs.resolved_dict(SimpleNamespace())
    assert shown == {"api_key": "hidden", "admin_api_key": None, "host": "h"}


def test_a_servers_sockets_lie_in_its_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    from sglang.srt.managers.load_snapshot import shm_path_for
    from sglang.srt.server_args import PortArgs

    def make() -> SimpleNamespace:
        with tempfile.NamedTemporaryFile(delete=False) as file:
            return SimpleNamespace(name=file.name, instance_id="uuid")

    monkeypatch.setattr(PortArgs, "init_new", staticmethod(make))
    startup.keep_files_in(str(tmp_path))
    ports = PortArgs.init_new()
    assert Path(ports.name).parent == tmp_path
    assert ports.instance_id == tmp_path.name
    assert fnmatch(shm_path_for(tmp_path.name), f"/dev/shm/sglang_loads_{tmp_path.name}_*.shm")
    assert "PortArgs.init_new(" in inspect.getsource(importlib.import_module(ENGINE))


def test_process_wide_state():
    from sglang.srt import runtime_context

    assert "attn_tp_rank" in inspect.getsource(runtime_context)
    assert callable(runtime_context.get_parallel)
    assert callable(runtime_context.get_serving)


def test_logit_rows_are_sglangs_pruned_rows():
    """Against LogitsProcessor's own example: lengths 4, 5, 6 with logits from 0, 5 and 3."""
    batch = SimpleNamespace(
        reqs=["a", "b", "c"],
        prefix_lens=[10, 0, 7],
        extend_lens=[4, 5, 6],
        extend_logprob_start_lens=[0, 5, 3],
    )
    assert list(batches.logit_rows(batch)) == [("a", 10, 4), ("b", 4, 1), ("c", 10, 3)]


def test_a_pass_is_named_by_its_kind_requests_and_tokens():
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    reqs = [SimpleNamespace(seqlen=7), SimpleNamespace(seqlen=9)]

    def passed(mode: ForwardMode) -> object:
        batch = SimpleNamespace(forward_mode=mode, reqs=reqs, extend_lens=[3, 2])
        return batches.pass_of(batch)

    assert passed(ForwardMode.DECODE) == ("decode", 2, 16)
    assert passed(ForwardMode.EXTEND) == ("prefill", 2, 5)
    assert passed(ForwardMode.IDLE) is None


def test_sampling_filters_are_sglangs_names():
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    names = set(SamplingBatchInfo.__dataclass_fields__)
    assert {"temperatures", "top_ks", "top_ps", "min_ps"} <= names
    needs = {"need_top_k_sampling", "need_top_p_sampling", "need_min_p_sampling"}
    assert needs <= names
    info = SimpleNamespace(
        top_ks=1,
        top_ps=2,
        min_ps=3,
        need_top_k_sampling=False,
        need_top_p_sampling=True,
        need_min_p_sampling=False,
    )
    assert batches.sampling_filters(info) == {"top_k_B": None, "top_p_B": 2, "min_p_B": None}


def test_auxiliary_outputs_are_added_to():
    result = SimpleNamespace(logits_output=SimpleNamespace(auxiliary_device_output=None))
    batches.attach_auxiliary(result, "first")
    assert result.logits_output.auxiliary_device_output == "first"
    batches.attach_auxiliary(result, "second")
    assert result.logits_output.auxiliary_device_output.outputs == ("first", "second")


def test_delayed_sampling_runs_inside_our_context():
    from contextlib import contextmanager

    inside = []

    @contextmanager
    def context():
        inside.append("in")
        yield
        inside.append("out")

    result = SimpleNamespace(delay_sample_func=lambda: inside.append("sample"))
    batches.wrap_delayed_sampling(result, context)
    result.delay_sample_func()
    assert inside == ["in", "sample", "out"]
    nothing = SimpleNamespace(delay_sample_func=None)
    batches.wrap_delayed_sampling(nothing, context)
    assert nothing.delay_sample_func is None


def test_the_streamer_adds_payloads_of_finished_requests_once():
    streamer = batches.streamer_class(lambda req: req.payload, "bridge")
    instance = object.__new__(streamer)
    request = lambda done, payload: SimpleNamespace(finished=lambda: done, payload=payload)  # noqa: E731
    built = instance.build_additional_customized_info(
        [request(True, {"x": 1}), request(False, {"x": 2}), request(True, None)]
    )
    assert built == {"bridge": [[{"x": 1}], [], []]}
    assert instance.build_additional_customized_info([request(False, {"x": 2})]) == {}
    assert instance.is_request_level_customized_info_key("bridge")
    assert not instance.is_request_level_customized_info_key("other")


def test_update_groups_get_our_timeout(monkeypatch: pytest.MonkeyPatch):
    from sglang.srt.model_executor.model_runner_components import weight_updater

    seen: dict[str, Any] = {}

    def formed(**kwargs: Any) -> Any:
        seen.update(kwargs)
        return SimpleNamespace(name=lambda: "gloo")

    monkeypatch.setattr(weight_updater, "init_custom_process_group", formed)
    with ranks.process_group_timeout(7):
        weight_updater.init_custom_process_group(rank=1)
    assert seen["timeout"].total_seconds() == 7
    assert seen["rank"] == 1
    weight_updater.init_custom_process_group(rank=2, timeout=None)
    assert seen["timeout"] is None


def test_an_update_group_that_was_not_joined_is_named():
    """Before: `KeyError: 'other'`."""
    runner = SimpleNamespace(weight_updater=SimpleNamespace(_model_update_group={}))
    with pytest.raises(LookupError, match=r"^this rank has not joined a group named other$"):
        ranks.update_group(runner, "other")


def test_checksum_payload_has_the_wire_types():
    import msgspec
    from sglang.srt.managers.io_struct import ChecksumInfo, ParallelismInfo
    from sglang.srt.utils import weight_checker

    info = dict.fromkeys(ParallelismInfo.__struct_fields__, 0) | {"role": "target"}
    checker = SimpleNamespace(
        _get_model=lambda: "model",
        _parallelism_info=lambda role: weight_checker.ParallelismInfo(**info),
    )
    payload = ranks.checksum_payload(checker, lambda model: {"m": model}, role="target")
    payload["parallelism_info"] = [payload["parallelism_info"]]
    assert msgspec.convert(payload, ChecksumInfo).checksums == {"m": "model"}


def test_entry_points_are_installed():
    groups = {
        "sglang.srt.plugins": "sglang_bridge.server.plugin:register",
        "sglang.srt.platforms": "sglang_bridge.server.platform:activate",
    }
    for group, value in groups.items():
        assert value in [entry.value for entry in importlib.metadata.entry_points(group=group)]


def test_the_platform_is_for_machines_without_cuda(monkeypatch: pytest.MonkeyPatch):
    from sglang_bridge.server import platform

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert platform.activate() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv(ENABLED_VARIABLE, "0")
    assert platform.activate() is None, "SGLang's own command is left alone"
    monkeypatch.setenv(ENABLED_VARIABLE, "1")
    assert resolve(platform.activate())().get_default_attention_backend() == "torch_native"


def test_a_scheduler_s_requests_and_how_far_they_are():
    """Names that SGLang's scheduler has; a finished request is no longer there."""
    from sglang.srt.managers.scheduler import Scheduler

    source = inspect.getsource(Scheduler)
    assert all(f"self.{name} = " in source for name in ("chunked_req", "last_batch"))
    assert "self.waiting_queue: List[Req] = " in source
    assert "[self.running_batch, self.last_batch]" in inspect.getsource(
        Scheduler._collect_inflight_batches
    )

    def request(rid: str, tokens: int, done: bool = False) -> SimpleNamespace:
        return SimpleNamespace(rid=rid, output_ids=[0] * tokens, finished=lambda: done)

    running = SimpleNamespace(reqs=[request("a", 3), request("b", 9, done=True)])
    scheduler = SimpleNamespace(
        _collect_inflight_batches=lambda: [running, None, running],
        chunked_req=request("c", 0),
        waiting_queue=[request("d", 2)],
    )
    assert ranks.requests_of(scheduler) == ({"a": 3, "c": 0}, ["d"])


def test_where_a_rank_ends_requests():
    """What the scheduler gives each request, and what that reads of its tokenizer."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler

    given = "eos_token_ids=self.model_config.hf_eos_token_id"
    assert given in inspect.getsource(Scheduler)
    finish = inspect.getsource(Req._check_token_based_finish)
    named = ("eos_token_ids", "tokenizer.eos_token_id", "tokenizer.additional_stop_token_ids")
    assert all(f"self.{name}" in finish for name in named)

    def ends(tokenizer: Any) -> dict[str, Any]:
        model = SimpleNamespace(hf_eos_token_id={9, 2})
        return ranks.ends_of(SimpleNamespace(model_config=model, tokenizer=tokenizer))

    assert ends(None) == {"model": [2, 9], "tokenizer": None}
    both = SimpleNamespace(eos_token_id=4, additional_stop_token_ids={3})
    assert ends(both) == {"model": [2, 9], "tokenizer": [3, 4]}
    none = SimpleNamespace(eos_token_id=None, additional_stop_token_ids=None)
    assert ends(none) == {"model": [2, 9], "tokenizer": []}


def test_seeds_of_a_batch(monkeypatch: pytest.MonkeyPatch):
    """Only where a request has one and SGLang samples; who has none gets one of its name."""
    monkeypatch.setattr(ranks, "is_deterministic", lambda: False)
    monkeypatch.setattr(runtime_context, "get_server_args", lambda: SimpleNamespace(random_seed=7))

    def batch(*seeds: int | None, greedy: bool = False, **fields: Any) -> SimpleNamespace:
        requests = [
            SimpleNamespace(rid=f"r{i}", sampling_params=SimpleNamespace(sampling_seed=seed))
            for i, seed in enumerate(seeds)
        ]
        plain = SimpleNamespace(is_none=lambda: True)
        usual = {"is_prefill_only": False, "spec_algorithm": plain}
        info = SimpleNamespace(is_all_greedy=greedy)
        return SimpleNamespace(reqs=requests, sampling_info=info, **(usual | fields))

    assert batches.batch_seeds(batch(3, 2**62)) == [3, 2**62]
    own = batches.batch_seeds(batch(3, None, None))
    assert own is not None
    assert own[0] == 3
    assert len(set(own)) == 3
    assert batches.batch_seeds(batch(3, None, None)) == own, "the same on every rank"
    assert batches.batch_seeds(batch(None, None)) is None
    assert batches.batch_seeds(batch(3, greedy=True)) is None
    assert batches.batch_seeds(batch(3, is_prefill_only=True)) is None
    speculative = SimpleNamespace(is_none=lambda: False)
    assert batches.batch_seeds(batch(3, spec_algorithm=speculative)) is None
    monkeypatch.setattr(ranks, "is_deterministic", lambda: True)
    assert batches.batch_seeds(batch(3)) is None, "SGLang has them"


def test_nccl_shares_memory_in_one_way_on_both_sides():
    """A group of ranks of both needs it; SGLang decides it for its own processes."""
    from sglang.srt.entrypoints import engine

    source = inspect.getsource(engine._set_envs_and_config)
    named = set(re.findall(r'"(NCCL_\w+)"', source))
    assert named == {
        "NCCL_CUMEM_ENABLE",
        "NCCL_GRAPH_MIXING_SUPPORT",
        "NCCL_MNNVL_ENABLE",  # servers of several nodes, which this project does not start
        "NCCL_NVLS_ENABLE",
    }
    decides = re.search(r'os.environ\["NCCL_CUMEM_ENABLE"\] = str\((.*?)\)\n', source, re.DOTALL)
    assert decides is not None
    asked = re.findall(r"[a-z_]{6,}", decides[1])
    assert asked == ["enable_symm_mem", "kv_shard_symmetric_scratch"]
    for setting in ("enable_symm_mem", "enable_kv_cache_sharding"):
        assert option_rules.why_refused(setting, "student") is not None
    assert ON_GPUS["NCCL_CUMEM_ENABLE"] == "0"
