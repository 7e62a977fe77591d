"""Says which of a student's ids a run uses: those of which every teacher has a row.

Checkpoints of one tokenizer pad their embeddings differently. An id that no text uses, and that a
teacher cannot score, is given probability 0 by the student's servers and by the learner alike.
"""

from __future__ import annotations

from typing import Any

from megatron_opd.config.schema import Config
from megatron_opd.models.spec import read_model_spec, read_text_config


def num_shared_ids(config: Config) -> int | None:
    """Return how many ids are used where the student has more than a teacher; None: all.

    All where the teacher's are others (scoring.alignment).

    What cannot be read here cuts nothing: who needs it says so.
    """
    if not config.estimator.reads_teacher or config.scoring.alignment is not None:
        return None
    try:
        rows = read_model_spec(config.student.model).vocab_size
    except ValueError:
        return None
    least = rows
    for section in config.all_teachers.values():
        try:
            theirs: Any = read_text_config(section.model / "config.json").get("vocab_size")
        except ValueError:
            continue
        if type(theirs) is int and theirs > 0:
            least = min(least, theirs)
    return least if least < rows else None
