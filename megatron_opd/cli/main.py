"""Parses the command line of `opd` and runs the subcommand.

Exit codes: 0 done, 1 a run failed, 2 bad input, 75 a run was preempted (start it again with
--auto-resume), 130 interrupted.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_opd import __version__
from megatron_opd.cli import commands, compare, convert, fleet, mismatch, report, watch
from megatron_opd.cli.errors import Preempted, RunFailed, UserError
from megatron_opd.config.load import ConfigError
from megatron_opd.data.without_torch import leave_torch_out

EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 1, 2, 130
EXIT_PREEMPTED = os.EX_TEMPFAIL


def positive_number(text: str) -> float:
    """Parse a number > 0. argparse.ArgumentTypeError: it is none."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number > 0, got {text!r}")
    return value


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of every subcommand, each with the function that runs it in `handler`."""
    parser = argparse.ArgumentParser(
        prog="opd", description="Asynchronous on-policy distillation on Megatron-Core and SGLang."
    )
    parser.add_argument("--version", action="version", version=f"megatron-opd {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="COMMAND")

    def with_config(name: str, summary: str) -> argparse.ArgumentParser:
        verb = verbs.add_parser(name, help=summary, description=summary)
        _add_config(verb)
        return verb

    run = with_config("run", "run everything on this machine: servers, learner, controller")
    _add_again(run)
    run.set_defaults(handler=commands.run)

    control = with_config("control", "run the controller; servers and learner start elsewhere")
    _add_again(control)
    control.set_defaults(handler=commands.control)

    _add_serve(verbs)
    _add_site(verbs)
    fleet.add_parser(verbs)

    _add_eval(with_config("eval", "measure avg@k and pass@k of checkpoints on held-out problems"))

    check = with_config("check", "validate a config and print the plan without starting anything")
    check.add_argument(
        "--data",
        action="store_true",
        help="read all rows and all weights, instead of the first rows and the headers",
    )
    check.add_argument(
        "--link-gbs",
        type=positive_number,
        metavar="GB/S",
        help="what a rank sends in a second, for the predicted time of a weight sync; default 50",
    )
    check.set_defaults(handler=commands.check)

    simulate = with_config(
        "simulate", "predict a run: the controller on simulated servers and learner"
    )
    given = simulate.add_mutually_exclusive_group()
    given.add_argument(
        "--calibrate",
        type=Path,
        metavar="RUN_DIR",
        help="fit costs and lengths to this recorded run, and say how far off they are",
    )
    given.add_argument(
        "--costs",
        type=Path,
        metavar="FILE",
        help="JSON file of what all work costs; default: simulation.costs, or what the GPU "
        "simulation.gpu is predicted to take",
    )
    simulate.add_argument(
        "--overwrite", action="store_true", help="replace an earlier run in the same run.dir"
    )
    simulate.set_defaults(handler=commands.simulate)

    _add_plan(with_config("plan", "search for the split of GPUs with the highest throughput"))

    mismatch.add_options(with_config("mismatch", mismatch.SUMMARY))

    objective = verbs.add_parser(
        "objective",
        help="evaluate a loss on a hand-written cache",
        description="Evaluate any objective on a cache written by hand, as JSON: "
        "{objective, support?, correction?, reduction?, offsets?, weight?, student_logp, "
        "sampler_logp?, teacher_logp?, prox_logp?, path?, lengths?, rewards?, groups?} -> "
        "{loss, grad_student_logp, metrics}.",
    )
    objective.add_argument("case", type=Path, metavar="CASE.json")
    objective.set_defaults(handler=commands.objective)

    sft = with_config("sft", "run supervised fine-tuning on the Megatron learner")
    sft.set_defaults(handler=commands.sft)

    convert.add_parser(verbs)
    compare.add_parser(verbs)
    report.add_parser(verbs)
    watch.add_parser(verbs)

    data = verbs.add_parser("make-data", help="write a built-in task's train and held-out files")
    data.add_argument("task", help="name of the task, such as arithmetic")
    data.add_argument("--out", type=Path, required=True, help="directory to write to")
    data.add_argument("--train", type=int, default=4096, metavar="N", help="training problems")
    data.add_argument("--heldout", type=int, default=256, metavar="N", help="held-out problems")
    data.add_argument("--seed", type=int, default=0, help="seed of the problems")
    data.set_defaults(handler=commands.make_data)
    return parser


def _add_eval(evaluate: argparse.ArgumentParser) -> None:
    """Add the options of `opd eval`."""
    which = evaluate.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", type=Path, metavar="DIR", help="a Hugging Face checkpoint")
    which.add_argument(
        "--checkpoints",
        type=Path,
        nargs="+",
        metavar="DIR",
        help="run directories, checkpoints of runs (checkpoints/step-*) or Hugging Face "
        "checkpoints; what --out holds already is not evaluated again",
    )
    evaluate.add_argument("--json", action="store_true", help="with --model: print JSON")
    evaluate.add_argument(
        "--out", type=Path, metavar="FILE", help="with --checkpoints: keep the figures here (JSON)"
    )
    evaluate.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="with --checkpoints: draw the curve here; .png, .svg or .pdf",
    )
    evaluate.set_defaults(handler=commands.evaluate)


def _add_plan(plan: argparse.ArgumentParser) -> None:
    """Add the options of `opd plan`."""
    plan.add_argument("--gpus", type=int, required=True, metavar="N", help="GPUs to split")
    plan.add_argument(
        "--gpu", metavar="NAME", help="kind of GPU; default: simulation.gpu, else h100"
    )
    plan.add_argument(
        "--staleness",
        type=int,
        metavar="S",
        help="largest bound on staleness, in updates; default: the config's schedule's",
    )
    plan.add_argument(
        "--keep",
        action="append",
        default=[],
        metavar="KEY[,KEY]",
        help="keys or sections that keep their values, e.g. schedule.type,learner.parallel",
    )
    plan.add_argument(
        "--trials",
        type=int,
        default=24,
        metavar="N",
        help="candidates of each staleness to simulate at most (default 24); 0: until the front "
        "is proven",
    )
    plan.add_argument("--out", type=Path, metavar="FILE", help="write the winner as a config here")
    plan.set_defaults(handler=commands.plan)


def _add_config(verb: argparse.ArgumentParser) -> None:
    """Add CONFIG.yaml and --set."""
    verb.add_argument("config", type=Path, metavar="CONFIG.yaml")
    verb.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help="override one key, e.g. --set schedule.max_staleness=4 (repeatable)",
    )


def _add_serve(verbs: Any) -> None:
    """Add `opd serve ROLE CONFIG.yaml`."""
    serve = verbs.add_parser("serve", help="start one SGLang server of a role")
    serve.add_argument("role", choices=("student", "teacher"))
    _add_config(serve)
    serve.add_argument("--name", help="a name in `teachers`; default: the section `teacher`")
    serve.add_argument("--index", type=int, default=0, help="server i listens on base_port + i")
    serve.set_defaults(handler=commands.serve)


def _add_site(verbs: Any) -> None:
    """Add `opd site NAME CONFIG.yaml`."""
    summary = "run a sampler site, far from the learner: its servers and its link"
    site = verbs.add_parser("site", help=summary, description=summary)
    site.add_argument("name", metavar="NAME", help="one of sites.members")
    _add_config(site)
    site.add_argument(
        "--keys",
        type=Path,
        metavar="FILE",
        help="the site's secrets, as the run wrote them; default: sites/NAME.keys in run.dir",
    )
    site.set_defaults(handler=commands.site)


def _add_again(verb: argparse.ArgumentParser) -> None:
    """Add the options that say what happens to an earlier run in the same run.dir."""
    choice = verb.add_mutually_exclusive_group()
    choice.add_argument(
        "--overwrite", action="store_true", help="replace an earlier run in the same run.dir"
    )
    choice.add_argument(
        "--resume", action="store_true", help="continue from the newest checkpoint in run.dir"
    )
    choice.add_argument(
        "--auto-resume",
        action="store_true",
        help="for a job that is requeued: continue if there is a checkpoint, begin if there is "
        "none, do nothing if the run is finished",
    )
    verb.add_argument(
        "--accept-changes",
        action="append",
        default=[],
        metavar="KEY[,KEY]",
        help="when continuing: keys that may differ from the run's, e.g. learner.optimizer.lr",
    )


def console(argv: Sequence[str] | None = None) -> int:
    """Run `opd` in a process of its own."""
    leave_torch_out()
    return main(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, dispatch, and turn every expected failure into one line on stderr."""
    # SIGTERM (a scheduler's stop) takes the same clean path as Ctrl-C; so does SIGINT sent to a
    # background job, which starts with it ignored. SIGUSR1 concerns runs alone, but a scheduler may
    # send it to every process of a job.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    arguments = build_parser().parse_args(argv)
    try:
        return arguments.handler(arguments)
    except (ConfigError, UserError) as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return EXIT_BAD_INPUT
    except RunFailed as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return EXIT_FAILED
    except Preempted as preempted:
        _heed_no_signal()
        print(f"preempted: {preempted}", file=sys.stderr)  # noqa: T201
        return EXIT_PREEMPTED
    except KeyboardInterrupt:
        _heed_no_signal()
        print("interrupted", file=sys.stderr)  # noqa: T201
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # the reader left (`opd check ... | head`): keep the interpreter from complaining at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


def _heed_no_signal() -> None:
    """Let nothing interrupt a program that is exiting."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
