"""English for the demo: the docstrings of the Python standard library on this machine.

The text is read from source files as a syntax tree, so no module is imported, and it is never shipped: only the
weights trained on one part of it are. The modules in `HELD_OUT` were kept away from training; the demo streams them.
"""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

HELD_OUT = ("argparse", "configparser", "fractions", "ipaddress", "shutil", "statistics", "textwrap", "threading")
"""Modules the model has not seen. Each is one file with plenty of prose in Python 3.11, 3.12 and 3.13."""

SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})

BEGIN = 0
"""The symbol every stream starts with, at stream position 0. The first one: the model embeds it as zero."""

_LETTERS = "\n" + "".join(map(chr, range(32, 127)))
_SYMBOL = {letter: index for index, letter in enumerate(_LETTERS, start=BEGIN + 1)}
_UNKNOWN = _SYMBOL["?"]

NUM_SYMBOLS = 1 + len(_LETTERS)
"""The beginning, the line feed and printable ASCII."""


def encode(text: str) -> Tensor:
    """Symbols of `text`, int64 `[len(text)]`; a letter outside ASCII becomes a question mark."""
    return torch.tensor([_SYMBOL.get(letter, _UNKNOWN) for letter in text], dtype=torch.int64)


def decode(symbols: Tensor) -> str:
    """The text of `symbols`, without beginnings. The inverse of `encode` on ASCII.

    >>> decode(encode("sink + window"))
    'sink + window'
    """
    return "".join(_LETTERS[symbol - 1] for symbol in symbols.tolist() if symbol != BEGIN)


def library_folder() -> Path:
    """The folder that holds the standard library's source files.

    Raises:
        FileNotFoundError: This Python comes without them.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    if not (folder / "argparse.py").is_file():
        raise FileNotFoundError("the demo reads the standard library's docstrings, but this Python has no source files")
    return folder


def docstrings(file: Path) -> list[str]:
    """Every docstring of one source file, in the order of the syntax tree's walk; none if it does not parse."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return []
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented))
    return [text for text in found if text]


def training_files() -> Iterator[Path]:
    """The source files the model may learn from, in a fixed order: all but tests and the held-out modules."""
    folder = library_folder()
    held_out = {folder / f"{module}.py" for module in HELD_OUT}
    for file in sorted(folder.rglob("*.py")):
        if file not in held_out and not SKIPPED_FOLDERS.intersection(file.relative_to(folder).parts):
            yield file


def training_text() -> str:
    """All docstrings of the training files; one that a held-out module repeats word for word is left out."""
    folder = library_folder()
    unseen = {text for module in HELD_OUT for text in docstrings(folder / f"{module}.py")}
    texts = (text for file in training_files() for text in docstrings(file))
    return "\n\n".join(dict.fromkeys(text for text in texts if text not in unseen))


def held_out_text(module: str) -> str:
    """The docstrings of one held-out module, joined by blank lines."""
    return "\n\n".join(docstrings(library_folder() / f"{module}.py"))


def streams(module: str, length: int) -> Tensor:
    """A held-out module cut into streams, int64 `[count, length]`, each opened by `BEGIN`. A rest is dropped."""
    symbols = encode(held_out_text(module))
    count = len(symbols) // (length - 1)
    bodies = symbols[: count * (length - 1)].view(count, length - 1)
    return torch.cat([torch.full((count, 1), BEGIN), bodies], dim=1)
