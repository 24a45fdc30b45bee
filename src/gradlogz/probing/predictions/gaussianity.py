"""Gaussianity: distance of the residual stream to a normal distribution.

    W²        mean squared distance of sorted whitened tokens along a direction to the quantiles of N(0, 1)
    excess    = max W² - its mean over Gaussian samples of the same documents

Read next: observables/gaussianity_tests.py (the statistics), pair_energy.py (tokens over depth).
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ..._typing import Bool, Float, Int, Tensor
from ...dynamics.intervals import band_of_draws
from ...dynamics.observables import OBSERVABLES
from ..batch_pass import BatchPass
from ..computed import Computed
from ..hypothesis_tests import NOTHING_MEASURED, Bounds, conclude, judge, measured, median_detail
from ..inside.events import Attended, Event, ForwardOutput
from ..prediction import Baseline, Prediction, Probed
from ..runs.judgement import Judgement, Measured
from ..runs.records import DESCRIPTIVE, Declaration, Finding, Label, Quantity
from ..statistics import (
    SAMPLE,
    Estimate,
    Sample,
    Sums,
    bootstrap,
    chosen,
    jackknifed,
    ratio,
    sample_of,
    sums_of,
    token_hashes,
)
from .observables.attention_rows import applies, rows_of
from .observables.gaussianity_tests import (
    AXES,
    COMPONENTS,
    DARLING,
    DIRECTIONS,
    LARGEST,
    LOGISTIC,
    PROJECTIONS,
    RANDOM,
    SHARED,
    SLICED,
    ProjectedTokens,
    gaussian_clouds,
    largest_square,
    project,
    shape,
)
from .observables.residual_stream import Depth, depth_of

DRAWS = 39  # the smallest number of draws whose extremes are a 95 % band
BOUND = 0.01
FEWEST = 128  # smallest number of tokens
NUMBERS = 1 << 21  # stored at each depth at most: 4096 tokens up to width 512, fewer above
LARGE, TIMES = 100.0, 1000.0  # a massive activation

ALL, CLEANED = "all tokens", "cleaned"
FIRST, MASSIVE, POSITIONS = "without first tokens", "without massive activations", "without position means"
REMOVED = {ALL: (), FIRST: (FIRST,), MASSIVE: (MASSIVE,), POSITIONS: (POSITIONS,), CLEANED: (FIRST, MASSIVE, POSITIONS)}
JUDGED = (ALL, CLEANED)  # with all statistics
EXCESS, SELF, MEAN, SHARE = "excess", "self weight", "mean fraction", "tokens with massive activations"
ABOUT = ("document", "position", "group")  # stored with each token

FORMULAS = f"""\
    z         tokens on their {COMPONENTS} leading principal axes, whitened
    W²        mean squared distance of sorted z along a direction to the quantiles of N(0, 1)
    sliced    = sqrt(mean W²) over {DIRECTIONS} random directions of z; also over the axes of z, and over {RANDOM}
              random directions of the residual stream
    largest   = sqrt(max W²) over the axes and the directions
    excess    = max W² - its mean over Gaussian samples of the same documents
    also      Mardia's skewness and kurtosis [mardia74], Anderson-Darling A²/n [anderson54], and the log likelihood
              ratio per token of the best logistic to the best normal distribution"""

_SHAPES = {
    LARGEST: Quantity("standard deviations", "√max W²(z·u, N(0,1))"),
    SLICED: Quantity("standard deviations", "√E_u W²(z·u, N(0,1))"),
    AXES: Quantity("standard deviations", "√E_i W²(zᵢ, N(0,1))"),
    PROJECTIONS: Quantity("standard deviations", "√E_p W²(x·p, N(0,1))"),
    DARLING: Quantity("1", "A² / n"),
    LOGISTIC: Quantity("nats per token", "(log L_logistic − log L_normal) / n"),
    "skewness": Quantity("1", "E (zᵢ·zⱼ)³"),
    "kurtosis": Quantity("1", "E|z|⁴ − d(d + 2)"),
    EXCESS: Quantity("squared standard deviations", "max W² − that of Gaussian samples"),
}

DECLARATION = Declaration(
    title="Gaussian residual stream",
    kind=DESCRIPTIVE,
    claim="The tokens of the residual stream are normally distributed at every depth.",
    formula=(
        "excess = M of the tokens - mean M of Gaussian samples. M (max-sliced W²): the tokens are whitened on their "
        f"{COMPONENTS} leading principal axes; W² is their squared Wasserstein distance to N(0, 1) along a direction, "
        "and M is the largest W² over several directions. A Gaussian sample has as many documents and tokens as the "
        "text: each document has a random Gaussian mean, and its tokens are Gaussian around this mean. The covariance "
        "of the means and the covariance within documents are estimated from the tokens. Cleaned tokens: first tokens "
        "and tokens with massive activations (very large coordinates) are left out, and the mean of each position is "
        "subtracted"
    ),
    supports=f"The excess of the cleaned tokens is below {BOUND:g}.",
    refutes=f"The excess of the cleaned tokens is above {BOUND:g} (for scale: a logistic distribution has 0.008).",
    method=(
        FORMULAS,
        "The fixed point of attention and normalisation is expected to be Gaussian [shim22]. It is an unstable "
        "equilibrium, and tokens that look Gaussian often attend mostly to themselves or lie far from 0 [theory "
        "10.1]; the attention weight a_ii of a token on itself and the share |E x|² / E|x|² of the mean token in the "
        "mean squared norm are therefore reported as well.",
        "Depths: the residual stream is sampled before every attention sublayer and at the end of the model, at the "
        "same random tokens, in its own precision. The weights a_ii are those of a sample of the rows.",
        f"Three artefacts distort the distribution: first tokens; massive activations, |a| > {LARGE:g} and at least "
        f"{TIMES:g} times the median [sun24]; and position means. Each is removed separately, and all together: "
        f'"{CLEANED}". Neighbouring positions are pooled until {SHARED} tokens share a mean. Subtracting the mean of k '
        "tokens lowers their variance; the differences are therefore multiplied by 1 / sqrt(1 - 1/k).",
        f"Gaussian samples: {DRAWS} samples over the same documents, with the covariances of the tokens between and "
        "within documents, cleaned likewise. They reproduce the similarity of tokens within a text, but no repeated "
        "words. These samples are the null of every statistic that compares the tokens with a Gaussian, except the "
        "excess, from which their mean is subtracted.",
        "Random-weights baseline: it is the null of the excess, of the weight a_ii and of the share of the mean token. "
        "The confidence interval of the excess is from the jackknife over groups, with fixed axes. W² of a Gaussian "
        "sample is inversely proportional to its number of tokens. For a jackknife sample of n' of the n tokens, the "
        "mean over Gaussian samples is therefore multiplied by n / n'.",
    ),
    decision_rule=(
        "For comparison, W² to the normal distribution is 0.008 for a logistic, 0.04 for a Laplace or uniform, and "
        "0.19 for an exponential distribution. The maximum over directions is used because every projection of a "
        "Gaussian must be Gaussian. Clusters in a plane, for example, change only two axes and hardly show in the mean "
        "over axes. The verdict on the model is that of more than half of its depths."
    ),
    quantities={
        MEAN: Quantity("1", "|E x|² / E|x|²"),
        SHARE: Quantity("share of tokens", f"P(|a| > {LARGE:g} and > {TIMES:g} × median)"),
        SELF: Quantity("weight", "aᵢᵢ"),
        **{f"{name}, {which}": quantity for which in JUDGED for name, quantity in _SHAPES.items()},
        **{f"{LARGEST}, {which}": _SHAPES[LARGEST] for which in REMOVED},
    },
    references=("sun24", "anderson54", "mardia74"),
    statistic="median excess of the max-sliced W² of cleaned tokens",
    null="random-weights baseline",
    unit="depth",
    number="{:.3f}",
    details={
        ALL: Label("median excess for all tokens", "{:.3f}", "random-weights baseline"),
        SELF: Label("median attention weight of a token on itself", null="random-weights baseline"),
        MEAN: Label("median share of the mean token in the mean squared norm", null="random-weights baseline"),
    },
    remarks={NOTHING_MEASURED: "No residual stream was recognised, or too few tokens were read."},
    labels={
        "excess, cleaned": "excess of max-sliced W², cleaned tokens",
        "excess, all tokens": "excess of max-sliced W², all tokens",
        "self weight": "attention weight of a token on itself",
        "mean fraction": "share of the mean token in the mean squared norm",
    },
    places={SELF: "attention layers"},
)


class State(NamedTuple):
    """Sampled tokens at every depth, by stack; self weights, by layer."""

    samples: Mapping[str, Sample] = {}
    self_weights: Mapping[str, Sums] = {}


class _Chosen(NamedTuple):
    """Tokens of a stack in the sample, and their residual streams so far."""

    hashes: Int[Tensor, " m"]
    rows: Int[Tensor, " m"]
    taken: dict[str, Tensor]
    size: int


@dataclass
class _Memory:
    samples: dict[str, _Chosen] = field(default_factory=dict)


def statistics(event: Event | ForwardOutput, batch_pass: BatchPass) -> State | None:
    """Sampled tokens at every depth, and self weights."""
    if isinstance(event, Attended):
        return _own_weight(event, batch_pass)
    depth, samples = depth_of(event, batch_pass), batch_pass.memory(_Memory).samples
    if depth is not None and (depth.attention or isinstance(event, ForwardOutput)):
        _take(depth, batch_pass, samples)
    if not isinstance(event, ForwardOutput) or not samples:
        return None
    return State({stack: sample_of(sample.taken, sample.hashes, size=sample.size) for stack, sample in samples.items()})


def evaluate(state: State, model: Probed) -> list[Measured]:
    """Shape statistics and mean fractions (jackknife over groups), self weights (bootstrap)."""
    rows = []
    for layer, tokens in _layers(state):
        rows += _beside(layer, tokens, state)
        for which in REMOVED:
            cloud = tokens.without(which, model.computed)
            if cloud is None:
                rows.append(Measured(layer, None, f"{LARGEST}, {which}", math.nan))
            elif which in JUDGED:
                rows += _shapes(layer, which, cloud)
                estimate = excess(cloud, _gaussian(cloud, model)[LARGEST])
                rows += measured(layer, f"{EXCESS}, {which}", estimate, len(cloud.features))
            else:
                value = float(largest_square(cloud.features, cloud.axes).sqrt())
                rows.append(Measured(layer, None, f"{LARGEST}, {which}", value, tokens=len(cloud.features)))
    return rows


def null(state: State, model: Probed, baseline: Baseline[State] | None) -> list[Measured]:
    """Values of Gaussian samples; for excess, mean fraction and self weight those of the random-weights baseline."""
    rows = []
    for layer, tokens in _layers(state):
        for which in JUDGED:
            cloud = tokens.without(which, model.computed)
            for name, draws in {} if cloud is None else _gaussian(cloud, model).items():
                band = band_of_draws(_unsquared(name, draws), level=0.95)
                low, usual, high = (float(end) for end in band)
                rows.append(Measured(layer, None, f"{name}, {which}", usual, low, high))
    of_baseline = State() if baseline is None else baseline.state
    for layer, tokens in _layers(of_baseline):
        rows += _beside(layer, tokens, of_baseline)
        for which in JUDGED:
            cloud = tokens.without(which, model.computed)
            if cloud is not None:
                draws = gaussian_clouds(cloud, DRAWS, torch.Generator().manual_seed(model.seed))
                estimate = excess(cloud, largest_square(draws, cloud.axes))
                rows += measured(layer, f"{EXCESS}, {which}", estimate, len(cloud.features))
    return rows


def verdict(findings: list[Finding]) -> Judgement:
    """Judge every depth by its cleaned excess."""
    quantity = f"{EXCESS}, {CLEANED}"
    ruled = judge(findings, quantity, lambda f: Bounds(BOUND, BOUND), small=True)
    reported = {ALL: f"{EXCESS}, {ALL}", SELF: SELF, MEAN: MEAN}
    return conclude(ruled, quantity, details=[median_detail(key, findings, name) for key, name in reported.items()])


# In a batch ----------------------------------------------------------------------------------------------------------


def _take(depth: Depth, batch_pass: BatchPass, samples: dict[str, _Chosen]) -> None:
    """Store the tokens of smallest hash; all depths of a stack share them, and they are chosen once, on the CPU."""
    if depth.stack not in samples:
        n, width = depth.stream.shape[1:]
        batch = batch_pass.batch
        mask, keys = depth.mask.cpu(), batch.keys.cpu()
        size = min(SAMPLE, NUMBERS // width)
        hashes = token_hashes(keys, batch.starts.cpu().unsqueeze(-1) + torch.arange(n)).flatten()
        rows = chosen(hashes, valid=mask.flatten(), size=size)
        positions = (mask.cumsum(1) - 1).flatten()[rows]
        about = (keys.repeat_interleave(n)[rows], positions, torch.full_like(rows, batch.group))
        taken = dict(zip(ABOUT, about, strict=True))
        samples[depth.stack] = _Chosen(hashes[rows], rows.to(depth.stream.device, non_blocking=True), taken, size)
    sample = samples[depth.stack]
    sample.taken[depth.layer] = depth.stream.flatten(0, 1)[sample.rows]


def _own_weight(event: Attended, batch_pass: BatchPass) -> State | None:
    """Self weights of tokens, mean over heads: sums and counts for each row."""
    if event.crosses or not applies(event, batch_pass) or event.query.shape[2] != event.key.shape[2]:
        return None
    rows = rows_of(event, batch_pass)
    if rows is None:
        return None
    at = rows.places[:, None, :, None].expand(-1, event.query.shape[1], -1, 1)
    self_weight = (rows.logits.gather(-1, at).squeeze(-1) - rows.of(event.attention.log_normalizer)).exp().mean(1)
    count = rows.valid.to(self_weight.dtype).sum(1)
    values = torch.stack((count, self_weight.masked_fill(~rows.valid, 0.0).sum(1), count), -1)
    return State(self_weights={event.layer: sums_of(values.double(), batch_pass.documents)})


# The merged sample ---------------------------------------------------------------------------------------------------


class _Tokens(NamedTuple):
    """The sampled tokens at one depth."""

    x: Float[Tensor, "n D"]
    documents: Int[Tensor, " n"]
    positions: Int[Tensor, " n"]
    groups: Int[Tensor, " n"]
    massive: Bool[Tensor, " n"]

    def without(self, which: str, computed: Computed) -> ProjectedTokens | None:
        """Remaining tokens after the removals of `which`, projected; None if they are too few."""
        any_massive = bool(self.massive.any())
        removed = tuple(each for each in REMOVED[which] if each != MASSIVE or any_massive)
        keep = torch.ones_like(self.massive)
        if FIRST in removed:
            keep = keep & (self.positions > 0)
        if MASSIVE in removed:
            keep = keep & ~self.massive
        if int(keep.sum()) < FEWEST:
            return None

        def compute() -> ProjectedTokens:
            positions = self.positions[keep] if POSITIONS in removed else None
            return project(self.x[keep], self.documents[keep], self.groups[keep], positions)

        return computed.once(self.x, removed, compute)  # values and nulls want the same


def _layers(state: State) -> Iterator[tuple[str, _Tokens]]:
    for sample in state.samples.values():
        for layer, x in sample.vectors.items():
            if layer not in ABOUT and len(x) > 1:
                documents, positions, groups = (sample.vectors[name].to(x.device) for name in ABOUT)
                large = x.float().abs().amax(1)
                massive = (large > LARGE) & (large >= TIMES * x.float().abs().median())
                yield layer, _Tokens(x, documents, positions, groups, massive)


def _gaussian(cloud: ProjectedTokens, model: Probed) -> dict[str, Tensor]:
    """Shape statistics of Gaussian samples, drawn once."""

    def compute() -> dict[str, Tensor]:
        drawn = gaussian_clouds(cloud, DRAWS, torch.Generator().manual_seed(model.seed))
        return shape(drawn, cloud.axes)

    return model.computed.once(cloud.features, "Gaussian clouds", compute)


def _shapes(layer: str, which: str, cloud: ProjectedTokens) -> list[Measured]:
    """All shape statistics of a sample, with jackknife intervals."""
    counts, masks = _without_groups(cloud.groups)
    parts = [shape(cloud.features[keep], cloud.axes) for keep in masks]
    rows = []
    for name in parts[0]:
        values = torch.stack([_unsquared(name, part[name]) for part in parts])
        rows += measured(layer, f"{name}, {which}", jackknifed(values[0], values[1:], counts), len(cloud.features))
    return rows


def excess(cloud: ProjectedTokens, draws: Float[Tensor, " m"]) -> Estimate:
    """Largest W² minus its mean over Gaussian samples, which is scaled to the size of each jackknife sample."""
    counts, masks = _without_groups(cloud.groups)
    squares = torch.stack([largest_square(cloud.features[keep], cloud.axes) for keep in masks])
    sizes = torch.stack([keep.sum() for keep in masks])
    less = squares - draws.double().mean() * (sizes[0] / sizes)
    return jackknifed(less[0], less[1:], counts)


def _unsquared(name: str, value: Tensor) -> Tensor:
    """Distances in place of squared distances; other statistics unchanged."""
    return value.sqrt() if name in (LARGEST, SLICED, AXES, PROJECTIONS) else value


def _beside(layer: str, tokens: _Tokens, state: State) -> list[Measured]:
    """Mean fraction, share of massive activations and self weight."""
    counts, masks = _without_groups(tokens.groups)
    n, x = len(tokens.x), tokens.x.double()
    values = torch.stack([OBSERVABLES["mean_fraction"](x[keep], None, None) for keep in masks])
    rows = measured(layer, MEAN, jackknifed(values[0], values[1:], counts), n)
    rows.append(Measured(layer, None, SHARE, float(tokens.massive.double().mean()), tokens=n))
    self_weights = state.self_weights.get(layer)
    return (
        rows
        if self_weights is None
        else rows + measured(layer, SELF, bootstrap(ratio, self_weights), self_weights.totals[0, 2])
    )


def _without_groups(groups: Int[Tensor, " n"]) -> tuple[Int[Tensor, " g"], list[Bool[Tensor, " n"]]]:
    """Number of tokens of each group; masks of all tokens, and of all but one group if there are several."""
    present, counts = groups.unique(return_counts=True)
    every = torch.ones_like(groups, dtype=torch.bool)
    return counts, [every, *(groups != g for g in present if len(present) > 1)]


PREDICTION = Prediction(__name__, DECLARATION, statistics, evaluate, null, verdict, empty=State, order=80)
