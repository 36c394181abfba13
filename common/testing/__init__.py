"""The oracle: managers held to one another, for this project's tests and for anybody's own manager."""

from boundedkv.testing.compare import differences
from boundedkv.testing.conformance import check_streams
from boundedkv.testing.differential import CASES, Difference, Pair

__all__ = ["CASES", "Difference", "Pair", "check_streams", "differences"]
