"""The figures of `docs/accuracy.md`. Mid grey on nothing, so that they can be read on light and on dark pages."""

from __future__ import annotations

from pathlib import Path

import matplotlib
from accuracy_measure import ELEMENT_TYPES, FAMILIES, SHAPES, USUAL, Study, Sweeps, times
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

GREY = "#797979"  # as far from white as from the dark of dark pages
COLORS = {
    "`ieee`": "#009e73",
    "default": "#0083cf",
    "SDPA float32": GREY,
    "TF32": "#e07b00",
    "bfloat16": "#d0509b",
    "SDPA bfloat16": "#9a6fd0",
}
MARKERS = dict(zip(COLORS, "oDsv^x", strict=True))
STYLE = {
    "svg.hashsalt": "boundedkv",  # the same file each time
    "svg.fonttype": "none",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), GREY),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": GREY,
    "grid.alpha": 0.25,
}
ERROR = "error, relative to the exact result"


def draw_errors(found: Study) -> Figure:
    """Every input at the usual shape: a mark for all outputs, a line on to the worst channel."""
    figure = Figure(figsize=(9.5, 5.6), layout="constrained")
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    for axes, element_type in zip(panels, ELEMENT_TYPES, strict=True):
        for name, color in COLORS.items():
            errors = [found[element_type, family, USUAL][name] for family in FAMILIES]
            rows = range(len(errors))
            axes.hlines(rows, *zip(*errors, strict=True), color=color, linewidth=1.2, alpha=0.8)
            look = {"color": color, "marker": MARKERS[name], "markersize": 4.5, "linestyle": "none"}
            axes.plot([error.overall for error in errors], rows, label=name.strip("`"), **look)
        axes.set_xscale("log")
        axes.minorticks_off()
        axes.set_yticks(range(len(FAMILIES)), FAMILIES)
        axes.grid()
        axes.set_xlabel(ERROR)
        axes.set_title(f"inputs held in {element_type}", loc="left")
    panels[0].invert_yaxis()
    label(figure, panels[0])
    return figure


def draw_factors(found: Study) -> Figure:
    """How many times nearer than TF32 the default path is, by the worse of the two measures."""
    figure = Figure(figsize=(9.5, 5.4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, element_type in zip(panels, ELEMENT_TYPES, strict=True):
        cells = [[found[element_type, family, shape] for shape in SHAPES] for family in FAMILIES]
        factors = [[min(errors["default"].beside(errors["TF32"])) for errors in row] for row in cells]
        shown = [[min(max(factor, 1 / 16), 16) for factor in row] for row in factors]
        axes.pcolormesh(shown, cmap="RdBu", norm=LogNorm(1 / 16, 16), edgecolor="white", linewidth=1)
        for y, row in enumerate(factors):
            for x, factor in enumerate(row):
                color = "black" if 1 / 8 < factor < 8 else "white"
                weight = "normal" if factor > 1 else "bold"
                axes.text(x + 0.5, y + 0.5, times(factor), ha="center", va="center", color=color, weight=weight)
        axes.set_xticks([x + 0.5 for x in range(len(SHAPES))], [name.replace(" ", "\n") for name in SHAPES])
        axes.set_yticks([y + 0.5 for y in range(len(FAMILIES))], FAMILIES)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_title(f"inputs held in {element_type}", loc="left")
    panels[0].invert_yaxis()
    return figure


def draw_sweeps(swept: Sweeps) -> Figure:
    """The worst channel, while one thing about the inputs grows."""
    figure = Figure(figsize=(9.5, 5.6), layout="constrained")
    panels = figure.subplots(len(ELEMENT_TYPES), len(swept) // len(ELEMENT_TYPES), sharey=True)
    for axes, ((_, title), points) in zip(panels.flat, swept.items(), strict=True):
        for name, color in COLORS.items():
            worst = [errors[name].worst for errors in points.values()]
            look = {"color": color, "marker": MARKERS[name], "markersize": 3.5, "linewidth": 1.2}
            axes.plot(list(points), worst, label=name.strip("`"), **look)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(list(points)[::2], [f"{x}" if "more keys" in title else f"x{x}" for x in list(points)[::2]])
        axes.minorticks_off()
        axes.grid()
        axes.set_title(title, loc="left", fontsize=9)
    for axes, element_type in zip(panels[:, 0], ELEMENT_TYPES, strict=True):
        axes.set_ylabel(f"inputs held in {element_type}")
    label(figure, panels[0, 0])
    return figure


def label(figure: Figure, axes: Axes) -> None:
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=len(COLORS), frameon=False)


def draw_all(found: Study, swept: Sweeps, folder: Path) -> None:
    """Write the three figures as SVG, the same bytes for the same numbers and the same matplotlib."""
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        figures = {"errors": draw_errors(found), "factors": draw_factors(found), "sweeps": draw_sweeps(swept)}
        for name, figure in figures.items():
            file = folder / f"accuracy-{name}.svg"
            figure.savefig(file, transparent=True, metadata={"Date": None, "Creator": None})
