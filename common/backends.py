"""Choosing a backend by name: our two, loaded when asked for, and anybody else's by entry point."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import cast

import torch

from boundedkv.config import BoundedKVConfig
from boundedkv.manager import BoundedKVManager

ENTRY_POINT_GROUP = "boundedkv.backends"

Factory = Callable[[BoundedKVConfig, torch.device | str, torch.dtype | None], BoundedKVManager]

_OURS = {"reference": ("boundedkv.reference", "ReferenceManager"), "fast": ("boundedkv.fast", "FastManager")}


def available_backends() -> tuple[str, ...]:
    """The names that `build` knows besides "auto": ours, then the installed entry points in alphabetical order."""
    others = {point.name for point in entry_points(group=ENTRY_POINT_GROUP)} - set(_OURS)
    return (*_OURS, *sorted(others))


def build(
    config: BoundedKVConfig,
    device: torch.device | str = "cpu",
    kv_dtype: torch.dtype | None = None,
    *,
    backend: str = "auto",
) -> BoundedKVManager:
    """Build a pool of slots.

    Args:
        config: the pool.
        device: where its tensors live.
        kv_dtype: element type of the slots; None keeps the config's.
        backend: "reference", "fast", the name of an entry point in the group `boundedkv.backends`, or "auto": fast
            where the device is a GPU, else the reference.

    Returns:
        A manager with every slot free.

    Raises:
        ValueError: no such backend; the message lists those there are.
        ImportError: the backend needs something that is not installed.

    Examples:
        >>> from boundedkv import SinkWindow
        >>> manager = build(BoundedKVConfig(1, 1, 8, SinkWindow(sink=2, window=4)), backend="reference")
        >>> manager.free_slots, tuple(manager.layer(0).shape)  # [slots, rows, heads, entries, 2 * head_dim]
        (32, (32, 1, 1, 6, 16))
    """
    if backend == "auto":
        backend = "fast" if torch.device(device).type == "cuda" else "reference"
    return _load(backend)(config, device, kv_dtype)


def _load(backend: str) -> Factory:
    if backend in _OURS:
        module, name = _OURS[backend]
        return cast(Factory, getattr(importlib.import_module(module), name))
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name == backend:
            return cast(Factory, point.load())
    known = ", ".join(repr(name) for name in ("auto", *available_backends()))
    raise ValueError(f"backend is {backend!r}, but should be one of {known}")
