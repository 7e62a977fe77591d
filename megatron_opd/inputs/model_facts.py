"""Reads what the config.json of a checkpoint says, and refuses models that are not supported.

A student's model is known by its layers. Of one that is only served, a teacher's above all, no more
is read than how large it is and how long its context; its server says which tensors it found.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from megatron_opd.checkpoint.hf_files import (
    DTYPE_BITS,
    HEAD,
    ITEM_BYTES,
    CodedTensor,
    StoredTensor,
)
from megatron_opd.config.roles import STUDENT, Role
from megatron_opd.config.schema import Config
from megatron_opd.config.servers import ServerConfig
from megatron_opd.config.teacher import Trust
from megatron_opd.config.wording import shown
from megatron_opd.errors import UserError, checked
from megatron_opd.inputs.served_rules import (
    DELTA_NET,
    MEASURED,
    ExactUpTo,
    check_architecture,
    check_keys,
    exact_up_to,
    named_architecture,
    rope_settings,
)
from megatron_opd.inputs.weights import check_format, has_weights, served_tensors
from megatron_opd.models.delta_net import DeltaNet
from megatron_opd.models.families.minimax import MINIMAX_M2, check_minimax_m2
from megatron_opd.models.families.mixtral import MIXTRAL
from megatron_opd.models.families.table import FAMILIES
from megatron_opd.models.file_kinds import ADAPTER, adapter_line, pointer_in, pointer_line
from megatron_opd.models.hf_config import check_delta_nets
from megatron_opd.models.spec import ModelSpec, read_model_spec, read_text_config
from megatron_opd.models.values import MAX_COUNT
from megatron_opd.sizing.served import ModelSize, TensorKind, kinds_of, size_of
from sglang_bridge.language_models import OTHER_PARTS

SUPPORTED_ARCHITECTURES = tuple(family.architecture for family in FAMILIES.values())
TRAINED_ALONE = frozenset(SUPPORTED_ARCHITECTURES) - MEASURED.keys()
"""Architectures that were compared as students: a teacher of one is read by a student's rules."""
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True)
class ServedFacts:
    """Holds what is known of a model that is served: all that a teacher needs.

    size: by its files, where they are here. exact: the tokens beyond which SGLang computes another
    model; None: there are none.
    """

    path: Path
    architecture: str
    vocab_size: int
    context_length: int
    raw: dict[str, Any]
    size: ModelSize
    exact: ExactUpTo | None = None


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Holds what is known of a model that is trained: its config.json, as ModelSpec reads it."""

    path: Path
    architecture: str
    vocab_size: int
    context_length: int
    raw: dict[str, Any]
    spec: ModelSpec

    @property
    def served(self) -> ServedFacts:
        """Returns what its servers need."""
        exact = None
        if (window := self.spec.window_limit) is not None:
            exact = ExactUpTo(window, f"ignores its sliding_window of {window}")
        return ServedFacts(
            self.path,
            self.architecture,
            self.vocab_size,
            self.context_length,
            self.raw,
            size_of(self.spec),
            exact,
        )


@dataclass(frozen=True, slots=True)
class RunModels:
    """Holds the models of a run, of which one is trained.

    by_student: teachers for which the student's servers score.
    """

    student: ModelFacts
    teachers: Mapping[Role, ServedFacts]
    by_student: frozenset[Role] = frozenset()

    @property
    def every(self) -> dict[Role, ServedFacts]:
        """Returns what is known of every role's model, the student's first."""
        return {STUDENT: self.student.served, **self.teachers}

    @property
    def served(self) -> dict[Role, ServedFacts]:
        """Returns what the servers of every role need that has some, the student's first."""
        return {role: each for role, each in self.every.items() if role not in self.by_student}


