"""The house stands as CONTRIBUTING.md draws it: arrows between folders, public names, docstrings, no Triton needed."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import boundedkv

ROOT = Path(__file__).parents[1]
PACKAGES = {"common": "boundedkv", "reference": "boundedkv.reference", "fast": "boundedkv.fast"}
FILES = [(folder, path) for folder in PACKAGES for path in sorted((ROOT / folder).rglob("*.py"))]
IDS = [path.relative_to(ROOT).as_posix() for _, path in FILES]

# Folder -> what none of its files may import.
BANNED = {
    "common": ("boundedkv.reference", "boundedkv.fast", "triton"),
    "reference": ("boundedkv.fast", "triton"),
    "fast": ("boundedkv.reference",),
}

PUBLIC = """
    SinkWindow BoundedKVConfig BoundedKVSpec EngineResourceInfo Resource BoundedKVManager build available_backends
    Segment StreamPosition BoundedKVStep BucketKey SlotLease GraphSlotSpec StepContext AdmitOutcome ADMIT_OK
    AllocationFailed AdmitRuntimeError RowLayout BoundedPlan PLAN_VERSION NUMERICS_VERSION Session
    self_test DeviceSelfTestError
""".split()

# One request through one step; formatted with a backend's name.
STEP = """
import torch
from boundedkv import BoundedKVConfig, BoundedKVStep, Segment, SinkWindow, StepContext, StreamPosition, build
config = BoundedKVConfig(num_layers=1, num_heads=1, head_dim=4, retention=SinkWindow(sink=1, window=2))
manager = build(config, backend={backend!r})
for written in range(5):
    step = BoundedKVStep((Segment("a", 1),), {{"a": StreamPosition(source_len=0, written=written)}})
    context = StepContext(request_ids=("a",))
    assert manager.admit(step, context).ok
    manager.plan(step, context)
    v = torch.eye(4)[written % 4].reshape(1, 1, 1, 4)
    out = manager.attend(0, torch.zeros(1, 1, 1, 4), torch.ones(1, 1, 1, 4), v)
    manager.commit(step, context)
# The last query sees positions 0 (the sink), 2 and 3 (the window) and itself, 4: all alike, so a quarter each.
assert out.tolist() == [[[[0.5, 0.0, 0.25, 0.25]]]], out
"""

# As if Triton were not installed: every finder of modules is asked for anything but it.
NO_TRITON = """
import sys
class Without:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, *args):
        return None if name.partition(".")[0] == "triton" else self.finder.find_spec(name, *args)
    def __getattr__(self, name):
        return getattr(self.finder, name)
sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""


