"""The public names of `boundedkv.testing`."""

from boundedkv.testing.attention import check_attention
from boundedkv.testing.closeness import Close
from boundedkv.testing.compare import differences
from boundedkv.testing.conformance import check_manager
from boundedkv.testing.differential import CASES, Difference, Pair
from boundedkv.testing.features import FEATURES
from boundedkv.testing.report import CaseReport, Report
from boundedkv.testing.samples import Sample
from boundedkv.testing.shadow import Shadow
from boundedkv.testing.traces import Trace, read_trace, record, replay

__all__ = [
    "CASES",
    "FEATURES",
    "CaseReport",
    "Close",
    "Difference",
    "Pair",
    "Report",
    "Sample",
    "Shadow",
    "Trace",
    "check_attention",
    "check_manager",
    "differences",
    "read_trace",
    "record",
    "replay",
]
