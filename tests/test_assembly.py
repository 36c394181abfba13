"""What the compilers make of the kernels obeys the numerics contract on every target, and fits there.

`assembly.py` compiles in a process of its own; here its texts are read. The interpreter can show none of this: a
multiply fused with an add, a sum folded into a dot, a subnormal flushed give other bits on a GPU only.
"""

import json
import math
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import triton
from assembly import COMPILED, TARGETS, table

PROGRAM = Path(__file__).with_name("assembly.py")
# Bytes of shared memory that one program can have there.
SHARED = {target: kib << 10 for target, kib in zip(TARGETS, (163, 227, 227, 99, 64, 64, 160), strict=True)}
KIND = os.environ.get("BOUNDEDKV_ASSEMBLY", "quick")  # or "full": half an hour of one core
GOLDEN = {target: json.loads((COMPILED / f"{target}.json").read_text(encoding="utf-8")) for target in TARGETS}

# Triton's own text: each operation on floats that the contract knows. A division is `tt.precise_divf`.
TRITON_FLOATS = set(
    """arith.addf arith.subf arith.mulf arith.cmpf arith.maxnumf arith.minnumf arith.fptosi arith.sitofp arith.extf
    arith.truncf math.fma math.absf""".split()
)
TRITON_OPAQUE = ("tt.extern_elementwise", "tt.elementwise_inline_asm", "tt.dot_scaled", "tt.fp_to_fp")
MAGIC = "1.258291e+07 0x4B400000".split()

# PTX: correctly rounded, nothing flushed. Whatever else names a float type is refused.
PTX_FLOATS = re.compile(
    r"""(add|sub|mul|fma)\.rn\.f32(x2|\.f16)? | div\.rn\.f32 | (min|max)(\.NaN)?\.f32 | redux\.sync\.max\.f32
    | (abs|neg|selp)\.f32 | setp\.\w+(\.(and|or))?\.f(32|16|16x2)
    | cvt\.rn\.(f16|f16x2)\.f32 | cvt\.rzi\.s32\.f32 | cvt\.rn\.f32\.s32 | cvt\.f32\.f16
    | mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.f16\.f16\.f32
    | wgmma\.mma_async\.sync\.aligned\.m\d+n\d+k16\.f32\.f16\.f16 | tcgen05\.mma\.cta_group::1\.kind::f16""",
    re.VERBOSE,
)
# AMD: the same; a division is expanded where it stands, between v_div_scale and v_div_fixup.
AMD_FLOATS = re.compile(
    r"""v_(pk_)?(add|sub|subrev|mul|fma)_f32 | v_(fmac|fmamk|fmaak)_f32 | v_fma_mix(lo|hi)_f16 | v_fma_mix_f32
    | v_(min|max|min3|max3)_f32 | v_pk_(min|max)_f32 | v_cmpx?_\w+_f(16|32) | v_pack_b32_f16
    | v_cvt_(i32_f32|f32_i32|f16_f32|f32_f16|pk_f16_f32) | v_div_(scale|fmas|fixup)_f32 | v_rcp_f32
    | v_mfma_f32_(32x32x(8|16)|16x16x(16|32))_?f16""",
    re.VERBOSE,
)
MODES = {
    f"float_{kind}_mode_{bits}": value for kind, value in (("round", "0"), ("denorm", "3")) for bits in ("32", "16_64")
}
TENSOR_CORES = re.compile(r"^\s+(?:@!?%p\d+\s+)?(mma\.sync|wgmma\.mma_async|tcgen05\.mma|v_mfma)", re.MULTILINE)
DIVISION = re.compile(r"^\s+(div\.rn\.f32|v_div_fixup_f32)", re.MULTILINE)
FUSED = re.compile(r"fma\.rn\.f32(x2)?|v_(?:fma|fmac|fmamk|fmaak|pk_fma)_f32|v_fma_mix")


class Value(NamedTuple):
    """An operation of Triton's text and what it is made of."""

    operation: str
    operands: tuple["Value", ...]
    text: str


