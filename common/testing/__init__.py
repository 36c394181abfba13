"""The oracle: managers held to one another, for this project's tests and for anybody's own manager."""

from boundedkv.testing.compare import differences
from boundedkv.testing.conformance import check_streams
from boundedkv.testing.differential import CASES, Difference, Pair
from boundedkv.testing.shadow import Shadow
from boundedkv.testing.traces import Trace, read_trace, record, replay

__all__ = [
    "CASES",
    "Difference",
    "Pair",
    "Shadow",
    "Trace",
    "check_streams",
    "differences",
    "read_trace",
    "record",
    "replay",
]
