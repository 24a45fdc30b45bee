"""One layer of a model repeated beyond its depth, on windows of a text and on sampled tokens.

    x(t + 1) = layer(x(t)),    x(0): tokens of the text where the layer begins, or sampled ones

    clouds = layer_clouds(model, tokenizer, layer=3)
    iterate_layer(layer_dynamics(model, clouds.inputs, 3), clouds, steps=100)

Each cloud is one window of the text. The layer is that of the model in the form of the simulator (layer_dynamics.py).

Read next: layer_dynamics.py, initial_tokens.py (initial distributions), records.py.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from ..._errors import InputValueError
from ..._progress import Progress, reporter
from ..._typing import Float, Tensor
from ...dynamics.evolution import Trajectory
from ..corpus.batching import Batch
from ..corpus.text import Source
from ..inside.discovery import discover
from ..inside.loading import describe
from .initial_tokens import Start, check_start, drawn, moments_of_text
from .layer_blocks import block_of
from .layer_passes import layers_of, passed
from .layer_step import LayerDynamics
from .records import LayerIteration, PropagationSettings
from .text_windows import SEEDS, TOKENS, longest_row, text_batches, window_length

STEPS = 100
RECORDS = 50  # recorded times, at most, besides the start and the end
OBSERVED = (
    "radius", "mean_fraction", "effective_rank", "log_pair_energy", "entropy", "self_weight", "displacement",
    "expansion", "contraction", "clusters", "within",
)  # fmt: skip


class LayerClouds(NamedTuple):
    """Tokens where a layer begins.

    Attributes:
        clouds: {series: [seeds, n, D]}, series "text" and "sampled".
        inputs: arguments of the model for the longest window, from which the layer can be read.
        settings: settings of the run.
        facts: facts about the model.
    """

    clouds: Mapping[str, Float[Tensor, "seeds n D"]]
    inputs: Mapping[str, Any]
    settings: PropagationSettings
    facts: Mapping[str, Any]


def layer_clouds(
    model: nn.Module,
    tokenizer: Any,
    texts: Source | Iterable[Mapping[str, Tensor]] = None,
    *,
    layer: int = 0,
    start: Start = "gaussian",
    name: str | None = None,
    tokens: int = TOKENS,
    length: int | None = None,
    seeds: int = SEEDS,
    seed: int = 0,
    reads: str = "text",
    facts: Mapping[str, Any] | None = None,
) -> LayerClouds:
    """Return windows of a text where a layer of a model begins, and sampled tokens with their moments.

    Args:
        layer: number of the layer, counted from 0.
        start: initial distribution, with the moments of the text where the layer begins.
        tokens: number of tokens of the text that are read for these moments.
        length: number of tokens of a cloud, at most; 128, or the context length if that is smaller.
        seeds: number of clouds of each series; those of the text are its longest windows.

    The other arguments are those of `propagate`.
    """
    check_start("layer_clouds", start)
    length = window_length(tokenizer, length)
    [batches] = text_batches(
        model, tokenizer, texts, tokens=max(tokens, seeds * length), length=length, seeds=1, seed=seed, reads=reads
    )
    architecture = discover(model, batches[0].inputs)
    block = block_of(architecture, layer, call="layer_clouds")
    number = layers_of(architecture).index(block)
    rows = _longest(batches, seeds)
    windows = [passed(model, architecture, row)[0][number].stream.double() for row in rows]
    n = min(map(len, windows))
    clouds = {"text": torch.stack([window[:n] for window in windows])}
    if start != "text":
        read = torch.cat([passed(model, architecture, batch)[0][number].stream for batch in batches])
        generator, moments = torch.Generator().manual_seed(seed % 2**63), moments_of_text(read)
        clouds["sampled"] = torch.stack([drawn(start, n, moments, generator) for _ in windows])
    source = texts if isinstance(texts, str) else ""
    settings = PropagationSettings(
        name or type(model).__name__, start, tokens, length, seeds, seed, source, number, STEPS
    )
    return LayerClouds(clouds, rows[0].inputs, settings, {**describe(model), **(facts or {}), "cloud": n})


def iterate_layer(
    dynamics: LayerDynamics, clouds: LayerClouds, *, steps: int = STEPS, progress: Progress = False
) -> LayerIteration:
    """Repeat a layer on clouds of tokens, and record the observables of the simulator.

    Args:
        dynamics: result of `layer_dynamics`.
        clouds: result of `layer_clouds`.
        steps: number of repetitions.
        progress: True for a bar on standard error, or a function f(steps, total).

    Law: tests/laws/test_distributions_pass_through_layers.py.
    """
    if not isinstance(steps, int) or steps < 1:
        problem = f"steps must be an integer of at least 1, got {steps!r}"
        raise InputValueError("iterate_layer", "steps", problem, "Pass 1 or more.")
    show, every = reporter(progress, "steps"), max(1, -(-steps // RECORDS))
    runs: dict[str, Trajectory] = {}
    for series, cloud in clouds.clouds.items():
        before = steps * len(runs)

        def tell(done: int, total: int, before: int = before) -> None:  # noqa: ARG001
            show(before + done, steps * len(clouds.clouds))

        runs[series] = _repeated(dynamics, cloud, steps, every, tell)
    facts = {"layer": dynamics.layer, "placement": dynamics.placement, "difference": dynamics.error}
    observed = {
        series: {name: values.double().mT for name, values in run.observed.items() if not bool(values.isnan().all())}
        for series, run in runs.items()
    }
    times = tuple(runs["text"].times.tolist())
    return LayerIteration(replace(clouds.settings, steps=steps), {**clouds.facts, **facts}, times, observed)


def _repeated(
    dynamics: LayerDynamics, cloud: Float[Tensor, "b n D"], steps: int, every: int, progress: Progress
) -> Trajectory:
    """Record every `every` steps and at the end."""
    rest = steps % every
    with torch.no_grad():
        run = dynamics.evolve(cloud, steps=steps - rest, observe=OBSERVED, every=every, progress=progress)
        return dynamics.evolve(run, steps=rest, observe=OBSERVED, every=steps) if rest else run


def _longest(batches: list[Batch], count: int) -> list[Batch]:
    """Return the longest rows, one batch each, without padding."""
    rows = [batch.rows([i]) for batch in batches for i in range(len(batch.keys))]
    rows = [row._replace(inputs=longest_row(row.inputs)) for row in rows]
    rows.sort(key=lambda row: -next(iter(row.inputs.values())).shape[1])
    if len(rows) < count:
        problem = f"the text has {len(rows)} windows, fewer than the {count} seeds"
        raise InputValueError("layer_clouds", "texts", problem, "Pass a longer text, or fewer seeds.")
    return rows[:count]