def values(text: str) -> Iterator[Value]:
    """Every operation, in order. Names are those of their region: they end with it."""
    scopes: list[dict[str, Value]] = [{}]
    for line in text.splitlines():
        line = re.sub(r"\s+loc\(.*", "", line.strip())
        if line.startswith("}"):
            scopes.pop()
        if match := re.match(r'(?:(%[\w.]+)(?::\d+)? = )?"?([a-z_]+\.[a-z_0-9.]+)"?(.*)', line):
            known = {name: value for scope in scopes for name, value in scope.items()}
            names = re.findall(r"%[\w.]+(?:#\d+)?", match[3])
            value = Value(match[2], tuple(known.get(name, Value("?", (), name)) for name in names), line)
            scopes[-1][match[1]] = value
            yield value
        if line.endswith("{"):
            scopes.append({})


def through_layout(value: Value) -> Value:
    """What a value is before it is spread or reshaped."""
    while value.operation in ("tt.expand_dims", "tt.broadcast", "tt.splat", "tt.reshape", "tt.trans", "tt.bitcast"):
        value = value.operands[0]
    return value


def is_power_of_two(value: Value) -> bool:
    """Whether it is one for certain (or zero): a constant, or an exponent shifted into its place."""
    value = through_layout(value)
    if value.operation == "arith.select":
        return all(is_power_of_two(operand) for operand in value.operands[1:])
    if value.operation == "arith.constant":
        number = re.search(r"(?:dense<|constant )(-?[\d.]+[eE][+-]\d+)", value.text)
        return number is not None and abs(math.frexp(np.float32(number[1]))[0]) in (0, 0.5)
    return value.operation == "arith.shli" and "dense<23>" in value.operands[1].text


def is_exact_sum(value: Value) -> bool:
    """Whether a dot starts from zero, or from a dot that does."""
    if value.operation == "tt.dot":
        return is_exact_sum(value.operands[2])
    return value.operation == "arith.constant" and "dense<0.000000e+00>" in value.text


def is_integer(value: Value) -> bool:
    """Whether it was rounded to an integer by adding and subtracting."""
    value = through_layout(value)
    return value.operation == "arith.subf" and any(magic in value.operands[1].text for magic in MAGIC)


def triton_findings(text: str) -> Iterator[str]:
    """What breaks the contract in Triton's own text, the same for all targets of a vendor."""
    reduced = None
    for value in values(text):
        name = value.operation
        if (re.match(r"math\.|arith\.\w*f(p\w+)?$", name) and name not in TRITON_FLOATS) or name in TRITON_OPAQUE:
            yield f"not an operation of the contract: {value.text}"
        if name == "math.fma" and not any(map(is_power_of_two, value.operands[:2])):
            yield f"a fused multiply and add whose product may round: {value.text}"
        if name == "tt.dot":
            if not is_exact_sum(value.operands[2]):
                yield f"a dot that starts from something else than an exact sum: {value.text}"
            if not re.search(r"xf16> \* tensor<\S+xf16> -> tensor<\S+xf32>", value.text):
                yield f"a dot of other types than float16 into float32: {value.text}"
        if name == "tt.load" and len(value.operands) == 2:
            yield f"a masked load that leaves open what it gives there: {value.text}"
        if name == "tt.reduce":
            reduced = value.operands[0]
        if name == "arith.addf" and reduced is not None and "tensor" not in value.text and not is_integer(reduced):
            yield f"a sum in no stated order of what may be no integers: {value.text}"
        if name == "tt.reduce.return":
            reduced = None


def width(match: re.Match[str]) -> int:
    return 2 if "x2" in match[0] or "pk_" in match[0] else 1


def llvm_findings(text: str) -> Iterator[str]:
    """A compiler that may contract, reassociate or approximate says so in LLVM's text."""
    from_integers = set(re.findall(r"(%\d+) = [su]itofp", text))  # never NaN, and LLVM says so
    for line in text.splitlines():
        product = re.search(r" = fmul nnan (?:float|<\d+ x float>) (%\d+), ", line)
        if product and product[1] in from_integers:
            continue
        if re.match(r"\s", line) and re.search(r"\b(fast|contract|reassoc|afn|arcp|nsz|nnan|ninf)\b|!fpmath", line):
            yield f"LLVM may take liberties: {line.strip()}"
    if re.search(r'"denormal-fp-math(-f32)?"="(?!ieee)', text):
        yield "LLVM is told to flush subnormals"


def llvm_fused(text: str) -> int:
    """How many single products and sums LLVM is told to fuse."""
    found = re.findall(r"call (?:<(\d+) x float>|float) @llvm\.fma\.", text)
    return sum(int(lanes or 1) for lanes in found)


