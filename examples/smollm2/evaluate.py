"""How near a student is to its teacher on held-out prompts, by transformers alone.

python -m examples.smollm2.evaluate --student DIR --teacher DIR --texts FILE --out FILE

No engine of a run takes part. Divergences are exact sums over the vocabulary, in nats a token.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from megatron_opd.data.end_tokens import Ending, read_end_tokens
from megatron_opd.data.faults import Unusable
from megatron_opd.data.records import read_records
from megatron_opd.data.render import Rendering, render_prompts
from megatron_opd.inputs.tokenizers import has_tokenizer

HELDOUT = Path(__file__).resolve().parent / "heldout.jsonl"
SEED, SHOWN = 11, 3


def load(path: Path) -> PreTrainedModel:
    """Load a checkpoint in float32."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def rendered(prompts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return token ids of prompts, by the chat template. ValueError: it does not take one."""
    found: list[list[int]] = []
    how = Rendering(chat_template=True)
    for prompt, each in zip(prompts, render_prompts(prompts, tokenizer, how), strict=True):
        if isinstance(each, Unusable):
            raise ValueError(f"{prompt!r}: {each}")
        found.append(each.ids)
    return found


def ending_of(model: PreTrainedModel) -> Ending:
    """Return what ends a response of a checkpoint where a run's servers hold it."""
    path, size = Path(model.name_or_path), model.config.vocab_size
    raw = json.loads((path / "config.json").read_text(encoding="utf-8"))
    tokenizer = AutoTokenizer.from_pretrained(path) if has_tokenizer(path) else None
    return Ending(read_end_tokens(path, raw, size, tokenizer).ids)


def complete(
    model: PreTrainedModel, prompts: Sequence[list[int]], tokens: int, *, greedy: bool
) -> list[list[int]]:
    """Return a response to every prompt, at most `tokens` long, its end token included."""
    torch.manual_seed(SEED)
    ending = ending_of(model)
    end = ending.token_ids[0]
    longest = max(map(len, prompts))
    ids = torch.tensor([[end] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    sampling = (
        {"do_sample": False}
        if greedy
        else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    )
    made = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=tokens,
        pad_token_id=end,
        eos_token_id=list(ending.token_ids),
        **sampling,
    )
    rows = made[:, longest:].tolist()
    lengths = [tokens if (index := ending.index(row)) is None else index + 1 for row in rows]
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]


def logp_TV(model: PreTrainedModel, prompt: list[int], response: list[int]) -> torch.Tensor:
    """Return the log-probs [T, V] that predict each token of the response."""
    ids = torch.tensor([prompt + response])
    logits = model(ids, logits_to_keep=len(response) + 1).logits[0, :-1]
    return logits.log_softmax(-1)


def nll_T(model: PreTrainedModel, prompt: list[int], response: list[int]) -> torch.Tensor:
    """Return the negative log-prob [T] of each token of the response."""
    return -logp_TV(model, prompt, response).gather(-1, torch.tensor(response)[:, None])[:, 0]


@torch.no_grad()
def read_texts(path: Path, teacher: PreTrainedModel, prompts: list[list[int]], tokens: int) -> Any:
    """Return what the teacher writes, greedy and sampled; made once, the same for every student.

    perplexity: of the sampled texts to the teacher itself.
    """
    if not path.exists():
        greedy = complete(teacher, prompts, tokens, greedy=True)
        sampled = complete(teacher, prompts, tokens, greedy=False)
        own = [nll_T(teacher, *pair) for pair in zip(prompts, sampled, strict=True)]
        perplexity = torch.cat(own).mean().exp().item()
        made = {"greedy": greedy, "sampled": sampled, "perplexity": perplexity}
        path.write_text(json.dumps(made), encoding="utf-8")
    return json.loads(path.read_text(encoding="utf-8"))


@torch.no_grad()
def measure(
    student: PreTrainedModel,
    teacher: PreTrainedModel,
    prompts: list[list[int]],
    texts: dict[str, list[list[int]]],
    tokens: int,
) -> dict[str, float]:
    """Return the figures of one student.

    reverse_kl_nats: KL(student || teacher) along the student's own samples at temperature 1, mean
    over tokens; its stderr is that over prompts. greedy_agreement: share of the tokens of the
    teacher's greedy answers that are the student's first choice too. teacher_text_perplexity: of
    what the teacher wrote at temperature 1, to the student.
    """
    samples = complete(student, prompts, tokens, greedy=False)
    reverse: list[torch.Tensor] = []
    nll: list[torch.Tensor] = []
    same: list[torch.Tensor] = []
    for prompt, own, sampled, greedy in zip(
        prompts, samples, texts["sampled"], texts["greedy"], strict=True
    ):
        p_TV, q_TV = logp_TV(student, prompt, own), logp_TV(teacher, prompt, own)
        reverse.append((p_TV.exp() * (p_TV - q_TV)).sum(-1))
        nll.append(nll_T(student, prompt, sampled))
        first_T = logp_TV(student, prompt, greedy).argmax(-1)
        same.append((first_T == torch.tensor(greedy)).float())
    by_prompt = [row.mean().item() for row in reverse]
    return {
        "reverse_kl_nats": torch.cat(reverse).mean().item(),
        "reverse_kl_stderr_nats": stdev(by_prompt) / math.sqrt(len(by_prompt)),
        "greedy_agreement": torch.cat(same).mean().item(),
        "teacher_text_perplexity": torch.cat(nll).mean().exp().item(),
        "response_tokens": fmean(map(len, samples)),
    }


def main() -> None:
    """Measure one student and write the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("student", "teacher", "texts", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--problems", type=int, default=16, help="held-out prompts to use")
    parser.add_argument("--tokens", type=int, default=64, help="longest response")
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.teacher)
    asked = [row["prompt"] for row in read_records(HELDOUT, ["prompt"])][: options.problems]
    prompts = rendered(asked, tokenizer)
    teacher, student = load(options.teacher), load(options.student)
    texts = read_texts(options.texts, teacher, prompts, options.tokens)
    figures: dict[str, Any] = measure(student, teacher, prompts, texts, options.tokens)
    figures["teacher_perplexity"] = texts["perplexity"]
    answers = complete(student, prompts[:SHOWN], options.tokens, greedy=True)
    theirs = tokenizer.batch_decode(texts["greedy"][:SHOWN], skip_special_tokens=True)
    ours = tokenizer.batch_decode(answers, skip_special_tokens=True)
    figures["answers"] = [
        dict(zip(("prompt", "teacher", "student"), row, strict=True))
        for row in zip(asked[:SHOWN], theirs, ours, strict=True)
    ]
    options.out.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
