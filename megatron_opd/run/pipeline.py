"""Reads what a run needs, locks its directory, finds its machines, and runs it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from rich.console import Console

from megatron_opd.checkpoint.run_dir import hold_run_dir
from megatron_opd.checkpoint.run_lock import RunLock
from megatron_opd.config.digests import learner_digests
from megatron_opd.config.roles import run_roles
from megatron_opd.config.schema import Config
from megatron_opd.errors import checked
from megatron_opd.inputs.models import check_inputs_are_kept
from megatron_opd.inputs.prepare import prepare
from megatron_opd.inputs.prepared import Prepared
from megatron_opd.launch.keys import run_keys
from megatron_opd.launch.machines import machines_of
from megatron_opd.launch.servers import check_addresses
from megatron_opd.output import print_lines
from megatron_opd.run.ready import get_ready
from megatron_opd.run.resume import find_resumption
from megatron_opd.run.run import run
from megatron_opd.transport.remote_learner import Admission
from megatron_opd.weight_sync.transport import transport_kind
from megatron_opd.wire.keys import RunKeys
from sglang_bridge import open_files


def run_pipeline(
    config: Config, *, overwrite: bool, resume: bool = False, accepted: Sequence[str] = ()
) -> int:
    """Run once, on the machines that config.cluster names.

    resume: continue from the newest checkpoint in run.dir; accepted: keys that may differ from its.

    Raises UserError for bad input, RunFailed when a started run cannot continue, KeyboardInterrupt
    after a clean stop by a signal.
    """
    open_files.raise_limit()
    check_inputs_are_kept(config)
    checked(lambda: transport_kind(config.weight_sync))
    roles, console = run_roles(config), Console(highlight=False)
    with hold_run_dir(config.run.dir, resume=resume, overwrite=overwrite) as lock:
        resumed = find_resumption(config, accepted) if resume else None
        if resumed is None:
            prepared = prepare(config)
        else:
            prepared = prepare(config, resumed.begun, resumed.template)
            resumed = replace(resumed, state=prepared.state)
        with (
            machines_of(config, roles, partial(print_lines, console)) as machines,
            run_keys(machines.config, roles) as keys,
        ):
            check_addresses(machines.config, learner_here=machines.learner_here)
            admission = checked(lambda: _admission(machines.config, prepared, lock, keys))

            async def main() -> None:
                await run(get_ready(machines, prepared, admission, roles, console, resumed))

            asyncio.run(main())
    return 0


def _admission(config: Config, prepared: Prepared, lock: RunLock, keys: RunKeys) -> Admission:
    """Return which learner is admitted. ValueError: the student's model cannot be read."""
    digests, vocab_size = learner_digests(config), prepared.student.vocab_size
    return Admission(keys=keys, digests=digests, vocab_size=vocab_size, claim=lock.claim)
