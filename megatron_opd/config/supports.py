"""Lists the supports: what the draw cache holds, one small section each, chosen by `type`.

Symbols in texts: o the sampler, q the teacher, w the weight of a cached id.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from megatron_opd.config.section import Section, type_or

DrawCount = Annotated[int, Field(ge=1, le=64)]
Atoms = Annotated[int, Field(ge=1, le=8192)]


class Support(Section):
    """Says which ids are cached at each response position, and what their weights estimate.

    owner: whose distribution they come from. covers: whether sum(weight * f) is an unbiased
    estimate of the owner's expectation of f (else the ids are a set whose outside is not scored).
    only_path: the sampled token is all that is cached.
    """

    owner: ClassVar[Literal["student", "teacher"]] = "student"
    covers: ClassVar[bool] = True
    only_path: ClassVar[bool] = False

    def num_atoms(self, vocab_size: int) -> int:
        """Returns how many of the most probable ids are taken exactly."""
        return 0

    @property
    def num_draws(self) -> int:
        """Returns the number of random draws, besides the token that continues the path."""
        return 0

    @property
    def thins(self) -> bool:
        """Tell whether fewer draws are made where less probability is left to draw from."""
        return False

    @property
    def is_set(self) -> bool:
        """Tell whether the ids are a fixed set to sum over: nothing is random."""
        return not self.covers

    def text(self) -> str:
        """Describes the cached ids and their weights in one line."""
        raise NotImplementedError


class McSupport(Support):
    """Caches m independent draws from the sampler, deduplicated: weight = count / m.

    AsyncOPD sec. 6.
    """

    type: Literal["mc"] = "mc"
    m: DrawCount = 64
    """Draws at each response position. Raising it lowers the gradient's variance and makes the
    cache larger where the next token is uncertain."""

    @property
    def num_draws(self) -> int:
        """Returns m: so many draws are made at every position."""
        return self.m

    def text(self) -> str:
        """Describes the cached ids and their weights in one line."""
        return f"{self.m} draws from o a token; w = count / {self.m}"


class PathSupport(Support):
    """Caches the sampled token alone, weight 1: one-sample MC, and all that rewards need."""

    only_path: ClassVar[bool] = True
    type: Literal["path"] = "path"

    def text(self) -> str:
        """Describes the cached ids and their weights in one line."""
        return "the sampled token; w = 1"


class TopkSupport(Support):
    """Caches the sampler's k most probable ids, weight = p_old.

    A stale set: what lies outside it is missing whatever the weights (AsyncOPD sec. 6).
    """

    covers: ClassVar[bool] = False
    type: Literal["topk"] = "topk"
    k: Atoms = 16
    """Ids at each response position. Raising it leaves less probability outside the set and makes
    cache and scoring larger in proportion."""

    def num_atoms(self, vocab_size: int) -> int:
        """Returns k, or the vocabulary's size where that is smaller."""
        return min(self.k, vocab_size)

    def text(self) -> str:
        """Describes the cached ids and their weights in one line."""
        return f"o's {self.k} likeliest ids; w = o"


class AtomsTailSupport(Support):
    """Caches the sampler's k most probable ids exactly (weight = p_old) and m draws from the rest.

    A draw weighs the rest's mass / m: unbiased like mc, at a fraction of the variance.
    """

    type: Literal["atoms_tail"] = "atoms_tail"
    k: Atoms = 16
    """Ids taken exactly. Raising it lowers the variance and makes the cache larger."""
    m: DrawCount = 48
    """Draws from the rest of the distribution. Raising it lowers the variance and makes the cache
    larger."""
    thin: bool = False
    """Make only ceil(m * mass of the rest) draws. The estimate stays unbiased and never varies more
    than mc of m draws; where p is peaked the cache holds little more than k ids."""

    def num_atoms(self, vocab_size: int) -> int:
        """Returns k, or the vocabulary's size where that is smaller."""
        return min(self.k, vocab_size)

    @property
    def num_draws(self) -> int:
        """Returns m: so many draws are made at every position, at most."""
        return self.m

    @property
    def thins(self) -> bool:
        """Tell whether fewer draws are made where less probability is left to draw from."""
        return self.thin

    def text(self) -> str:
        """Describes the cached ids and their weights in one line."""
        atoms = f"o's {self.k} likeliest ids, w = o"
        if self.thin:
            return (
                f"{atoms}; n = ceil({self.m} * mass of the rest) draws from the rest, "
                "w = count * mass of the rest / n"
            )
        return f"{atoms}; {self.m} draws from the rest, w = count * mass of the rest / {self.m}"


class ExactSupport(Support):
    """Caches the whole vocabulary, weight = p_old: no variance. For at most 8192 ids."""

    type: Literal["exact"] = "exact"

    def num_atoms(self, vocab_size: int) -> int:
        """Returns the vocabulary's size: every id is asked for."""
        return vocab_size

    @property
    def is_set(self) -> bool:
        """Tell whether the ids are a fixed set to sum over: nothing is random."""
        return True

    def text(self) -> str:
        """Describes the cached ids and their weights in one line."""
        return "the whole vocabulary; w = o"


class TeacherTopkSupport(Support):
    """Caches the teacher's k most probable ids, chosen at scoring time, weight = q."""

    owner: ClassVar[Literal["student", "teacher"]] = "teacher"
    covers: ClassVar[bool] = False
    type: Literal["teacher_topk"] = "teacher_topk"
    k: Atoms = 16
    """Ids at each response position. Raising it leaves less probability outside the set and makes
    cache and scoring larger in proportion."""

    def num_atoms(self, vocab_size: int) -> int:
        """Returns k, or the vocabulary's size where that is smaller."""
        return min(self.k, vocab_size)

    def text(self) -> str:
        """Describes the cached ids and their weights in one line."""
        return f"q's {self.k} likeliest ids; w = q"


class TeacherMcSupport(Support):
    """Caches m independent draws from the teacher, made at scoring time: weight = count / m."""

    owner: ClassVar[Literal["student", "teacher"]] = "teacher"
    type: Literal["teacher_mc"] = "teacher_mc"
    m: DrawCount = 16
    """Draws at each response position. Raising it lowers the gradient's variance and makes the
    cache larger where the teacher is uncertain."""

    @property
    def num_draws(self) -> int:
        """Returns m: so many draws are made at every position."""
        return self.m

    def text(self) -> str:
        """Describes the cached ids and their weights in one line."""
        return f"{self.m} draws from q a token; w = count / {self.m}"


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
