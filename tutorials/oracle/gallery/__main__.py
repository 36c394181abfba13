"""Finds every fault of the gallery and prints, or writes, the page that shows them.

cd tutorials/oracle
python -m gallery                    the whole page
python -m gallery WindowOneShort     one fault
python -m gallery --write            docs/gallery.md, a few minutes
"""

import argparse
import inspect
import re
from pathlib import Path

import torch

from . import GALLERY, SECTIONS

PAGE = Path(__file__).parents[3] / "docs" / "gallery.md"
INTRODUCTION = """\
# Gallery of faults

{count} faults as KV caches really have them, each planted in the reference or in an attention function, each found by
[the oracle](oracle.md), each with its message as it was printed. The code is in `tutorials/oracle/gallery/`. Above each
fault stands what `check_manager` or `check_attention` was told to draw: `@found_with("batch")` is `features=["batch"]`.
The word before a message is the case that found it.

`cd tutorials/oracle && python -m gallery --write` makes this page. Which calls a message shows depends on hypothesis'
version; what it says of them does not.
"""


def title(name):
    """A fault's name as words."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|_", " ", name)
    return words[0].upper() + words[1:].lower()


def section(module):
    """A section of the page."""
    faults = [planted for planted in GALLERY.values() if planted.fault.__module__ == module.__name__]
    return "\n".join([inspect.getdoc(module), *map(entry, faults)])


def entry(planted):
    """A fault: its code and its message."""
    source = inspect.getsource(planted.fault).rstrip()
    message = planted.message() or "NOT FOUND"
    return f"\n### {title(planted.fault.__name__)}\n\n```py\n{source}\n```\n\n```text\n{message}\n```"


def page():
    """The page."""
    sections = (f"\n## {name}\n\n{section(module)}\n" for name, module in SECTIONS.items())
    return INTRODUCTION.format(count=len(GALLERY)) + "".join(sections)


def main():
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m gallery", description="Finds every fault of the gallery.")
    parser.add_argument("faults", nargs="*", metavar="FAULT", help="these alone")
    parser.add_argument("--write", action="store_true", help="write docs/gallery.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.write:
        PAGE.write_text(page(), encoding="utf-8")
    elif options.faults:
        print("\n".join(entry(GALLERY[name]) for name in options.faults))
    else:
        print(page())


if __name__ == "__main__":
    main()
