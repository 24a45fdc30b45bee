"""gradlogz simulate: run a preset or a parameter grid, print the results, write the page.

Read next: ../simulation/run_simulation.py (one simulation), ../simulation/parameter_sweep.py (a grid of them),
../probing/propagation/run_propagation.py (tokens in the layers of a trained model).
"""

from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.text import Text

from .._input_errors import InputValueError
from .boundary import INTERRUPTED, PARTIAL
from .engine_options import Address, EngineName, EngineOptions, Restart, Resume, Workers, print_failures
from .outputs import Force, Open, check_drawing, check_files, finish, progress, terminal
from .simulate_model import ModelOptions, check_options


def command(
    preset: Annotated[
        str | None,
        typer.Argument(
            help="Preset, see --list; options replace its parameters (default: whitening).", show_default=False
        ),
    ] = None,
    beta: Annotated[
        float | None, typer.Option(help="Inverse temperature of attention (default: 0.354).", show_default=False)
    ] = None,
    tau: Annotated[
        float | None,
        typer.Option(help="Step size of the ascent; negative for descent (default: 0.5).", show_default=False),
    ] = None,
    dim: Annotated[int | None, typer.Option(help="Dimension of a token (default: 8).", show_default=False)] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Number of tokens (default: 500; 2048 with --model).", show_default=False)
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Number of steps (default: 600; 100 with --layer).", show_default=False)
    ] = None,
    contraction: Annotated[
        str | None,
        typer.Option(
            help="Normalisation in each step: none, center, scalar, batch_norm, zca, pca, cholesky, monge, "
            "sphere, rms_norm, layer_norm, shrinkage, inverse_step, recoloring; join several with + (default: zca).",
            show_default=False,
        ),
    ] = None,
    placement: Annotated[
        str | None,
        typer.Option(
            help="Position of the normalisation: after (post), before (pre) or around (peri) attention "
            "(default: post).",
            show_default=False,
        ),
    ] = None,
    initial: Annotated[
        str | None,
        typer.Option(
            help="Initial distribution: gaussian, uniform, laplace, exponential, sphere, circle (default: gaussian).",
            show_default=False,
        ),
    ] = None,
    causal: Annotated[
        bool | None, typer.Option("--causal/--no-causal", help="Causal mask (default: no).", show_default=False)
    ] = None,
    residual: Annotated[
        bool | None,
        typer.Option("--residual/--no-residual", help="Residual connection (default: yes).", show_default=False),
    ] = None,
    heads: Annotated[
        int | None,
        typer.Option(help="Number of heads; each acts on dim / heads coordinates (default: 1).", show_default=False),
    ] = None,
    keys: Annotated[
        int | None,
        typer.Option(help="Number of fixed keys; with 0 the tokens are the keys (default: 0).", show_default=False),
    ] = None,
    key_measure: Annotated[
        str | None,
        typer.Option(help="Measure in place of keys: none, gaussian, sphere (default: none).", show_default=False),
    ] = None,
    key_mean: Annotated[
        str | None, typer.Option(help="Mean of Gaussian keys: 0.5 or 1,-0.5 (default: 0).", show_default=False)
    ] = None,
    key_covariance: Annotated[
        str | None,
        typer.Option(
            help="Covariance of Gaussian keys: 2, diagonal 2,0.5 or rows 2,0.6/0.6,0.5 (default: 1).",
            show_default=False,
        ),
    ] = None,
    qk_matrix: Annotated[
        str | None,
        typer.Option(help="Matrix B of the logits, written as a covariance (default: 1).", show_default=False),
    ] = None,
    ov_matrix: Annotated[
        str | None,
        typer.Option(
            help="Matrix of the values, written as a covariance (default: qk, that is B).", show_default=False
        ),
    ] = None,
    natural: Annotated[
        bool | None,
        typer.Option("--natural/--no-natural", help="Natural-gradient steps (default: no).", show_default=False),
    ] = None,
    draws: Annotated[
        int | None,
        typer.Option(
            help="Keys drawn by attention weights in place of attention; 0 for attention (default: 0).",
            show_default=False,
        ),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(help="Number of seeds (default: 4; 5 with --model).", show_default=False)
    ] = None,
    seed: Annotated[int | None, typer.Option(help="First seed (default: 0).", show_default=False)] = None,
    every: Annotated[
        int | None,
        typer.Option(
            help="Recording interval in steps; 0 for a logarithmic schedule (default: 0).", show_default=False
        ),
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            help='Phase diagram over one or two parameters: "beta=0.1:4:12,tau=-0.5:1:8" (from:to:count) or '
            '"contraction=zca|rms_norm".',
            show_default=False,
        ),
    ] = None,
    engine: EngineName = None,
    workers: Workers = None,
    resume: Resume = None,
    restart: Restart = False,
    address: Address = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Trained model whose layers the tokens pass through, as in probe (default: none).", show_default=False
        ),
    ] = None,
    start: Annotated[
        str | None,
        typer.Option(
            help="With --model, initial tokens: gaussian (moments of the text), standard, sphere or text (default: "
            "gaussian).",
            show_default=False,
        ),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(help="With --model, file or folder of text (default: built-in).", show_default=False),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(help="With --model, window length in tokens (default: 128).", show_default=False),
    ] = None,
    layer: Annotated[
        int | None,
        typer.Option(help="With --model, number of one layer to repeat --steps times.", show_default=False),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            help="HTML page to write (default: PRESET.html; simulation.html if no preset is named; phases.html with "
            "--sweep; MODEL.html with --model).",
            show_default=False,
        ),
    ] = None,
    json: Annotated[
        str | None,
        typer.Option(help="JSON file for the results; - for standard output (default: none).", show_default=False),
    ] = None,
    details: Annotated[
        bool, typer.Option("--details", help="Print explanations and the numbers of each seed.")
    ] = False,
    force: Force = False,
    open_: Open = False,
    list_: Annotated[bool, typer.Option("--list", help="List the presets with their predictions, and exit.")] = False,
) -> int:
    """Simulate tokens under repeated attention and normalisation, and compare the results with theory.

    Prints a table of results and writes an HTML page.

    With --model, sampled tokens pass through the layers of a trained model, beside text and random weights.

    Options not given are taken from the preset; the defaults below are those of `whitening`.
    """
    if list_:
        return _list_presets()
    parameters = {
        "beta": beta, "tau": tau, "dim": dim, "tokens": tokens, "steps": steps, "contraction": contraction,
        "placement": placement, "initial": initial, "causal": causal, "residual": residual, "heads": heads,
        "keys": keys, "key_measure": key_measure, "key_mean": key_mean, "key_covariance": key_covariance,
        "qk_matrix": qk_matrix, "ov_matrix": ov_matrix, "natural": natural, "draws": draws, "seeds": seeds,
        "seed": seed, "every": every,
    }  # fmt: skip
    console = terminal(json)
    named = None if model is None else Path(model).name
    path = Path(out or f"{'phases' if sweep else preset or named or 'simulation'}.html")
    check_files("simulate", {"--out": path, "--json": json}, inputs=[text], force=force)
    check_drawing("simulate")
    distribution = EngineOptions(engine, workers, resume, restart, address)
    if sweep is None:
        distribution.refuse("simulate", "--sweep")
    distribution.check("simulate")
    if model is not None:
        shared = ("tokens", "seeds", "seed", "steps")
        options = ModelOptions(model, start, text, tokens, length, seeds, seed, layer, steps)
        others = {name: value for name, value in parameters.items() if name not in shared}
        check_options(options, {"preset": preset, "sweep": sweep, **others})
        output = _model(console, options, details=details)
    elif (unused := _only_with_model(start=start, text=text, length=length, layer=layer)) is not None:
        problem = f"--{unused} concerns a trained model, but --model is missing"
        raise InputValueError("simulate", f"--{unused}", problem, f"Add --model minilm, or drop --{unused}.")
    elif sweep is None:
        output = _simulation(console, preset, parameters, details=details)
    else:
        output = _phases(console, sweep, preset, parameters | distribution.arguments, details=details)
    finish(console, output.lines, run=output.run, page=path, html=output.html, json=json, data=output.data, show=open_)
    return output.status


