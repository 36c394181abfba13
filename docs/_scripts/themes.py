"""Figures for light and for dark pages: their greys and the colours of their words are set apart from the page's own.

A figure as it is committed has mid tones, which can be read on either. On the site it follows the page.
"""

from __future__ import annotations

# Colour in the file -> on a light page, on a dark one.
GREY = ("#6b6b6b", "#a0a0a0")
TONES = {"#797979": GREY, "#808080": GREY}
WORDS = {"#c2571a": ("#b04a10", "#e8935c"), "#3b6fd4": ("#2f61c4", "#8aaaf0"), "#2a8050": ("#22703f", "#6cc492")}


def themed(svg: str) -> str:
    """An SVG with a style sheet of its own, for both kinds of page."""
    start = svg.index(">", svg.index("<svg ")) + 1
    light, dark = (_rules(page) for page in range(2))
    return f"{svg[:start]}\n<style>{light} @media (prefers-color-scheme: dark) {{ {dark} }}</style>{svg[start:]}"


def _rules(page: int) -> str:
    rules = [
        f'[{paint}="{tone}"], [style*="{paint}: {tone}"] {{ {paint}: {shown[page]} !important }}'
        for tone, shown in TONES.items()
        for paint in ("fill", "stroke")
    ]
    rules += [
        f'text[fill="{word}"], text[style*="fill: {word}"] {{ fill: {shown[page]} !important }}'
        for word, shown in WORDS.items()
    ]
    return " ".join(rules)
