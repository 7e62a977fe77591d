"""What the draw cache holds: one small section per support, chosen by `type`."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from megatron_opd.config.section import Section, type_or

Draws = Annotated[int, Field(ge=1, le=64)]
Atoms = Annotated[int, Field(ge=1, le=8192)]


class Support(Section):
    """Which actions are cached at each response position, and what their weights estimate.

    owner: whose distribution they come from. covers: whether sum(weight * f) is an unbiased
    estimate of the owner's expectation of f (else the ids are a set whose outside is not scored).
    """

    owner: ClassVar[Literal["student", "teacher"]] = "student"
    covers: ClassVar[bool] = True

    def num_atoms(self, vocab_size: int) -> int:
        """Most probable ids that are taken exactly."""
        return 0

    @property
    def num_draws(self) -> int:
        """Random draws, besides the token that continues the path."""
        return 0


class McSupport(Support):
    """m iid draws from the sampler, deduplicated (AsyncOPD sec. 6): weight = count / m."""

    type: Literal["mc"] = "mc"
    m: Draws = 64
    """Draws per response position."""

    @property
    def num_draws(self) -> int:
        """It makes m draws at every position."""
        return self.m


class PathSupport(Support):
    """The sampled token alone, weight 1: one-sample MC, and all that rewards need."""

    type: Literal["path"] = "path"


class TopkSupport(Support):
    """The sampler's k most probable ids, weight = p_old.

    A stale set: what lies outside it is missing whatever the weights (AsyncOPD sec. 6).
    """

    covers: ClassVar[bool] = False
    type: Literal["topk"] = "topk"
    k: Atoms = 16
    """Ids per response position."""

    def num_atoms(self, vocab_size: int) -> int:
        """It asks for k ids, or for all where there are fewer."""
        return min(self.k, vocab_size)


class AtomsTailSupport(Support):
    """The sampler's k most probable ids exactly (weight = p_old) and m iid draws from the rest.

    A draw weighs the rest's mass / m: unbiased like mc, at a fraction of the variance.
    """

    type: Literal["atoms_tail"] = "atoms_tail"
    k: Atoms = 16
    """Ids taken exactly."""
    m: Draws = 48
    """Draws from the tail."""
    thin: bool = False
    """Only ceil(m * mass of the rest) draws: as unbiased, never more variance than mc of m draws,
    and little more than k ids where p is peaked."""

    def num_atoms(self, vocab_size: int) -> int:
        """It asks for k ids, or for all where there are fewer."""
        return min(self.k, vocab_size)

    @property
    def num_draws(self) -> int:
        """It makes m draws at every position."""
        return self.m


class ExactSupport(Support):
    """The whole vocabulary, weight = p_old: no variance. For vocabularies of at most 8192 ids."""

    type: Literal["exact"] = "exact"

    def num_atoms(self, vocab_size: int) -> int:
        """It asks for every id."""
        return vocab_size


class TeacherTopkSupport(Support):
    """The teacher's k most probable ids, chosen at scoring time, weight = q."""

    owner: ClassVar[Literal["student", "teacher"]] = "teacher"
    covers: ClassVar[bool] = False
    type: Literal["teacher_topk"] = "teacher_topk"
    k: Atoms = 16
    """Ids per response position."""

    def num_atoms(self, vocab_size: int) -> int:
        """It asks for k ids, or for all where there are fewer."""
        return min(self.k, vocab_size)


class TeacherMcSupport(Support):
    """m iid draws from the teacher, made at scoring time: weight = count / m."""

    owner: ClassVar[Literal["student", "teacher"]] = "teacher"
    type: Literal["teacher_mc"] = "teacher_mc"
    m: Draws = 16
    """Draws per response position."""

    @property
    def num_draws(self) -> int:
        """It makes m draws at every position."""
        return self.m


SupportConfig = Annotated[
    Annotated[McSupport, Tag("mc")]
    | Annotated[PathSupport, Tag("path")]
    | Annotated[TopkSupport, Tag("topk")]
    | Annotated[AtomsTailSupport, Tag("atoms_tail")]
    | Annotated[ExactSupport, Tag("exact")]
    | Annotated[TeacherTopkSupport, Tag("teacher_topk")]
    | Annotated[TeacherMcSupport, Tag("teacher_mc")],
    Discriminator(type_or("mc")),
]
