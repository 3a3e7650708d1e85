"""The compiled operations of cpu_*.cpp: built once with the system's C++ compiler, called through ctypes.

The library is kept in the cache folder under a name that depends on source, compiler and CPU. It is written
beside its place and then renamed, so that two processes that build at the same time do no harm.
"""
from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from shared.default_model import cache_home
from shared.errors import EngineError

FOLDER = Path(__file__).parent
SOURCES = {name: FOLDER / f"cpu_{name}.cpp" for name in ("fused", "attention", "linear", "layers")}
HEADERS = [FOLDER / f"cpu_{name}.h" for name in ("numbers", "vectors", "linear")]
SUFFIXES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
COMPILE = ("-O3", "-std=c++17", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
# Flags to compile and to link, the first that work. The OpenMP runtime is not linked: its symbols resolve
# to the one that torch has loaded, so that both share their threads.
ATTEMPTS = (
    (("-march=native", "-mprefer-vector-width=512", "-fopenmp"), ()),  # x86
    (("-mcpu=native", "-fopenmp"), ()),  # ARM
    (("-mcpu=native", "-Xclang", "-fopenmp"), ("-undefined", "dynamic_lookup")),  # Apple's clang
    (("-fopenmp-simd",), ()),  # one thread
    ((), ()),
)


class KernelsUnavailable(EngineError):
    """The compiled operations cannot be had here; the plain path needs none of them."""


@functools.cache
def kernels() -> ctypes.CDLL:
    """The library, built if this machine has not built it yet; raises KernelsUnavailable."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "c++", "g++", "clang++"))), None)
    if compiler is None:
        raise KernelsUnavailable("no C++ compiler found: c++, g++ or clang++, or the one that CXX names")
    errors = []
    for compile_flags, link_flags in ATTEMPTS:
        try:
            return declared(ctypes.CDLL(str(built(compiler, compile_flags, link_flags))))
        except (OSError, subprocess.CalledProcessError) as error:
            errors.append(str(getattr(error, "stderr", "") or error).strip())
    raise KernelsUnavailable(f"{compiler} could not build cpu_*.cpp: {errors[-1][-500:]}")


def built(compiler: str, compile_flags: tuple[str, ...], link_flags: tuple[str, ...]) -> Path:
    """The file of the library for these flags, made if it is not there."""
    folder = cache_home() / "kernels"
    wanted = folder / f"cpu_kernels-{fingerprint(compiler, *compile_flags, *link_flags)}.so"
    if not wanted.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            library = Path(scratch, "kernels.so")

            def compiled(source: Path) -> str:
                code = str(Path(scratch, f"{source.stem}.o"))
                run(compiler, *COMPILE, *compile_flags, "-c", str(source), "-o", code)
                return code

            with ThreadPoolExecutor() as pool:
                codes = list(pool.map(compiled, SOURCES.values()))
            run(compiler, "-shared", *link_flags, *codes, "-o", str(library))
            ctypes.CDLL(str(library))  # a library that does not load is no library
            os.replace(library, wanted)
    return wanted


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def fingerprint(compiler: str, *flags: str) -> str:
    """Changes with everything the library depends on: source, compiler, flags, and the CPU it is made for."""
    cpu_info = Path("/proc/cpuinfo")
    features = [line for line in cpu_info.read_text().splitlines() if line.lower().startswith(("flags", "features"))] \
        if cpu_info.exists() else [platform.processor()]
    texts = [path.read_text() for path in (*HEADERS, *SOURCES.values())]
    parts = [*texts, run(compiler, "--version"), *flags, platform.platform(), *sorted(set(features))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


ARGUMENTS = {  # p: a tensor's memory, or None; i: a count; f: a number
    "add_rms_norm": "ppppiif",
    "rotary": "pppppiiiif",
    "swiglu": "ppii",
    "paged_attention": "pipipippppp" "ii" "pp" "iiiif",
    "linear": "ppppiii",
    "decoder_layers": "pipppp",
}


# The structures of cpu_layers.cpp, field by field.


class Weights(ctypes.Structure):
    """Addresses of one layer's weights, None for those it does not have."""

    _fields_ = [(name, ctypes.c_void_p) for name in (
        "input_norm", "post_norm", "q_norm", "k_norm",
        "qkv", "qkv_bias", "o", "o_bias", "gate_up", "gate_up_bias", "down", "down_bias",
    )]  # fmt: skip


class Shape(ctypes.Structure):
    """What all layers of a model share."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("hidden", "intermediate", "heads", "kv_heads", "head_dim")),
        ("eps", ctypes.c_float), ("qk_eps", ctypes.c_float),
    ]  # fmt: skip


class Step(ctypes.Structure):
    """What a step brings: addresses of the cache and of the batch, and their sizes."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in (
            "keys", "values", "cos", "sin", "slots", "block_tables", "query_start_loc", "seq_lens")),
        *((name, ctypes.c_int64) for name in ("layer_size", "table_width", "block_size", "requests", "tokens")),
    ]  # fmt: skip


def declared(library: ctypes.CDLL) -> ctypes.CDLL:
    """Tell ctypes the types of every argument."""
    types = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float}
    for name, letters in ARGUMENTS.items():
        for suffix in SUFFIXES.values():
            function = getattr(library, f"{name}_{suffix}", None)
            if function is not None:
                function.argtypes, function.restype = [types[letter] for letter in letters], None
    return library


def operation(name: str, dtype: torch.dtype):
    """The compiled function for one type of stored numbers; raises KernelsUnavailable."""
    if dtype not in SUFFIXES:
        raise KernelsUnavailable(f"dtype {dtype}: the compiled operations have {sorted(SUFFIXES.values())}")
    function = getattr(kernels(), f"{name}_{SUFFIXES[dtype]}", None)
    if function is None:
        raise KernelsUnavailable(f"{name}: not compiled for {SUFFIXES[dtype]} on this CPU")
    return function


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
