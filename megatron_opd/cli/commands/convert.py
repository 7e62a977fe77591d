"""Runs `opd convert`: Hugging Face checkpoints to Megatron distributed checkpoints, and back."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_opd.checkpoint.run_dir import RESOLVED
from megatron_opd.checkpoint.state_dirs import MANIFEST
from megatron_opd.checkpoint.state_files import read_json
from megatron_opd.config.load import load_config
from megatron_opd.config.schema import Config
from megatron_opd.data.template import RunTemplate
from megatron_opd.errors import RunFailed, UserError
from megatron_opd.models.file_kinds import around_megatron
from megatron_opd.run.checkpoints import RUN

if TYPE_CHECKING:
    from megatron_opd.checkpoint.conversion import ConversionReport
    from megatron_opd.checkpoint.crew import Crew

DTYPES = ("float32", "bfloat16", "float16")
# Relative to the largest logit: float32 sums in another order, layer after layer.
LOGIT_TOLERANCE = 1e-4
GIB = 2**30
MAX_SHARD_GIB = 1_000_000


def add_parser(verbs: Any) -> None:
    """Register `opd convert hf-to-megatron` and `opd convert megatron-to-hf`."""
    convert = verbs.add_parser(
        "convert",
        help="Hugging Face checkpoints to Megatron's distributed format, and back",
        description="Convert checkpoints tensor by tensor; see docs/convert.md.",
    )
    ways = convert.add_subparsers(dest="way", required=True, metavar="WAY")

    def way(name: str, summary: str, handler: Callable[..., int]) -> argparse.ArgumentParser:
        parser = ways.add_parser(name, help=summary, description=summary)
        parser.add_argument("source", type=Path, metavar="SRC")
        parser.add_argument("target", type=Path, metavar="DST")
        parser.add_argument("--dtype", choices=DTYPES, help="cast every tensor; default: keep")
        parser.add_argument(
            "--verify",
            action="store_true",
            help="also compare all numbers of both checkpoints, and logits with transformers' "
            "(both models whole in memory)",
        )
        parser.set_defaults(handler=handler)
        return parser

    to_megatron = way(
        "hf-to-megatron",
        "write a Megatron distributed checkpoint that loads at any layout",
        hf_to_megatron,
    )
    degrees = {
        "tp": "tensor-parallel ranks",
        "pp": "pipeline stages",
        "vpp": "interleaved chunks a stage",
        "ep": "expert-parallel ranks",
    }
    for name, what in degrees.items():
        summary = f"cut and group the files for this many {what}"
        to_megatron.add_argument(f"--{name}", type=_positive, default=1, metavar="N", help=summary)
    to_hf = way("megatron-to-hf", "write a Hugging Face checkpoint", megatron_to_hf)
    to_hf.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="where config.json and the tokenizer are (default: SRC)",
    )
    to_hf.add_argument(
        "--max-shard-gib",
        type=float,
        default=4.0,
        metavar="SIZE",
        help="start a new safetensors file at this size (4)",
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be >= 1, got {value}")
    return value


def hf_to_megatron(arguments: argparse.Namespace) -> int:
    """Run `opd convert hf-to-megatron SRC DST`."""
    from megatron_opd.checkpoint import to_megatron
    from megatron_opd.config.learner import ParallelConfig

    tp, pp, vpp, ep = arguments.tp, arguments.pp, arguments.vpp, arguments.ep
    if vpp > 1 and pp == 1:
        raise UserError(f"--vpp above 1 needs --pp above 1, got --vpp {vpp} --pp 1")
    parallel = ParallelConfig(tp=tp, pp=pp, vpp=vpp, ep=ep, dp=ep)
    source, target = arguments.source, arguments.target

    def work(crew: Crew) -> ConversionReport:
        dtype = _dtype(arguments)
        return to_megatron.hf_to_megatron(source, target, parallel=parallel, dtype=dtype, crew=crew)

    return _convert(arguments, work, megatron=target, hf=source)


def megatron_to_hf(arguments: argparse.Namespace) -> int:
    """Run `opd convert megatron-to-hf SRC DST`."""
    from megatron_opd.checkpoint import to_hf

    if not 0 < arguments.max_shard_gib <= MAX_SHARD_GIB:  # nan is neither
        raise UserError(
            f"--max-shard-gib must be > 0 and <= {MAX_SHARD_GIB}, got {arguments.max_shard_gib}"
        )
    source, target = arguments.source, arguments.target
    if around := around_megatron(source):
        raise UserError(f"SRC: {around}")
    described = source if arguments.model is None else arguments.model
    if source.is_dir() and not (described / "config.json").is_file():
        option = f"--model {described}" if arguments.model else f"SRC {source} without --model"
        raise UserError(
            f"{option} must hold config.json; of a learner's checkpoint, --model is the Hugging "
            "Face directory that it started from"
        )
    limit = int(arguments.max_shard_gib * GIB)

    def work(crew: Crew) -> ConversionReport:
        return to_hf.megatron_to_hf(
            source,
            target,
            dtype=_dtype(arguments),
            crew=crew,
            model=arguments.model,
            max_file_bytes=limit,
            chat_template=template_beside(source),
            end_ids=end_ids_beside(source),
        )

    return _convert(arguments, work, megatron=source, hf=target)


def template_beside(source: Path) -> str | None:
    """Return the chat template of the user's that a run keeps beside its learner's weights.

    None: it has none, or `source` is no run's. ValueError: what the run has kept is damaged.
    """
    step = _step_of(source)
    if step is None:
        return None
    return RunTemplate.from_json(read_json(step / RUN).get("template")).exported


def end_ids_beside(source: Path) -> tuple[int, ...]:
    """Return rollout.stop_token_ids of the run whose checkpoint `source` is part of; none without.

    ValueError: the configuration that the run has kept is damaged.
    """
    step = _step_of(source)
    resolved = None if step is None else step.parent.parent / RESOLVED
    if resolved is None or not resolved.is_file():
        return ()
    return load_config(Config, resolved).rollout.stop_token_ids


def _step_of(source: Path) -> Path | None:
    """Return the run's checkpoint that the learner's weights in `source` are part of."""
    step = source.resolve().parent
    return step if (step / MANIFEST).is_file() and (step / RUN).is_file() else None


def _dtype(arguments: argparse.Namespace) -> Any:
    import torch

    return None if arguments.dtype is None else getattr(torch, arguments.dtype)


def _convert(
    arguments: argparse.Namespace,
    work: Callable[[Crew], ConversionReport],
    *,
    megatron: Path,
    hf: Path,
) -> int:
    """Run `work` on this rank; rank 0 prints the report and any error. Raises UserError."""
    from megatron_opd.checkpoint.crew import Crew

    if not arguments.source.is_dir():
        raise UserError(f"SRC must be a checkpoint directory, not found: {arguments.source}")
    crew = Crew.join(os.environ)
    try:
        report = work(crew)
    except ValueError as error:
        if crew.rank:
            return 2  # rank 0 says it
        raise UserError(str(error).replace("learner.parallel.", "--")) from None
    finally:
        crew.leave()
    if crew.rank:
        return 0
    for note in report.notes:
        sys.stderr.write(f"note: {note}\n")
    shown = asdict(report)
    shown["verified"] = ["checksums"]
    if arguments.verify:
        shown |= _compare_numbers(megatron, hf, _dtype(arguments))
        shown |= _compare_logits(megatron, hf)
        shown["verified"] += ["numbers", "logits"]
    sys.stdout.write(json.dumps(shown) + "\n")
    return 0


def _compare_numbers(megatron: Path, hf: Path, dtype: Any) -> dict[str, int]:
    """Compare what both checkpoints hold, whatever converted one into the other. RunFailed."""
    from megatron_opd.checkpoint.accounting import hf_numbers, megatron_numbers
    from megatron_opd.models.spec import read_model_spec

    spec = read_model_spec(hf)
    one, other = megatron_numbers(megatron, spec, dtype), hf_numbers(hf, spec, dtype)
    if one != other:
        differ = "of other values" if one.count == other.count else "not as many"
        raise RunFailed(
            f"--verify: the numbers in {megatron} and {hf} must be the same, they are {differ}: "
            f"{one.count} and {other.count}"
        )
    return {"numbers": one.count}


def _compare_logits(megatron: Path, hf: Path) -> dict[str, float]:
    """Compare logits in a process of its own, whose memory ends with it. Raises RunFailed."""
    ours = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
    done = subprocess.run(
        [sys.executable, "-m", "megatron_opd.learner.verify", str(megatron), str(hf)],
        env={key: value for key, value in os.environ.items() if key not in ours},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RunFailed(f"--verify: cannot compare logits of {megatron} and {hf}: {reason}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    if not found["max_abs_logit_diff"] <= LOGIT_TOLERANCE * found["max_abs_logit"]:
        raise RunFailed(
            f"--verify: logits of {megatron} and {hf} differ by {found['max_abs_logit_diff']:.2e}, "
            f"largest logit {found['max_abs_logit']:.2e}"
        )
    return found
