"""Records the golden traces, where they are shipped from or in another folder, with larger ones beside them there."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from boundedkv.backends import build
from boundedkv.testing.golden import FOLDER
from boundedkv.testing.golden.streams import LARGER, STREAMS, Stream
from boundedkv.testing.traces import record


def write_golden(folder: Path, streams: Mapping[str, Stream] = STREAMS) -> tuple[Path, ...]:
    """Record streams with the reference.

    Args:
        folder: where a file for each is put; made if need be.
        streams: name -> config and stream.

    Returns:
        The files. Files of those names are replaced.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, (config, stream) in streams.items():
        paths.append(folder / f"{name}.safetensors")
        with record(build(config, backend="reference"), paths[-1]) as manager:
            stream(manager)
    return tuple(paths)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the traces that the command line asks for, and say which."""
    parser = argparse.ArgumentParser(prog="python -m boundedkv.testing.golden", description="Record the golden traces.")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write here, the larger ones too")
    out = parser.parse_args(arguments).out
    for path in write_golden(FOLDER) if out is None else write_golden(out, STREAMS | LARGER):
        print(f"{path}  {path.stat().st_size / 1024:.0f} KB")


if __name__ == "__main__":
    main()
