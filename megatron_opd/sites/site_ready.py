"""Makes the first stage of a site: input read, keys there, directory locked, nothing started."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from megatron_opd.checkpoint.claimant import Claimant, claimant_of
from megatron_opd.config.roles import STUDENT, Role, section_of, teacher_roles
from megatron_opd.config.schema import Config
from megatron_opd.data.judge import Judge
from megatron_opd.data.template import reads_clock
from megatron_opd.errors import UserError, checked
from megatron_opd.fleet.ends import FirstCause
from megatron_opd.inputs.models import CheckedModels, check_models, ending_of
from megatron_opd.inputs.prepare import make_judge
from megatron_opd.inputs.rendering import with_template
from megatron_opd.inputs.verifiers import check_isolation
from megatron_opd.launch.gpus import gpus_here
from megatron_opd.launch.keys import role_key
from megatron_opd.launch.parts import server_parts
from megatron_opd.launch.placement import Placement, place
from megatron_opd.launch.placing import in_turn
from megatron_opd.launch.processes import Processes
from megatron_opd.launch.servers import server_processes
from megatron_opd.output import print_lines
from megatron_opd.sites.config import member, site_config
from megatron_opd.sites.handshake import hello_of
from megatron_opd.sites.keys import SiteKeys
from megatron_opd.sites.messages import SiteHello

LOOK_S = 0.5
"""Wait in seconds between two looks for the file of keys."""


@dataclass(frozen=True, slots=True)
class SiteInput:
    """Holds what a site reads before anything else.

    config: the site's own. scores: whether it asks the teachers. judge: None without a verifier.
    hello: says what the site is.
    """

    config: Config
    name: str
    scores: bool
    models: CheckedModels
    judge: Judge | None
    hello: SiteHello

    @property
    def roles(self) -> tuple[Role, ...]:
        """Returns the roles of the site's servers."""
        teachers = teacher_roles(self.config).values() if self.scores else ()
        return (STUDENT, *teachers)


@dataclass(frozen=True, slots=True)
class SiteReady:
    """Holds what a site begins with.

    keys: of its link. directory: its part of run.dir. api_keys, urls: of every role's servers.
    processes: started by none yet. ends: why the site ended.
    """

    input: SiteInput
    keys: SiteKeys
    directory: Path
    claimant: Claimant
    api_keys: Mapping[Role, str | None]
    urls: Mapping[Role, tuple[str, ...]]
    processes: Processes
    ends: FirstCause
    say: Callable[..., None]

    @property
    def logs(self) -> Path:
        """Returns the directory of the servers' logs."""
        return self.directory / "logs"


def read_input(config: Config, name: str) -> SiteInput:
    """Read what site `name` needs of the run's configuration, and its models. Raises UserError."""
    scores, own = member(config, name).scores, site_config(config, name)
    check_isolation(own)
    models = check_models(own, teachers=scores)
    tokenizer = models.tokenizer
    assert tokenizer is not None, "only a plan may lack it"
    if own.environment is not None:
        models, _ = with_template(own, models, None)
    if own.environment is not None and reads_clock(tokenizer):
        raise UserError(
            "data.chat_template must not read the clock with section environment at a site, which "
            "would write another moment than the run, got the one of "
            f"{models.template.origin}; name a template without strftime_now"
        )
    judge = checked(lambda: make_judge(own, tokenizer)) if scores else None
    vocab_size, ending = models.student.vocab_size, ending_of(own, models)
    hello = checked(lambda: hello_of(own, name, vocab_size, ending, scores=scores))
    return SiteInput(own, name, scores, models, judge, hello)


def wait_for_keys(path: Path, limit_s: float, say: Callable[[str], None]) -> SiteKeys:
    """Return the site's keys once the run has written them. UserError: it does not in time."""
    until_s, said = time.monotonic() + limit_s, False
    while (keys := checked(lambda: SiteKeys.read(path))) is None:
        if not said:
            say(f"waiting for the keys of the site in {path}, which opd run writes")
            said = True
        if time.monotonic() > until_s:
            raise UserError(
                f"{path} is not there after student.startup_timeout_s = {limit_s:g} s: start "
                "opd run with this configuration, or copy the file here and name it with --keys"
            )
        time.sleep(LOOK_S)
    return keys


def get_site_ready(
    site: SiteInput, keys: SiteKeys, directory: Path, say: Callable[..., None]
) -> SiteReady:
    """Return the first stage. directory: the site's, locked. UserError: a port is taken."""
    config, roles = site.config, site.roles
    api_keys = {role: role_key(section_of(config, role), role) for role in roles}
    placement, logs = _placement(site), directory / "logs"
    servers = {
        role: server_processes(config, role, logs, api_keys[role], placement) for role in roles
    }
    processes = Processes([server for role in roles for server in servers[role]], None)
    return SiteReady(
        input=site,
        keys=keys,
        directory=directory,
        claimant=claimant_of(f"opd site {site.name} in", directory),
        api_keys=api_keys,
        urls={
            role: section_of(config, role).urls or tuple(each.url for each in servers[role])
            for role in roles
        },
        processes=processes,
        ends=FirstCause(processes.watched),
        say=say,
    )


def _placement(site: SiteInput) -> Placement:
    """Place the servers of a site on this machine's GPUs. Raises UserError."""
    config = site.config
    parts = server_parts({role: section_of(config, role) for role in site.roles})
    share = config.cluster.share_gpus
    return checked(lambda: place(parts, gpus_here(), share=share, in_turn=in_turn(config)))


def printed_by(name: str, console: Console) -> Callable[..., None]:
    """Return what prints lines of site `name` for the user."""

    def say(*lines: str) -> None:
        print_lines(console, *(f"{name}: {line}" for line in lines))

    return say
