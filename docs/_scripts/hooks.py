"""What the site does beyond Markdown: pages made from other files, code taken from the source, captions.

MkDocs calls these functions while it builds; `mkdocs.yml` names this file.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from notebooks import as_page
from source_code import with_source
from themes import themed

ROOT = Path(__file__).parents[2]
PROJECT_PAGES = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
ROW_OF_A_TABLE = re.compile(r"^\|.*\|$", flags=re.MULTILINE)
PAIR = re.compile(r"(?<=\d) / (?=\d)")  # of numbers, which should not be parted
# Long lists, found behind the pages that explain.
BOOST = {"gallery.md": 0.3, "mutants.md": 0.3, "assembly.md": 0.5, "api/numerics.md": 0.5}
# Where a name is documented from is a folder of links: `make tree`.
LINKED = re.compile(r"build/tree/boundedkv/(?=(reference|fast)/)?")
FIGURE = re.compile(r"^!\[(?P<caption>[^\]]+)\]\((?P<file>[^)\s]+)\)$", flags=re.MULTILINE)


def on_config(config: MkDocsConfig) -> None:
    """Lay the folder of links that the API pages are read from, where it is missing."""
    if not (ROOT / "build" / "tree" / "boundedkv").is_dir():
        subprocess.run(["make", "--silent", "tree"], cwd=ROOT, check=True)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that come from other folders: the tutorials, the changelog, contributing. Dress the figures."""
    for figure in [file for file in files if file.src_uri.startswith("figures/")]:
        files.remove(figure)
        files.append(File.generated(config, figure.src_uri, content=themed(figure.content_string)))
    for page, name in PROJECT_PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")
        files.append(File.generated(config, page, content=text))
    for notebook in sorted((ROOT / "tutorials").glob("*.ipynb")):
        text, pictures = as_page(notebook)
        files.append(File.generated(config, f"tutorials/{notebook.stem}.md", content=text))
        for name, data in pictures.items():
            files.append(File.generated(config, f"tutorials/{name}", content=themed(data.decode())))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put code where a page names it and captions under figures; say what a page is about and how a search ranks it."""
    page.meta.setdefault("description", _first_sentence(markdown))
    if page.file.src_uri in BOOST:
        page.meta["search"] = {"boost": BOOST[page.file.src_uri]}
    markdown = ROW_OF_A_TABLE.sub(lambda row: PAIR.sub("\u00a0/\u00a0", row[0]), markdown)
    return FIGURE.sub(_with_caption, with_source(markdown, page.file.src_uri))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Name the source files of the API as the repository does."""
    return LINKED.sub(lambda link: "" if link[1] else "common/", html)


def _first_sentence(markdown: str) -> str:
    """What stands first below a page's title, up to the full stop, without marks."""
    paragraphs = (part for part in markdown.split("\n\n") if re.match(r"[A-Z`*\[]", part))
    text = re.sub(r"\]\([^)]*\)|[*`\[\]]", "", next(paragraphs, "")).replace("\n", " ")
    return text.partition(". ")[0].replace('"', "'")


def _with_caption(figure: re.Match[str]) -> str:
    image, caption = figure[0], figure["caption"]
    return f'<figure markdown="1">\n\n{image}\n\n<figcaption>{caption}</figcaption>\n</figure>'
