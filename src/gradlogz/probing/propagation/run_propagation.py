"""Propagation: a distribution of tokens through the layers of a model, beside text and beside random weights.

    text       windows of a text in the model, those of each seed disjoint; their moments where the layers begin
    sampled    tokens of an initial distribution in place of theirs, with the same masks and positions
    baselines  the same tokens in models with random weights: untrained, and of the trained spectra; one for each seed

Read next: initial_tokens.py (initial distributions), layer_passes.py (one pass), layer_observables.py, records.py.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ..._errors import InputValueError
from ..._progress import Progress, reporter
from ..._typing import Float, Tensor
from ...dynamics.gaussian_null import mardia_band, null_band
from ..corpus.batching import Batch
from ..corpus.text import Source
from ..inside.architecture import Architecture
from ..inside.discovery import discover
from ..inside.loading import describe
from ..inside.random_models import with_random_weights
from ..inside.redrawn_models import RedrawnModels
from ..inside.weights import weights_of
from .initial_tokens import Start, TextMoments, check_start, drawn, moments_of_text
from .layer_blocks import LayerBlock
from .layer_observables import LayerTokens, observables_of
from .layer_passes import joined, layers_of, passed
from .records import Propagation, PropagationSettings
from .text_windows import SEEDS, TOKENS, text_batches, window_length

DRAWS = 39  # Gaussian clouds of the null band: the fewest whose range is a 95 % interval
BASELINES = ("untrained", "redrawn")


def propagate(
    model: nn.Module,
    tokenizer: Any,
    texts: Source | Iterable[Mapping[str, Tensor]] = None,
    *,
    start: Start = "gaussian",
    name: str | None = None,
    tokens: int = TOKENS,
    length: int | None = None,
    seeds: int = SEEDS,
    seed: int = 0,
    baselines: Iterable[str] = BASELINES,
    reads: str = "text",
    facts: Mapping[str, Any] | None = None,
    progress: Progress = False,
) -> Propagation:
    """Push a sampled distribution of tokens through the layers of a model, and record the observables of the simulator.

    The tokens of a text and models with random weights are the comparison. Sampled tokens replace the tokens of the
    text where the layers begin, window by window, under the same masks and positions.

    Args:
        tokenizer: tokenizer of the model; None if `texts` are batches of inputs.
        texts: as in `probe`; the help topics of Python if None.
        start: "gaussian" with mean and covariance of the text, "standard" Gaussian, "sphere" of the radius of the text,
            or "text".
        name: name of the model in the result; its class name by default.
        tokens: number of tokens of a cloud; more than the width of the model.
        length: largest number of tokens of a window; 128, or the context length if that is smaller.
        seeds: number of clouds of each series: texts, draws of tokens, draws of random weights.
        baselines: "untrained", "redrawn", both or none.
        reads: what a model without texts reads, as in the facts of `load`.
        progress: True for a bar on standard error, or a function f(passes, total).

    Law: tests/laws/test_distributions_pass_through_layers.py.
    """
    wanted = tuple(baselines)
    _check(start, tokens, seeds, wanted)
    length = window_length(tokenizer, length)
    clouds = text_batches(model, tokenizer, texts, tokens=tokens, length=length, seeds=seeds, seed=seed, reads=reads)
    architecture = discover(model, clouds[0][0].inputs)
    layers = layers_of(architecture)
    series = ("text", *(("sampled",) if start != "text" else ()), *wanted)
    show, done, total = reporter(progress, "clouds"), 0, len(series) * seeds
    observed: dict[str, list[dict[str, Tensor]]] = {each: [] for each in series}
    runs = [_text(model, architecture, batches) for batches in clouds]
    n = min(tokens, *(run.size for run in runs))
    if n <= architecture.width + 1:
        problem = (
            f"a cloud must have more tokens than the width of the model and one, {architecture.width + 1}, got {n}"
        )
        raise InputValueError("propagate", "tokens", problem, "Pass more tokens, or a longer text.")
    moments = moments_of_text(torch.cat([run.first for run in runs]))
    for run in runs:
        observed["text"].append(_observed(run.parts, n, layers))
        show(done := done + 1, total)
    inputs = clouds[0][0].inputs
    models = _Baselines(model, architecture, inputs, wanted)
    for number, (batches, run) in enumerate(zip(clouds, runs, strict=True)):
        starts = _starts(start, moments, run, seed + number)
        for each in series[1:]:
            weights = model if each == "sampled" else models.draw(each, seed + number)
            parts = [passed(weights, architecture, b, x)[0] for b, x in zip(batches, starts, strict=True)]
            observed[each].append(_observed(parts, n, layers))
            show(done := done + 1, total)
    settings = PropagationSettings(
        name or type(model).__name__, start, tokens, length, seeds, seed, texts if isinstance(texts, str) else ""
    )
    placement = layers[0].attention.placement
    known = {**describe(model), **(facts or {}), "layers": len(layers), "placement": placement, "cloud": n}
    columns = {s: {k: torch.stack([o[k] for o in rows]) for k in rows[0]} for s, rows in observed.items()}
    return Propagation(settings, known, columns, _null(n, architecture.width))


class _Run(NamedTuple):
    """The text of one seed in the model: tokens at every depth of each batch, and shapes where the layers begin."""

    parts: list[list[LayerTokens]]
    shapes: list[tuple[int, ...]]

    @property
    def first(self) -> Float[Tensor, "n D"]:
        """Tokens where the layers begin."""
        return torch.cat([part[0].stream for part in self.parts])

    @property
    def size(self) -> int:
        """Number of tokens."""
        return sum(len(part[0].stream) for part in self.parts)


def _text(model: nn.Module, architecture: Architecture, batches: list[Batch]) -> _Run:
    parts, shapes = zip(*(passed(model, architecture, batch) for batch in batches), strict=True)
    return _Run(list(parts), list(shapes))


def _starts(start: Start, moments: TextMoments, run: _Run, seed: int) -> Sequence[Tensor | None]:
    """Return the initial tokens of every batch of a seed, [b, n, D]; None for the text itself."""
    if start == "text":
        return [None] * len(run.shapes)
    generator = torch.Generator().manual_seed(seed % 2**63)
    return [drawn(start, b * n, moments, generator).reshape(b, n, -1) for b, n, _ in run.shapes]


def _observed(parts: list[list[LayerTokens]], n: int, layers: list[LayerBlock]) -> dict[str, Tensor]:
    return observables_of(joined(parts, n), [layer.attention for layer in layers])


class _Baselines:
    """Models with random weights, one of each kind for each seed."""

    def __init__(
        self, model: nn.Module, architecture: Architecture, inputs: Mapping[str, Any], wanted: tuple[str, ...]
    ) -> None:
        self._model = model
        weights = weights_of(model, architecture, inputs) if "redrawn" in wanted else {}
        self._redrawn = RedrawnModels(model, architecture, weights) if "redrawn" in wanted else None

    def draw(self, kind: str, seed: int) -> nn.Module:
        """Return the model of a kind with the weights of a seed."""
        if kind == "untrained":
            return with_random_weights(self._model, seed=seed)
        assert self._redrawn is not None  # wanted
        return self._redrawn.draw(seed)


def _null(n: int, width: int) -> dict[str, tuple[float, float, float]]:
    """Return the 95 % ranges of two distances to a Gaussian for n Gaussian tokens, whatever their moments."""
    generator = torch.Generator().manual_seed(0)
    cloud = torch.randn(n, width, generator=generator, dtype=torch.float64)
    band = null_band("sliced_wasserstein", cloud, draws=DRAWS, generator=generator)
    bands = {"sliced_wasserstein": band, "kurtosis": mardia_band("kurtosis", n, width)}
    return {name: (float(b.low), float(b.middle), float(b.high)) for name, b in bands.items()}


def _check(start: str, tokens: int, seeds: int, baselines: tuple[str, ...]) -> None:
    check_start("propagate", start)
    for name, count in (("tokens", tokens), ("seeds", seeds)):
        if not isinstance(count, int) or count < 1:
            problem = f"{name} must be an integer of at least 1, got {count!r}"
            raise InputValueError("propagate", name, problem, "Pass 1 or more.")
    unknown = [each for each in baselines if each not in BASELINES]
    if unknown:
        problem = f"baselines must be among {', '.join(BASELINES)}, got {unknown[0]!r}"
        raise InputValueError("propagate", "baselines", problem, "Pass () for none.")
