"""The command line: gradlogz probe, report, compare, simulate, track, verify.

It needs the extra [cli] (typer, rich). torch is imported only when a command runs, so that help answers at once.
"""

import sys
import warnings
import webbrowser
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Optional

from . import __version__
from .page import check_drawing, check_file, missing, write

PAGE = "report.html"  # in the folder of a run
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
        from .verification.command import verify_command

        raise typer.Exit(verify_command(json, only))

    @app.command()
    def probe(
        model: Annotated[
            str, typer.Argument(help="minilm, smollm2, rxnmapper, rxnfp, a folder, a GGUF file, or a name of the hub.")
        ] = "minilm",
        text: Annotated[
            Optional[str],  # noqa: UP045
            typer.Option(
                help="What the model reads: a file, a folder, or - for standard input; by default the prose that comes "
                "with Python, or reactions for a model that reads those. Of images a folder.",
                show_default=False,
            ),
        ] = None,
        tokens: Annotated[int, typer.Option(min=0, help="About how many tokens to read; 0 reads all.")] = 20_000,
        length: Annotated[
            Optional[int],  # noqa: UP045
            typer.Option(help="Tokens of a window at most; by default 1024, or the context.", show_default=False),
        ] = None,
        only: Annotated[
            Optional[list[str]],  # noqa: UP045
            typer.Option(help="Only this prediction; may be given several times.", show_default=False),
        ] = None,
        out: Annotated[
            Optional[str],  # noqa: UP045
            typer.Option(help="The folder of the run; by default runs/MODEL.", show_default=False),
        ] = None,
        json: Annotated[
            Optional[str],  # noqa: UP045
            typer.Option(help="Write the findings as JSON to this file; - is standard output.", show_default=False),
        ] = None,
        device: Annotated[
            Optional[str],  # noqa: UP045
            typer.Option(help="cpu, cuda, cuda:1 …; by default the GPU if there is one.", show_default=False),
        ] = None,
        dtype: Annotated[
            Optional[str],  # noqa: UP045
            typer.Option(help="float32 (the default), float64, bfloat16 or float16.", show_default=False),
        ] = None,
        seed: Annotated[int, typer.Option(help="Of the random twin, and of which documents are read.")] = 0,
        twin: Annotated[float, typer.Option(help="The part of the tokens that a random twin reads; 0 for none.")] = 0.1,
        matrices: Annotated[
            bool, typer.Option("--matrices", help="Keep the matrices in the run too; they may take gigabytes.")
        ] = False,
        allow_pickle: Annotated[
            bool, typer.Option("--allow-pickle", help="Read pickled weights, as plain tensors only.")
        ] = False,
        allow_remote_code: Annotated[
            bool, typer.Option("--allow-remote-code", help="Run code that comes with a model.")
        ] = False,
    ) -> None:
        """What a trained transformer says about the theory: every prediction, head by head, with nulls and intervals.

        Ends with a table of verdicts, a folder that holds all that was measured, and a page in it. Ctrl-C finishes the
        batch that is under way and keeps what was measured.
        """
        from .probing.command import probe_command

        raise typer.Exit(
            probe_command(
                model,
                text=text,
                tokens=tokens,
                length=length,
                only=only,
                out=out,
                json=json,
                device=device,
                dtype=dtype,
                seed=seed,
                twin=twin,
                matrices=matrices,
                allow_pickle=allow_pickle,
                allow_remote_code=allow_remote_code,
                finish=_page_of_run,
            )
        )

    @app.command()
    def report(
        run: Annotated[str, typer.Argument(help="The folder of a run of gradlogz probe.")],
        out: Annotated[
            Optional[str],  # noqa: UP045
            typer.Option(help="The page; by default report.html in the folder.", show_default=False),
        ] = None,
        open_: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = False,
    ) -> None:
        """Make the page of a run again: verdicts, a map of heads, every claim with its figures, all data.

        A damaged or incomplete run has a page of what can be read, which says what is missing.
        """
        raise typer.Exit(_report(run, out, open_))

    @app.command()
    def compare(
        runs: Annotated[
            list[str], typer.Argument(help="Folders of runs of gradlogz probe, two or more.", metavar="RUN RUN ...")
        ],
        out: Annotated[str, typer.Option(help="The page.")] = "compare.html",
        open_: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = False,
    ) -> None:
        """Put several runs side by side: models, or checkpoints of one training with trends over its steps.

        A run has a step if its facts, its name or its folder say so, as in step1000 or checkpoint-500.
        """
        raise typer.Exit(_compare(runs, out, open_))

    @app.command()
    def simulate(
        preset: Annotated[
            Optional[str],  # noqa: UP045
            typer.Argument(
                help="A run with a name; --list shows all. Options override its numbers.", show_default=False
            ),
        ] = None,
        beta: Annotated[
            Optional[float], typer.Option(help="Inverse temperature of attention.", show_default=False)  # noqa: UP045
        ] = None,
        tau: Annotated[
            Optional[float], typer.Option(help="Size of a step; negative descends.", show_default=False)  # noqa: UP045
        ] = None,
        dim: Annotated[
            Optional[int], typer.Option(help="Dimensions of a token.", show_default=False)  # noqa: UP045
        ] = None,
        tokens: Annotated[
            Optional[int], typer.Option(help="Tokens of a cloud.", show_default=False)  # noqa: UP045
        ] = None,
        steps: Annotated[
            Optional[int], typer.Option(help="Steps of attention.", show_default=False)  # noqa: UP045
        ] = None,
        contraction: Annotated[
            Optional[str],  # noqa: UP045
            typer.Option(
                help="What holds the cloud together: none, center, scalar, batch_norm, zca, pca, cholesky, monge, "
                "sphere, rms_norm, layer_norm, resolvent; several joined by +.",
                show_default=False,
            ),
        ] = None,
        placement: Annotated[
            Optional[str],  # noqa: UP045
            typer.Option(help="Where it stands: post, pre or peri.", show_default=False),
        ] = None,
        initial: Annotated[
            Optional[str],  # noqa: UP045
            typer.Option(
                help="Law of the start: gaussian, uniform, laplace, exponential, sphere, circle.", show_default=False
            ),
        ] = None,
        causal: Annotated[
            Optional[bool],  # noqa: UP045
            typer.Option("--causal/--no-causal", help="A token sees those before it.", show_default=False),
        ] = None,
        residual: Annotated[
            Optional[bool],  # noqa: UP045
            typer.Option("--residual/--no-residual", help="A token is added to what it sees.", show_default=False),
        ] = None,
        heads: Annotated[
            Optional[int], typer.Option(help="Heads that share the coordinates.", show_default=False)  # noqa: UP045
        ] = None,
        keys: Annotated[
            Optional[int], typer.Option(help="Frozen keys; 0: the tokens themselves.", show_default=False)  # noqa: UP045
        ] = None,
        seeds: Annotated[
            Optional[int], typer.Option(help="How many clouds.", show_default=False)  # noqa: UP045
        ] = None,
        seed: Annotated[
            Optional[int], typer.Option(help="Seed of the first.", show_default=False)  # noqa: UP045
        ] = None,
        every: Annotated[
            Optional[int],  # noqa: UP045
            typer.Option(help="Steps between two looks; 0: fewer and fewer.", show_default=False),
        ] = None,
        sweep: Annotated[
            Optional[str],  # noqa: UP045
            typer.Option(
                help="A phase diagram over one or two of beta, tau, dim, tokens, heads, contraction, as "
                '"beta=0.1:4:12,tau=-0.5:1:8" (from, to, how many) or "contraction=zca|rms_norm".',
                show_default=False,
            ),
        ] = None,
        out: Annotated[
            Optional[str],  # noqa: UP045
            typer.Option(help="The page; by default the name of the preset with .html.", show_default=False),
        ] = None,
        json: Annotated[
            Optional[str],  # noqa: UP045
            typer.Option(help="Write everything seen as JSON to this file; - is standard output.", show_default=False),
        ] = None,
        open_: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = False,
        list_: Annotated[bool, typer.Option("--list", help="List the presets, one line each, and exit.")] = False,
    ) -> None:
        """Run clouds of tokens under repeated attention and normalisation, and make a page of what they do.

        Without a preset: 500 Gaussian tokens in 8 dimensions, beta 0.354, tau 0.5, whitening, 600 steps, 4 seeds.
        """
        numbers = {
            "beta": beta, "tau": tau, "dim": dim, "tokens": tokens, "steps": steps, "contraction": contraction,
            "placement": placement, "initial": initial, "causal": causal, "residual": residual, "heads": heads,
            "keys": keys, "seeds": seeds, "seed": seed, "every": every,
        }  # fmt: skip
        from .simulation.command import presets_command, simulate_command

        if list_:
            raise typer.Exit(presets_command())
        raise typer.Exit(simulate_command(preset, numbers, sweep, out, json, open_))

    @app.command()
    def track(
        file: Annotated[
            Optional[str],  # noqa: UP045
            typer.Argument(
                help="CSV or parquet with columns time, target, x, y and perhaps z; any of x, y, z may be empty. "
                "Without a file: aircraft that turn, with the truth beside them.",
                show_default=False,
            ),
        ] = None,
        filter_: Annotated[
            Optional[str], typer.Option("--filter", help="imm (the default), gpb2 or gpb1.", show_default=False)  # noqa: UP045
        ] = None,
        model: Annotated[
            Optional[str],  # noqa: UP045
            typer.Option(
                help="cv: constant velocity, quiet and manoeuvring (the default of a file); cv-ca: velocity and "
                "acceleration; turn: straight, left and right.",
                show_default=False,
            ),
        ] = None,
        sigma: Annotated[
            Optional[float],  # noqa: UP045
            typer.Option(help="Standard deviation of a detection; found if not given.", show_default=False),
        ] = None,
        noise: Annotated[
            Optional[float],  # noqa: UP045
            typer.Option(
                help="Spectral density of quiet motion, length²/time³; found if not given.", show_default=False
            ),
        ] = None,
        turn_rate: Annotated[
            Optional[float],  # noqa: UP045
            typer.Option(help="Of --model turn, degrees a unit of time; found if not given.", show_default=False),
        ] = None,
        smooth: Annotated[bool, typer.Option("--smooth", help="Let later detections speak of earlier states.")] = False,
        fit: Annotated[bool, typer.Option("--fit", help="Learn the levels of noise.")] = False,
        skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave bad rows out, and say how many.")] = False,
        seed: Annotated[int, typer.Option(help="Of the built-in scenario.")] = 0,
        out: Annotated[
            Optional[str],  # noqa: UP045
            typer.Option(help="The page; by default the name of the file with .html.", show_default=False),
        ] = None,
        out_table: Annotated[
            Optional[str],  # noqa: UP045
            typer.Option(help="Write a row for each detection, as .csv or .parquet.", show_default=False),
        ] = None,
        json: Annotated[
            Optional[str],  # noqa: UP045
            typer.Option(help="Write what was found as JSON to this file; - is standard output.", show_default=False),
        ] = None,
        open_: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = False,
    ) -> None:
        """Filter detections of moving targets: tracks, modes, and whether the filter is what it claims.

        Makes a page, and a table if asked for. Levels of noise that are not given are found from the detections.
        """
        options = {
            "filter": filter_, "model": model, "sigma": sigma, "noise": noise, "turn_rate": turn_rate,
            "smooth": smooth, "fit": fit, "skip_bad": skip_bad, "seed": seed,
        }  # fmt: skip
        from .tracking.command import track_command

        raise typer.Exit(track_command(file, options, out, out_table, json, open_))

    return app


