"""Faults as kernels really have them, each found by the oracle: `docs/gallery.md` shows them with their messages."""

from . import kernels, lifecycle, numbers, sights, slots
from .planted import GALLERY, Planted

SECTIONS = {"Sights": sights, "Slots and plans": slots, "Numbers": numbers, "Lifecycle": lifecycle, "Kernels": kernels}

__all__ = ["GALLERY", "SECTIONS", "Planted"]
