"""A model's config.json -> the architecture, and the plan of its memory."""

from __future__ import annotations

import json

from checks.fuzz.engine import Target
from checks.fuzz.mutations import damaged_json
from checks.fuzz.places import scratch
from harness.tree import ROOT
from megatron_opd.config.learner import LearnerConfig, ParallelConfig
from megatron_opd.errors import UserError
from megatron_opd.inputs.model_facts import read_model
from megatron_opd.models.spec import ModelSpec
from megatron_opd.models.tensors import expected_tensors
from megatron_opd.sizing import learner as planning

FILES = [*ROOT.glob("examples/*/models/*/config.json"), *ROOT.glob("examples/*/*/config.json")]
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
}


def call(data: bytes) -> ModelSpec:
    """Read the model as `opd check` does."""
    path = scratch() / "described"
    path.mkdir(exist_ok=True)
    (path / "config.json").write_bytes(data)
    spec = read_model(path, "student.model").spec
    try:
        spec.check_parallel(ParallelConfig())
    except ValueError as error:
        raise UserError(str(error)) from None
    planning.refusal(spec, LearnerConfig(gpu_memory_gib=80.0), 4096)
    return spec


def oracle(data: bytes, spec: ModelSpec) -> str | None:
    """Every size is a whole number above 0, and the tensors can be listed."""
    raw = json.loads(data)
    for key in ("hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size"):
        if type(raw.get(key)) is not int or raw[key] < 1:
            return f"{key} is {type(raw.get(key)).__name__}"
    for key in ("attention_bias", "tie_word_embeddings", "norm_topk_prob"):
        if raw.get(key) not in (None, True, False):
            return f"{key} is no truth value"
    if spec.is_moe and not 0 < spec.experts_per_token <= spec.num_experts:
        return "more experts a token than experts"
    if spec.num_heads % spec.num_kv_heads or spec.head_dim % 2:
        return "heads that no attention takes"
    if spec.num_layers * max(spec.num_experts, 1) < 20_000:
        for name, shape in expected_tensors(spec).items():
            if min(shape) < 1:
                return f"the tensor {name} is empty"
    return None


TARGET = Target(
    "model_config",
    damaged_json([LLAMA, *(json.loads(file.read_bytes()) for file in FILES)]),
    call,
    (UserError,),
    oracle,
    share=2,
)
