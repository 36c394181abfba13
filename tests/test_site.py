"""The site builds without a warning, asks the network for nothing, and every link on it leads somewhere."""

import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

pytest.importorskip("mkdocs")
pytest.importorskip("mkdocstrings")
pytest.importorskip("nbconvert")

ROOT = Path(__file__).parents[1]
LOADED = {"script": "src", "img": "src", "source": "src", "iframe": "src"}  # and every link but an `a` or the like


class Page(HTMLParser):
    """The anchors of a page, where its links lead, and what it loads by itself.

    Args:
        html: its text.
    """

    def __init__(self, html):
        super().__init__()
        self.anchors, self.links, self.loaded = {""}, set(), set()
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.anchors.update(attributes[name] for name in ("id", "name") if attributes.get(name))
        if tag == "a" and attributes.get("href"):
            self.links.add(attributes["href"])
        elif tag == "link" and attributes.get("href") and attributes.get("rel") not in ("prev", "next", "canonical"):
            self.loaded.add(attributes["href"])
        elif LOADED.get(tag) in attributes:
            self.loaded.add(attributes[LOADED[tag]])


def faults(site):
    """What is wrong with the links of a built site, a line each."""
    pages = {file: Page(file.read_text(encoding="utf-8")) for file in site.rglob("*.html")}
    for file, page in pages.items():
        name = file.relative_to(site)
        for link in page.links | page.loaded:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if link in page.loaded and parts.scheme != "data":
                    yield f"{name} loads {link}"
                continue
            base = site if parts.path.startswith("/") else file.parent  # only 404.html may be anywhere itself
            target = Path(os.path.normpath(base / unquote(parts.path).lstrip("/"))) if parts.path else file
            if target.is_dir():
                target /= "index.html"
            if not target.is_file():
                yield f"{name}: {link} leads nowhere"
            elif target in pages and unquote(parts.fragment) not in pages[target].anchors:
                yield f"{name}: {link} has no such place"
    for file in site.rglob("*.css"):
        if "url(http" in file.read_text(encoding="utf-8").replace('"', "").replace("'", ""):
            yield f"{file.relative_to(site)} loads from the network"


def build(site):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


def test_the_site_is_whole(tmp_path):
    done = build(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    assert sorted(faults(tmp_path)) == []
    names = {path.relative_to(tmp_path).with_suffix("").as_posix() for path in tmp_path.rglob("*.html")}
    notebooks = {f"tutorials/{path.stem}" for path in (ROOT / "tutorials").glob("*.ipynb")}
    assert len(notebooks) == 7
    assert {"index", "quickstart", "api/manager", "changelog", "contributing", *notebooks} <= names
    reading = (tmp_path / "reading-kernels.html").read_text(encoding="utf-8")
    assert "merge_kernel" in reading
    assert "```" not in reading
    lessons = [page.read_text(encoding="utf-8") for page in (tmp_path / "tutorials").glob("*.html")]
    assert not [text for text in lessons if "Figure drawn by" in text], "a figure without a caption right below it"
    api = {page.stem: page.read_text(encoding="utf-8") for page in (tmp_path / "api").glob("*.html")}
    assert "rewind_request" in api["manager"]
    assert not [name for name, text in api.items() if "<blockquote>" in text], "`>>>` outside an `Examples:` section"


def test_faults_are_found(tmp_path):
    (tmp_path / "a.html").write_text(
        '<p id="here"><a href="b.html#there">1</a><a href="#here">2</a><a href="c.html">3</a><a href="#gone">4</a>'
        '<a href="https://example.org">5</a><script src="https://example.org/a.js"></script><img src="d.svg">',
        encoding="utf-8",
    )
    (tmp_path / "b.html").write_text("<p>", encoding="utf-8")
    (tmp_path / "a.css").write_text('@import url("https://example.org/a.css")', encoding="utf-8")
    assert sorted(faults(tmp_path)) == [
        "a.css loads from the network",
        "a.html loads https://example.org/a.js",
        "a.html: #gone has no such place",
        "a.html: b.html#there has no such place",
        "a.html: c.html leads nowhere",
        "a.html: d.svg leads nowhere",
    ]