def _only_with_model(**options: Any) -> str | None:
    """The first of the options of --model that is given."""
    return next((name for name, value in options.items() if value is not None), None)


class Output(NamedTuple):
    """The page, the JSON, the table, the line about the run, and the exit status."""

    html: str
    data: str
    lines: list[Text]
    run: str
    status: int = 0


def _list_presets() -> int:
    from ..reporting.simulation_terminal import preset_lines
    from ..simulation.presets import PRESETS

    for line in preset_lines(PRESETS.values()):
        print(line)
    return 0


def _simulation(console: Console, preset: str | None, parameters: dict[str, Any], *, details: bool) -> Output:
    from ..page import as_json
    from ..reporting import report
    from ..reporting.simulation_page import data_of
    from ..reporting.simulation_terminal import simulation_details, simulation_table
    from ..reporting.simulation_wording import run_text
    from ..simulation.presets import DEFAULT
    from ..simulation.run_simulation import simulate

    width = console.width
    with progress(console, "Simulating") as tell:
        simulation = simulate(preset or DEFAULT, progress=tell, **parameters)
        tell(what="Writing the page")
        html, data = report(simulation), as_json(data_of(simulation))
        lines = simulation_table(simulation, width)
        lines += simulation_details(simulation, width) if details else []
    return Output(html, data, lines, run_text(simulation))