def assembly_findings(text: str, fused: int, allowed: re.Pattern[str]) -> Iterator[str]:
    """Every float instruction is one of the contract's, and no more of them are fused than LLVM was told to."""
    opcodes = Counter(re.findall(r"^\s+(?:@!?%p\d+\s+)?([a-z][\w.:]+)", text, flags=re.MULTILINE))
    for opcode, times in opcodes.items():
        plain = re.sub(r"_(e32|e64|dpp|sdwa)+$", "", opcode)
        floats = re.search(
            r"(?<![a-z])t?f(16|32|64)|bf16|approx|ftz|(ex2|lg2|sin|cos|tanh|rsqrt|rcp|exp|log)[._]", opcode
        )
        if floats and not opcode.startswith((".", "ld.", "st.", "mov.")) and not allowed.fullmatch(plain):
            yield f"not an instruction of the contract: {opcode} ({times} times)"
    divisions = opcodes["v_div_fixup_f32"]
    if opcodes["v_rcp_f32_e32"] != divisions:
        yield f"{opcodes['v_rcp_f32_e32']} reciprocals for {divisions} divisions"
    # AMD's compiler may do one for both halves of a register, and round each to float16 where it lies.
    halves = Counter(re.findall(r"v_fma_mix(?:lo|hi)_f16 v\d+, (.*)", text))
    found = sum(width(match) for match in FUSED.finditer(text)) - sum(times // 2 for times in halves.values())
    if found > fused + 5 * divisions:  # fewer where two were the same
        yield f"{found} fused instructions, where {fused} are asked for and {divisions} divisions take 5 each"
    modes = dict(re.findall(r"\.amdhsa_(float_\w+_mode_\w+) (\d)", text))
    if modes != (MODES if "v_" in text else {}):
        yield f"modes are {modes}, but should be {MODES}: round to nearest even, flush no subnormal"


def findings(kernel: dict) -> list[str]:
    """Everything about a compiled kernel that the contract or the device does not allow."""
    if "error" in kernel:
        return [f"does not compile: {kernel['error']}"]
    assembly, allowed = (kernel["amdgcn"], AMD_FLOATS) if "amdgcn" in kernel else (kernel["ptx"], PTX_FLOATS)
    found = [*triton_findings(kernel["ttir"]), *llvm_findings(kernel["llir"])]
    found += assembly_findings(assembly, llvm_fused(kernel["llir"]), allowed)
    if kernel["shared"] > SHARED[kernel["target"]]:
        found.append(
            f"takes {kernel['shared']} bytes of shared memory of {SHARED[kernel['target']]}: cannot be launched"
        )
    constants = kernel["constants"]
    if constants.get("enable_fp_fusion") is not False:
        found.append("is launched without enable_fp_fusion=False, and some versions of Triton fuse unless told not to")
    attends, merges = kernel["kernel"].startswith("attention"), kernel["kernel"].startswith("merge")
    if bool(TENSOR_CORES.search(assembly)) != (attends and not constants["IEEE"]):
        found.append("tensor cores belong in the default path, and only there")
    if bool(DIVISION.search(assembly)) != (merges or (attends and not constants["BY_SPLIT"])):
        found.append("a correctly rounded division belongs where a result is finished, and only there")
    return found


def compiled(folder: Path, *arguments: str) -> list[dict]:
    """What `assembly.py` makes of these arguments, in a process of its own."""
    command = [sys.executable, str(PROGRAM), *arguments, "--texts", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    print(done.stdout)
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.iterdir())]


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_obey_the_contract(target, tmp_path):
    kernels = compiled(tmp_path, target, "--kind", KIND)
    found = {kernel["kernel"]: list(dict.fromkeys(findings(kernel))) for kernel in kernels}
    wrong = "\n".join(f"{name}: {finding}" for name, some in found.items() for finding in some)
    assert not wrong, f"compiled for {target}:\n{wrong}"

    assert_whole(kernels)
    if triton.__version__ == GOLDEN[target]["triton"]:
        golden = GOLDEN[target]["kernels"]
        changed = {name: (golden.get(name), now) for name, now in table(kernels).items() if golden.get(name) != now}
        assert not changed, f"not as in tests/compiled/ (golden, now): write it anew, and say why: {changed}"


