"""gradlogz simulate: run a preset or a sweep, show the verdicts, write the page.

Read next: ../simulation/run_simulation.py (one simulation), ../simulation/parameter_sweep.py (a grid of them).
"""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from .outputs import Open, check_drawing, check_file, progress, terminal, write_json, write_page


def command(
    preset: Annotated[
        str | None,
        typer.Argument(help="A run with a name; --list shows all. Options override its numbers.", show_default=False),
    ] = None,
    beta: Annotated[float | None, typer.Option(help="Inverse temperature of attention.", show_default=False)] = None,
    tau: Annotated[float | None, typer.Option(help="Size of a step; negative descends.", show_default=False)] = None,
    dim: Annotated[int | None, typer.Option(help="Dimensions of a token.", show_default=False)] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens of a cloud.", show_default=False)] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of attention.", show_default=False)] = None,
    contraction: Annotated[
        str | None,
        typer.Option(
            help="What holds the cloud together: none, center, scalar, batch_norm, zca, pca, cholesky, monge, "
            "sphere, rms_norm, layer_norm, resolvent; several joined by +.",
            show_default=False,
        ),
    ] = None,
    placement: Annotated[
        str | None, typer.Option(help="Where it stands: post, pre or peri.", show_default=False)
    ] = None,
    initial: Annotated[
        str | None,
        typer.Option(
            help="Law of the start: gaussian, uniform, laplace, exponential, sphere, circle.", show_default=False
        ),
    ] = None,
    causal: Annotated[
        bool | None, typer.Option("--causal/--no-causal", help="A token sees those before it.", show_default=False)
    ] = None,
    residual: Annotated[
        bool | None,
        typer.Option("--residual/--no-residual", help="A token is added to what it sees.", show_default=False),
    ] = None,
    heads: Annotated[int | None, typer.Option(help="Heads that share the coordinates.", show_default=False)] = None,
    keys: Annotated[int | None, typer.Option(help="Frozen keys; 0: the tokens themselves.", show_default=False)] = None,
    seeds: Annotated[int | None, typer.Option(help="How many clouds.", show_default=False)] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the first.", show_default=False)] = None,
    every: Annotated[
        int | None, typer.Option(help="Steps between two looks; 0: fewer and fewer.", show_default=False)
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            help="A phase diagram over one or two of beta, tau, dim, tokens, heads, contraction, as "
            '"beta=0.1:4:12,tau=-0.5:1:8" (from, to, how many) or "contraction=zca|rms_norm".',
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        str | None, typer.Option(help="The page; by default the name of the preset with .html.", show_default=False)
    ] = None,
    json: Annotated[
        str | None,
        typer.Option(help="Write everything seen as JSON to this file; - is standard output.", show_default=False),
    ] = None,
    open_: Open = False,
    list_: Annotated[bool, typer.Option("--list", help="List the presets, one line each, and exit.")] = False,
) -> int:
    """Run clouds of tokens under repeated attention and normalisation, and make a page of what they do.

    Without a preset: 500 Gaussian tokens in 8 dimensions, beta 0.354, tau 0.5, whitening, 600 steps, 4 seeds.
    """
    if list_:
        return _list_presets()
    numbers = {
        "beta": beta, "tau": tau, "dim": dim, "tokens": tokens, "steps": steps, "contraction": contraction,
        "placement": placement, "initial": initial, "causal": causal, "residual": residual, "heads": heads,
        "keys": keys, "seeds": seeds, "seed": seed, "every": every,
    }  # fmt: skip
    console = terminal(json)
    path = Path(out or f"{'phases' if sweep else preset or 'simulation'}.html")
    check_file("simulate", "--out", path)
    check_file("simulate", "--json", json)
    check_drawing("simulate")
    if sweep is None:
        html, data = _simulation(console, preset, numbers)
    else:
        html, data = _phases(console, sweep, preset, numbers)
    write_page(console, path, html, show=open_)
    write_json(json, data)
    return 0


def _list_presets() -> int:
    from ..reporting.simulation_terminal import preset_lines
    from ..simulation.presets import PRESETS

    for line in preset_lines(PRESETS.values()):
        print(line)
    return 0


def _simulation(console: Console, preset: str | None, numbers: dict[str, Any]) -> tuple[str, str]:
    """The page and the JSON of one simulation, printed in short."""
    from ..page import as_json
    from ..reporting import report
    from ..reporting.simulation_page import data_of
    from ..reporting.simulation_terminal import evidence_table, simulation_summary
    from ..simulation.presets import DEFAULT
    from ..simulation.run_simulation import simulate

    with progress(console, "Steps") as tell:
        simulation = simulate(preset or DEFAULT, progress=tell, **numbers)
        tell(what="Page")
        html, data = report(simulation), as_json(data_of(simulation))
    for line in simulation_summary(simulation):
        console.print(line, soft_wrap=True)
    console.print(evidence_table(simulation, console.width))
    return html, data


def _phases(console: Console, sweep_text: str, preset: str | None, numbers: dict[str, Any]) -> tuple[str, str]:
    """The page and the JSON of a phase diagram, printed in short."""
    from ..page import as_json
    from ..reporting import report
    from ..reporting.phases_page import data_of
    from ..reporting.simulation_terminal import phases_summary
    from ..simulation.grid import parse_grid
    from ..simulation.parameter_sweep import sweep

    with progress(console, "Places of the grid") as tell:
        phases = sweep(parse_grid(sweep_text), preset=preset, progress=tell, **numbers)
    console.print(phases_summary(phases), soft_wrap=True)
    return report(phases), as_json(data_of(phases))
