"""A tokenizer that puts tokens in front of a text and behind it, as those of public models do."""

from transformers import PreTrainedTokenizerFast

from megatron_opd.data.tokenizer import build_tokenizer

BOS, END, TURN, STOP = "<unused0>", "<unused1>", "<unused2>", "<unused3>"


def framed(*, begin: bool = True, end: bool = False) -> PreTrainedTokenizerFast:
    """The tokenizer of the built-in tasks with BOS in front of a text and END behind it.

    TURN and STOP are special tokens for templates.
    """
    from tokenizers.processors import TemplateProcessing

    made = build_tokenizer()
    made.add_special_tokens({"additional_special_tokens": [BOS, END, TURN, STOP]})
    made.bos_token = BOS
    before, after = (f"{BOS} " if begin else ""), (f" {END}" if end else "")
    made.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{before}$A{after}",
        special_tokens=[(each, made.convert_tokens_to_ids(each)) for each in (BOS, END)],
    )
    return made
