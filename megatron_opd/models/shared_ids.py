"""Says which of a student's ids a run uses: those of which every teacher has a row.

Checkpoints of one tokenizer pad their embeddings differently. An id that no text uses, and that a
teacher cannot score, is given probability 0 by the student's servers and by the learner alike.
"""

from __future__ import annotations

from megatron_opd.config.schema import Config
from megatron_opd.models.spec import read_model_spec


def num_shared_ids(config: Config) -> int | None:
    """Return how many ids are used where the student has more than a teacher; None: all.

    What cannot be read here cuts nothing: who needs it says so.
    """
    if not config.estimator.reads_teacher:
        return None
    try:
        rows = read_model_spec(config.student.model).vocab_size
    except ValueError:
        return None
    least = rows
    for section in config.all_teachers.values():
        try:
            least = min(least, read_model_spec(section.model).vocab_size)
        except ValueError:
            continue
    return least if least < rows else None
