"""What a run renders its prompts with, keeps of it, and tells the user."""

import json
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from megatron_opd.checkpoint.run_dir import RunDir
from megatron_opd.cli.commands.convert import end_ids_beside, template_beside
from megatron_opd.config.schema import Config
from megatron_opd.data.render import Rendering
from megatron_opd.data.template import RunTemplate
from megatron_opd.errors import UserError
from megatron_opd.evaluation.evaluate import questions_of
from megatron_opd.inputs.prepare import prepare
from megatron_opd.inputs.prepared import Prepared
from megatron_opd.inputs.rendering import first_prompt, template_notes
from megatron_opd.mismatch.run import prepare as prepare_mismatch
from tests.support.cli_cases import call
from tests.support.framed import BOS, framed
from tests.support.kept_states import FakeLearner, make_config, save_some

THEN = datetime(2024, 2, 29, 23, 59, 58)
CLOCK = "{{ strftime_now('%Y-%m-%d %H:%M:%S') }} {% for m in messages %}{{ m.content }}{% endfor %}"
PLAIN = "{% for m in messages %}<{{ m.content }}>{% endfor %}"


def with_file(tmp_path: Path, config: dict[str, Any], template: str) -> Path:
    file = tmp_path / "own.jinja"
    file.write_text(template)
    config["data"]["chat_template"] = str(file)
    return file


def prompt_of(config: dict[str, Any], prepared: Prepared) -> str:
    return prepared.decode(next(prepared.prompts).token_ids_P.tolist())


def test_a_file_of_the_users_is_the_template(tmp_path: Path, config: dict[str, Any]) -> None:
    """Before: true and false were all there was."""
    file = with_file(tmp_path, config, PLAIN)
    prepared = prepare(Config.model_validate(config))
    assert prompt_of(config, prepared) == "<1+1=>"
    assert (prepared.template.source, prepared.template.origin) == (PLAIN, str(file))
    file.unlink()
    with pytest.raises(UserError, match=r"data\.chat_template: cannot read .*own\.jinja"):
        prepare(Config.model_validate(config))