def run_fresh(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process that has imported nothing of ours; its kernels are interpreted, GPU or not."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)


def imported_modules(path: Path, package: str) -> Iterator[str]:
    """Every module that an import statement of the file names, wherever it stands, relative ones resolved."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ""
            if node.level:
                base = ".".join(package.split(".")[: len(package.split(".")) - (node.level - 1)])
            module = ".".join(part for part in (base, node.module) if part)
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def package_of(folder: str, path: Path) -> str:
    """The dotted name of the package that a file belongs to."""
    return ".".join((PACKAGES[folder], *path.parent.relative_to(ROOT / folder).parts))


def is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def test_every_folder_is_seen():
    assert {folder for folder, _ in FILES} == set(PACKAGES)
    assert len(FILES) > 10


@pytest.mark.parametrize(("folder", "path"), FILES, ids=IDS)
def test_arrows_point_one_way(folder, path):
    crossed = [
        module
        for module in imported_modules(path, package_of(folder, path))
        for banned in BANNED[folder]
        if is_within(module, banned)
    ]
    assert not crossed, f"{path.relative_to(ROOT)} imports {crossed}, but {folder} imports none of {BANNED[folder]}"


@pytest.mark.parametrize(
    ("line", "package", "found"),
    [
        ("import boundedkv.fast.kernels", "boundedkv", "boundedkv.fast.kernels"),
        ("from boundedkv import fast", "boundedkv", "boundedkv.fast"),
        ("from . import fast", "boundedkv", "boundedkv.fast"),
        ("from .. import fast", "boundedkv.reference", "boundedkv.fast"),
        ("from ..fast.manager import FastManager", "boundedkv.testing", "boundedkv.fast.manager"),
        ("def f():\n    import triton.language as tl", "boundedkv", "triton.language"),
    ],
)
def test_import_finder_sees(line, package, found, tmp_path):
    file = tmp_path / "file.py"
    file.write_text(line, encoding="utf-8")
    assert found in set(imported_modules(file, package))


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name(name):
    assert hasattr(boundedkv, name)
    assert name in boundedkv.__all__


def test_every_exported_name_exists():
    assert len(set(boundedkv.__all__)) == len(boundedkv.__all__)
    assert [name for name in boundedkv.__all__ if not hasattr(boundedkv, name)] == []


def test_backends_are_where_their_names_say():
    from boundedkv.fast import FastManager
    from boundedkv.reference import ReferenceManager

    for manager in (ReferenceManager, FastManager):
        assert issubclass(manager, boundedkv.BoundedKVManager)


def undocumented(tree: ast.Module, documented_elsewhere: frozenset[str]) -> Iterator[str]:
    """Public classes, functions and methods without a docstring; a method that the interface documents needs none."""
    for node in tree.body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef) or node.name.startswith("_"):
            continue
        if not ast.get_docstring(node):
            yield node.name
        for child in node.body if isinstance(node, ast.ClassDef) else []:
            if not isinstance(child, ast.FunctionDef) or child.name.startswith("_"):
                continue
            if child.name not in documented_elsewhere and not ast.get_docstring(child):
                yield f"{node.name}.{child.name}"


@pytest.mark.parametrize(("folder", "path"), FILES, ids=IDS)
def test_public_is_documented(folder, path):
    interface = frozenset(name for name in dir(boundedkv.BoundedKVManager) if not name.startswith("_"))
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), f"{path.relative_to(ROOT)} does not say what it is"
    assert list(undocumented(tree, interface if folder in ("reference", "fast") else frozenset())) == []


def test_import_loads_neither_triton_nor_a_backend():
    done = run_fresh("import sys, boundedkv; print(*sys.modules); boundedkv.build; print(*sys.modules)")
    assert done.returncode == 0, done.stderr
    bare, loaded = (line.split() for line in done.stdout.splitlines())
    assert "torch" not in bare
    assert "boundedkv.config" in loaded
    unwanted = ("triton", "boundedkv.fast", "boundedkv.reference", "boundedkv.testing", "boundedkv.demo")
    assert [module for module in loaded for name in unwanted if is_within(module, name)] == []


def test_hidden_triton_is_not_found():
    done = run_fresh(NO_TRITON + "import importlib.util; print(importlib.util.find_spec('triton')); import triton")
    assert done.stdout.split() == ["None"]
    assert "No module named 'triton'" in done.stderr


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_reference_runs_without_triton(backend):
    done = run_fresh(NO_TRITON + STEP.format(backend=backend) + "print(type(manager).__name__)")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["ReferenceManager"]


def test_fast_without_triton_says_what_to_install():
    done = run_fresh(NO_TRITON + STEP.format(backend="fast"))
    assert done.returncode != 0
    error = done.stderr.strip().splitlines()[-1]
    assert error.startswith(("ImportError: ", "ModuleNotFoundError: ", "RuntimeError: ")), done.stderr
    assert "install" in error
    assert "triton" in error.lower()


@pytest.mark.parametrize("backend", ["reference", "fast"])
def test_step_runs_in_a_fresh_process(backend):
    done = run_fresh(STEP.format(backend=backend))
    assert done.returncode == 0, done.stderr


def test_auto_on_a_cpu_is_the_reference():
    from boundedkv.reference import ReferenceManager

    config = boundedkv.BoundedKVConfig(num_layers=1, num_heads=1, head_dim=4, retention=boundedkv.SinkWindow(1, 2))
    assert type(boundedkv.build(config, device="cpu")) is ReferenceManager


def test_unknown_backend_lists_the_known_ones():
    config = boundedkv.BoundedKVConfig(num_layers=1, num_heads=1, head_dim=4, retention=boundedkv.SinkWindow(1, 2))
    known = boundedkv.available_backends()
    assert {"reference", "fast"} <= set(known)
    with pytest.raises(ValueError, match="no-such-backend") as refused:
        boundedkv.build(config, backend="no-such-backend")
    assert all(name in str(refused.value) for name in known)


def test_triton_imported_first_without_a_gpu_is_told():
    code = (
        "import triton, torch\ntorch.cuda.is_available = lambda: False\nfrom boundedkv import *\n"
        "config = BoundedKVConfig(1, 1, 4, SinkWindow(0, 1))\nbuild(config, backend='fast')"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "triton was imported before the fast backend" in done.stderr
    assert "set TRITON_INTERPRET=1" in done.stderr


@pytest.mark.parametrize(("triton", "numpy", "works"), [("3.6.0", "2.4.1", False), ("3.6.0", "2.3.5", True)])
def test_an_interpreter_that_does_not_work_with_this_numpy_is_told(triton, numpy, works):
    installed = f"import torch, numpy, triton\ntriton.__version__, numpy.__version__ = {triton!r}, {numpy!r}\n"
    done = run_fresh(installed + STEP.format(backend="fast"))
    assert (done.returncode == 0) == works
    assert ("install 'numpy<2.4' or 'triton>=3.7'" in done.stderr) != works
