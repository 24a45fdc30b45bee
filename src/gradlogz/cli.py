"""The command line: gradlogz verify.

It needs the extra [cli] (typer, rich). torch is imported only when a command runs, so that help answers at once.
"""

import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

from . import __version__

if TYPE_CHECKING:
    from rich.table import Table

    from .verification.program import Verdict

WIDE = 140  # columns from which on a table may have six of them
INSTALL = (
    "gradlogz: the command line must have typer and rich; got neither. Install them with: pip install 'gradlogz[cli]'"
)


def main() -> None:
    """Run the command line; without its extra, say how to install it and exit with 2."""
    try:
        import rich  # noqa: F401
        import typer
    except ImportError:
        print(INSTALL, file=sys.stderr)
        raise SystemExit(2) from None
    # A torch without NumPy says so on import; nothing here needs NumPy.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    application(typer)()


def application(typer: Any) -> Any:
    """The commands, as a typer application."""
    app = typer.Typer(
        help="Attention is the gradient of a log normaliser.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    def show_version(wanted: bool | None) -> None:
        if wanted:
            print(f"gradlogz {__version__}")
            raise typer.Exit

    @app.callback()
    def options(
        version: Annotated[
            Optional[bool],  # noqa: UP045
            typer.Option("--version", callback=show_version, is_eager=True, help="Print the version and exit."),
        ] = None,
    ) -> None:
        """Attention is the gradient of a log normaliser."""

    @app.command()
    def verify(
        json: Annotated[
            Optional[str], typer.Option(help="Write the table as JSON to this file; - is standard output.")  # noqa: UP045
        ] = None,
        only: Annotated[
            Optional[str], typer.Option(help="Only the statement with this key, or those that contain this text.")  # noqa: UP045
        ] = None,
    ) -> None:
        """Check the theory: every statement of the sources that can be computed, as printed and as corrected.

        Exits with 1 if a corrected statement fails.
        """
        raise typer.Exit(_verify(json, only))

    return app


def _verify(json: str | None, only: str | None) -> int:
    from rich.console import Console
    from rich.progress import Progress

    from .verification.program import as_json, statements, verify

    console = Console(stderr=json == "-")
    if json not in (None, "-") and not Path(json).parent.is_dir():
        console.print(f"verify: --json must name a file in a folder that exists; got {json}. Make the folder first.")
        return 2
    selected = statements(only)
    if not selected:
        console.print(f"verify: --only must match a statement; got {only!r}. Without it all are checked.")
        return 2
    verdicts = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("Checking the theory", total=len(selected))
        for verdict in verify(selected):
            verdicts.append(verdict)
            progress.advance(task)
    console.print(_table(verdicts, console.width))
    failed = [v for v in verdicts if not v.holds]
    for v in failed:
        console.print(
            f"[bold red]fails[/] {v.statement.key}: {v.error or f'residual {v.residual:.1e}'}", highlight=False
        )
    wrong = sum(v.printed is not None and v.printed > v.statement.tolerance for v in verdicts)
    console.print(
        f"{len(verdicts) - len(failed)} of {len(verdicts)} corrected statements hold; "
        f"{wrong} are false as printed, off by the size shown.",
        highlight=False,
    )
    console.print(
        "Keys are those of the paper, of docs/errata.md (E...) and of docs/theory.md; residuals are relative to the "
        "scale of the statement.",
        style="dim",
        highlight=False,
    )
    if json == "-":
        print(as_json(verdicts))
    elif json is not None:
        _write(Path(json), as_json(verdicts))
    return 1 if failed else 0


def _table(verdicts: "list[Verdict]", width: int) -> "Table":
    """The verdicts; on a narrow terminal the printed formula goes below the corrected one instead of beside it."""
    from rich.markup import escape
    from rich.table import Table

    wide = width >= WIDE
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("statement", no_wrap=True)
    if wide:
        table.add_column("as printed", overflow="fold", ratio=2)
        table.add_column("off by", justify="right", no_wrap=True)
    table.add_column("as corrected" if wide else "as corrected (and as printed)", overflow="fold", ratio=3)
    table.add_column("residual", justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for v in verdicts:
        printed, corrected = escape(v.statement.printed or ""), escape(v.statement.corrected)
        off = "" if v.printed is None else f"[yellow]{v.printed:.2g}[/]"
        if not wide and off:
            corrected += f"\n[dim]printed: {printed}[/] [yellow]off by {v.printed:.2g}[/]"
        beside = [printed, off] if wide else []
        verdict = "[green]holds[/]" if v.holds else "[bold red]fails[/]"
        table.add_row(escape(v.statement.key), *beside, corrected, f"{v.residual:.0e}", verdict)
    return table


def _write(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(text + "\n", encoding="utf-8")
    part.replace(path)


if __name__ == "__main__":
    main()
