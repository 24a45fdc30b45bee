"""gradlogz track: filter detections, print the results, write the page and the table.

Read next: ../tracking/run_tracking.py.
"""

from pathlib import Path
from typing import Annotated

import typer

from .._input_errors import InputValueError
from .boundary import INTERRUPTED, PARTIAL
from .engine_options import Address, EngineName, EngineOptions, Restart, Resume, Workers, print_failures
from .outputs import Force, Open, check_drawing, check_files, finish, progress, terminal


def command(
    file: Annotated[
        str | None,
        typer.Argument(
            help="CSV or parquet file: columns time, x, y or lat, lon, optionally target (default: built-in scenario).",
            show_default=False,
        ),
    ] = None,
    filter_: Annotated[
        str | None,
        typer.Option(
            "--filter",
            help="imm (interacting multiple model), gpb2 or gpb1 (generalised pseudo-Bayesian) (default: imm).",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="cv or cv3 (constant velocity, 2 or 3 noise levels), cv-ca (velocity or acceleration) or turn "
            "(default: cv; built-in scenario: turn).",
            show_default=False,
        ),
    ] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(
            help="Column of a quantity, QUANTITY=NAME or QUANTITY=NAME:UNIT, such as x=east:km; repeatable "
            "(default: by name).",
            show_default=False,
        ),
    ] = None,
    sigma: Annotated[
        str | None,
        typer.Option(
            help="Standard deviation of a detection, or one for each coordinate: 50,80 (default: columns sigma, or "
            "estimated; built-in scenario: 100).",
            show_default=False,
        ),
    ] = None,
    sigma_velocity: Annotated[
        float | None,
        typer.Option(
            help="Standard deviation of velocities in columns groundspeed and track (default: not used).",
            show_default=False,
        ),
    ] = None,
    noise: Annotated[
        float | None,
        typer.Option(
            help="Spectral density of the process noise, length²/time³ (default: estimated; built-in scenario: 1).",
            show_default=False,
        ),
    ] = None,
    jitter: Annotated[
        float | None,
        typer.Option(
            help="Standard deviation of the times of detections; 0 for exact times (default: estimated).",
            show_default=False,
        ),
    ] = None,
    turn_rate: Annotated[
        float | None,
        typer.Option(
            help="Turn rate of --model turn, degrees per unit of time (default: estimated; built-in scenario: true "
            "value, 3).",
            show_default=False,
        ),
    ] = None,
    outliers: Annotated[
        float | None,
        typer.Option(
            help="Probability that a detection is an outlier; 0 rejects none (default: 0.01).", show_default=False
        ),
    ] = None,
    levels: Annotated[
        str | None,
        typer.Option(
            help="Results (--json) of an earlier run with the noise levels (default: none).", show_default=False
        ),
    ] = None,
    smooth: Annotated[bool, typer.Option("--smooth", help="Also estimate each state from all detections.")] = False,
    fit: Annotated[bool, typer.Option("--fit", help="Refine the noise levels by maximum likelihood.")] = False,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Skip and count invalid rows.")] = False,
    seed: Annotated[int, typer.Option(help="Random seed of the built-in scenario.")] = 0,
    out: Annotated[
        str | None,
        typer.Option(
            help="HTML page to write (default: name of FILE with .html; built-in scenario: track.html).",
            show_default=False,
        ),
    ] = None,
    out_table: Annotated[
        str | None,
        typer.Option(
            help="Table to write, .csv or .parquet, with one row per detection (default: none).", show_default=False
        ),
    ] = None,
    json: Annotated[
        str | None,
        typer.Option(help="JSON file for the results; - for standard output (default: none).", show_default=False),
    ] = None,
    details: Annotated[
        bool,
        typer.Option("--details", help="Also print sentences on consistency and errors, and the rule of the verdicts."),
    ] = False,
    force: Force = False,
    open_: Open = False,
    engine: EngineName = None,
    workers: Workers = None,
    resume: Resume = None,
    restart: Restart = False,
    address: Address = None,
) -> int:
    """Track moving targets with a switching Kalman filter and test whether the filter is consistent (NIS).

    Prints a table of results and writes an HTML page.

    Noise levels are given by --sigma and --noise, or estimated from the detections; --fit refines them by
    maximum likelihood, and --levels takes those of an earlier run.

    With --engine or --resume, batches of targets are filtered on all cores or on a cluster; the same command
    continues where it stopped.
    """
    check_detections(file)  # before the imports below, which take seconds
    from ..page import as_json
    from ..reporting import report
    from ..reporting.tracks_page import data_of
    from ..reporting.tracks_terminal import tracks_details, tracks_table
    from ..reporting.tracks_wording import run_text
    from ..tracking.run_tracking import track
    from ..tracking.table import check_table, write_table

    console = terminal(json)
    distribution = EngineOptions(engine, workers, resume, restart, address)
    distribution.check("track")
    divided = engine is not None or resume is not None
    if not divided:
        distribution.refuse("track", "--engine")
    columns, numbers = columns_in(column or []), numbers_in(sigma)
    path = Path(out or (f"{Path(file).stem}.html" if file else "track.html"))
    files = {"--out": path, "--out-table": out_table, "--json": json}
    check_files("track", files, inputs=[file, levels], force=force)
    if out_table is not None:
        check_table(out_table)
    check_drawing("track")
    with progress(console, "Filtering") as tell:
        tracks = track(
            file, filter=filter_, model=model, columns=columns, sigma=numbers,
            sigma_velocity=sigma_velocity, noise=noise, jitter=jitter,
            turn_rate=turn_rate, outliers=outliers, levels=levels, smooth=smooth, fit=fit,
            skip_bad=skip_bad, seed=seed, progress=tell, **(distribution.arguments if divided else {}),
        )  # fmt: skip
        tell(what="Writing the page")
        html, data = report(tracks), "" if json is None else as_json(data_of(tracks))
        if out_table is not None:
            tell(what="Writing the table")
            write_table(tracks, out_table)
    width = console.width
    lines = tracks_table(tracks, width) + (tracks_details(tracks, width) if details else [])
    tables = [out_table] if out_table is not None else []
    finish(
        console, lines, run=run_text(tracks), page=path, html=html, json=json, data=data, tables=tables, show=open_
    )  # fmt: skip
    print_failures(console, tracks.failures)
    return INTERRUPTED if tracks.interrupted else PARTIAL if tracks.failures else 0


