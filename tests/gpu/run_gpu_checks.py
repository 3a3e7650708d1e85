"""Everything that only a GPU can show, in one run of less than 8 minutes. Needs torch, triton and transformers.

    python -m tests.gpu.run_gpu_checks --model FOLDER     from the root of the repository
    python -m tests.gpu.run_gpu_checks --dry-run          every line that a CPU can run, with a tiny model

Each check reports ok, failed, or skipped with the reason; each measurement is printed. Both go to
evidence/gpu_checks.json and evidence/gpu_measurements.json with hardware, versions, date and command.
The exit status is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_args(arguments)
    os.environ["TRITON_INTERPRET"] = "1" if args.dry_run else "0"  # before Triton is imported
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch

    if not args.dry_run and not torch.cuda.is_available():
        print("no CUDA device: nothing was checked (--dry-run runs what a CPU can)", file=sys.stderr)
        return 1
    from tests.gpu.checks import CHECKS
    from tests.gpu.measures import MEASURES
    from tests.gpu.setting import Setting

    setting = Setting.here(args.dry_run, args.model)
    deadline = time.monotonic() + args.budget
    checks = [run(check, setting, deadline) for check in CHECKS if wanted(check, args.only)]
    measured = [run(measure, setting, deadline) for measure in MEASURES if wanted(measure, args.only)]
    save(args, "gpu_checks", "what must be right on a GPU", checks)
    save(args, "gpu_measurements", "each part of the optimisation stack alone and together", measured)
    statuses = [record["status"] for record in checks + measured]
    print(", ".join(f"{statuses.count(status)} {status}" for status in ("ok", "failed", "skipped")))
    return 1 if "failed" in statuses or not statuses else 0


def parse_args(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, with a tiny model and Triton's interpreter")
    parser.add_argument("--model", help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--only", nargs="*", default=[], help="names of checks or measurements")
    parser.add_argument("--budget", type=float, default=450, help="seconds after which nothing more is started")
    parser.add_argument("--save", type=Path, default=ROOT / "evidence", help="folder of the records")
    return parser.parse_args(arguments)


def wanted(function: Callable, only: Sequence[str]) -> bool:
    return not only or function.__name__ in only


def run(function: Callable, setting: Any, deadline: float) -> dict[str, Any]:
    """Run one check or measurement and say how it went; nothing is left out in silence."""
    from tests.gpu.measures import release
    from tests.gpu.setting import Skipped

    release()  # of what the one before held
    started, record = time.monotonic(), {"name": function.__name__, "status": "ok"}
    try:
        if started > deadline:
            raise Skipped("the time was spent before this one")
        record["seen"] = function(setting)
    except Skipped as reason:
        record.update(status="skipped", reason=str(reason))
    except Exception as error:
        trace = traceback.format_exc().splitlines()[-12:]
        record.update(status="failed", reason=f"{type(error).__name__}: {error}", trace=trace)
    record["seconds"] = round(time.monotonic() - started, 1)
    print(f"{record['status']:8}{record['name']}  {record['seconds']} s  {record.get('reason', '')}", flush=True)
    for seen in record["seen"] if isinstance(record.get("seen"), list) else ():
        share = f", {seen['share_of_bandwidth']:.0%} of the bandwidth" if "share_of_bandwidth" in seen else ""
        print(f"          {seen['what']}: {seen['median']:.2f} {seen['unit']} (n={seen['n']}{share})", flush=True)
    return record


def machine() -> dict[str, str]:
    import torch

    facts = {"python": platform.python_version(), "system": platform.platform()}
    facts |= {name: version(name) for name in ("torch", "triton", "transformers")}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "device": properties.name, "memory": f"{properties.total_memory / 1e9:.0f} GB",
            "multiprocessors": str(properties.multi_processor_count),
            "compute_capability": f"{properties.major}.{properties.minor}", "cuda": str(torch.version.cuda),
        }  # fmt: skip
    else:
        facts["device"] = "CPU only"
    return facts


def save(args: argparse.Namespace, name: str, what: str, results: list[dict[str, Any]]) -> None:
    command = "python -m tests.gpu.run_gpu_checks" + " --dry-run" * args.dry_run
    record = {
        "what": what, "command": command, "date": datetime.date.today().isoformat(), "dry_run": args.dry_run,
        "machine": machine(), "results": results,
    }  # fmt: skip
    args.save.mkdir(parents=True, exist_ok=True)
    (args.save / f"{name}.json").write_text(json.dumps(record, indent=2, default=str) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
