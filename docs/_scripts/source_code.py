"""Code on pages, taken from the repository when the site is built.

A page names what it wants to show, one file a line:

    ```source
    reference/attention.py: fold, finish
    ```

and the reader sees the functions as they are.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```source\n(?P<body>.*?)^```$", flags=re.MULTILINE | re.DOTALL)


def with_source(markdown: str, page: str) -> str:
    """A page with each `source` block replaced by the code that it names.

    Args:
        markdown: the page.
        page: its name, for messages.

    Raises:
        LookupError: a block names a file or a definition that does not exist.
    """

    def shown(block: re.Match[str]) -> str:
        try:
            return "\n\n".join(_fence(line) for line in block["body"].splitlines() if line.strip())
        except LookupError as missing:
            raise LookupError(f"{page}: {missing.args[0]}") from None

    return BLOCK.sub(shown, markdown)


def _fence(line: str) -> str:
    name, _, wanted = line.partition(":")
    names = [each.strip() for each in wanted.split(",") if each.strip()]
    return f'```py title="{name.strip()}"\n{code(name.strip(), names)}\n```'


def code(name: str, wanted: list[str]) -> str:
    """The text of some definitions of a file, or of the whole file.

    Args:
        name: a Python file, from the repository's root.
        wanted: functions, classes, constants, or `Class.method`; none for everything.

    Raises:
        LookupError: there is no such file or definition.
    """
    path = ROOT / name
    if not path.is_file():
        raise LookupError(f"no file {name!r}")
    text = path.read_text(encoding="utf-8")
    if not wanted:
        return text.rstrip()
    found = dict(_definitions(ast.parse(text).body))
    missing = [each for each in wanted if each not in found]
    if missing:
        raise LookupError(f"{name} defines no {', '.join(missing)}")
    lines = text.splitlines()
    return "\n\n\n".join(_dedented(lines[slice(*found[each])]) for each in wanted)


def _definitions(body: list[ast.stmt], owner: str = "") -> Iterator[tuple[str, tuple[int, int]]]:
    """Name and lines of each definition, decorators included."""
    for node in body:
        lines = (node.lineno - 1, node.end_lineno or node.lineno)
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) - 1
            yield owner + node.name, (first, lines[1])
            if isinstance(node, ast.ClassDef):
                yield from _definitions(node.body, f"{owner}{node.name}.")
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                for name in ast.walk(target):
                    if isinstance(name, ast.Name):
                        yield owner + name.id, lines


def _dedented(lines: list[str]) -> str:
    indent = len(lines[0]) - len(lines[0].lstrip())
    return "\n".join(line[indent:] for line in lines)
