"""Lists what a teacher's weights may be: its checkpoint's, or the student's, now or earlier.

Every source but `checkpoint` follows: the learner sends the teacher's servers new weights, as it
does the student's. Version v of the student is what its weights are after v updates; a teacher that
follows holds a version too, the number of updates that its weights have seen.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from megatron_opd.config.section import PositiveInt, Section, type_or


class TeacherSource(Section):
    """Says where a teacher's weights come from. follows: the learner sends them, again and again.

    keeps_average: the learner's ranks hold an average of their weights besides.
    """

    follows: ClassVar[bool] = True
    keeps_average: ClassVar[bool] = False

    @property
    def student_share(self) -> float | None:
        """Returns the share of time in which the student's servers score; None: its own do."""
        return None

    @property
    def period(self) -> int:
        """Returns how many updates lie between two versions of the teacher."""
        return 1

    @property
    def keeps_copy(self) -> bool:
        """Returns whether the learner's ranks hold the teacher's version while they make others."""
        return self.period > 1

    def version_at(self, updates: int) -> int:
        """Return the teacher's version after so many updates of the student."""
        return updates // self.period * self.period


class CheckpointSource(TeacherSource):
    """Scores with the weights of `model`, which never change."""

    follows: ClassVar[bool] = False
    type: Literal["checkpoint"] = "checkpoint"


class StudentSource(TeacherSource):
    """Scores with the student's weights, of its last weight sync."""

    type: Literal["student"] = "student"
    share: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Largest share of the time in which the student's own servers score for this teacher while
    they sample; while they have nothing to sample they score as much as there is. null: the teacher
    has servers of its own, which get each of the student's weight syncs. Raising it scores sooner
    and samples less; a share costs no second copy of the weights. Such a teacher has no other keys
    of servers."""

    @property
    def student_share(self) -> float | None:
        """Returns the share of time in which the student's servers score; None: its own do."""
        return self.share


class LaggedSource(TeacherSource):
    """Scores with the weights that the student had at the last multiple of `every` updates."""

    type: Literal["lagged"] = "lagged"
    every: PositiveInt
    """Number of updates after which the teacher takes over the student's weights: after v updates
    it holds version floor(v / every) * every. Raising it keeps the target still for longer, and
    further behind. Above 1 each learner rank holds a copy of its weights, in learner.dtype."""

    @property
    def period(self) -> int:
        """Returns how many updates lie between two versions of the teacher."""
        return self.every


class AverageSource(TeacherSource):
    """Scores with an exponential moving average of the student's weights.

    After each update a <- decay * a + (1 - decay) * w, from the first weights on, in float32; w are
    the weights that the student's servers get.
    """

    keeps_average: ClassVar[bool] = True
    type: Literal["ema"] = "ema"
    decay: Annotated[float, Field(gt=0, lt=1)]
    """Weight of the average so far in each update's average; it spans some 1 / (1 - decay) updates.
    Raising it makes the teacher slower and steadier. Costs each learner rank 4 bytes for each of
    its weights."""
    every: PositiveInt = 1
    """Number of updates between two averages that are sent to the teacher's servers. Raising it
    costs fewer weight syncs, and with anything above 1 another 4 bytes for each weight of a learner
    rank: the average that was sent is kept beside the one that goes on."""

    @property
    def period(self) -> int:
        """Returns how many updates lie between two versions of the teacher."""
        return self.every


SourceConfig = Annotated[
    Annotated[CheckpointSource, Tag("checkpoint")]
    | Annotated[StudentSource, Tag("student")]
    | Annotated[LaggedSource, Tag("lagged")]
    | Annotated[AverageSource, Tag("ema")],
    Discriminator(type_or("checkpoint")),
]
