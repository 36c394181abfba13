"""Compile the kernels for GPUs that are not here, and read what came out. Run it: `python tests/assembly.py --help`.

Launches are recorded, not listed: `fast/launch.py` is called as a manager calls it, with tensors that have no memory,
and Triton's own JIT turns each call into a kernel for the target. So what is read here is what would run there.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

if __name__ == "__main__" and os.environ.get("TRITON_INTERPRET") != "0":
    # Triton reads these when it is first imported: start again, and compile everything anew.
    with tempfile.TemporaryDirectory() as cache:
        fresh = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": cache, "TRITON_DUMP_PTXAS_LOG": "1"}
        sys.exit(subprocess.run([sys.executable, *sys.argv], env={**os.environ, **fresh}).returncode)

import torch
import triton
import triton.language as tl

from boundedkv import BoundedKVConfig, SinkWindow
from boundedkv.plan import ROW_INTS, BoundedPlan

COMPILED = Path(__file__).with_name("compiled")
TARGETS = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx90a", "gfx942", "gfx950")


class Case(NamedTuple):
    """A step of one config; everything that a launch is compiled for can be said here."""

    head_dim: int = 64
    tokens: int = 1
    ieee: bool = False
    q: str = "float32"
    kv: str = "float32"
    pool: str = "float32"
    bias: str = ""
    source: str = ""
    row_source: str = ""
    causal: bool = True
    group: int = 1
    retained: int = 100
    reverse: bool = False


# What a case can be, an axis each. Head dims: each size of a block, and one that does not fill its block.
AXES: dict[str, tuple[dict[str, Any], ...]] = {
    "head_dim": tuple({"head_dim": d} for d in (16, 64, 96, 128, 256)),
    "step": ({"tokens": 1}, {"tokens": 64}, {"ieee": True}),
    "types": (
        {},
        {"q": "float16", "kv": "float16", "pool": "float16"},
        {"q": "bfloat16", "kv": "bfloat16", "pool": "bfloat16"},
        {"q": "bfloat16", "kv": "float32", "pool": "float16"},
        {"q": "float16", "kv": "bfloat16", "pool": "float32"},
    ),
    "bias": tuple({"bias": kind} for kind in ("", "float32", "float16", "bfloat16")),
    "source": tuple({"source": kind} for kind in ("", "same", "float32", "float16", "bfloat16")),
    "row_source": tuple({"row_source": kind} for kind in ("", "same", "float32", "float16", "bfloat16")),
    "causal": ({"causal": True}, {"causal": False, "reverse": True}),
    "retained": ({"retained": 100}, {"retained": 2000, "group": 2}),
}


def covering(strength: int) -> tuple[Case, ...]:
    """Cases that hold every value of every axis (strength 1) or every pair of values of two axes (strength 2).

    The usual greedy construction: each case is grown axis by axis, by the value that meets most of what is missing.
    """
    names = list(AXES)
    missing = {
        frozenset(zip(chosen, values, strict=True))
        for chosen in itertools.combinations(names, strength)
        for values in itertools.product(*(range(len(AXES[name])) for name in chosen))
    }
    cases = []
    while missing:
        grown = dict(min(missing, key=lambda some: sorted((names.index(name), value) for name, value in some)))
        for name in [name for name in names if name not in grown]:
            gains = [
                sum(some <= {*grown.items(), (name, value)} for some in missing) for value in range(len(AXES[name]))
            ]
            grown[name] = gains.index(max(gains))
        missing -= {some for some in missing if some <= set(grown.items())}
        options = {key: value for name in names for key, value in AXES[name][grown[name]].items()}
        pool = options.get("pool", "float32")
        cases.append(Case(**{key: pool if value == "same" else value for key, value in options.items()}))
    return tuple(cases)


# What most calls are: the page shows these.
USUAL = tuple(
    Case(head_dim, **step, q=kind, kv=kind, pool=kind)
    for head_dim in (64, 128, 256)
    for step in ({}, {"tokens": 64}, {"ieee": True})
    for kind in ("float32", "bfloat16")
)
KINDS = {"quick": lambda: covering(1), "full": lambda: covering(1) + USUAL + covering(2)}


class Launch(NamedTuple):
    """One call of a kernel, as `fast/launch.py` makes it."""

    kernel: Any
    args: tuple[Any, ...]
    constants: dict[str, Any]


class Recorder(NamedTuple):
    """Stands where a kernel is launched, `kernel[grid](..)`, and writes it down."""

    kernel: Any
    launches: list[Launch]

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **constants: self.launches.append(Launch(self.kernel, args, constants))


def record(case: Case) -> list[Launch]:
    """The launches of one step: attention, the merge if it is split, and the write."""
    from boundedkv.fast import launch

    def empty(*shape: int, kind: str) -> torch.Tensor:
        return torch.empty(shape, dtype=getattr(torch, kind), device="meta")

    config = BoundedKVConfig(
        num_layers=1,
        num_heads=2,
        num_query_heads=2 * case.group,
        head_dim=case.head_dim,
        retention=SinkWindow(4, 4096),
        query_window=4096 if case.causal else None,
        max_source_len=8,
        max_slots=2,
        dtype=getattr(torch, case.pool),
        reverse_step_order=case.reverse,
    )
    heads, tokens, width = 2 * case.group, case.tokens, 2 * case.head_dim
    row_source = empty(2, 1, 2, 8, width, kind=case.row_source or "float32"), empty(3, kind="int32")
    inputs = launch.Inputs(
        q=empty(3, heads, tokens, case.head_dim, kind=case.q),
        k=empty(3, 2, tokens, case.head_dim, kind=case.kv),
        v=empty(3, 2, tokens, case.head_dim, kind=case.kv),
        pool=empty(2, 1, 2, config.slot_tokens, width, kind=case.pool),
        source=empty(2, 1, 2, 8, width, kind=case.source) if case.source else None,
        row_source=row_source if case.row_source else None,
        rel_bias=empty(3, heads, tokens, 5000, kind=case.bias) if case.bias else None,
    )
    table = empty(3, ROW_INTS, kind="int32")
    plan = BoundedPlan(table, (), case.retained, tokens, bool(case.source), bool(case.row_source))
    launches: list[Launch] = []
    with contextlib.ExitStack() as stack:
        for name in ("attention_kernel", "merge_kernel", "write_kernel"):
            recorder = Recorder(getattr(launch, name), launches)
            stack.enter_context(mock.patch.object(launch, name, recorder))
        launch.attend(config, plan, inputs, case.ieee)
        launch.write(config, plan, inputs)
    return launches


def name_of(launch: Launch) -> str:
    """The kernel with the constants that tell variants apart."""
    c = launch.constants
    words = [launch.kernel.__name__.removesuffix("_kernel"), f"D{c['D']}"]
    words += [f"Q{c['BLOCK_Q']}"] if "BLOCK_Q" in c else []
    words += [f"G{c['G']}"] if c.get("G", 1) > 1 else []
    words += [key.lower().removeprefix("has_") for key, value in c.items() if value is True]
    words += ["".join("fhb"[value] for key, value in c.items() if key.endswith("_TYPE"))]
    return "-".join(words)


class Target:
    """Stands where Triton expects a driver of a device, and compiles for that device without having it."""

    def __init__(self, name: str) -> None:
        from triton.backends.compiler import GPUTarget

        nvidia = name.startswith("sm_")
        self.name = name
        self._target = GPUTarget("cuda", int(name[3:]), 32) if nvidia else GPUTarget("hip", name, 64)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> str:
        return self.name

    def get_current_stream(self, device: Any = None) -> int:
        return 0

    def use(self) -> None:
        """Be the device that launches are made for."""
        from triton.runtime import driver

        driver.set_active(self)

    def compile(self, launch: Launch) -> dict[str, Any]:
        """Compile one launch: the texts of its stages and what `measure` finds."""
        log = io.StringIO()
        with contextlib.redirect_stdout(log):
            done = launch.kernel.warmup(*launch.args, grid=(1,), **launch.constants)
        texts = {stage: text for stage, text in done.asm.items() if isinstance(text, str) and stage != "source"}
        return {**texts, "shared": done.metadata.shared, **measure(done.asm, log.getvalue(), chunks(launch.constants))}


NUMBERS = ("warps", "registers", "spilled", "shared", "tile")
_INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/|\s+[vsdb]\w*_")


def chunks(constants: dict[str, Any]) -> int:
    """How often the loop over a key's elements turns in one tile."""
    return 1 if constants.get("IEEE", True) else -(-constants["D"] // 64)


def instructions(lines: list[str], turns: int) -> int:
    """How many instructions a warp takes for one turn of the main loop, in which an inner loop turns so often.

    The main loop is the shortest stretch that jumps back and holds nearly all of the work.
    """
    place: dict[str, int] = {}
    for i, line in enumerate(lines):
        if label := re.match(r"\s*(?:/\*([0-9a-f]{4,})\*/|(\.LBB\w+):)", line):
            place[(label[1] or label[2]).lstrip("0") or "0"] = i
    loops = []
    for i, line in enumerate(lines):
        jump = re.search(r"\bBRA\S*\s.*?0x([0-9a-f]+)|s_c?branch\S*\s+(\.LBB\w+)", line)
        start = place.get((jump[1] or jump[2]).lstrip("0")) if jump else None
        if start is not None and start < i:
            loops.append(range(start, i + 1))
    work = [sum(bool(re.search(r"MMA|F(MUL|ADD|FMA)|_f32", lines[i])) for i in loop) for loop in loops]
    main = min((loop for loop, n in zip(loops, work, strict=True) if n >= 0.9 * max(work)), key=len, default=range(0))
    inner = max((loop for loop in loops if set(loop) < set(main)), key=len, default=range(0))
    count = [sum(bool(_INSTRUCTION.match(lines[i])) for i in loop) for loop in (main, inner)]
    return count[0] + (turns - 1) * count[1]


def measure(asm: dict[str, Any], log: str, turns: int) -> dict[str, Any]:
    """Registers, bytes spilled and instructions a tile; None where the tools to tell are missing."""
    if "amdgcn" in asm:
        read = dict(re.findall(r"\.(\w+):\s+(\d+)$", asm["amdgcn"], flags=re.MULTILINE))
        registers, spilled = int(read["vgpr_count"]), int(read["private_segment_fixed_size"])
        return {"registers": registers, "spilled": spilled, "tile": instructions(asm["amdgcn"].splitlines(), turns)}
    from triton import knobs

    used = re.search(r"Used (\d+) registers", log)
    spill = re.search(r"(\d+) bytes spill stores", log)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        sass = subprocess.run([knobs.nvidia.cuobjdump.path, "-sass", file.name], capture_output=True, text=True).stdout
    registers, spilled = int(used[1]) if used else None, int(spill[1]) if spill else None
    return {"registers": registers, "spilled": spilled, "tile": instructions(sass.splitlines(), turns)}


@triton.jit
def fused(x_ptr):
    """A product and a sum, compiled with fusion on."""
    x = tl.load(x_ptr)
    tl.store(x_ptr, x * x + x)


@triton.jit
def folded(x_ptr):
    """The compiler adds a sum to a dot by starting the dot from it, and this one is no integer of 24 bits."""
    i = tl.arange(0, 16)
    pointers = x_ptr + i[:, None] * 16 + i[None, :]
    x = tl.load(pointers)
    half = x.to(tl.float16)
    tl.store(pointers, x * 256.0 + tl.dot(half, half))


@triton.jit
def exponential(x_ptr):
    tl.store(x_ptr, tl.exp2(tl.load(x_ptr)))


@triton.jit
def divided(x_ptr):
    tl.store(x_ptr, 3.0 / tl.load(x_ptr))


@triton.jit
def floored(x_ptr):
    tl.store(x_ptr, tl.floor(tl.load(x_ptr)))


@triton.jit
def inexact(x_ptr):
    """A fused multiply and add whose product is rounded in the contract."""
    x = tl.load(x_ptr)
    tl.store(x_ptr, tl.fma(x, 3.0, x))


@triton.jit
def summed(x_ptr):
    """A sum in whatever order the layout gives, of numbers that are no integers."""
    i = tl.arange(0, 128)
    tl.store(x_ptr, tl.sum(tl.load(x_ptr + i)))


@triton.jit
def unstated(x_ptr):
    """A masked load that leaves open what it gives where it is masked."""
    i = tl.arange(0, 128)
    tl.store(x_ptr + i, tl.load(x_ptr + i, mask=i < 100))


# Small kernels that break the contract, to see that the tests notice.
WRONG = (fused, folded, exponential, divided, floored, inexact, summed, unstated)


def table(kernels: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What is measured of each kernel, by name."""
    return {kernel["kernel"]: {number: kernel[number] for number in NUMBERS} for kernel in kernels}


def page_table() -> str:
    """What most calls are compiled to, from the golden files, as the page shows it."""
    lines = ["| path | types | head_dim | " + " | ".join(TARGETS) + " |", "|---" * (3 + len(TARGETS)) + "|"]
    golden = {target: json.loads((COMPILED / f"{target}.json").read_text(encoding="utf-8")) for target in TARGETS}
    for step, path in (({}, "decode"), ({"tokens": 64}, "prefill"), ({"ieee": True}, "ieee")):
        for kind in ("float32", "bfloat16"):
            for head_dim in (64, 128, 256):
                case = Case(head_dim, **step, q=kind, kv=kind, pool=kind)
                row = [path, kind, str(head_dim)]
                for target in TARGETS:
                    kernel = golden[target]["kernels"][name_of(record(case)[0])]
                    issued = round(kernel["tile"] * kernel["warps"] / 64)
                    row.append(f"{kernel['registers']} / {kernel['shared'] / 1024:.0f} / {issued}")
                lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def chosen(kind: str) -> dict[str, Launch]:
    """Launches by name: the `quick` ones, the `full` list, or the `wrong` ones."""
    if kind == "wrong":
        x = (torch.empty(256, device="meta"),)
        return {kernel.__name__: Launch(kernel, x, {"enable_fp_fusion": kernel is fused}) for kernel in WRONG}
    return {name_of(launch): launch for case in KINDS[kind]() for launch in record(case)}


def main() -> None:
    """Compile, measure, print a table, and write the texts for a test to read."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", help=f"sm_NN or gfxNNN; {', '.join(TARGETS)} if none is named")
    parser.add_argument("--kind", choices=(*KINDS, "wrong"), default="quick")
    parser.add_argument("--golden", action="store_true", help="write what is measured to tests/compiled/")
    parser.add_argument(
        "--page", action="store_true", help="put the golden files' table into docs/assembly.md, no more"
    )
    parser.add_argument("--texts", type=Path, help="write each compiled kernel to this folder, as JSON")
    options = parser.parse_args()
    if options.page:
        Target("sm_90").use()
        page = Path(__file__).parents[1] / "docs" / "assembly.md"
        before, _, rest = page.read_text(encoding="utf-8").partition("<!-- table -->\n")
        after = rest.partition("<!-- end of table -->")[2]
        page.write_text(f"{before}<!-- table -->\n{page_table()}\n<!-- end of table -->{after}", encoding="utf-8")
        return
    for name in options.targets or TARGETS:
        target = Target(name)
        target.use()
        results = []
        for kernel, launch in chosen(options.kind).items():
            result = {
                "target": name,
                "kernel": kernel,
                "constants": launch.constants,
                "warps": launch.constants.get("num_warps", 4),
            }
            try:
                result |= target.compile(launch)
            except Exception as error:  # of many classes: what a compiler refuses, a test shall say
                result |= {"error": str(error)}
            if options.texts is not None:
                options.texts.mkdir(parents=True, exist_ok=True)
                (options.texts / f"{name}-{kernel}.json").write_text(json.dumps(result), encoding="utf-8")
            results.append(result)
            numbers = [f"{key} {result.get(key, '-')}" for key in NUMBERS]
            print(f"{name:7} {kernel:55} {', '.join(numbers)} {result.get('error', '')}", flush=True)
        if options.golden:
            told = {"triton": triton.__version__, "kernels": table(results)}
            (COMPILED / f"{name}.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
