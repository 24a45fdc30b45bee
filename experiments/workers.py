"""The runs of an experiment, divided among the workers of an engine (gradlogz.engine).

A run is an item: it is trained in a folder of its own, from which it continues if it is killed (training.py), and its
row is a file below parts/. The same call therefore continues an experiment, with any engine, and its rows are the same.

Read next: training.py (one run), __main__.py (the options).
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from gradlogz import __version__
from gradlogz._progress import reporter
from gradlogz.engine import Engine, InProcess, run_items


class FailedRunsError(Exception):
    """Runs that raised an error, or whose workers died, by name; the rows of the others are kept."""

    def __init__(self, failures: Mapping[str, str]) -> None:
        super().__init__("\n".join(f"{name} failed: {text.splitlines()[-1]}" for name, text in failures.items()))
        self.failures = failures


class Workers(NamedTuple):
    """Who computes the runs; restart: measure all runs again, without training those that are complete."""

    engine: Engine = InProcess()
    restart: bool = False

    def rows(self, function: Callable[[Any], Any], items: Mapping[str, Any], settings: Any, folder: Path) -> list[Any]:
        """Return function(item) for all runs, in their order.

        Args:
            function: a function of one item that workers import; its result is JSON.
            settings: dataclass on which the rows depend; a folder of other settings, or of other code, is refused.
        """
        facts = {"version": __version__, "code": _hash_of_code(), "settings": asdict(settings)}
        results = run_items(
            function, items, engine=self.engine, folder=folder / "parts", facts=facts, restart=self.restart,
            call="experiment", progress=reporter(True, "runs"),
        )  # fmt: skip
        if results.failures:
            raise FailedRunsError(results.failures)
        if results.interrupted:
            raise KeyboardInterrupt
        return [results.states[name] for name in items]


def _hash_of_code() -> str:
    """Hash of the source files of all experiments, but of those that make pages of results."""
    root = Path(__file__).parent
    files = (path for path in sorted(root.rglob("*.py")) if not path.name.startswith("page"))
    sources = (f"{path.relative_to(root)}\n".encode() + path.read_bytes() for path in files)
    return hashlib.sha256(b"".join(sources)).hexdigest()[:16]
