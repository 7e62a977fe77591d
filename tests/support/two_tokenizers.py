"""Small real tokenizers of two kinds: byte-level BPE, and pieces with byte fallback."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.support.models import tiny_qwen3

CORPUS = ["the cat sat on the mat", "12+34=46\n", "naïve café", "über"] * 4
END = "<end>"


def byte_level(size: int, *, prefix: bool = True, of: Sequence[str] = ()) -> Any:
    """Byte-level BPE of at most `size` ids trained on CORPUS. prefix: a text begins with a blank.

    of: texts to train it on instead, whose bytes are then all that it knows.
    """
    made: Any = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    made.decoder = decoders.ByteLevel()
    alphabet = [] if of else pre_tokenizers.ByteLevel.alphabet()
    trainer: Any = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, special_tokens=[END], show_progress=False
    )
    made.train_from_iterator(of or CORPUS, trainer)
    return made


def with_fallback(letters: str = "thecasonm", merges: tuple[str, ...] = ("th",)) -> Any:
    """As Llama 2's: pieces with blanks as U+2581, bytes where no piece holds a character."""
    pieces = ["<unk>", END, *(f"<0x{b:02X}>" for b in range(256)), "▁", *letters, *merges]
    made: Any = Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[(pair[0], pair[1]) for pair in merges],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    made.add_special_tokens(["<unk>", END])
    return made


def fast(made: Any) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END)


def tiny_model(path: Path, made: Any, **overrides: object) -> Path:
    """A random Qwen3 checkpoint of this tokenizer."""
    size = len(fast(made).get_vocab())
    ends = {"eos_token_id": made.token_to_id(END), "pad_token_id": None}
    fields: dict[str, Any] = {"vocab_size": size} | ends | overrides
    tiny_qwen3(path, **fields)
    fast(made).save_pretrained(path)
    return path
