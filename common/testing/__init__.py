"""The oracle: managers held to one another, for this project's tests and for anybody's own manager."""

from boundedkv.testing.closeness import Close
from boundedkv.testing.compare import differences
from boundedkv.testing.conformance import check_manager
from boundedkv.testing.differential import CASES, Difference, Pair
from boundedkv.testing.features import FEATURES
from boundedkv.testing.report import Report
from boundedkv.testing.samples import Sample

__all__ = ["CASES", "FEATURES", "Close", "Difference", "Pair", "Report", "Sample", "check_manager", "differences"]
