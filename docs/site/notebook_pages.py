"""Tutorials: notebooks as pages, with the output of every cell.

Cells run in this process, one notebook after the other, in a temporary folder. An output is what a cell prints, the
value of its last expression, and the figures of matplotlib that it leaves open.
"""

import ast
import contextlib
import io
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


def markdown(notebook: Path, folder: Path, *, run: bool) -> str:
    """Page of a notebook; its figures are written to `folder`. Without `run` it has no outputs."""
    lines, names = [], {"__name__": "__main__"}
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    with _temporary_folder():
        for number, cell in enumerate(cells):
            source = "".join(cell["source"])
            if cell["cell_type"] == "markdown":
                lines.append(source)
                continue
            lines.append(f"```python\n{source}\n```")
            if run:
                lines += _output(source, names, f"{notebook.name}, cell {number}")
                lines += _figures(folder, f"{notebook.stem}_{number}")
    lines.append(f"*This page is the notebook `docs/notebooks/{notebook.name}`; the tests run its cells.*")
    return "\n\n".join(lines) + "\n"


@contextlib.contextmanager
def _temporary_folder() -> Iterator[None]:
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


def _output(source: str, names: dict, name: str) -> list[str]:
    """Run a cell; return what it prints and the value of its last expression as a block of text."""
    tree = ast.parse(source)
    last = ast.Expression(tree.body.pop().value) if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(io.StringIO()):
        exec(compile(tree, name, "exec"), names)
        value = eval(compile(last, name, "eval"), names) if last is not None else None
        if value is not None and not source.rstrip().endswith(";"):  # as in Jupyter
            print(value)
    text = printed.getvalue().rstrip()
    return [f"```{{ .text .output }}\n{text}\n```"] if text else []


def _figures(folder: Path, stem: str) -> list[str]:
    """Write the open figures of matplotlib as SVG files, and return the pictures."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    pictures = []
    for index, figure in enumerate(map(pyplot.figure, pyplot.get_fignums())):
        folder.mkdir(parents=True, exist_ok=True)
        file = f"{stem}_{index}.svg"
        figure.savefig(folder / file, bbox_inches="tight", metadata={"Date": None})
        pictures.append(f"![Figure of the cell above]({file}){{ .figure }}")
    pyplot.close("all")
    return pictures
