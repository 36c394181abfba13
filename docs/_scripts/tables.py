"""Writes the table of the plan format from the code's columns: `python docs/_scripts/tables.py`."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from boundedkv.plan import COLUMNS

PAGE = Path(__file__).parents[1] / "plan-format.md"
BEGIN = "<!-- columns: written by docs/_scripts/tables.py -->\n"
END = "<!-- end -->\n"

HOLDS = {
    "slot": "the slot that the row reads and writes",
    "source": "index of the row's prefix in `source`; -1: it is read from `row_source`",
    "tokens": "how many of the row's own tokens are real; 2^31 - 1 for as many as the step brings",
    "length": "entries of the stream when the step starts: own token t stands at stream position `length + t`",
    "sink": "stream positions below this are sinks",
    "read_sink_source": "sinks that lie in the source",
    "read_sink_slot": "sinks that lie in the slot",
    "read_window_source": "the window's part in the source",
    "read_ring": "the window's part in the ring",
    "read_ring_wrapped": "its rest, where the ring wraps",
    "write_sink": "own tokens that become sinks",
    "write_ring": "own tokens that go into the ring",
    "write_ring_wrapped": "their rest, where the ring wraps",
}


def group_of(column: str) -> str:
    """What a column belongs to: a read's start and its length are one thing."""
    if not column.startswith(("read_", "write_")):
        return column
    return column.rpartition("_")[0]


def columns() -> str:
    """The table, one line for each read, write and single number."""
    lines = ["| column | name | what it holds |", "|---|---|---|"]
    for group, members in groupby(enumerate(COLUMNS), lambda member: group_of(member[1])):
        numbers, names = zip(*members, strict=True)
        lines.append(
            f"| {', '.join(map(str, numbers))} | {', '.join(f'`{name}`' for name in names)} | {HOLDS[group]} |"
        )
    return "\n".join(lines) + "\n"


def with_columns(page: str) -> str:
    """The page with its table written anew."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{columns()}{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_columns(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
