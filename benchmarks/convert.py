"""Checkpoint conversion both ways: memory against its rule, speed, resumption, bitwise equality.

    python -m benchmarks convert              a Qwen3-MoE checkpoint of 8 GB, random weights
    python -m benchmarks.convert --gb 1 --dir /fast/disk

The rule: peak memory <= 2 x the largest safetensors file + 1 GB, however large the model. Each
conversion is a process of its own, `opd convert`; its peak is the kernel's count (ru_maxrss). The
first is killed (SIGKILL) when a third of its units are done and started again. Needs disk space for
three copies, in a temporary directory that is removed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megatron_opd.checkpoint.conversion import bytes_of, grouped
from megatron_opd.checkpoint.hf_files import INDEX, stored_tensors
from megatron_opd.checkpoint.hf_reader import read_rows
from megatron_opd.checkpoint.hf_writer import write_safetensors
from megatron_opd.models.spec import ModelSpec, read_model_spec
from megatron_opd.models.tensors import hf_shapes, model_keys

GB = 10**9
FILE_BYTES = 2**30
STD = 0.02
# Qwen3-30B-A3B with half its experts and as many layers as the size asks for.
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "dtype": "bfloat16",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def make_checkpoint(path: Path, gigabytes: float) -> int:
    """Write a random checkpoint of about so many GB (1e9 bytes); returns its bytes."""
    path.mkdir(parents=True)

    def spec_of(layers: int) -> ModelSpec:
        config = json.dumps(CONFIG | {"num_hidden_layers": layers}, indent=2)
        (path / "config.json").write_text(config + "\n", encoding="utf-8")
        return read_model_spec(path)

    one, two = (_total(spec_of(layers)) for layers in (1, 2))
    spec = spec_of(max(1, round((gigabytes * GB - one) / (two - one)) + 1))
    keys = list(model_keys(spec))
    sizes = [bytes_of(spec, key, torch.bfloat16) for key in keys]
    files = list(grouped(keys, sizes, [0] * len(keys), FILE_BYTES))
    generator, weight_map = torch.Generator().manual_seed(0), dict[str, str]()
    for number, held in enumerate(files, start=1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        shapes = {n: shape for key in held for n, shape in hf_shapes(spec, key).items()}
        layout = {n: (torch.bfloat16, shape) for n, shape in shapes.items()}
        tensors = ((n, _random(shape, generator)) for n, shape in shapes.items())
        write_safetensors(path / name, layout, tensors)
        weight_map |= dict.fromkeys(shapes, name)
    (path / INDEX).write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    return sum(sizes)


def _total(spec: ModelSpec) -> int:
    return sum(bytes_of(spec, key, torch.bfloat16) for key in model_keys(spec))


def _random(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16).normal_(std=STD, generator=generator)


def _convert(way: str, source: Path, target: Path, *options: str, ranks: int = 1) -> dict[str, Any]:
    """Run `opd convert`; its report."""
    done = subprocess.run(_command(way, source, target, *options, ranks=ranks), **_PIPES)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.strip().splitlines()[-1])


_PIPES: dict[str, Any] = {"capture_output": True, "text": True, "check": False}


def _command(way: str, source: Path, target: Path, *options: str, ranks: int = 1) -> list[str]:
    start = ["-m"]
    if ranks > 1:
        start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    paths = [str(source), str(target)]
    return [sys.executable, *start, "megatron_opd", "convert", way, *paths, *options]


def _killed(source: Path, target: Path, units: int) -> int:
    """Start a conversion and kill it when `units` are done; how many were."""
    records = target.with_name(f"{target.name}.part") / ".opd" / "units"
    process = subprocess.Popen(_command("hf-to-megatron", source, target))
    while process.poll() is None and len(list(records.glob("[0-9]*.json"))) < units:
        time.sleep(0.05)
    process.kill()
    process.wait()
    if target.exists():
        raise RuntimeError(f"{target} was complete before it could be killed")
    return len(list(records.glob("[0-9]*.json")))


def _differences(one: Path, other: Path) -> Iterator[str]:
    """Names of tensors that are not equal bit for bit, or on one side alone."""
    ours, theirs = stored_tensors(one), stored_tensors(other)
    yield from sorted(ours.keys() ^ theirs.keys())
    for name in sorted(ours.keys() & theirs.keys()):
        left, right = (read_rows(side[name], 0, side[name].shape[0]) for side in (ours, theirs))
        if left.dtype != right.dtype or not torch.equal(
            left.view(torch.int16), right.view(torch.int16)
        ):
            yield name


def _figures(report: dict[str, Any], limit: int) -> dict[str, Any]:
    converted = report["tensor_bytes"] / 1e6 / report["convert_s"]
    whole = report["tensor_bytes"] / 1e6 / (report["convert_s"] + report["verify_s"])
    return {
        "peak_rss_bytes": report["peak_rss_bytes"],
        "within_memory_rule": report["peak_rss_bytes"] <= limit,
        "convert_s": round(report["convert_s"], 2),
        "verify_s": round(report["verify_s"], 2),
        "convert_mb_per_s": round(converted, 1),
        "convert_and_verify_mb_per_s": round(whole, 1),
        "units": report["units"],
        "units_kept": report["units_kept"],
    }


def measure(gigabytes: float = 8.0, directory: Path | None = None) -> dict[str, Any]:
    """The figures."""
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        base = Path(scratch)
        source, megatron, hf = base / "source", base / "megatron", base / "hf"
        num_bytes = make_checkpoint(source, gigabytes)
        largest = max(file.stat().st_size for file in source.glob("*.safetensors"))
        limit = 2 * largest + GB
        shard = ("--max-shard-gib", str(FILE_BYTES / 2**30))
        killed = base / "killed"
        before = _killed(source, killed, units=max(1, num_bytes // (3 * 256 * 2**20)))
        resumed = _convert("hf-to-megatron", source, killed)
        subprocess.run(["rm", "-r", str(killed)], check=True)
        there = _convert("hf-to-megatron", source, megatron)
        back = _convert("megatron-to-hf", megatron, hf, *shard)
        different = list(_differences(source, hf))
        subprocess.run(["rm", "-r", str(hf)], check=True)
        ranks = _convert("megatron-to-hf", megatron, hf, *shard, ranks=2)
        different += list(_differences(source, hf))
    kept = _figures(resumed, limit)
    for speed in [key for key in kept if key.endswith("mb_per_s")]:
        del kept[speed]  # of a part of the bytes
    return {
        "model": {k: CONFIG[k] for k in ("model_type", "hidden_size", "num_experts")},
        "tensor_bytes": num_bytes,
        "largest_shard_bytes": largest,
        "memory_rule_bytes": limit,
        "hf_to_megatron": _figures(there, limit),
        "megatron_to_hf": _figures(back, limit),
        "megatron_to_hf_2_ranks": _figures(ranks, limit),
        "killed_and_resumed": {"units_before_kill": before, **kept},
        "bitwise_equal": not different,
        "different_tensors": different[:10],
    }


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.convert", description=__doc__)
    parser.add_argument("--gb", type=float, default=8.0, help="size of the checkpoint, 1e9 bytes")
    parser.add_argument("--dir", type=Path, help="where the copies are made")
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.gb, arguments.dir), indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
