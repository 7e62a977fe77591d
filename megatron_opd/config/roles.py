"""Names the roles of SGLang servers after their config sections: student, teacher, teachers.NAME.

A run has the teachers that its estimator reads: none of them when it learns from rewards alone.
"""

from __future__ import annotations

import re

from megatron_opd.config.rules import key_of_teacher
from megatron_opd.config.schema import Config
from megatron_opd.config.servers import ServerConfig
from megatron_opd.errors import UserError

Role = str
STUDENT: Role = "student"

# a name is part of file names
TEACHER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def teacher_roles(config: Config) -> dict[str, Role]:
    """Return {name that prompts use: role} for the teachers that a run asks. Raises UserError."""
    if not config.estimator.reads_teacher:
        return {}
    for name in config.all_teachers:
        if not TEACHER_NAME.fullmatch(name):
            raise UserError(
                f"teachers: a name must consist of letters, digits, '_', '.' and '-', got {name!r}"
            )
    return {name: key_of_teacher(name) for name in config.all_teachers}


def all_roles(config: Config) -> tuple[Role, ...]:
    """Return the student and every teacher of a run."""
    return (STUDENT, *teacher_roles(config).values())


def run_roles(config: Config) -> tuple[Role, ...]:
    """Return the roles whose servers are part of `opd run`; sampler sites have their own.

    The teachers are, where a site leaves scoring to the learner's site.
    """
    if not config.sites.members:
        return all_roles(config)
    if all(site.scores for site in config.sites.members.values()):
        return ()
    return tuple(teacher_roles(config).values())


def section_of(config: Config, role: Role) -> ServerConfig:
    """Return the role's section. Raises UserError when the config has none."""
    teachers = {key_of_teacher(name): section for name, section in config.all_teachers.items()}
    sections = {STUDENT: config.student} | teachers
    if role not in sections:
        raise UserError(f"missing key {role!r}; the roles are: {', '.join(sections)}")
    return sections[role]
