"""Compiles kernels for a GPU that need not be there."""

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

CAPABILITIES = (80, 90, 100)
"""Of A100, of H100 and H200, of B200."""
SHARED_BYTES = {80: 163 * 2**10, 90: 227 * 2**10, 100: 227 * 2**10}
"""The most that a program may have."""
REGISTERS = 2**16
"""Of a multiprocessor, which its threads share."""
POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
MULTIPLES = ("width", "stride", "vocab")
"""Sizes that are multiples of 16 where models are real."""
WARP = 32
USED = re.compile(r"Used (\d+) registers")
SPILLED = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


@dataclass(frozen=True)
class Compiled:
    """What a kernel needs on a GPU, and its code. registers: of a thread."""

    ptx: str
    registers: int
    spilled_bytes: int
    shared_bytes: int


def compiled(
    kernel: Any,
    kinds: Mapping[str, str],
    constants: Mapping[str, Any],
    capability: int,
    *,
    warps: int = 4,
    stages: int = 3,
) -> Compiled:
    """Compile for sm_`capability`.

    kinds: Triton's type of an argument, i32 where there is none. constants: those that it has not
    are left out.
    """
    signature: dict[str, str] = {}
    aligned: dict[tuple[int], list[list[Any]]] = {}
    for place, name in enumerate(kernel.arg_names):
        kind = kinds.get(name, "i32")
        signature[name] = "constexpr" if name in constants else kind
        if kind.startswith("*") or name in MULTIPLES:
            aligned[(place,)] = [["tt.divisibility", 16]]
    used = {name: value for name, value in constants.items() if name in signature}
    found = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=used, attrs=aligned),
        target=GPUTarget("cuda", capability, WARP),
        options={"num_warps": warps, "num_stages": stages},
    )
    ptx, said = found.asm["ptx"], _assembled(found.asm["ptx"])
    registers, spilled = USED.search(said), SPILLED.search(said)
    assert registers is not None, said
    assert spilled is not None, said
    spilled_bytes = int(spilled[1]) + int(spilled[2])
    return Compiled(ptx, int(registers[1]), spilled_bytes, found.metadata.shared)


def _assembled(ptx: str) -> str:
    """What the assembler that Triton brings says of a kernel."""
    target = re.search(r"\.target (\w+)", ptx)
    assert target is not None
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    name = "ptxas-blackwell" if target[1].startswith("sm_1") else "ptxas"
    command = [tools / name, "-v", f"--gpu-name={target[1]}", "-", "-o", "/dev/null"]
    done = subprocess.run(command, input=ptx, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr
