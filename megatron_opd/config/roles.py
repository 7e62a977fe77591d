"""Names the roles of SGLang servers after their config sections: student, teacher, teachers.NAME.

A run has the teachers that its estimator asks for scores or answers: none of them when it learns
from rewards alone, but the one that plays the user (environment.type user).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from megatron_opd.config.servers import ServerConfig
from megatron_opd.config.sources import TeacherSource
from megatron_opd.config.tree import ConfigTree, key_of_teacher
from megatron_opd.config.wording import shown
from megatron_opd.errors import UserError

Role = str
STUDENT: Role = "student"

# a name is part of file names
TEACHER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def teacher_roles(config: ConfigTree) -> dict[str, Role]:
    """Return {name that prompts use: role} for the teachers that a run asks. Raises UserError."""
    names: Iterable[str] = config.all_teachers
    if not config.estimator.asks_teacher:
        names = () if config.user_teacher is None else (config.user_teacher,)
    for name in names:
        if not TEACHER_NAME.fullmatch(name):
            raise UserError(
                "teachers: a name must consist of letters, digits, '_', '.' and '-', got "
                f"{shown(name)}"
            )
    return {name: key_of_teacher(name) for name in names}


def answering(config: ConfigTree) -> dict[str, Role]:
    """Return {name: role whose servers score} for the teachers of a run. Raises UserError."""
    return {
        name: STUDENT if config.all_teachers[name].source.student_share else role
        for name, role in teacher_roles(config).items()
    }


def student_share(config: ConfigTree) -> float | None:
    """Return the share of time in which the student's servers may score for all teachers together.

    The largest of the teachers' shares; None: they score for none.
    """
    sources = [config.all_teachers[name].source for name in teacher_roles(config)]
    return max((each.student_share for each in sources if each.student_share), default=None)


def followers(config: ConfigTree) -> dict[Role, TeacherSource]:
    """Return {role: source} for the teachers of a run whose weights the learner sends."""
    sources = {role: config.all_teachers[name].source for name, role in answering(config).items()}
    return {role: each for role, each in sources.items() if role != STUDENT and each.follows}


def gets_weights(config: ConfigTree, role: Role) -> bool:
    """Return whether the learner sends weights to the role's servers, which are one run's then."""
    return role == STUDENT or role in followers(config)


def all_roles(config: ConfigTree) -> tuple[Role, ...]:
    """Return the student and every teacher of a run that has servers of its own."""
    return tuple(dict.fromkeys((STUDENT, *answering(config).values())))


def run_roles(config: ConfigTree) -> tuple[Role, ...]:
    """Return the roles whose servers are part of `opd run`; sampler sites have their own.

    The teachers are, where a site leaves scoring to the learner's site.
    """
    if not config.sites.members:
        return all_roles(config)
    if all(site.scores for site in config.sites.members.values()):
        return ()
    return tuple(answering(config).values())


def section_of(config: ConfigTree, role: Role) -> ServerConfig:
    """Return the section of a role's servers. Raises UserError when the config has none."""
    names = {key_of_teacher(name): name for name in config.all_teachers}
    if role in names and config.all_teachers[names[role]].source.student_share:
        return config.student
    sections = config.served
    if role not in sections:
        raise UserError(f"missing key {shown(role)}; the roles are: {', '.join(sections)}")
    return sections[role]
