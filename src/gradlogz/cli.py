"""The command line: a table of commands.

It needs the extra [cli] (typer, rich). torch is imported only when a command runs, so that help is fast.

Read next: commands (one module for each command), commands/boundary.py (errors for bad input).
"""

import sys
import warnings
from typing import TYPE_CHECKING, Annotated

from . import __version__

if TYPE_CHECKING:
    import typer

INSTALL = (
    "gradlogz: the command line needs typer and rich, which are not installed. "
    "Install them with: pip install 'gradlogz[cli]'"
)


def main() -> None:
    """Run the command line; if its extra is missing, print how to install it and exit with status 2."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError:
        print(INSTALL, file=sys.stderr)
        raise SystemExit(2) from None
    # torch warns on import if NumPy is missing; nothing here needs NumPy.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    application()()


def application() -> "typer.Typer":
    """Return the typer application with all commands."""
    import typer

    from .commands import compare, doctor, merge, probe, report, simulate, track, verify
    from .commands.boundary import bounded

    commands = {
        "verify": verify,
        "probe": probe,
        "report": report,
        "compare": compare,
        "merge": merge,
        "simulate": simulate,
        "track": track,
        "doctor": doctor,
    }

    app = typer.Typer(
        help="Verify the theory that attention is the gradient of a log normaliser, test it on trained models and in "
        "simulations, and track moving targets with switching filters.",
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
            bool | None,
            typer.Option("--version", callback=show_version, is_eager=True, help="Print the version and exit."),
        ] = None,
    ) -> None:
        """Options of the command line itself."""

    for name, module in commands.items():
        app.command(name)(bounded(module.command))
    return app


if __name__ == "__main__":
    main()
