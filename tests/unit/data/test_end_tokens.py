"""What ends a response, against SGLang's own functions in this process."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_opd.data.end_tokens import ATTACHED, Ending, name_end_tokens, read_end_tokens
from megatron_opd.models.families.table import FAMILIES
from sglang_bridge.server.entry import offer_standins
from tests.support.end_tables import ABSENT, PUBLISHED, Published

offer_standins()

from sglang.srt.configs.model_config import ModelConfig  # noqa: E402
from sglang.srt.managers.schedule_batch import Req  # noqa: E402
from sglang.srt.utils.hf_transformers import (  # noqa: E402
    common,
    get_config,
    get_generation_config,
    get_tokenizer,
)

TEXTS = {"<s>": 1, "</s>": 2, "<|im_end|>": 7}


def engines_ends(path: Path, *, tokenizer: bool = True) -> set[int]:
    """The ids that end a request, asked of the engine's request for every id of the vocabulary."""
    config = get_config(str(path), trust_remote_code=False)
    generation = get_generation_config(str(path), trust_remote_code=False)
    both: Any = SimpleNamespace(hf_config=config, hf_generation_config=generation)
    request: Any = SimpleNamespace(
        sampling_params=SimpleNamespace(ignore_eos=False, stop_token_ids=None),
        eos_token_ids=ModelConfig._get_hf_eos_token_id(both),
        tokenizer=get_tokenizer(str(path)) if tokenizer else None,
        output_ids=[0],
    )
    size = json.loads((path / "config.json").read_text())
    vocab_size = (size.get("text_config") or size)["vocab_size"]
    return {i for i in range(vocab_size) if Req._check_token_based_finish(request, [i])}


def tokenizer(eos: int | None, added: dict[str, int]) -> Any:
    return SimpleNamespace(eos_token_id=eos, get_added_vocab=lambda: added)


def our_ends(path: Path) -> Any:
    raw = json.loads((path / "config.json").read_text())
    size = (raw.get("text_config") or raw)["vocab_size"]
    loaded: Any = get_tokenizer(str(path))
    family = FAMILIES.get(raw["model_type"])
    default = None if family is None else family.end_token
    return read_end_tokens(path, raw, size, loaded, default)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_checkpoint_ends_where_the_engine_ends(name: str, tmp_path: Path):
    path = PUBLISHED[name].write(tmp_path / "model")
    ours = our_ends(path)
    assert set(ours.ids) == engines_ends(path)
    assert set(ours.model) == engines_ends(path, tokenizer=False)
    assert ours.written in ours.ids


def test_the_table_holds_what_tells_the_rules_apart():
    """At least 30 checkpoints; some whose ends no single file of theirs names."""
    assert len(PUBLISHED) >= 30
    whole = {
        name for name, each in PUBLISHED.items() if each.generation not in (ABSENT, each.config)
    }
    assert len(whole) >= 8
    attached = {name for name, each in PUBLISHED.items() if set(ATTACHED) & set(each.tokens)}
    assert {"Llama-3.1", "R1-Distill-Llama", "SmolLM3", "K2-Horizon"} <= attached


SHAPES = (ABSENT, None, 0, 5, [5, 6], [0], [])


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_every_shape_of_the_two_files_is_read_as_the_engine_reads_it(family: Any, tmp_path: Path):
    for at, (config, generation) in enumerate(itertools.product(SHAPES, SHAPES)):
        name, architecture = family.name, family.architecture
        published = Published(name, architecture, 16, config, generation, "</s>", TEXTS)
        path = published.write(tmp_path / str(at))
        assert set(our_ends(path).ids) == engines_ends(path), (config, generation)


def test_the_texts_that_the_engine_attaches_are_ours():
    assert common._ADDITIONAL_STOP_TOKEN_TEXTS == ATTACHED


@pytest.mark.parametrize("value", [-1, 16, "</s>", 2.0, True, [None], ["7"], [2, -1], {"a": 1}])
@pytest.mark.parametrize("where", ["config", "generation"])
def test_what_is_no_id_of_the_model_is_refused_with_its_file(
    value: Any, where: str, tmp_path: Path
):
    shapes = {"config": 2, "generation": 2, where: value}
    published = Published(
        "llama", "LlamaForCausalLM", 16, shapes["config"], shapes["generation"], "</s>", TEXTS
    )
    path = published.write(tmp_path / "model")
    raw = json.loads((path / "config.json").read_text())
    file = {"config": "config.json", "generation": "generation_config.json"}[where]
    with pytest.raises(ValueError, match=f"eos_token_id of its {file} must be an id below"):
        read_end_tokens(path, raw, 16, tokenizer(2, TEXTS))


@pytest.mark.parametrize("text", ["{", "[]", "null", '"x"', "\xff"])
def test_a_generation_config_that_cannot_be_read_is_named(text: str, tmp_path: Path):
    """The engine goes on without one that is no JSON: its ends would be others than were meant."""
    (tmp_path / "generation_config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"cannot read .*generation_config\.json"):
        read_end_tokens(tmp_path, {"eos_token_id": 1}, 16, None)


@pytest.mark.parametrize("name", ["Llama-2", "Qwen3", "Zephyr", "GLM-4-0414", "Yi-Chat"])
def test_an_export_names_the_ends_of_its_run_for_whoever_serves_it(name: str, tmp_path: Path):
    path = PUBLISHED[name].write(tmp_path / "model")
    before, file = our_ends(path), path / "generation_config.json"
    kept = file.read_bytes() if file.exists() else None
    name_end_tokens(path, ())
    assert (file.read_bytes() if file.exists() else None) == kept, "nothing was asked for"
    name_end_tokens(path, (9, 11))
    assert set(our_ends(path).ids) == {*before.ids, 9, 11} == engines_ends(path)
    alone = get_generation_config(str(path), trust_remote_code=False).eos_token_id
    published = PUBLISHED[name]
    said = published.config if published.generation is ABSENT else published.generation
    assert set(alone) == {9, 11, *(said if isinstance(said, list) else [said])}


def test_without_any_end_a_checkpoint_is_refused_unless_the_run_names_one(tmp_path: Path):
    raw = {"eos_token_id": None}
    with pytest.raises(ValueError, match="every response would run to its limit"):
        read_end_tokens(tmp_path, raw, 16, None)
    assert read_end_tokens(tmp_path, raw, 16, None, asked=[3]).ids == (3,)


def test_a_written_response_ends_with_what_the_run_names_then_the_tokenizers():
    def written(eos: Any, added: Any, asked: tuple[int, ...]) -> int:
        raw = {"eos_token_id": [9, 3]}
        loaded = tokenizer(eos, added)
        return read_end_tokens(Path("/nowhere"), raw, 16, loaded, asked=asked).written

    assert written(5, {"<|eom_id|>": 4}, (8,)) == 8
    assert written(5, {"<|eom_id|>": 4}, ()) == 5
    assert written(None, {"<|eom_id|>": 4}, ()) == 9


@given(
    st.lists(st.integers(0, 9), max_size=12),
    st.lists(st.integers(0, 9), max_size=3),
)
@settings(max_examples=200)
def test_a_response_ends_at_its_first_end_token(ids: list[int], ends: list[int]):
    index = Ending(tuple(ends)).index(ids)
    before = ids if index is None else ids[:index]
    assert not set(before) & set(ends)
    assert index is None or ids[index] in ends
