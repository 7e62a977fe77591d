"""What a teacher reads otherwise than its own chat template writes it, by families of templates."""

from __future__ import annotations

import json
from itertools import permutations, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_opd.config.schema import Config
from megatron_opd.data.chats import SYSTEM, USER, ChatMessage
from megatron_opd.data.outcomes import AskedPrompt
from megatron_opd.data.render import Rendered, Renderer, Rendering
from megatron_opd.errors import UserError
from megatron_opd.inputs.prepare import prepare
from megatron_opd.inputs.template_preflight import TemplateGap, closing, template_gap
from tests.support.chat_families import BY_NAME, TEMPLATES, every_token

HOW = Rendering(True, section="teacher")
ASKED = ("What is the answer?", (ChatMessage(SYSTEM, "Be brief."), ChatMessage(USER, "And now?")))


def template_of(name: str) -> str:
    return (TEMPLATES / BY_NAME[name].template).read_text(encoding="utf-8")


def gap_of(read: str, written: str, how: Rendering = HOW, bos: str | None = None) -> Any:
    """The gap between prompts that are read in one template and written in another."""
    tokenizer = every_token()
    tokenizer.bos_token = bos
    tokenizer.chat_template = read
    found = Renderer(tokenizer, HOW).render(ASKED)
    asked = [
        AskedPrompt(f"f:{n}", ("teacher",), prompt, np.array(each.ids, np.int32))
        for n, (prompt, each) in enumerate(zip(ASKED, found, strict=True), start=1)
        if isinstance(each, Rendered)
    ]
    tokenizer.chat_template = written
    return template_gap(tokenizer, how, asked)


def ids_of(name: str, number: int, bos: str | None) -> list[int]:
    """A prompt as transformers itself writes it in a family's template."""
    tokenizer = every_token()
    tokenizer.bos_token, asked = bos, ASKED[number]
    chat = (ChatMessage(USER, asked),) if isinstance(asked, str) else asked
    text = tokenizer.apply_chat_template(
        [{"role": m.role, "content": m.content} for m in chat],
        chat_template=template_of(name),
        tokenize=False,
        add_generation_prompt=True,
    )
    return tokenizer(text, add_special_tokens=False)["input_ids"]


NAMED = ("qwen2.5", "qwen3", "llama3.1", "glm4.5", "deepseek-v3", "phi3", "gpt-oss", "qwen3.5")


@pytest.mark.parametrize("name", NAMED)
def test_equal_templates_are_silent(name: str):
    assert gap_of(template_of(name), template_of(name), bos=BY_NAME[name].bos) is None


@pytest.mark.parametrize(("read", "written"), list(permutations(NAMED, 2)))
def test_the_first_difference_of_two_families_is_found(read: str, written: str):
    gap = gap_of(template_of(read), template_of(written), bos=BY_NAME[written].bos)
    assert isinstance(gap, TemplateGap)
    first = int(gap.where.removeprefix("f:")) - 1
    ours, theirs = (ids_of(name, first, BY_NAME[written].bos) for name in (read, written))
    place = next(n for n, pair in enumerate(zip_longest(ours, theirs)) if pair[0] != pair[1])
    tokenizer = every_token()
    assert gap.place == place + 1
    assert (gap.read, gap.written) == (
        tokenizer.decode(ours[place:]),
        tokenizer.decode(theirs[place:]),
    )


PLAIN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>"


@pytest.mark.parametrize(
    ("read", "written", "meaning", "place"),
    [
        (PLAIN, PLAIN + "<think>\n", "its own opens <think> in front of an answer", None),
        (PLAIN + "<think>\n", PLAIN, "what it reads opens <think>", None),
        (PLAIN, PLAIN + "<think>\n\n</think>\n\n", "its own shuts an empty <think>", None),
        (PLAIN + "<think>", PLAIN + "<think></think>", "its own shuts the <think>", None),
        (PLAIN, "<s>" + PLAIN, "its own begins with <s>", 1),
        ("<s>" + PLAIN, PLAIN, "its own does not begin with <s>", 1),
        (PLAIN, "<|system|>Be kind." + PLAIN, "its own writes a system message", 1),
        (PLAIN.removesuffix("<|assistant|>"), PLAIN, "its own begins the answer", None),
        (PLAIN, PLAIN.removesuffix("<|assistant|>"), "what it reads begins the answer", None),
        (PLAIN, PLAIN.removesuffix("<|assistant|>") + "[INST]", "answers are begun", None),
        # tinker-cookbook#796: a base model's roles as text, a teacher trained on another template
        (
            "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}Assistant:",
            template_of("qwen3"),
            "messages are written otherwise",
            1,
        ),
    ],
)
def test_what_a_difference_means(read: str, written: str, meaning: str, place: int | None):
    gap = gap_of(read, written, bos="<s>")
    assert gap.meaning.startswith(meaning)
    assert str(gap).startswith(f"{gap.differing} of 2 tried: {meaning}")
    assert place in (None, gap.place)


