"""What this machine is and how fast it is, measured: the numbers that the roofline needs."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shared.default_model import DEFAULT_MODEL, cache_home, missing_file

GIGA = 1e9


@dataclass(frozen=True)
class Measurement:
    """A median of `n` runs with the lowest and highest, in `unit`."""

    what: str
    median: float
    low: float
    high: float
    n: int
    unit: str

    @classmethod
    def of(cls, what: str, samples: Sequence[float], unit: str) -> Measurement:
        return cls(what, statistics.median(samples), min(samples), max(samples), len(samples), unit)

    def __str__(self) -> str:
        return f"{self.median:.1f} {self.unit} (median of {self.n}, {self.low:.1f} to {self.high:.1f})"


def measured_bandwidth(megabytes: int = 256, n: int = 5, device: str = "cpu") -> Measurement:
    """GB/s at which `device` reads a tensor larger than its caches: the sum of float32 numbers."""
    import torch

    numbers = torch.ones(megabytes * 1_000_000 // 4, device=device)  # [megabytes * 250_000]
    gigabytes = numbers.numel() * numbers.element_size() / GIGA
    return _rates("memory read", gigabytes, "GB/s", n, lambda: numbers.sum(), device)


def measured_flops(size: int = 1024, n: int = 5, device: str = "cpu", dtype=None) -> Measurement:
    """GFLOP/s of one square matrix product, 2 * size**3 operations, in `dtype` (default float32)."""
    import torch

    a, b = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))  # [size, size]
    return _rates("matrix product", 2 * size**3 / GIGA, "GFLOP/s", n, lambda: a @ b, device)


def timed(what: str, work: Callable[[], object], n: int = 5) -> Measurement:
    """Milliseconds of `work()`: the median of `n` runs, after one to warm up."""
    work()
    times = []
    for _ in range(n):
        started = time.perf_counter()
        work()
        times.append((time.perf_counter() - started) * 1e3)
    return Measurement.of(what, times, "ms")


def environment() -> dict[str, str]:
    """What the course runs on, each fact as text; nothing is measured and nothing is downloaded."""
    import torch

    facts = {"python": platform.python_version(), "torch": torch.__version__}
    facts["system"] = platform.platform(terse=True)
    facts["processor"] = f"{_cores()} cores, {torch.get_num_threads()} threads in torch"
    facts["memory"] = _memory()
    facts["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU only"
    facts["transformers"] = importlib.metadata.version("transformers")
    present = missing_file(cache_home() / "models" / DEFAULT_MODEL) is None
    facts["model"] = f"{DEFAULT_MODEL}: {'present' if present else 'not here yet; the first load fetches it'}"
    return facts


def environment_report(measure: bool = True) -> str:
    """Lines of text for the environment check; with `measure`, the speed of memory and arithmetic too."""
    lines = [f"{name:13}{value}" for name, value in environment().items()]
    for device in _devices() if measure else []:
        for measurement in (measured_bandwidth(device=device), measured_flops(device=device)):
            lines.append(f"{device:5}{measurement.what}: {measurement}")
    return "\n".join(lines)


def _devices() -> list[str]:
    import torch

    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def _rates(what: str, amount: float, unit: str, n: int, work: Callable[[], object],
           device: str) -> Measurement:
    """`amount` per second over `n` runs, after one run to warm up."""
    _seconds(work, device)
    rates = [amount / _seconds(work, device) for _ in range(n)]
    return Measurement.of(what, rates, unit)


def _seconds(work: Callable[[], object], device: str) -> float:
    import torch

    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    work()
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _cores() -> int:
    """Cores that this process may use."""
    usable = getattr(os, "sched_getaffinity", None)
    return len(usable(0)) if usable else os.cpu_count() or 1


def _memory() -> str:
    import psutil

    state = psutil.virtual_memory()
    return f"{state.total / GIGA:.1f} GB, {state.available / GIGA:.1f} GB of it available"
