"""What an implementation may leave out. Everything else is asked of every one."""

from __future__ import annotations

from collections.abc import Iterable

FEATURES = {
    "batch": "several requests in one step",
    "lookahead": "span < T: own tokens that are seen by the step and do not join the stream yet",
    "ragged": "BoundedKVStep.tokens: rows with fewer real tokens than the step brings",
    "padding": "padding rows",
    "layers": "several layers that share a plan",
    "rows": "rows_per_request > 1",
    "grouped_heads": "num_query_heads > num_heads",
    "any_head_dim": "a head_dim below 16, or no power of two",
    "sources": "source prefixes in a shared bank",
    "row_source": "source prefixes by row, StreamPosition.source == -1",
    "retention_by_length": "a retention that depends on the source length",
    "rel_bias": "rel_bias, a score term by distance",
    "query_window": "the causal rule, query by query",
    "window_includes_step": "the step's span counts towards the window",
    "reverse_step_order": "the span joins the stream last first",
    "ieee": "attend(ieee=True)",
    "float16": "float16 elements",
    "bfloat16": "bfloat16 elements",
    "mixed_types": "q, k, v, source, rel_bias and slots of different element types",
    "strides": "tensors that are not contiguous",
    "extremes": "NaN, infinities, subnormals and 3e38 among the inputs",
    "poisoned_memory": "memory that no position says was written holds NaN",
    "long_rows": "windows, sinks and prefixes longer than 64 or 512 entries",
    "far_positions": "streams before stream position 64, 512, 2**24, 2**31 - 1, ...",
    "spare": "spare ring entries, and rewind_request",
    "export": "export_request and import_request",
    "leases": "persistent plan tables of leased graph slots",
    "capture": "plans under StepContext.capture, and their replay",
    "refusals": "wrong steps and calls out of turn, refused with the reference's words",
}


def chosen(features: Iterable[str] | None = None, without: Iterable[str] = ()) -> frozenset[str]:
    """The features to be checked.

    Args:
        features: names out of `FEATURES`; None means all of them.
        without: names to leave out of these.

    Raises:
        ValueError: a name that is not known; the message lists those that are.
    """
    if isinstance(features, str) or isinstance(without, str):
        raise ValueError(f"features is {features!r} and without is {without!r}, but each should be a list of names")
    named = set(FEATURES) if features is None else set(features)
    left_out = set(without)
    unknown = sorted(map(str, (named | left_out) - set(FEATURES)))
    if unknown:
        raise ValueError(f"no feature is called {', '.join(map(repr, unknown))}; known are {', '.join(FEATURES)}")
    return frozenset(named - left_out)
