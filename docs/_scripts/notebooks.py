"""Notebooks as pages: their text, code and outputs as Markdown, so that they look like all other pages."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
from nbconvert import MarkdownExporter
from traitlets.config import Config

LINK_TO_PAGE = re.compile(r"\]\(\.\./docs/(?P<page>[^)]+)\)")
CAPTIONED = re.compile(r"!\[[^\]]*\](?P<picture>\([^)]+\){ \.figure })\n+\*(?P<caption>[^*]+)\*$", re.MULTILINE)
LINK_TO_NOTEBOOK = re.compile(r"\]\((?P<name>[\w-]+)\.ipynb(?P<anchor>#[^)]*)?\)")

# Printed text as a block of its own; nbconvert would indent it, and a list before it would swallow it.
TEMPLATES = Path(__file__).parent / "templates"


def as_page(path: Path) -> tuple[str, dict[str, bytes]]:
    """A notebook as a page.

    Args:
        path: an executed notebook.

    Returns:
        The Markdown, its links turned to pages of the site, and the pictures that it shows, by file name.
    """
    notebook = nbformat.read(path, as_version=4)
    exporter = MarkdownExporter(
        config=Config(TemplateExporter={"extra_template_basedirs": [str(TEMPLATES)], "template_name": "page"})
    )
    names = f"{path.stem}_{{cell_index}}_{{index}}{{extension}}"
    text, resources = exporter.from_notebook_node(
        notebook, resources={"output_files_dir": "", "unique_key": path.stem, "output_filename_template": names}
    )
    text = LINK_TO_PAGE.sub(r"](../\g<page>)", text)
    text = LINK_TO_NOTEBOOK.sub(lambda link: f"]({link['name']}.md{link['anchor'] or ''})", text)
    text = CAPTIONED.sub(_with_caption, text)
    return _with_origin(text, path.name), dict(resources["outputs"])


def _with_caption(figure: re.Match[str]) -> str:
    """A figure told by the caption below it to those who cannot see it."""
    told = figure["caption"].replace("\n", " ").replace("[", "").replace("]", "")
    return f"![{told}]{figure['picture']}\n\n*{figure['caption']}*"


def _with_origin(text: str, name: str) -> str:
    """Under the title, which notebook this is."""
    title, _, rest = text.lstrip().partition("\n")
    origin = f"The notebook `tutorials/{name}` as it ran. In a clone: `jupyter lab tutorials/{name}`."
    return f'{title}\n\n<small markdown="span">{origin}</small>\n{rest}'
