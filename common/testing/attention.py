"""For those who have an attention function and no manager: it is judged inside the reference."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from boundedkv.config import BoundedKVConfig
from boundedkv.manager import BoundedKVManager
from boundedkv.testing.conformance import EXAMPLES, Factory, Numerics, check_manager
from boundedkv.testing.features import FEATURES
from boundedkv.testing.report import Report

Attention = Callable[..., Tensor]

# Features that are the manager's alone.
OF_MANAGERS = ("spare", "export", "leases", "capture", "refusals")


def check_attention(
    fn: Attention,
    numerics: Numerics = "bits",
    features: Iterable[str] | None = None,
    *,
    writes: bool = False,
    without: Iterable[str] = (),
    device: torch.device | str = "cpu",
    examples: int = EXAMPLES,
    seed: int = 0,
    first_only: bool = False,
) -> Report:
    """Hold an attention function to the reference; the reference plans its steps and keeps its slots.

    The function is called by keyword, with B rows in the plan, rows = `config.rows_per_request`, Hq query heads, H
    key/value heads, T own tokens a row, D = head_dim:

        q           [B * rows, Hq, T, D]
        k, v        [B * rows, H, T, D], to be rounded to the pool's element type before they take part
        pool        [max_slots, rows, H, cap, 2D], this layer's slots, keys then values
        source      [sources, rows, H, L, 2D], or None
        table       int32 [B, ROW_INTS], the plan's lines: docs/plan-format.md
        config      the `BoundedKVConfig`: query_window, scale, reverse_step_order, ...
        row_source  (storage [slots, rows, H, L, 2D], slots [>= B]), or None
        rel_bias    [B * rows, Hq, T, R], or None
        ieee        whether the plain binary32 path is asked for

    and returns [B * rows, T, Hq, D] in q's element type, on its device.

    Args:
        fn: the function.
        numerics: as in `check_manager`, and so are the others.
        features: what it supports; None means all that an attention function can.
        writes: it writes the step's span into the pool too, after reading it. If not, the pool is read only, and a
            write to it is a difference.
        without: features to leave out.
        device: where its tensors live.
        examples: drawn streams of a case.
        seed: which streams.
        first_only: stop after the first case that differs.

    Returns:
        What was found.

    Raises:
        TypeError: the function cannot be called.
        ValueError: as in `check_manager`.

    Examples:
        A softmax of our own in float64, over the keys that the plan's line lists:

        >>> from boundedkv.testing.exact import exact
        >>> def softmax(q, k, v, pool, source, table, config, row_source, rel_bias, ieee):
        ...     return exact(config, table, pool, q, k, v, source, row_source, rel_bias).out.to(q.dtype)
        >>> check_attention(softmax, "close", features=["batch"], examples=1).conforms
        True
    """
    if not callable(fn):
        raise TypeError(f"fn is {fn!r}, but should be a function of q, k, v, pool, source, table and so on")
    named = [name for name in FEATURES if name not in OF_MANAGERS] if features is None else features
    return check_manager(
        attention_manager(fn, writes=writes),
        numerics,
        named,
        without=without,
        device=device,
        examples=examples,
        seed=seed,
        first_only=first_only,
    )


def attention_manager(fn: Attention, *, writes: bool = False) -> Factory:
    """A factory of reference managers whose attention is somebody's own.

    Args:
        fn: as in `check_attention`.
        writes: whether it writes the slots.

    Returns:
        The factory; its managers run the function on their own device.
    """
    reference: type[BoundedKVManager] = importlib.import_module("boundedkv.reference").ReferenceManager

    def attend(
        manager: BoundedKVManager, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, plan: Any, *rest: Any
    ) -> Tensor:
        source, row_source, rel_bias, ieee = rest
        out = fn(
            q=q,
            k=k,
            v=v,
            pool=manager.layer(layer_idx),
            source=source,
            table=plan.table[: len(plan.rows)],
            config=manager.config,
            row_source=row_source,
            rel_bias=rel_bias,
            ieee=ieee,
        )
        if not writes:
            reference._attend(manager, layer_idx, q, k, v, plan, *rest)
        return out

    name = str(getattr(fn, "__name__", type(fn).__name__))
    judged = type(name, (reference,), {"_attend": attend})

    def factory(config: BoundedKVConfig, device: torch.device, kv_dtype: torch.dtype | None) -> BoundedKVManager:
        manager: BoundedKVManager = judged(config, device, kv_dtype)
        return manager

    factory.__qualname__ = name
    return factory