def _phases(console: Console, grid: str, preset: str | None, parameters: dict[str, Any], *, details: bool) -> Output:
    from ..page import as_json
    from ..reporting import report
    from ..reporting.phases_page import data_of
    from ..reporting.simulation_terminal import phases_details, phases_table
    from ..reporting.simulation_wording import grid_run_text
    from ..simulation.grid import parse_grid
    from ..simulation.parameter_sweep import sweep

    width = console.width
    with progress(console, "Simulating grid points") as tell:
        phases = sweep(parse_grid(grid), preset=preset, progress=tell, **parameters)
    print_failures(console, phases.failures)
    lines = phases_table(phases, width) + (phases_details(phases, width) if details else [])
    status = INTERRUPTED if phases.interrupted else PARTIAL if phases.failures else 0
    return Output(report(phases), as_json(data_of(phases)), lines, grid_run_text(phases), status)


def _model(console: Console, options: ModelOptions, *, details: bool) -> Output:
    """Sampled tokens through the layers of a model, or through one of them repeatedly."""
    from ..page import as_json
    from ..probing.inside.loading import load
    from ..probing.propagation.initial_tokens import check_start
    from ..reporting import propagation_terminal as tables
    from ..reporting import report
    from ..reporting.propagation_page import data_of
    from ..reporting.propagation_wording import iteration_run_text, run_text

    check_start("simulate", options.start or "gaussian")
    with console.status(Text(f"Loading {options.model}")):
        loaded = load(options.model)
    model, tokenizer, width = loaded.model, loaded.tokenizer, console.width
    arguments = {"name": options.model, "reads": loaded.facts["reads"], "facts": loaded.facts, **options.common}
    with progress(console, "Running the model") as tell:
        if options.layer is None:
            from ..probing.propagation.run_propagation import propagate

            result = propagate(model, tokenizer, options.text, progress=tell, **arguments)
            lines = tables.propagation_table(result, width)
            lines += tables.propagation_details(result, width) if details else []
            return Output(report(result), as_json(data_of(result)), lines, run_text(result))
        from ..probing.propagation.layer_dynamics import layer_dynamics
        from ..probing.propagation.layer_iteration import STEPS, iterate_layer, layer_clouds

        clouds = layer_clouds(model, tokenizer, options.text, layer=options.layer, **arguments)
        dynamics = layer_dynamics(model, clouds.inputs, options.layer)
        repeated = iterate_layer(dynamics, clouds, steps=options.steps or STEPS, progress=tell)
    lines = tables.iteration_table(repeated, width) + (tables.iteration_details(repeated, width) if details else [])
    return Output(report(repeated), as_json(data_of(repeated)), lines, iteration_run_text(repeated))