def read_model(path: Path, key: str) -> ModelFacts:
    """Read config.json of a model to be trained; `key` is the config key that named it.

    Raises UserError.
    """
    raw = _read_raw(path, key)
    architecture = named_architecture(raw)
    if isinstance(raw.get("text_config"), dict):
        raise UserError(
            f"{key}: architecture {shown(architecture, 80)} has parts besides its language model, "
            "which no learner takes: save that alone (transformers' class of text_config, with the "
            "keys that SGLang reads) and give the result"
        )
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise UserError(
            f"{key}: architecture {shown(architecture, 80)} is not supported; "
            f"supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    try:
        spec = read_model_spec(path)
    except ValueError as error:
        raise UserError(f"{key}: {error}") from None
    if architecture != spec.family.architecture:
        raise UserError(
            f"{key}: {path / 'config.json'}: architectures must be "
            f"[{spec.family.architecture!r}] with model_type {spec.family.name!r}, which "
            f"transformers goes by, got {architecture!r}, which SGLang would serve"
        )
    check_servable(key, spec)
    return ModelFacts(path, architecture, spec.vocab_size, spec.max_position, raw, spec)


def check_window(key: str, spec: ModelSpec, limit: int, remedy: str = "lower it") -> None:
    """Check that no context of `limit` tokens passes a window that SGLang ignores. UserError."""
    if spec.window_limit is not None and limit > spec.window_limit:
        raise UserError(
            f"sliding_window must be null or at least {key}, because SGLang 0.5.23 ignores it, got "
            f"{spec.window_limit} and {limit}; {remedy}"
        )


def read_served(path: Path, key: str, trust: Trust = "measured") -> ServedFacts:
    """Read config.json of a model that is only served, and how large its tensors are.

    key: the config key that named it. Raises UserError.
    """
    raw, section = _read_raw(path, key), key.rpartition(".")[0]
    if named_architecture(raw) in TRAINED_ALONE:
        return read_model(path, key).served
    remedy = f"set {section}.trust: any to serve it all the same, with scoring.guard"
    where = path / "config.json"
    try:
        check_architecture(raw, trust, remedy if section else "docs/families.md lists them")
        numbers = _numbers(raw)
        check_keys(raw)
        if raw.get("model_type") == MIXTRAL.name:
            _check_mixtral(raw, numbers)
        if raw.get("model_type") == MINIMAX_M2.name:
            check_minimax_m2(raw)
        exact = exact_up_to(raw)
    except KeyError as error:
        raise UserError(f"{key}: {where} lacks the key {error}") from None
    except ValueError as error:
        raise UserError(f"{key}: {where}: {error}") from None
    check_format(path, key, trust)
    if has_weights(path):
        net, layers = _delta_net(raw)
        family = FAMILIES.get(str(raw.get("model_type")))
        size = ModelSize(
            tensors=_kinds(path, key, raw),
            delta_net=net,
            delta_layers=layers,
            whole_embedding=family is not None and family.scaled_embedding,
            **numbers,
        )
    elif raw.get("model_type") in FAMILIES:
        size = size_of(checked(lambda: read_model_spec(path)))
    else:
        raise UserError(
            f"{key}: {path} must hold its weights: of a {shown(named_architecture(raw), 80)} their "
            "headers alone say how large it is"
        )
    return ServedFacts(
        path,
        named_architecture(raw),
        numbers["vocab_size"],
        _count(raw, "max_position_embeddings"),
        raw,
        size,
        exact,
    )


def read_evaluated(path: Path, key: str) -> ServedFacts:
    """Read a model that is served in the student's place: a student, or one that only answers.

    Raises UserError.
    """
    try:
        return read_model(path, key).served
    except UserError:
        return read_served(path, key)


def read_teacher(config: Config, role: Role) -> ServedFacts:
    """Read a teacher's model as far as it takes to serve it. Raises UserError."""
    section = config.all_teachers[role.removeprefix("teachers.")]
    facts = read_served(section.model, f"{role}.model", section.trust)
    check_exact(role, facts, section)
    return facts


def trust_note(key: str, facts: ServedFacts) -> str | None:
    """Return a line on an architecture that nobody compared; None: it was measured."""
    if facts.architecture in MEASURED or facts.architecture in TRAINED_ALONE:
        return None
    return (
        f"{key}: nobody compared scores of {shown(facts.architecture, 80)} with transformers' "
        "(trust any); scoring.guard does, over short passages"
    )


def check_exact(role: Role, facts: ServedFacts, section: ServerConfig) -> None:
    """Check that a server takes no sequence that it would compute wrongly. Raises UserError."""
    limit = section.context_length or facts.context_length
    if facts.exact is not None and limit > facts.exact.tokens:
        raise UserError(
            f"{role}.context_length must be <= {facts.exact.tokens}: SGLang 0.5.23 "
            f"{facts.exact.why}, so that beyond it serves another model than {facts.path}, got "
            f"{limit}"
        )


def _read_raw(path: Path, key: str) -> dict[str, Any]:
    if not path.is_dir():
        found = "got the file" if path.exists() else "not found:"
        raise UserError(f"{key} must be a Hugging Face checkpoint directory, {found} {path}")
    if (path / ADAPTER).is_file():  # transformers would load it on top of what lies beside it
        raise UserError(f"{key}: {adapter_line(path)}")
    pointer = pointer_in(path)
    if pointer is not None:
        raise UserError(f"{key}: {pointer_line(pointer)}")
    try:
        return read_text_config(path / "config.json")
    except ValueError as error:
        raise UserError(f"{key}: {error}") from None


def _numbers(raw: dict[str, Any]) -> dict[str, int]:
    """Return the sizes of ModelSize that config.json states. KeyError, ValueError."""
    heads, hidden = _count(raw, "num_attention_heads"), _count(raw, "hidden_size")
    experts = next((key for key in EXPERT_COUNTS if raw.get(key) is not None), None)
    return {
        "num_layers": _count(raw, "num_hidden_layers"),
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": _count(raw, "num_key_value_heads", heads),
        "head_dim": _count(raw, "head_dim", max(1, hidden // heads)),
        "ffn_size": _count(raw, "intermediate_size", raw.get("moe_intermediate_size")),
        "vocab_size": _count(raw, "vocab_size"),
        "num_experts": _count(raw, experts) if experts else 0,
        "experts_per_token": _count(raw, "num_experts_per_tok") if experts else 0,
        "latent_kept": _count(raw, "kv_lora_rank") + _count(raw, "qk_rope_head_dim")
        if raw.get("kv_lora_rank") is not None
        else 0,
    }


def _delta_net(raw: dict[str, Any]) -> tuple[DeltaNet | None, int]:
    """Return the gated delta nets of a model that is only served, and how many layers have one."""
    if DELTA_NET not in raw:
        return None, 0
    sizes = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    net = DeltaNet(*(_count(raw, f"linear_{name}") for name in (*sizes, "conv_kernel_dim")))
    return net, check_delta_nets(raw).count("linear_attention")


def _check_mixtral(raw: dict[str, Any], numbers: dict[str, int]) -> None:
    """Raise ValueError for numbers that SGLang 0.5.23 rounds or derives in a Mixtral model."""
    if numbers["head_dim"] * numbers["num_heads"] != numbers["hidden_size"]:
        raise ValueError(
            f"head_dim must be hidden_size / num_attention_heads, got {numbers['head_dim']}"
        )
    for settings in (raw, *rope_settings(raw)):
        theta = settings.get("rope_theta", 1)
        if type(theta) not in (int, float) or not float(theta).is_integer():
            raise ValueError(f"rope_theta must be a whole number, got {shown(theta)}")


def _count(raw: dict[str, Any], key: str, default: int | None = None) -> int:
    """Return a count. default: of a key that is absent or null; KeyError without one."""
    value = raw[key] if default is None else raw.get(key)
    value = default if value is None and default is not None else value
    if type(value) is not int or not 1 <= value <= MAX_COUNT:
        raise ValueError(f"{key} must be an integer >= 1 and <= {MAX_COUNT}, got {shown(value)}")
    return value


def _kinds(path: Path, key: str, raw: dict[str, Any]) -> tuple[TensorKind, ...]:
    """Return what a server holds of the files: the embedding for a tied head, and text's parts."""
    tied = raw.get("tie_word_embeddings") is True
    return kinds_of(
        (name, each.shape, _kept_bits(each))
        for name, each in served_tensors(path, key, raw).items()
        if not (tied and name == HEAD) and not OTHER_PARTS.intersection(name.split("."))
    )


def _kept_bits(stored: StoredTensor) -> float | None:
    """Return the bits of a number that a server keeps as the file has it, with its scale's share.

    None: it is held in the server's dtype.
    """
    if isinstance(stored, CodedTensor):
        held = stored.numbers.num_bytes + stored.scales.num_bytes
        return 8 * held / max(1, prod(stored.shape))
    return None if stored.dtype in (*ITEM_BYTES, "F64") else DTYPE_BITS[stored.dtype]


def check_servable(key: str, spec: ModelSpec) -> None:
    """Check that SGLang serves the model that config.json describes. Raises UserError.

    Where its version here ignores a key, it would serve another model, or parameters that were
    never loaded.
    """
    dense = [layer for layer, moe in enumerate(spec.moe_layers) if not moe]
    if spec.is_moe and dense and "mlp_only_layers" in spec.family.defaults:
        raise UserError(
            f"{key} must have experts in every layer, because SGLang 0.5.23 ignores "
            f"mlp_only_layers and decoder_sparse_step; layer {dense[0]} of config.json is dense"
        )
    wrong = None
    if spec.is_moe and spec.tied:
        wrong = "tie_word_embeddings must be false", "true"
    elif spec.family == MIXTRAL and spec.rope.type != "default":
        wrong = "the rope type must be default", spec.rope.type
    elif spec.family == MIXTRAL and not spec.rope.theta.is_integer():
        wrong = "rope_theta must be a whole number", spec.rope.theta
    elif spec.family == MIXTRAL and spec.head_dim * spec.num_heads != spec.hidden_size:
        wrong = "head_dim must be hidden_size / num_attention_heads", spec.head_dim
    if wrong is not None:
        rule, got = wrong
        raise UserError(
            f"{key}: {rule} in a {spec.family.name} model, because SGLang 0.5.23 serves it as if "
            f"it were, got {got}"
        )
