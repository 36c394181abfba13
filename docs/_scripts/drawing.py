"""A few shapes as SVG: cells of a strip, text, lines. Mid tones on nothing, to be read on light and on dark pages."""

from __future__ import annotations

from html import escape

CELL = 26
GREY = "#797979"  # as far from white as from the dark of dark pages
COLORS = {"sink": "#c2571a", "window": "#3b6fd4", "own": "#2a8050", "source": "#8e5bbf", "plain": GREY}


class Drawing:
    """Shapes that pile up; the picture is as large as they need.

    Args:
        title: what it shows, for those who cannot see it.
    """

    def __init__(self, title: str) -> None:
        """Start empty."""
        self._title = title
        self._shapes: list[str] = []
        self._width = self._height = 0.0

    def _reach(self, x: float, y: float) -> None:
        self._width, self._height = max(self._width, x), max(self._height, y)

    def cell(self, x: float, y: float, text: object = "", kind: str | None = None, *, width: float = CELL) -> None:
        """A box with its left upper corner at (x, y), filled with the colour of a kind; None leaves an outline."""
        fill = "none" if kind is None else COLORS[kind]
        dashes = ' stroke-dasharray="2 2"' if kind is None else ""
        self._shapes.append(
            f'<rect x="{x + 1:g}" y="{y + 1:g}" width="{width - 2:g}" height="{CELL - 2}" rx="3" fill="{fill}" '
            f'stroke="{GREY if kind is None else fill}"{dashes}/>'
        )
        color = GREY if kind is None else "#ffffff"
        self.text(x + width / 2, y + CELL / 2 + 4, text, anchor="middle", color=color)
        self._reach(x + width, y + CELL)

    def text(
        self, x: float, y: float, text: object, *, anchor: str = "start", color: str = GREY, size: int = 11
    ) -> None:
        """A line of text; y is its base line."""
        if text != "":
            shown = escape(str(text))
            self._shapes.append(
                f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{color}" font-size="{size}">{shown}</text>'
            )
            width = 0.58 * size * len(str(text))
            self._reach(x + {"start": width, "middle": width / 2, "end": 0}[anchor], y + 4)

    def line(self, points: list[tuple[float, float]], kind: str = "plain", *, width: float = 1.2) -> None:
        """A line through points."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self._shapes.append(
            f'<polyline points="{path}" fill="none" stroke="{COLORS[kind]}" stroke-width="{width:g}" opacity="0.8"/>'
        )
        for x, y in points:
            self._reach(x, y)

    def legend(self, x: float, y: float, entries: dict[str, str | None]) -> None:
        """Small boxes and what their colours mean, on one line."""
        for text, kind in entries.items():
            fill = "none" if kind is None else COLORS[kind]
            self._shapes.append(
                f'<rect x="{x:g}" y="{y - 9:g}" width="10" height="10" rx="2" fill="{fill}" stroke="{fill or GREY}"/>'
                if kind
                else f'<rect x="{x:g}" y="{y - 9:g}" width="10" height="10" rx="2" fill="none" stroke="{GREY}" '
                'stroke-dasharray="2 2"/>'
            )
            self.text(x + 15, y, text)
            x += 15 + 6.2 * len(text) + 18

    def svg(self) -> str:
        """The picture as the text of a file."""
        width, height = self._width + 6, self._height + 6
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
                f'viewBox="0 0 {width:g} {height:g}" font-family="sans-serif" role="img">',
                f"<title>{escape(self._title)}</title>",
                *self._shapes,
                "</svg>\n",
            ]
        )
