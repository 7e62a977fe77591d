"""Compiles the fused kernels for a GPU that need not be there."""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_opd.losses import kernels
from megatron_opd.losses.fused import KernelShape

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
WARP = 32
SPILLED = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


@dataclass(frozen=True)
class Compiled:
    """What a kernel needs on a GPU, and its code."""

    ptx: str
    shared_bytes: int
    spilled_bytes: int


def compiled(kernel: str, dtype: torch.dtype, shape: KernelShape, capability: int) -> Compiled:
    """Compile a kernel of `kernels` with everything that it can do, for sm_`capability`."""
    function: Any = getattr(kernels, kernel)
    constants = {
        "M": shape.rows,
        "K": shape.ids,
        "H": shape.depth,
        "GROUP": shape.group,
        "EXACT": dtype == torch.float32,
        "WIDEN": False,
        **dict.fromkeys(("EVEN", "ENTROPY", "SLOPE", "PAIRS"), True),
    }
    operand = f"*{NAMES[dtype]}"
    pointers = dict.fromkeys(("hidden", "weight", "grad_TC"), operand)
    pointers |= dict.fromkeys(("bounds", "place_N", "row_N", "id_N"), "*i32")
    signature: dict[str, str] = {}
    aligned: dict[tuple[int], list[list[Any]]] = {}
    for place, name in enumerate(function.arg_names):
        kind = "*fp32" if name.endswith(("_N", "_T", "_ST")) else "i32"
        kind = {"temperature": "fp32", **pointers}.get(name, kind)
        signature[name] = "constexpr" if name in constants else kind
        if kind.startswith("*") or name in ("width", "stride"):
            aligned[(place,)] = [["tt.divisibility", 16]]
    used = {name: value for name, value in constants.items() if name in signature}
    found = triton.compile(
        ASTSource(fn=function, signature=signature, constexprs=used, attrs=aligned),
        target=GPUTarget("cuda", capability, WARP),
        options={"num_warps": shape.warps, "num_stages": shape.stages},
    )
    ptx = found.asm["ptx"]
    return Compiled(ptx, found.metadata.shared, _spilled(ptx))


def _spilled(ptx: str) -> int:
    """What the assembler that Triton brings says of registers that do not suffice."""
    target = re.search(r"\.target (\w+)", ptx)
    assert target is not None
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    name = "ptxas-blackwell" if target[1].startswith("sm_1") else "ptxas"
    command = [tools / name, "-v", f"--gpu-name={target[1]}", "-", "-o", "/dev/null"]
    done = subprocess.run(command, input=ptx, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = SPILLED.search(done.stderr)
    assert found is not None, done.stderr
    return int(found[1]) + int(found[2])
