"""What only a GPU can tell: the self test, the tests marked `gpu`, the benchmark. `make gpu` runs it; see docs/gpu.md.

Nearly all of the time goes into compiling, a kernel for each mixture of options. So each part is spread over processes,
which need nothing but pytest and share Triton's cache on disk.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
NO_TESTS = 5  # pytest's exit status where it has selected none
STRETCH = 6  # tests: few enough to be spread evenly, and worth a process
WORKERS = min(16, os.cpu_count() or 1)

# The device, and which families: every n-th from the i-th on.
SELF_TEST = """
import sys
from boundedkv import selftest
device, i, n = sys.argv[1], *map(int, sys.argv[2:])
selftest.FAMILIES = dict(list(selftest.FAMILIES.items())[i::n])
report = selftest.self_test(device)
print(report.results, "results as numerics version", report.numerics_version, "says:", *report.families)
"""
SELF_TESTS = 4

ABOUT = """
import platform, sys, numpy, torch, triton
if sys.argv[1] == "cuda" and not torch.cuda.is_available():
    sys.exit("torch sees no GPU")
name = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
print(f"{name}, Python {platform.python_version()}, torch {torch.__version__}, triton {triton.__version__}, "
      f"numpy {numpy.__version__}")
"""


class Part(NamedTuple):
    """A command that has ended."""

    status: int
    text: str


def python(device: str, limit: float, *arguments: str) -> Part:
    """Run Python in the root, its kernels compiled unless the device is the CPU, and stop it at the limit."""
    environment = {**os.environ, "TRITON_INTERPRET": "1" if device == "cpu" else "0"}
    command = [sys.executable, *arguments]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, errors="replace", timeout=limit
        )
    except subprocess.TimeoutExpired as late:
        return Part(124, f"{(late.stdout or b'').decode(errors='replace')}\nstopped after {limit:.0f} s")
    return Part(done.returncode, done.stdout if done.returncode == 0 else f"{done.stdout}\n{done.stderr}")


def run_self_test(device: str, limit: float) -> list[Part]:
    """The self test, its families spread over processes."""
    with ThreadPoolExecutor(SELF_TESTS) as pool:
        return list(
            pool.map(
                lambda i: python(device, limit, "-c", SELF_TEST, device, str(i), str(SELF_TESTS)), range(SELF_TESTS)
            )
        )


def marked_tests(device: str, limit: float) -> tuple[Part, list[str]]:
    """What collecting the tests marked `gpu` came to, and their ids."""
    part = python(device, limit, "-m", "pytest", "-m", "gpu", "--collect-only", "-q", "-p", "no:cacheprovider")
    return part, [line for line in part.text.splitlines() if line.startswith("tests/") and "::" in line]


def run_tests(device: str, limit: float, tests: Sequence[str]) -> list[Part]:
    """Run tests in as many processes as there are workers, each a stretch of the list: neighbours share kernels."""

    def run(stretch: Sequence[str]) -> Part:
        with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
            file.write("\n".join(stretch))
            file.flush()
            return python(device, limit, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", f"@{file.name}")

    with ThreadPoolExecutor(WORKERS) as pool:
        return list(pool.map(run, [tests[i : i + STRETCH] for i in range(0, len(tests), STRETCH)]))


def run_benchmark(device: str, limit: float, *options: str) -> Part:
    """The benchmark; on the CPU a small one."""
    tiny = ["--tiny"] if device == "cpu" else []
    return python(device, limit, "tests/benchmark.py", "--device", device, *tiny, *options)


def main(arguments: list[str] | None = None) -> int:
    """Run all parts, whatever comes of each; 0 if all went well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: a rehearsal, interpreted")
    parser.add_argument("--limit", type=float, default=150, metavar="S", help="seconds for one part (default: 150)")
    options = parser.parse_args(arguments)
    started = time.monotonic()

    def tell(name: str, well: bool, text: str) -> bool:
        print(
            f"{name} {'passed' if well else 'FAILED'}, {time.monotonic() - started:.0f} s since the start", flush=True
        )
        print(text.strip(), end="\n\n", flush=True)
        return well

    device, limit = options.device, options.limit
    about = python(device, limit, "-c", ABOUT, device)
    print(about.text)
    if about.status:
        return 1
    parts = run_self_test(device, limit)
    well = tell("self test", not any(part.status for part in parts), "\n".join(part.text.strip() for part in parts))

    with ThreadPoolExecutor(1) as pool:
        compiling = pool.submit(run_benchmark, device, limit, "--rounds", "0")
        part, tests = marked_tests(device, limit)
        parts = [part, *run_tests(device, limit, tests)]
        compiling.result()
    failed = [part.text for part in parts if part.status not in (0, NO_TESTS)]
    ends = [part.text.strip().splitlines()[-1] for part in parts[1:]]
    well &= tell(f"{len(tests)} tests marked gpu", bool(tests) and not failed, "\n".join([*failed, *ends]))

    part = run_benchmark(device, limit, *(["--rounds", "1"] if device == "cpu" else []))
    well &= tell("benchmark", part.status == 0, part.text)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
