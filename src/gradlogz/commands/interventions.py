"""The option --intervene of `gradlogz probe`: interventions on the model of a run, written to its folder.

    interventions.json      facts and effects; the page of the run has a section of them
    interventions.csv       the effects, one line each

Read next: probe.py (the command), ../probing/interventions/run_interventions.py (the measurement).
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from ..probing.inside.loading import Loaded
    from ..probing.interventions.records import Interventions

ALL = "all"
SHARE = 0.1  # losses are measured on this share of the tokens of a run, since every intervention is a pass

Intervene = Annotated[
    str | None,
    typer.Option(
        help="Interventions: all, or some of gradient,steps,layers,heads,feed_forward (default: none).",
        show_default=False,
    ),
]


def check_intervene(names: str | None) -> None:
    """Raise before any computation if --intervene has an unknown name."""
    if names is not None:
        from ..probing.interventions.run_interventions import chosen_interventions

        chosen_interventions(_named(names))


def print_interventions(console: "Console", effects: "Interventions") -> None:
    """Print the table of effects."""
    from ..reporting.interventions_terminal import interventions_table
    from ..reporting.result_table import print_lines

    print_lines(console, interventions_table(effects, console.width))


def write_interventions(
    place: Path,
    names: str,
    loaded: "Loaded",
    text: str | None,
    *,
    name: str,
    tokens: int,
    length: int | None,
    seed: int,
) -> "Interventions":
    """Measure interventions and write them into the folder of a run."""
    from .._output_files import write
    from ..probing.corpus.readers import corpus_of
    from ..probing.interventions.run_interventions import FIT_TOKENS, TOKENS, chosen_interventions, intervene
    from ..reporting.interventions_page import FILE, TABLE

    effects = intervene(
        loaded.model, loaded.tokenizer, corpus_of(loaded.tokenizer, text, reads=loaded.facts["reads"]), name=name,
        interventions=chosen_interventions(_named(names)), tokens=max(round(SHARE * tokens), 1) if tokens else TOKENS,
        fit_tokens=tokens or FIT_TOKENS, length=length, seed=seed, progress=True,
    )  # fmt: skip
    write(place / FILE, f"{effects.to_json()}\n")
    write(place / TABLE, effects.to_csv())
    return effects


def _named(names: str) -> list[str] | None:
    return None if names == ALL else [name.strip() for name in names.split(",")]