def _page_of_run(run: Path) -> str:
    """Write the page of a run into its folder; a line that says where it is, or how to get one."""
    if missing():
        return "Page: none; pip install 'gradlogz[report]', then gradlogz report."
    from .reporting import report

    return f"Page: {write(run / PAGE, report(run))}"


def _report(run: str, out: str | None, show: bool) -> int:
    from .reporting import report

    return _page("report", lambda: report(run), Path(out) if out is not None else Path(run) / PAGE, show)


def _compare(runs: list[str], out: str, show: bool) -> int:
    from .reporting import compare

    return _page("compare", lambda: compare(runs), Path(out), show)


def _page(call: str, make: Callable[[], str], path: Path, show: bool) -> int:
    """Make and write a page; 2 with a sentence for what cannot be done."""
    from rich.console import Console
    from rich.markup import escape

    try:
        text = make()
        check_file(call, "--out", path)
        check_drawing(call)
    except (ValueError, ImportError) as refusal:
        Console(stderr=True, soft_wrap=True).print(escape(str(refusal)), highlight=False)
        return 2
    write(path, text)
    Console().print(f"page: {escape(str(path))} ({len(text) / 1e6:.1f} MB)", highlight=False, soft_wrap=True)
    if show:
        webbrowser.open(path.resolve().as_uri())
    return 0


if __name__ == "__main__":
    main()
