"""Finds the language model in checkpoints of published classes that have other parts besides.

Their config.json describes it in text_config, and their files name its tensors with a prefix of
their own. Everything here trains and serves it as its text class. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

Tensor = TypeVar("Tensor")


@dataclass(frozen=True, slots=True)
class Published:
    """Describes a class. text_type, text_class: model_type and class of its language model."""

    architecture: str
    text_type: str
    text_class: str


PUBLISHED = {
    "qwen3_5": Published("Qwen3_5ForConditionalGeneration", "qwen3_5_text", "Qwen3_5ForCausalLM"),
    "qwen3_5_moe": Published(
        "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"
    ),
}
"""By config.json's model_type."""
PREFIX, PUBLISHED_PREFIX = "model.", "model.language_model."
"""What names of the text class's tensors begin with, but for the head's, and the published ones."""
VISION_PREFIX = "model.visual."
OTHER_PARTS = frozenset(
    {"mtp", "mtp_block", "visual", "vision_tower", "vision_model", "multi_modal_projector"}
)
"""Modules of published models that no text goes through: further predictions, other media."""
OF_ALL = ("quantization_config", "eos_token_id")
"""Keys outside text_config that are meant for the language model too, and win there."""


def published_class(raw: Mapping[str, Any]) -> Published | None:
    """Return the class of a config.json; None: one whose language model is all of it, or another.

    ValueError: of such a class, and without a text_config of its language model.
    """
    found = PUBLISHED.get(str(raw.get("model_type")))
    if found is None:
        return None
    text = raw.get("text_config")
    if not isinstance(text, dict) or text.get("model_type") != found.text_type:
        raise ValueError(
            f"text_config must describe the language model, with model_type {found.text_type!r}"
        )
    return found


def text_config(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of the language model alone; `raw` itself where that is all of it.

    ValueError: see published_class; or only one part ties the head to the embedding.
    """
    found = published_class(raw)
    if found is None:
        return raw
    text = {**raw["text_config"], "architectures": [found.text_class]}
    if raw.get("architectures") != [found.architecture]:
        text["architectures"] = raw.get("architectures")
    if raw.get("tie_word_embeddings", False) != text.get("tie_word_embeddings", False):
        raise ValueError(
            "tie_word_embeddings must be the same in text_config and outside it, as transformers "
            "reads the one and SGLang the other"
        )
    return text | {key: raw[key] for key in OF_ALL if raw.get(key) is not None}


def is_published(raw: Mapping[str, Any]) -> bool:
    """Return whether a config.json is of such a class, and describes its language model."""
    try:
        return published_class(raw) is not None
    except ValueError:
        return False  # what is wrong with it is said where it is read


def renamed(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a published class by the text class's names, without vision towers."""
    for name, tensor in weights:
        if name.startswith(PUBLISHED_PREFIX):
            yield PREFIX + name.removeprefix(PUBLISHED_PREFIX), tensor
        elif not name.startswith(VISION_PREFIX):
            yield name, tensor
