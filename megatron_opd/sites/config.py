"""Derives what a sampler site runs with from the run's configuration.

Sites on one machine with fixed ports have ranges of their own: the servers of a site come behind
those of the sites before it in sites.members.
"""

from __future__ import annotations

from megatron_opd.config.schema import Config
from megatron_opd.config.servers import ServerConfig
from megatron_opd.config.sites import SiteConfig
from megatron_opd.config.wording import shown
from megatron_opd.errors import UserError

MAX_PORT = 65535


def member(config: Config, name: str) -> SiteConfig:
    """Return a site's section. UserError: there is none."""
    members = config.sites.members
    if name not in members:
        there = ", ".join(members) or "none"
        raise UserError(
            f"sites.members must have the site that is started, got {shown(name, 80)}; the sites "
            f"are: {there}"
        )
    return members[name]


def site_config(config: Config, name: str) -> Config:
    """Return the configuration of site `name`: its own servers, ports and slots. UserError."""
    site = member(config, name)
    before = list(config.sites.members).index(name)
    earlier = list(config.sites.members.values())[:before]
    default = config.student.servers
    taken = sum(default if other.servers is None else other.servers for other in earlier)
    servers = default if site.servers is None else site.servers
    student = {
        "servers": servers,
        "base_port": _port(config.student, taken, servers, "student"),
        # a list for another number of servers says nothing about these
        "gpus": config.student.gpus if servers == default else None,
    }
    slots = config.rollout.concurrency if site.concurrency is None else site.concurrency
    update = {
        "student": config.student.model_copy(update=student),
        "rollout": config.rollout.model_copy(update={"concurrency": slots}),
        "teachers": {
            key: _teacher(section, before, f"teachers.{key}")
            for key, section in config.teachers.items()
        },
    }
    if config.teacher is not None:
        update["teacher"] = _teacher(config.teacher, before, "teacher")
    return config.model_copy(update=update)


def _teacher(section: ServerConfig, before: int, key: str) -> ServerConfig:
    """Return a teacher's section with ports of its own. The learner's site has the first ones."""
    port = _port(section, (before + 1) * section.servers, section.servers, key)
    return section.model_copy(update={"base_port": port})


def _port(section: ServerConfig, taken: int, servers: int, key: str) -> int:
    if section.base_port == 0:
        return 0
    port = section.base_port + taken
    if port + servers - 1 > MAX_PORT:
        raise UserError(
            f"{key}.base_port must leave ports for the servers of all sites up to {MAX_PORT}, got "
            f"{section.base_port} and {taken} servers before this site's; lower it or let it be 0"
        )
    return port