def test_a_thinking_switch_is_found():
    """Qwen3 shuts an empty thought in front of answers that are not to think."""
    qwen = template_of("qwen3")
    off = Rendering(True, None, {"enable_thinking": False}, section="teacher")
    assert gap_of(qwen, qwen, off).meaning.startswith("its own shuts an empty <think>")


def test_what_ends_an_answer():
    tokenizer = BY_NAME["qwen3"].tokenizer()
    assert closing(tokenizer, HOW) == "<|im_end|>"
    assert closing(BY_NAME["llama3.1"].tokenizer(), HOW) == "<|eot_id|>"


# -------------------------------------------------------------------------- whole configurations

CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def teacher_with(
    tmp_path: Path, config: dict[str, Any], template: str, **data: Any
) -> dict[str, Any]:
    """Give the teacher's checkpoint a chat template."""
    source, copy = Path(config["teacher"]["model"]), tmp_path / "chatty"
    copy.mkdir()
    for entry in source.iterdir():
        (copy / entry.name).symlink_to(entry)
    (copy / "chat_template.jinja").write_text(template)
    own = tmp_path / "students.jinja"
    own.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}")
    teacher, data = config["teacher"] | {"model": str(copy)}, config["data"] | data
    return config | {"teacher": teacher, "data": data}


def notes_of(config: dict[str, Any], **teacher: Any) -> list[str]:
    own = config | {"teacher": config["teacher"] | teacher}
    found = prepare(Config.model_validate(own)).notes
    return [note for note in found if note.startswith("teacher.model reads")]


def test_a_teacher_in_another_template_is_refused_before_anything_starts(
    tmp_path: Path, config: dict[str, Any]
):
    own = str(tmp_path / "students.jinja")
    config = teacher_with(tmp_path, config, CHAT, chat_template=own)
    said = r"^teacher\.model reads prompts in another chat template than its own, \d+ of \d+ tried"
    with pytest.raises(UserError, match=said + r".*token 1: it reads 'user: .*set scoring.guard"):
        notes_of(config)
    assert notes_of(config, chat_template=True) == []
    (told,) = notes_of(config, chat_template=own)
    assert "to let it read its own" not in told
    warned = config | {"scoring": {"guard": "warn"}}
    (line,) = notes_of(warned)
    assert line.endswith("; to let it read its own: teacher.chat_template: true")
    assert notes_of(config | {"scoring": {"guard": "off"}}) == []


def test_a_teacher_of_texts_is_told_of_the_template_that_it_has(
    tmp_path: Path, config: dict[str, Any]
):
    config = teacher_with(tmp_path, config, CHAT)
    (line,) = notes_of(config)
    assert line.startswith("teacher.model reads prompts in no chat template, ")
    assert notes_of(config, chat_template=True) == []
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (Path(config["teacher"]["model"]) / "chat_template.jinja").write_text(plain)
    assert notes_of(config) == []


def test_other_settings_of_sampling_are_told(tmp_path: Path, config: dict[str, Any]):
    config = teacher_with(tmp_path, config, CHAT)
    said = "teacher.model's generation_config.json samples otherwise than the student's: "
    file = Path(config["teacher"]["model"]) / "generation_config.json"

    def notes(settings: dict[str, Any]) -> list[str]:
        written = json.loads((Path(config["student"]["model"]) / file.name).read_text())
        file.unlink(missing_ok=True)
        file.write_text(json.dumps(written | settings))
        return [
            note.removeprefix(said)
            for note in prepare(Config.model_validate(config)).notes
            if note.startswith(said)
        ]

    assert notes({}) == []
    assert notes({"max_length": 7}) == []
    (note,) = notes({"temperature": 0.6, "top_p": 0.95})
    assert note.startswith("temperature 0.6, not None, top_p 0.95, not None; scores are of ")
