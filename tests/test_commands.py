"""Every command on a page exists: its targets, files, options and extras."""

import functools
import os
import re
import shlex
import subprocess
import sys
import tomllib

import pytest
from pages import PAGES, ROOT, blocks

COMMANDS = [
    pytest.param(line, id=f"{block.page}:{block.line + number}")
    for page in PAGES
    for block in blocks(page)
    if block.kind == "sh"
    for number, line in enumerate(block.text.splitlines())
    if line.partition("#")[0].strip()
]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
READ_ONLY = ("python -m boundedkv size",)  # quick, and writes nothing: run as it stands


def words_of(line):
    """A command's words, without a comment and without the variables set before it."""
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        del words[0]
    return words


@functools.cache
def help_of(*command):
    """What a command prints when asked for help."""
    done = run([*command, "--help"])
    assert done.returncode == 0, done.stderr
    return done.stdout


def run(command):
    environment = {**os.environ, "COLUMNS": "200"}
    words = [sys.executable, *command[1:]] if command[0] == "python" else [sys.executable, "-m", *command]
    return subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


def check_options(words, known):
    missing = [word for word in words if word.startswith("--") and word.partition("=")[0] not in known]
    assert not missing


def check_python(words):
    if words[1] == "-m" and words[2] == "boundedkv":
        check_options(words[4:], help_of(*words[:4]))
        if " ".join(words).startswith(READ_ONLY):
            done = run(words)
            assert done.returncode == 0, done.stderr
    elif words[1] == "-m":
        check_options(words[3:], help_of(*words[:3]))
    else:
        assert (ROOT / words[1]).is_file()
        if words[1].startswith("tests/"):
            check_options(words[2:], help_of(*words[:2]))


def check_pip(words):
    assert words[1] == "install"
    for extras in re.findall(r"\[([\w,]+)\]", " ".join(words)):
        assert set(extras.split(",")) <= set(EXTRAS)


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_of_a_page_exists(line):
    words = words_of(line.replace(".venv/bin/", ""))
    if words[0] == "cd":
        assert (ROOT / words[1]).is_dir()
        words = words[words.index("&&") + 1 :] if "&&" in words else []
    if not words:
        return
    if words[0] == "make":
        assert {word for word in words[1:] if "=" not in word} <= TARGETS
    elif words[0] == "python":
        check_python(words)
    elif words[0] == "pip":
        check_pip(words)
    elif words[0] == "pytest":
        check_options(words[1:], help_of("pytest"))
    elif words[:2] == ["jupyter", "lab"]:
        assert all((ROOT / word).exists() for word in words[2:])
    else:
        pytest.fail(f"{words[0]!r} is a command that no test knows")


@pytest.mark.parametrize(
    "line",
    [
        "make coffee",
        "python -m boundedkv bake",
        "python -m boundedkv size --sugar 2",
        "python tests/nothing.py",
        "python tests/mutants.py --everything",
        "pip install 'boundedkv[milk]'",
        "pytest --boundedkv-cups 3",
        "brew coffee",
    ],
)
def test_a_command_that_does_not_exist_is_found(line):
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        test_a_command_of_a_page_exists(line)
