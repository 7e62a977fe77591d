"""Holds one function per subcommand: it loads the config and calls the part that does the work.

Parts are imported where they are used, so that `opd --help` and config errors need no engine.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys

from megatron_opd.cli.errors import UserError
from megatron_opd.cli.roles import STUDENT, section_of
from megatron_opd.config.evaluation import ONLY_SET
from megatron_opd.config.load import load_config
from megatron_opd.config.rules import key_of_teacher, keyless_problem
from megatron_opd.config.schema import Config
from megatron_opd.config.sft import SftConfig
from sglang_bridge.listening import is_loopback


def run(arguments: argparse.Namespace) -> int:
    """Run `opd run`: servers, learner and controller; or submit it to a Ray cluster."""
    config = load_config(Config, arguments.config, arguments.overrides)
    if config.cluster.type == "ray" and config.cluster.ray.submit is not None:
        from megatron_opd.cli.submit import submit_run

        return submit_run(config, arguments)
    return _pipeline(arguments, config)


def control(arguments: argparse.Namespace) -> int:
    """Run `opd control`: the controller alone; all else is started by something else."""
    config = load_config(Config, arguments.config, arguments.overrides)
    cluster = config.cluster.model_copy(update={"type": "external"})
    return _pipeline(arguments, config.model_copy(update={"cluster": cluster}))


def _pipeline(arguments: argparse.Namespace, config: Config) -> int:
    from megatron_opd.cli.auto_resume import Start, how_to_start
    from megatron_opd.cli.run import run_pipeline
    from megatron_opd.cli.stopping import PREEMPTIONS, preempt_now

    for number in PREEMPTIONS:
        signal.signal(number, preempt_now)
    accepted = accepted_changes(arguments)
    start = Start(resume=arguments.resume, overwrite=arguments.overwrite)
    if arguments.auto_resume:
        start = how_to_start(config, accepted)
        if start is None:
            _print(f"run.dir {config.run.dir}: the run is finished")
            return 0
    return run_pipeline(config, overwrite=start.overwrite, resume=start.resume, accepted=accepted)


def accepted_changes(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Return the keys of every --accept-changes.

    Raises UserError when there is nothing to resume.
    """
    keys = [key.strip() for given in arguments.accept_changes for key in given.split(",")]
    if keys and not (arguments.resume or arguments.auto_resume):
        raise UserError("--accept-changes has no effect without --resume: add it")
    return tuple(dict.fromkeys(key for key in keys if key))


def serve(arguments: argparse.Namespace) -> int:
    """Run `opd serve`: one SGLang server, until it ends or this process is told to stop."""
    from megatron_opd.cli.keys import named_key
    from megatron_opd.cli.serve import serve_until_told
    from megatron_opd.cli.servers import server_spec
    from sglang_bridge.server.spec import NONCE_VARIABLE, server_command, server_env

    config = load_config(Config, arguments.config, arguments.overrides)
    role, name = arguments.role, arguments.name
    if name is not None:
        role = key_of_teacher(name)
        if arguments.role == STUDENT:
            raise UserError(f"opd serve: --name is for teachers only, got {name!r} for a student")
    section = section_of(config, role)
    if section.base_port == 0:
        raise UserError(f"opd serve: {role}.base_port must be a fixed port, got 0")
    if not 0 <= arguments.index <= 65535 - section.base_port:
        raise UserError(
            f"opd serve: --index must be >= 0 and base_port + index <= 65535, got {arguments.index}"
        )
    key = named_key(section, role)
    if key is None and not (config.security.insecure or is_loopback(section.host)):
        raise UserError(f"opd serve: {keyless_problem(role, f'{role}.host {section.host}')}")
    spec = server_spec(config, role, arguments.index)
    sys.stdout.flush()
    # by a launcher, whose servers prove what it has started
    environment = server_env(spec, api_key=key, nonce=os.environ.get(NONCE_VARIABLE))
    return serve_until_told(server_command(spec), environment)


def site(arguments: argparse.Namespace) -> int:
    """Run `opd site`: a sampler site, until its learner's run has ended."""
    from megatron_opd.cli.site import run_site

    config = load_config(Config, arguments.config, arguments.overrides)
    return run_site(config, arguments.name, arguments.keys)


