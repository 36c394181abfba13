"""A folder that shows a difference again: the calls as two traces, one of each manager's answers, and a script."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from boundedkv.config import BoundedKVConfig
from boundedkv.testing.traces import TraceWriter
from boundedkv.testing.wrapper import Answer

_SCRIPT = '''\
"""Makes the calls of reference.safetensors again, and holds them to what the reference answered.

    python repro.py                           on the reference alone: all alike
    python repro.py PACKAGE.MODULE:FACTORY    on a manager of yours as well, made by FACTORY(config, device, kv_dtype)
    python repro.py PACKAGE.MODULE:FACTORY cuda
"""

import importlib
import os
import sys
from pathlib import Path

import torch

from boundedkv import build
from boundedkv.testing import read_trace, replay

trace = Path(__file__).parent / "reference.safetensors"
config = read_trace(trace).config
print("the reference:", replay(trace, build(config, backend="reference")), "calls alike")
if len(sys.argv) > 1:
    sys.path.insert(0, os.getcwd())
    module, _, name = sys.argv[1].partition(":")
    factory = getattr(importlib.import_module(module), name)
    device = torch.device(sys.argv[2] if len(sys.argv) > 2 else "cpu")
    print(f"{sys.argv[1]}:", replay(trace, factory(config, device, None)), "calls alike")
'''


class Call(NamedTuple):
    """One call that led to a difference.

    Attributes:
        name: which call of the interface, or of a trace's own.
        arguments: what it was given.
        judged: what came of it for the judged manager; None if that is not to be compared.
        reference: the same for the reference.
    """

    name: str
    arguments: Mapping[str, Any]
    judged: Answer | None = None
    reference: Answer | None = None


def write_repro(folder: Path, message: str, config: BoundedKVConfig, calls: Sequence[Call]) -> Path:
    """Write what shows a difference again.

    Args:
        folder: where a new folder for it is put; made if need be.
        message: the difference in words.
        config: the managers' config.
        calls: the calls, first to last.

    Returns:
        The new folder, which appears whole or not at all: difference.txt, reference.safetensors and judged.safetensors
        (the same calls with each one's answers), repro.py.

    Raises:
        TypeError: a trace cannot hold an argument or an answer.
        OSError: the folder cannot be written.
    """
    names = (f"difference-{os.getpid()}-{number}" for number in count(1))
    path = next(folder / name for name in names if not (folder / name).exists())
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.mkdir(parents=True)
    try:
        (unfinished / "difference.txt").write_text(message + "\n", encoding="utf-8")
        (unfinished / "repro.py").write_text(_SCRIPT, encoding="utf-8")
        for side in ("reference", "judged"):
            writer = TraceWriter(config)
            for call in calls:
                writer.add(writer.arguments(call.name, call.arguments), getattr(call, side))
            writer.save(unfinished / f"{side}.safetensors")
        unfinished.rename(path)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return path
