"""gradlogz track: read, filter, say whether the filter is what it claims, write the page and the table.

Read next: ../tracking/run_tracking.py.
"""

from pathlib import Path
from typing import Annotated

import typer

from .outputs import Open, check_drawing, check_file, progress, terminal, write_json, write_page


def command(
    file: Annotated[
        str | None,
        typer.Argument(
            help="CSV or parquet with columns time, target, x, y and perhaps z; any of x, y, z may be empty. "
            "Without a file: aircraft that turn, with the truth beside them.",
            show_default=False,
        ),
    ] = None,
    filter_: Annotated[
        str | None, typer.Option("--filter", help="imm (the default), gpb2 or gpb1.", show_default=False)
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="cv: constant velocity, quiet and manoeuvring (the default of a file); cv-ca: velocity and "
            "acceleration; turn: straight, left and right.",
            show_default=False,
        ),
    ] = None,
    sigma: Annotated[
        float | None, typer.Option(help="Standard deviation of a detection; found if not given.", show_default=False)
    ] = None,
    noise: Annotated[
        float | None,
        typer.Option(help="Spectral density of quiet motion, length²/time³; found if not given.", show_default=False),
    ] = None,
    turn_rate: Annotated[
        float | None,
        typer.Option(help="Of --model turn, degrees a unit of time; found if not given.", show_default=False),
    ] = None,
    smooth: Annotated[bool, typer.Option("--smooth", help="Let later detections speak of earlier states.")] = False,
    fit: Annotated[bool, typer.Option("--fit", help="Learn the levels of noise.")] = False,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave bad rows out, and say how many.")] = False,
    seed: Annotated[int, typer.Option(help="Of the built-in scenario.")] = 0,
    out: Annotated[
        str | None, typer.Option(help="The page; by default the name of the file with .html.", show_default=False)
    ] = None,
    out_table: Annotated[
        str | None, typer.Option(help="Write a row for each detection, as .csv or .parquet.", show_default=False)
    ] = None,
    json: Annotated[
        str | None,
        typer.Option(help="Write what was found as JSON to this file; - is standard output.", show_default=False),
    ] = None,
    open_: Open = False,
) -> int:
    """Filter detections of moving targets: tracks, modes, and whether the filter is what it claims.

    Makes a page, and a table if asked for. Levels of noise that are not given are found from the detections.
    """
    from ..page import as_json
    from ..reporting import report
    from ..reporting.tracks_page import data_of
    from ..reporting.tracks_terminal import tracks_summary
    from ..tracking.run_tracking import track
    from ..tracking.table import check_table, write_table

    console = terminal(json)
    path = Path(out or (f"{Path(file).stem}.html" if file else "track.html"))
    check_file("track", "--out", path)
    check_file("track", "--out-table", out_table)
    if out_table is not None:
        check_table(out_table)
    check_file("track", "--json", json)
    check_drawing("track")
    with progress(console, "Rows") as tell:
        tracks = track(
            file, filter=filter_, model=model, sigma=sigma, noise=noise, turn_rate=turn_rate, smooth=smooth, fit=fit,
            skip_bad=skip_bad, seed=seed, progress=tell,
        )  # fmt: skip
        tell(what="Page")
        html, data = report(tracks), "" if json is None else as_json(data_of(tracks))
        if out_table is not None:
            tell(what="Table")
            write_table(tracks, out_table)
    for line in tracks_summary(tracks):
        console.print(line, soft_wrap=True)
    if out_table is not None:
        console.print(f"table: {out_table}", highlight=False, soft_wrap=True, markup=False)
    write_page(console, path, html, show=open_)
    write_json(json, data)
    return 0