def test_a_run_goes_on_with_template_and_clock_of_its_start(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    file = with_file(tmp_path, config, CLOCK)
    valid = Config.model_validate(config)
    began = RunTemplate(THEN, str(file), CLOCK, own=True)
    again = prepare(valid, kept=began)
    assert prompt_of(config, again) == "2024-02-29 23:59:58 1+1="
    assert again.template == began
    notes = " ".join(again.notes)
    assert "after --resume too, it stands at 2024-02-29 23:59:58" in notes
    assert "has changed" not in notes
    for change in (lambda: file.write_text(PLAIN), file.unlink):
        change()
        later = prepare(valid, kept=began)
        assert prompt_of(config, later) == "2024-02-29 23:59:58 1+1="
        assert any("has changed or is gone; the run goes on" in note for note in later.notes)
    # another one by --accept-changes data.chat_template
    other = tmp_path / "other.jinja"
    other.write_text(PLAIN)
    config["data"]["chat_template"] = str(other)
    changed = prepare(Config.model_validate(config), kept=began)
    assert prompt_of(config, changed) == "<1+1=>"
    assert changed.template == RunTemplate(THEN, str(other), PLAIN, own=True)


def test_an_evaluation_stands_at_the_moment_of_the_run(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    with_file(tmp_path, config, CLOCK)
    config["data"]["heldout"] = config["data"]["train"]
    config["evaluation"]["problems"] = 1
    valid = Config.model_validate(config)
    before = datetime.now().replace(microsecond=0)
    assert before <= questions_of(valid).template.clock <= datetime.now()
    assert questions_of(valid, THEN).template.clock == THEN
    valid.run.dir.mkdir()
    kept = RunDir(valid.run.dir).template
    kept.write_text(json.dumps(RunTemplate(THEN).as_json()))
    own = str(tmp_path / "own.jinja")
    assert questions_of(valid).template == RunTemplate(THEN, own, CLOCK, own=True)
    kept.write_text("{}")
    with pytest.raises(UserError, match=r"template\.json is damaged"):
        questions_of(valid)


def test_what_is_measured_is_rendered_alike(tmp_path: Path, config: dict[str, Any]) -> None:
    with_file(tmp_path, config, PLAIN)
    valid = Config.model_validate(config)
    ours, theirs = next(prepare(valid).prompts), prepare_mismatch(valid, 1).prompts[0]
    assert ours.token_ids_P.tolist() == theirs.token_ids_P.tolist()
    with_file(tmp_path, config, CLOCK)
    assert any("reads the clock" in note for note in prepare_mismatch(valid, 1).notes)


def test_check_shows_the_first_prompt_and_what_is_odd(
    tmp_path: Path, config: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "student"
    for key in ("student", "teacher"):
        source = Path(config[key]["model"])
        copy = tmp_path / key
        copy.mkdir()
        for entry in source.iterdir():
            if "token" not in entry.name:
                (copy / entry.name).symlink_to(entry)
        framed().save_pretrained(copy)
        config[key]["model"] = str(copy)
    assert model.is_dir()
    Path(config["data"]["train"]).write_text(f'{{"prompt": "{BOS}1+1=", "answer": "2"}}\n')
    assert call(tmp_path, config, verb="check") == 0
    shown = " ".join(capsys.readouterr().out.split())
    ids = framed()(f"{BOS}1+1=", add_special_tokens=False)["input_ids"]
    joined = "".join(shown.split())
    assert "".join(f"'{BOS}1+1='; 5 ids: {', '.join(map(str, ids))}".split()) in joined
    assert f"specialtokens:1x{BOS}({ids[0]})" in joined
    assert "1of1promptsbeginwiththeBOStokenastext,sothatnoneisputinfrontofit" in joined


def test_a_long_prompt_is_shown_by_its_ends() -> None:
    tokenizer = framed()
    ids = tokenizer("ab" * 5000 + "\n")["input_ids"]
    text = first_prompt(tokenizer, ids)
    assert len(text) < 700
    assert text.startswith(f"'{BOS}abab")
    assert f"10002 ids: {ids[0]}, " in text
    assert first_prompt(tokenizer, ids[1:2]).endswith("1 ids: 69; special tokens: none")


def test_a_converted_checkpoint_has_the_runs_template(tmp_path: Path) -> None:
    config = make_config(tmp_path, rollout={"stop_token_ids": [7, 9], "max_new_tokens": 8})
    own = RunTemplate(THEN, "/gone/own.jinja", PLAIN, own=True)
    for template, found in ((own, PLAIN), (replace(own, own=False), None)):
        save_some(config, FakeLearner(), [2], template=template)
        step = config.run.dir / "checkpoints" / "step-000002"
        assert template_beside(step / "learner") == found
    assert template_beside(tmp_path) is None
    assert end_ids_beside(tmp_path) == ()
    assert end_ids_beside(step / "learner") == (7, 9)
    (step / "run.json").write_text("{}")
    with pytest.raises(ValueError, match="not a template and its clock"):
        template_beside(step / "learner")


def test_a_template_that_begins_no_answer_is_noted() -> None:
    tokenizer = framed()
    told = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}\n{% endfor %}"
    for template, noted in (
        (told, True),
        (told + "{% if add_generation_prompt %}<assistant>{% endif %}", False),
        (told.replace("{{ eos_token }}", "</s>"), False),
    ):
        tokenizer.chat_template = BOS + template
        notes = template_notes(Rendering(True, clock=THEN), tokenizer)
        assert [f"prompts end with {tokenizer.eos_token}" in note for note in notes] == [
            True
        ] * noted


def with_teacher(config: dict[str, Any], **keys: Any) -> Config:
    return Config.model_validate(config | {"teacher": config["teacher"] | keys})


def read_by(config: Config, kept: RunTemplate | None = None) -> tuple[list[str | None], Prepared]:
    """What student and teacher read of the first prompt."""
    prepared = prepare(config, kept=kept)
    prompt = next(prepared.prompts)
    read = (prompt.token_ids_P, prompt.teacher_ids_Q)
    return [None if ids is None else prepared.decode(ids.tolist()) for ids in read], prepared


def test_a_teacher_reads_as_its_own_section_says(tmp_path: Path, config: dict[str, Any]) -> None:
    file = tmp_path / "teacher.jinja"
    file.write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ end }}")
    end = {"end": "."}
    asked: tuple[tuple[dict[str, Any], str | None], ...] = (
        ({}, None),
        ({"chat_template": str(file)}, "<user>1+1="),
        ({"chat_template": str(file), "chat_template_kwargs": end}, "<user>1+1=."),
        ({"chat_template": str(file), "system_prompt": "Add."}, "<system>Add.<user>1+1="),
    )
    for keys, theirs in asked:
        read, prepared = read_by(with_teacher(config, **keys))
        assert read == ["1+1=", theirs]
        assert prepared.template.source is None
    with pytest.raises(UserError, match=r"^teacher\.chat_template is true but .* no chat template"):
        prepare(with_teacher(config, chat_template=True))
    named = {"chat_template": str(tmp_path / "gone.jinja")}
    with pytest.raises(UserError, match=r"^teacher\.chat_template: cannot read .*gone\.jinja"):
        prepare(with_teacher(config, **named))
    unread = {"chat_template": str(file), "chat_template_kwargs": {"thinking": True}}
    _, prepared = read_by(with_teacher(config, **unread))
    assert any(
        note.startswith("teacher.chat_template_kwargs:") and "does not read thinking" in note
        for note in prepared.notes
    )


