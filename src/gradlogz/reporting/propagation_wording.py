"""Words of the results of `propagate` and `iterate_layer`: names of series and observables, sentences.

Read next: propagation_page.py, propagation_terminal.py.
"""

import math

from ..probing.propagation.records import LayerIteration, Propagation, SeedMean
from .simulation_wording import NAMED, number

START_NAMES = {
    "gaussian": "Gaussian tokens",
    "standard": "standard Gaussian tokens",
    "sphere": "tokens on a sphere",
    "text": "text",
}
START_TEXTS = {
    "gaussian": "Gaussian tokens with the mean and covariance of the text",
    "standard": "standard Gaussian tokens",
    "sphere": "tokens uniform on the sphere with the radius of the text",
    "text": "the tokens of the text",
}
SHORT_STARTS = {"gaussian": "Gaussian", "standard": "N(0, I)", "sphere": "sphere", "text": "text"}
COLOURS = {"text": "green", "sampled": "blue", "untrained": "grey", "redrawn": "vermilion"}
NAMES = {
    **NAMED,
    "sliced_wasserstein": ("sliced W₂ to Gaussian", "std. dev.", ""),
    "expansion": ("change by attention", "nats", "log tr C(x + A) − log tr C(x)"),
    "contraction": ("change by norms and feed-forward", "nats", "log tr C(x′) − log tr C(x + A)"),
    "log_pair_energy": ("log pair energy", "nats", "log Σₕᵢⱼ exp logit"),
}
SHORT = {
    "mean_fraction": "share of the mean",
    "sliced_wasserstein": "sliced W₂ (Gaussian)",
    "contraction": "change by norms, FF",
    "within": "spread in clusters",
}
CAPTIONS = {
    "radius": "Root mean square norm of the tokens.",
    "mean_fraction": "Squared norm of the mean divided by the mean squared norm; 1: all tokens are equal.",
    "effective_rank": "Exponential of the entropy of the covariance eigenvalues, normalised to sum 1.",
    "sliced_wasserstein": "Distance W₂ of the whitened tokens to a standard Gaussian, mean over one-dimensional "
    "projections. Grey band: 95 % range for Gaussian tokens of equal number.",
    "kurtosis": "Mardia's excess kurtosis. Grey band: 95 % range for Gaussian tokens of equal number.",
    "clusters": "Number of connected components among at most 600 tokens, if tokens closer to each other than 5 % of "
    "the radius are linked.",
    "within": "Root mean square distance of tokens to the mean of their component, divided by the radius.",
    "displacement": "Root mean square change of the stream in the layer, divided by the radius of the stream.",
    "expansion": "Change of the log total variance by the attention update of the layer.",
    "contraction": "Change of the log total variance by the rest of the layer: norms and feed-forward sublayer.",
    "entropy": "Entropy of the attention weights, mean over heads and tokens.",
    "self_weight": "Attention weight of a token on itself, mean over heads and tokens.",
    "log_pair_energy": "Log of the sum of exp logit over pairs of tokens and heads of this layer.",
}


def series_name(series: str, start: str, *, short: bool = False) -> str:
    """Name of a series: "text", "Gaussian tokens", "untrained weights", "redrawn weights"."""
    if series == "sampled":
        return SHORT_STARTS[start] if short else START_NAMES[start]
    names = {"untrained": ("untrained weights", "untrained"), "redrawn": ("redrawn weights", "redrawn")}
    return names[series][short] if series in names else series


def observable_name(name: str, *, short: bool = False) -> str:
    """Name of an observable."""
    return SHORT.get(name, NAMES[name][0]) if short else NAMES[name][0]


def interval_text(value: SeedMean, decimals: int = 4) -> str:
    """Mean and half width of its 95 % confidence interval, "92±1", to one digit of the latter.

    The mean has at most four digits, or so many decimals if it is below 1. It stands alone without an interval, or if
    all seeds agree.
    """
    if math.isnan(value.value):
        return ""
    half = (value.high - value.low) / 2
    if math.isnan(half) or half < 1e-12 * max(abs(value.value), 1.0):
        return number(value.value, 4)
    most = decimals if abs(value.value) < 1 else max(3 - math.floor(math.log10(abs(value.value))), 0)
    shown = min(max(-math.floor(math.log10(half)), 0), most)
    return f"{value.value:.{shown}f}±{half:.{shown}f}".replace("-", "−")


def headline(result: Propagation) -> str:
    """The distance to a Gaussian and the effective rank after the last layer, of each series."""
    null = result.null["sliced_wasserstein"]
    parts = [
        f"{series_name(series, result.settings.start)} {number(result.estimate(series, 'sliced_wasserstein').value)} "
        f"(effective rank {number(result.estimate(series, 'effective_rank').value)})"
        for series in result.observed
    ]
    return (
        f"Sliced W₂ distance to a Gaussian after the last layer: {', '.join(parts)}; 95 % range for Gaussian tokens "
        f"{number(null[0])}–{number(null[2])}."
    )


def iteration_headline(result: LayerIteration) -> str:
    """The share of the mean, the effective rank and the displacement after the last repetition."""
    parts = []
    for series in result.observed:
        values = [number(result.estimate(series, n).value) for n in ("mean_fraction", "effective_rank", "displacement")]
        name = series_name(series, result.settings.start)
        parts.append(f"{name}: share of the mean {values[0]}, effective rank {values[1]}, displacement {values[2]}")
    return f"After {result.times[-1]} repetitions, {'; '.join(parts)}."


def run_text(result: Propagation) -> str:
    """Parameters of a run on one line."""
    s, facts = result.settings, result.facts
    return (
        f"{s.model}, {facts['layers']} layers of width {facts['hidden_size']} ({facts['placement']}-norm), "
        f"{START_TEXTS[s.start]}, {s.seeds} seed{'s' * (s.seeds > 1)} × {facts['cloud']} tokens in windows of at most "
        f"{s.length}"
    )


def iteration_run_text(result: LayerIteration) -> str:
    """Parameters of a run on one line."""
    s, facts = result.settings, result.facts
    return (
        f"{s.model}, layer {s.layer} repeated {s.steps} times, {START_TEXTS[s.start]}, {s.seeds} "
        f"seed{'s' * (s.seeds > 1)} × {facts['cloud']} tokens; one step differs from the layer by "
        f"{facts['difference']:.1g}"
    )
