"""Options of commands whose work an engine divides.

    --engine, --workers, --address     who computes; --gpus for each part, where parts use GPUs
    --resume, --restart                a folder of finished parts, from which the same command continues

Read next: ../engine/work_loop.py, boundary.py (exit statuses).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console

from .._foreign_text import visible
from .._input_errors import InputValueError

if TYPE_CHECKING:
    from ..engine import Engine

EngineName = Annotated[
    str | None,
    typer.Option(
        "--engine", help="Where parts are computed: process, processes, slurm, ray (default: processes).",
        show_default=False,
    ),
]  # fmt: skip
Workers = Annotated[
    int | None, typer.Option(min=1, help="Most parts at a time (default: number of cores).", show_default=False)
]
Resume = Annotated[
    str | None,
    typer.Option(
        help="Folder of finished parts; the same command continues there (default: none).", show_default=False
    ),
]
Restart = Annotated[bool, typer.Option("--restart", help="Begin again in the folder of --resume.")]
Address = Annotated[
    str | None,
    typer.Option(help="Ray cluster: auto or HOST:PORT (default: a new one on this machine).", show_default=False),
]

Gpus = Annotated[
    int | None, typer.Option(min=0, help="GPUs of each part, on Slurm or Ray (default: 0).", show_default=False)
]


class EngineOptions(NamedTuple):
    """The options, None and False where they are not given."""

    engine: str | None
    workers: int | None
    resume: str | None
    restart: bool
    address: str | None
    gpus: int | None = None

    def check(self, call: str) -> None:
        """Raise if --restart is given without the folder in which to begin again."""
        if self.restart and self.resume is None:
            problem = "--restart begins again in the folder of --resume, but --resume is missing"
            raise InputValueError(call, "--restart", problem, "Add --resume FOLDER, or drop --restart.")

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the functions that take an engine."""
        values = {"workers": self.workers, "folder": self.resume, "restart": self.restart, "address": self.address}
        return values | ({} if self.engine is None else {"engine": self.engine})

    def engine_in(self, call: str, folder: Path) -> "Engine":
        """Return the engine of these options for work in a folder."""
        from ..engine import engine_of

        return engine_of(
            call, self.engine or "processes", workers=self.workers, folder=folder.absolute(), address=self.address,
            gpus=self.gpus or 0,
        )  # fmt: skip

    def refuse(self, call: str, flag: str) -> None:
        """Raise if an option is given without the flag that it belongs to."""
        for name, value in self._asdict().items():
            if value and flag != f"--{name}":
                problem = f"--{name} divides the work of {flag}, but {flag} is missing"
                raise InputValueError(call, f"--{name}", problem, f"Add {flag}, or drop --{name}.")


def print_failures(console: Console, failures: Mapping[str, str]) -> None:
    """Print the parts that failed, each with the last line of its error."""
    for name, error in failures.items():
        console.print(f"{name} failed: {visible(error.splitlines()[-1])}", style="red", highlight=False, markup=False)