def test_a_teacher_without_a_template_of_its_own_is_in_the_students(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    with_file(tmp_path, config, "{% for m in messages %}<{{ m.content }}>{% endfor %}{{ end }}")
    config["data"] |= {"system_prompt": "Add.", "chat_template_kwargs": {"end": "!"}}
    asked: tuple[tuple[dict[str, Any], str | None], ...] = (
        ({}, None),
        ({"system_prompt": "Add well."}, "<Add well.><1+1=>!"),
        ({"chat_template_kwargs": {"end": "."}}, "<Add.><1+1=>."),
    )
    for keys, theirs in asked:
        read, _ = read_by(with_teacher(config, **keys))
        assert read == ["<Add.><1+1=>!", theirs]
    config["data"] |= {"system_prompt": None, "chat_template_kwargs": {}}
    read, _ = read_by(with_teacher(config, chat_template=False))
    assert read == ["<1+1=>", "1+1="]


def test_a_run_goes_on_with_its_teachers_templates(tmp_path: Path, config: dict[str, Any]) -> None:
    file = tmp_path / "teacher.jinja"
    file.write_text(CLOCK)
    valid = with_teacher(config, chat_template=str(file))
    began = RunTemplate(THEN, teachers={"teacher": (str(file), CLOCK)})
    assert prepare(valid).template.teachers == began.teachers
    for change in (lambda: file.write_text(PLAIN), file.unlink):
        change()
        read, later = read_by(valid, began)
        assert read == ["1+1=", "2024-02-29 23:59:58 1+1="]
        assert later.template == began
        assert any(
            note.startswith("teacher.chat_template:") and "has changed or is gone" in note
            for note in later.notes
        )
    other = tmp_path / "other.jinja"
    other.write_text(PLAIN)
    read, _ = read_by(with_teacher(config, chat_template=str(other)), began)
    assert read == ["1+1=", "<1+1=>"]


def test_the_guard_tries_a_teacher_on_what_it_reads(tmp_path: Path, config: dict[str, Any]) -> None:
    file = tmp_path / "teacher.jinja"
    file.write_text(PLAIN)
    _, prepared = read_by(with_teacher(config, chat_template=str(file)))
    (probe,) = {prepared.decode(p.token_ids_P.tolist()) for p in prepared.probes["teacher"]}
    assert probe == "<1+1=>"