def evaluate(arguments: argparse.Namespace) -> int:
    """Run `opd eval`: avg@k and pass@k of one checkpoint, or of many."""
    from megatron_opd.cli.evaluate import evaluate_checkpoint

    config = load_config(Config, arguments.config, arguments.overrides)
    if arguments.checkpoints is not None:
        return _evaluate_many(arguments, config)
    for option in ("out", "plot"):
        if getattr(arguments, option) is not None:
            raise UserError(f"--{option} has no effect with --model: use --checkpoints, or --json")
    reports = evaluate_checkpoint(config, arguments.model)
    if not arguments.json:
        of_several = len(reports) > 1
        for name, report in reports.items():
            _print(f"{name}: {report.line()}" if of_several else report.line())
        return 0
    found = {name: report.as_dict() for name, report in reports.items()}
    _print(json.dumps(found.get(ONLY_SET, found), indent=2))
    return 0


def _evaluate_many(arguments: argparse.Namespace, config: Config) -> int:
    from rich.console import Console

    from megatron_opd.cli.evaluate_many import evaluate_checkpoints

    if arguments.json:
        raise UserError("--json has no effect with --checkpoints, which write JSON to --out")
    if arguments.out is None:
        raise UserError("--checkpoints needs --out FILE.json, where its figures are kept")
    console = Console(highlight=False)
    evaluate_checkpoints(config, arguments.checkpoints, arguments.out, arguments.plot, console)
    return 0


def check(arguments: argparse.Namespace) -> int:
    """Run `opd check`: validate the configuration and print the plan."""
    from rich.console import Console

    from megatron_opd.cli.check import LINK_GBS
    from megatron_opd.cli.check import check as check_config

    config = load_config(Config, arguments.config, arguments.overrides)
    link_gbs = arguments.link_gbs or LINK_GBS
    check_config(config, Console(), data=arguments.data, link_gbs=link_gbs)
    return 0


def simulate(arguments: argparse.Namespace) -> int:
    """Run `opd simulate`: the controller on simulated servers and learner."""
    from rich.console import Console

    from megatron_opd.cli.simulate import run_simulation

    config = load_config(Config, arguments.config, arguments.overrides)
    console = Console(highlight=False)
    return run_simulation(
        config,
        console,
        costs_file=arguments.costs,
        recorded=arguments.calibrate,
        overwrite=arguments.overwrite,
    )


def plan(arguments: argparse.Namespace) -> int:
    """Run `opd plan`: the split of GPUs, layout and schedule with the highest throughput."""
    from rich.console import Console

    from megatron_opd.cli.plan import run_plan

    return run_plan(
        load_config(Config, arguments.config, arguments.overrides),
        Console(highlight=False),
        gpus=arguments.gpus,
        gpu=arguments.gpu,
        staleness=arguments.staleness,
        keep=arguments.keep,
        out=arguments.out,
        trials=arguments.trials,
    )


def sft(arguments: argparse.Namespace) -> int:
    """Run `opd sft`: supervised fine-tuning."""
    from megatron_opd.cli.sft import run_sft

    return run_sft(load_config(SftConfig, arguments.config, arguments.overrides))


def objective(arguments: argparse.Namespace) -> int:
    """Run `opd objective CASE.json`: print the report as JSON."""
    from megatron_opd.cli.objective import objective_report

    _print(json.dumps(objective_report(arguments.case), indent=2))
    return 0


def make_data(arguments: argparse.Namespace) -> int:
    """Run `opd make-data`: write the files of a built-in task."""
    from megatron_opd.cli.prepare import checked
    from megatron_opd.data.writer import write_task

    for file in (arguments.out / "train.jsonl", arguments.out / "heldout.jsonl"):
        if file.exists():
            raise UserError(f"--out: {file} exists already; choose another directory or remove it")
    try:
        written = checked(
            lambda: write_task(
                arguments.task, arguments.out, arguments.train, arguments.heldout, arguments.seed
            )
        )
    except OSError as error:
        raise UserError(f"--out: cannot write to {arguments.out}: {error.strerror}") from None
    _print(f"{written.train_file}: {written.train} problems")
    _print(f"{written.heldout_file}: {written.heldout} problems")
    return 0


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
