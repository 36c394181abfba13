"""Executes the tutorials: `python tests/tutorials.py tutorials/1-*.ipynb` writes their outputs, `make tutorials` all.

A notebook's first code cell is tagged `parameters`, as papermill has it: it sets BACKEND, and whatever else a test may
make smaller. Other values go into a cell behind it, for one run; the notebook that is written keeps its own.
"""

import argparse
import os
from pathlib import Path

import hypothesis
import nbformat
import torch
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
TUTORIALS = sorted((ROOT / "tutorials").glob("*.ipynb"))


def execute(path, before="", after=""):
    """Run a notebook in a fresh kernel, in its own folder.

    Args:
        path: the notebook.
        before: code to run behind its parameters.
        after: code to run at the end.

    Returns:
        The notebook with its outputs, those two cells included where they hold something.
    """
    notebook = nbformat.read(path, as_version=4)
    first = next(cell for cell in notebook.cells if cell.cell_type == "code")
    if "parameters" not in first.metadata.get("tags", ()):
        raise ValueError(f"{path.name}: the first code cell should be tagged 'parameters'")
    if before:
        notebook.cells.insert(notebook.cells.index(first) + 1, nbformat.v4.new_code_cell(before))
    if after:
        notebook.cells.append(nbformat.v4.new_code_cell(after))
    client = NotebookClient(
        notebook,
        timeout=1200,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
        record_timing=False,
        coalesce_streams=True,
    )
    return client.execute()


def ran_with():
    """The versions that random numbers and drawn examples depend on, and so what a notebook prints."""
    return {"torch": torch.__version__.partition("+")[0], "hypothesis": hypothesis.__version__}


def main():
    """Execute notebooks and keep what they print. Figures bear no date, so that the same run is the same file."""
    os.environ["SOURCE_DATE_EPOCH"] = "0"
    parser = argparse.ArgumentParser(description="Execute tutorials and write their outputs into them.")
    parser.add_argument("notebooks", nargs="*", type=Path, default=TUTORIALS)
    for path in parser.parse_args().notebooks:
        notebook = execute(path)
        notebook.metadata = {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
            "ran_with": ran_with(),
        }
        for cell in notebook.cells:
            cell.metadata = {"tags": tags} if (tags := cell.metadata.get("tags")) else {}
        nbformat.write(notebook, path)
        print(path.name)


if __name__ == "__main__":
    main()