def check_detections(file: str | None) -> None:
    """Raise if the file of detections cannot be opened; None is the simulated example."""
    if file is None:
        return
    if Path(file).is_fifo():  # it would have to be read twice, and opening it waits for its writer
        problem = f"{file} is a pipe, which can be read only once"
        raise InputValueError("track", "detections", problem, "Save the detections to a file.")
    try:
        Path(file).open("rb").close()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        remedy = "Pass a CSV or .parquet file with the columns time, target, x, y."
        raise InputValueError("track", "detections", f"{file} cannot be read: {reason}", remedy) from None


def columns_in(options: list[str]) -> dict[str, str]:
    """{quantity: column} of the options --column."""
    pairs = [option.partition("=") for option in options]
    wrong = next((option for option, pair in zip(options, pairs, strict=True) if not (pair[0] and pair[2])), None)
    if wrong is not None:
        problem = f"--column must be QUANTITY=NAME, got {wrong!r}"
        raise InputValueError("track", "--column", problem, "Write it as in --column x=east.")
    return {quantity.strip().lower(): name for quantity, _, name in pairs}


def numbers_in(option: str | None) -> "float | tuple[float, ...] | None":
    """Numbers of an option, separated by commas."""
    if option is None:
        return None
    try:
        values = tuple(float(part) for part in option.split(","))
    except ValueError:
        problem = f"--sigma must be a number, or several separated by commas, got {option!r}"
        raise InputValueError("track", "--sigma", problem, "Write it as in --sigma 50 or --sigma 50,80.") from None
    return values[0] if len(values) == 1 else values
