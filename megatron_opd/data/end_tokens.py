"""Says what ends a response: the ids at which an SGLang server of a checkpoint ends, and strings.

Invariant: `model` and `tokenizer` of EndTokens are the server's own lists (SGLang's
ModelConfig.hf_eos_token_id, and the ids of the tokenizer in Req._check_token_based_finish), so that
they can be compared with what a server says. Needs neither torch nor transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from megatron_opd.config.wording import line, shown

GENERATION_CONFIG = "generation_config.json"
ATTACHED = ("<|eom_id|>", "<|content_model_end_sampling|>", "<|ifm|im_end|>")
"""Added tokens at which SGLang ends whatever the checkpoint names."""
KEY = "eos_token_id"


@dataclass(frozen=True, slots=True)
class Ending:
    """Says what ends one response, as its request asks for it.

    token_ids: the response ends with the first of them. strings: it ends as soon as its text holds
    one.
    """

    token_ids: tuple[int, ...] = ()
    strings: tuple[str, ...] = ()

    def beside(self, strings: Sequence[str]) -> Ending:
        """Return what ends the response to a row that has strings of its own."""
        return replace(self, strings=tuple(dict.fromkeys((*self.strings, *strings))))

    def index(self, ids: Sequence[int]) -> int | None:
        """Return the index of the first end token, None without one."""
        return next((i for i, token in enumerate(ids) if token in self.token_ids), None)


@dataclass(frozen=True, slots=True)
class EndTokens:
    """Holds the ids that end a response of one checkpoint, by who names them.

    model: config.json, then generation_config.json. eos: the tokenizer's end token. attached:
    further tokens of the tokenizer at which SGLang ends. asked: what a run names besides.
    """

    model: tuple[int, ...]
    eos: int | None = None
    attached: tuple[int, ...] = ()
    asked: tuple[int, ...] = ()

    @property
    def tokenizer(self) -> tuple[int, ...]:
        """Returns the ids at which a server ends because of its tokenizer."""
        eos = () if self.eos is None else (self.eos,)
        return (*eos, *self.attached)

    @property
    def ids(self) -> tuple[int, ...]:
        """Returns all ids that end a response, rising."""
        return tuple(sorted({*self.model, *self.tokenizer, *self.asked}))

    @property
    def written(self) -> int:
        """Returns the id that ends a response which is written out, such as a target of SFT."""
        eos = () if self.eos is None else (self.eos,)
        return next(iter((*self.asked, *eos, *self.model, *self.attached)))


def read_end_tokens(
    path: Path,
    raw: Mapping[str, Any],
    vocab_size: int,
    tokenizer: Any,
    default: int | None = None,
    asked: Sequence[int] = (),
) -> EndTokens:
    """Return what ends a response of the checkpoint at `path`, whose config.json is `raw`.

    tokenizer: transformers', None without one. default: what the model's family takes for a
    config.json without the key (models/families/). asked: ids that a run names besides.
    ValueError: one is no id of the model, or there is none.
    """
    if type(default) is int and default >= vocab_size:
        default = None  # of the published vocabulary; a smaller one never has it
    eos = None if tokenizer is None else tokenizer.eos_token_id
    added: Mapping[str, int] = {} if tokenizer is None else tokenizer.get_added_vocab()
    found = EndTokens(
        (
            *_checked(_named(raw, default), "config.json", vocab_size),
            *_checked(_generation(path), GENERATION_CONFIG, vocab_size),
        ),
        next(iter(_checked(eos, "tokenizer", vocab_size)), None),
        _checked([added[t] for t in ATTACHED if t in added], "tokenizer", vocab_size),
        tuple(asked),
    )
    if not found.ids:
        raise ValueError(
            f"neither its config.json nor its {GENERATION_CONFIG} nor its tokenizer names an "
            "end-of-sequence token: every response would run to its limit; name one in "
            f"{GENERATION_CONFIG} ({KEY})"
        )
    return found


def name_end_tokens(path: Path, asked: Sequence[int]) -> None:
    """Add ids to those of the checkpoint's generation_config.json, so that others end there too.

    Where that names none, transformers would read config.json, so its ids are repeated there.
    """
    if not asked:
        return
    file = path / GENERATION_CONFIG
    tree: Any = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    named = tree.get(KEY)
    if named is None:
        named = _named(json.loads((path / "config.json").read_text(encoding="utf-8")), None)
    ids: list[int] = [] if named is None else named if isinstance(named, list) else [named]
    tree[KEY] = list(dict.fromkeys((*ids, *asked)))
    file.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")


def _named(raw: Mapping[str, Any], default: int | None) -> Any:
    """Return what config.json says: of a model with parts, where only the text's part says it."""
    if KEY in raw:
        return raw[KEY]
    text = raw.get("text_config")
    if isinstance(text, Mapping) and KEY in text:
        return text[KEY]
    return default


def generation_config(path: Path) -> dict[str, Any]:
    """Return a checkpoint's generation_config.json, {} without one. ValueError: it is none."""
    file = path / GENERATION_CONFIG
    if not file.is_file():
        return {}
    try:
        tree: Any = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(tree, dict):
            raise ValueError("it must be a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"cannot read {file}: {line(error)}") from None
    return cast(dict[str, Any], tree)


def _generation(path: Path) -> Any:
    """Return what generation_config.json says; SGLang takes a lone 0 there for nothing."""
    named = generation_config(path).get(KEY)
    return None if type(named) is int and named == 0 else named


def _checked(named: Any, origin: str, vocab_size: int) -> tuple[int, ...]:
    """Return the ids that `named` holds: none, one or a list. ValueError: it holds else."""
    ids: list[Any] = [] if named is None else named if isinstance(named, list) else [named]
    for each in ids:
        if type(each) is not int or not 0 <= each < vocab_size:
            raise ValueError(
                f"{KEY} of its {origin} must be an id below vocab_size {vocab_size}, "
                f"got {shown(each, 80)}"
            )
    return tuple(ids)
