"""What the site does beyond Markdown: pages made from other files, code taken from the source, captions.

MkDocs calls these functions while it builds; `mkdocs.yml` names this file.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from notebooks import as_page
from source_code import with_source

ROOT = Path(__file__).parents[2]
PROJECT_PAGES = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
# Long lists, found behind the pages that explain.
BOOST = {"gallery.md": 0.3, "mutants.md": 0.3, "assembly.md": 0.5, "api/numerics.md": 0.5}
# Where a name is documented from is a folder of links: `make tree`.
LINKED = re.compile(r"build/tree/boundedkv/(?=(reference|fast)/)?")
FIGURE = re.compile(r"^!\[(?P<caption>[^\]]+)\]\((?P<file>[^)\s]+)\)$", flags=re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that come from other folders: the tutorials, the changelog, how to contribute."""
    for page, name in PROJECT_PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")
        files.append(File.generated(config, page, content=text))
    for notebook in sorted((ROOT / "tutorials").glob("*.ipynb")):
        text, pictures = as_page(notebook)
        files.append(File.generated(config, f"tutorials/{notebook.stem}.md", content=text))
        for name, data in pictures.items():
            files.append(File.generated(config, f"tutorials/{name}", content=data))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put code where a page names it, captions under figures, and a page's weight in the search."""
    if page.file.src_uri in BOOST:
        page.meta["search"] = {"boost": BOOST[page.file.src_uri]}
    return FIGURE.sub(_with_caption, with_source(markdown, page.file.src_uri))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Name the source files of the API as the repository does."""
    return LINKED.sub(lambda link: "" if link[1] else "common/", html)


def _with_caption(figure: re.Match[str]) -> str:
    caption = figure["caption"]
    return f'<figure markdown="span">\n![{caption}]({figure["file"]})\n<figcaption>{caption}</figcaption>\n</figure>'
