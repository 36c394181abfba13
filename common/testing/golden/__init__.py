"""The golden traces: recorded once, shipped with the package, so that bits cannot drift unnoticed.

`python -m boundedkv.testing.golden` records them anew with the reference, after a change that raised a version.
"""

from pathlib import Path

FOLDER = Path(__file__).parent


def golden_traces() -> tuple[Path, ...]:
    """The shipped traces, by name."""
    return tuple(sorted(FOLDER.glob("*.safetensors")))
