"""`python -m shared.lab.kernel_compiler [kernel ...]`: compile the Triton kernels for GPUs that need not be there.

Triton brings its own assembler, so that a machine without a GPU can make the machine code of any, offline, and
count what it uses. Prints one JSON object a kernel, data type and architecture. Needs a process in which
TRITON_INTERPRET is not set: interpreted kernels can't be compiled.
"""
from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ARCHITECTURES = (80, 90)  # A100, H100
TYPES = {"bfloat16": "bf16", "float32": "fp32"}
INDICES = {"block_tables", "seq_lens", "query_start_loc", "slot_mapping"}
FLOATS = {"partial_out", "partial_lse", "cos", "sin"}  # float32 whatever the model's type
ALIGNED = {"q_stride", "k_stride", "v_stride", "out_stride", "slot_stride", "row_size", "size", "block_size"}
SAME = {"q", "k", "v", "keys", "values", "out", "x", "added", "summed", "weight", "gate", "up"}


def cases(dtype: str) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Each kernel with the constants that the wrappers give it: Qwen3-0.6B's, and the default model's heads."""
    import torch

    from shared import kernels, kernels_attention

    for group, head_dim in ((2, 128), (3, 64)):
        tile = kernels_attention.tile_size(head_dim, getattr(torch, dtype))
        shape = dict(GROUP=group, HEAD_DIM=head_dim, DIM=head_dim, TILE=tile)
        yield kernels_attention.decode_kernel, dict(**shape, ROWS=16)
        yield kernels_attention.prefill_kernel, dict(**shape, ROWS=tile)
    yield kernels_attention.store_kernel, dict(ROW=8 * 128)
    yield kernels_attention.combine_kernel, dict(HEAD_DIM=128, DIM=128, SPLITS=16)
    yield kernels.rotary_kernel, dict(HEADS=16, KV_HEADS=8, HALF=64)
    yield kernels.rms_norm_kernel, dict(ADD=True, WIDTH=1024)
    yield kernels.silu_and_mul_kernel, dict(WIDTH=1024)


def compile_kernel(kernel: Any, constants: dict[str, Any], dtype: str, arch: int) -> dict[str, Any]:
    """Compile one kernel to machine code and say what a program of it uses."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: argument_type(name, constants, TYPES[dtype]) for name in kernel.arg_names}
    aligned = (i for i, (name, kind) in enumerate(signature.items()) if kind[0] == "*" or name in ALIGNED)
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}  # as Triton finds them when it launches a kernel
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32))
    return {
        "kernel": kernel.__name__, "dtype": dtype, "arch": f"sm_{arch}", "constants": constants,
        "ptx_lines": len(compiled.asm["ptx"].splitlines()), "cubin_bytes": len(compiled.asm["cubin"]),
        "tensor_core_instructions": len(re.findall(r"\b(?:mma\.sync|wgmma\.mma)", compiled.asm["ptx"])),
        "shared_bytes": compiled.metadata.shared, "warps": compiled.metadata.num_warps,
        **resources(compiled.asm["cubin"]),
    }  # fmt: skip


def argument_type(name: str, constants: dict[str, Any], dtype: str) -> str:
    if name in constants:
        return "constexpr"
    if name in SAME or name in FLOATS or name in INDICES:
        return "*" + (dtype if name in SAME else "fp32" if name in FLOATS else "i64")
    return "fp32" if name in ("scale", "eps") else "i32"


def resources(cubin: bytes) -> dict[str, int]:
    """Registers of a thread, and bytes that did not fit into them, as the machine code declares them."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", said))
    return {"registers": int(found["REG"]), "spilled_bytes": int(found["STACK"]) + int(found["LOCAL"])}


def compile_all(names: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """All kernels, or those of these names in bfloat16."""
    for dtype in ("bfloat16",) if names else TYPES:
        for kernel, constants in cases(dtype):
            for arch in ARCHITECTURES if not names or kernel.__name__ in names else ():
                yield compile_kernel(kernel, constants, dtype, arch)


if __name__ == "__main__":
    for record in compile_all(sys.argv[1:]):
        print(json.dumps(record), flush=True)