def assert_whole(kernels: list[dict]) -> None:
    """Every value that a constant can take is compiled."""
    for kernel in ("attention", "merge", "write"):
        seen = [launch["constants"] for launch in kernels if launch["kernel"].startswith(kernel)]
        for name in filter(str.isupper, seen[0]):
            values = {constants[name] for constants in seen}
            if name.endswith("_TYPE"):
                assert kernel != "attention" or values == {0, 1, 2}, f"{kernel}: {name} was only {values}"
            elif isinstance(seen[0][name], bool):
                assert values == {False, True}, f"{kernel}: {name} was only {values}"


# Registers spilled, in bytes: everything that does. docs/assembly.md tells why.
SPILLING = {
    ("sm_80", "attention-D128-Q32-causal-alike-bbbbbbb"): 24,
    ("sm_80", "attention-D256-Q16-G2-bias-source-row_source-by_split-hhhhhff"): 20,
    ("sm_80", "attention-D256-Q16-causal-bias-source-hbbfffb"): 20,
    ("sm_90", "attention-D256-Q16-causal-source-row_source-hbbfbbh"): 52,
    ("sm_90", "attention-D256-Q1-causal-ieee-alike-bbbbbbb"): 16,
    ("sm_100", "attention-D256-Q1-causal-ieee-alike-fffffff"): 24,
    ("sm_100", "attention-D256-Q1-causal-ieee-alike-bbbbbbb"): 8,
    ("sm_120", "attention-D256-Q16-causal-alike-fffffff"): 8,
    ("sm_120", "attention-D256-Q1-causal-ieee-alike-fffffff"): 36,
}


def test_no_variant_spills_registers_but_those_told():
    """The golden files have every pair of options on every target."""
    spilling = {
        (target, name): numbers["spilled"]
        for target in TARGETS
        for name, numbers in GOLDEN[target]["kernels"].items()
        if numbers["spilled"]
    }
    assert spilling == SPILLING


# Kernel -> what is found of it in Triton's text, and in the assembly of NVIDIA and AMD; None: only the former can tell.
WRONG = {
    "fused": (None, "1 fused instructions, where 0", "1 fused instructions, where 0"),
    "folded": ("a dot that starts from something else", None, None),
    "exponential": ("math.exp2", "ex2.approx.ftz", "v_exp_f32"),
    "divided": ("arith.divf", "div.full", None),
    "floored": ("math.floor", ".ftz", "v_floor_f32"),
    "inexact": ("whose product may round", None, None),
    "summed": ("a sum in no stated order", None, None),
    "unstated": ("a masked load that leaves open", None, None),
}


def test_checks_notice_what_breaks_the_contract(tmp_path):
    kernels = compiled(tmp_path, "sm_90", "gfx942", "--kind", "wrong")
    assert len(kernels) == 2 * len(WRONG)
    for kernel in kernels:
        in_triton, in_ptx, in_amd = WRONG[kernel["kernel"]]
        amd = "amdgcn" in kernel
        text, allowed = (kernel["amdgcn"], AMD_FLOATS) if amd else (kernel["ptx"], PTX_FLOATS)
        seen = list(triton_findings(kernel["ttir"]))
        assert any(in_triton in finding for finding in seen) if in_triton else not seen, kernel["kernel"]
        seen = list(assembly_findings(text, llvm_fused(kernel["llir"]), allowed))
        expected = in_amd if amd else in_ptx
        assert any(expected in finding for finding in seen) if expected else not seen, (kernel["kernel"], seen)


def test_checks_notice_a_compiler_that_takes_liberties():
    assert list(llvm_findings("  %3 = fmul contract float %1, %2\n")) != []
    assert list(llvm_findings("  %3 = fdiv float %1, %2, !fpmath !4\n")) != []
    assert list(llvm_findings('attributes #0 = { "denormal-fp-math-f32"="preserve-sign" }')) != []
    assert list(llvm_findings('  %3 = fmul float %1, %2\nattributes #0 = { "denormal-fp-math-f32"="ieee" }')) == []


def test_checks_notice_flushed_subnormals_on_amd():
    modes = "".join(f"\t\t.amdhsa_{name} {value}\n" for name, value in MODES.items())
    code = "\tv_add_f32_e32 v0, v0, v1\n"
    assert list(assembly_findings(code + modes, 0, AMD_FLOATS)) == []
    assert list(assembly_findings(code + modes.replace("mode_32 3", "mode_32 0"), 0, AMD_FLOATS)) != []
