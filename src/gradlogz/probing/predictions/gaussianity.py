"""Gaussianity: distance of the residual stream to a normal distribution.

    W²        mean squared distance of sorted whitened tokens along a direction to the quantiles of N(0, 1)
    excess    = max W² - its mean over Gaussian samples of the same documents
    trend     = Spearman's rank correlation of depth and excess

Read next: observables/gaussianity_tests.py (the statistics), pair_energy.py (tokens over depth).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ..._typing import Bool, Float, Int, Tensor
from ...dynamics.intervals import band_of_draws
from ..batch_pass import BatchPass
from ..computed import Computed
from ..hypothesis_tests import NOTHING_MEASURED, absent, describe, measured, median_detail
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
    FEW,
    LARGEST,
    LOGISTIC,
    PROJECTIONS,
    RANDOM,
    REPEATED,
    SHARED,
    SLICED,
    ProjectedTokens,
    gaussian_samples,
    largest_square,
    places_of,
    project,
    repeated,
    shape,
)
from .observables.residual_stream import Depth, depth_of

DRAWS = 39  # the smallest number of draws whose extremes are a 95 % band
FEWER = 10  # draws where their mean alone is needed
FEWEST = 128  # smallest number of tokens
NUMBERS = 1 << 21  # stored at each depth at most: 4096 tokens up to width 512, fewer above
LARGE, TIMES = 100.0, 1000.0  # a massive activation

ALL, CLEANED = "all tokens", "cleaned"
EXCESS, SELF, MEAN, SHARE = "excess", "self weight", "mean fraction", "tokens with massive activations"
TREND = "trend"
ABOUT = ("document", "position", "group", "type")  # stored with each token

FORMULAS = f"""\
    z         tokens on their {COMPONENTS} leading principal axes, whitened
    W²        mean squared distance of sorted z along a direction to the quantiles of N(0, 1)
    sliced    = sqrt(mean W²) over {DIRECTIONS} random directions of z; also over the axes of z, and over {RANDOM}
              random directions of the residual stream
    largest   = sqrt(max W²) over the axes and the directions
    excess    = max W² - its mean over Gaussian samples of the same documents
    trend     = Spearman's rank correlation of depth and excess of the cleaned tokens
    also      Mardia's skewness and kurtosis [mardia74], Anderson-Darling A²/n [anderson54], and the log likelihood
              ratio per token of the best logistic to the best normal distribution, both over {FEW} directions"""

_SHAPES = {
    LARGEST: Quantity("standard deviations", "√max W²(z·u, N(0,1))"),
    SLICED: Quantity("standard deviations", "√E_u W²(z·u, N(0,1))"),
    AXES: Quantity("standard deviations", "√E_i W²(zᵢ, N(0,1))"),
    PROJECTIONS: Quantity("standard deviations", "√E_p W²(x·p, N(0,1))"),
    DARLING: Quantity("1", "A² / n"),
    LOGISTIC: Quantity("nats per token", "(log L_logistic − log L_normal) / n"),
    "skewness": Quantity("1", "E (zᵢ·zⱼ)³"),
    "kurtosis": Quantity("1", "E|z|⁴ − d(d + 2)"),
}
_EXCESS = Quantity("squared standard deviations", "max W² − that of Gaussian samples")

DECLARATION = Declaration(
    title="Gaussian residual stream",
    kind=DESCRIPTIVE,
    claim="The tokens of the residual stream become more Gaussian with depth.",
    formula=(
        "trend = Spearman's rank correlation of depth and excess: -1 if the excess decreases from depth to depth. "
        "excess = M of the cleaned tokens - mean M of Gaussian samples. M (max-sliced W²): the tokens are whitened on "
        f"their {COMPONENTS} leading principal axes; W² is their squared Wasserstein distance to N(0, 1) along a "
        "direction, and M is the largest W² over several directions. A Gaussian sample has as many documents and "
        "tokens as the text: each document has a random Gaussian mean, and its tokens are Gaussian around this mean. "
        "The covariance of the means and the covariance within documents are estimated from the tokens. Cleaned "
        "tokens: first tokens and tokens with massive activations (very large coordinates) are left out, and the means "
        "of each token type and of each position are subtracted"
    ),
    refutes="",
    method=(
        FORMULAS,
        "The fixed point of attention and normalisation is expected to be Gaussian [shim22]. It is an unstable "
        "equilibrium of attention that ascends its log normaliser, which predicts an excess that increases with "
        "depth; it attracts only where attention descends [theory 10.2]. Tokens that look Gaussian often attend mostly "
        "to themselves or lie far from 0 [theory 10.1]; the attention weight a_ii of a token on itself and the share "
        "|E x|² / E|x|² of the mean token in the mean squared norm are therefore reported as well.",
        "No depth is exactly Gaussian: the first one has as many values as there are words. The change over depth is "
        "therefore shown, not the excess itself. Neighbouring depths are alike, so that a random order of the depths "
        "is no null of the trend, and the trend is described and not tested.",
        "Depths: the residual stream is sampled before every attention sublayer and at the end of the model, at the "
        "same random tokens, in its own precision. The weights a_ii are those of a sample of the rows.",
        f"Four artefacts distort the distribution: first tokens; massive activations, |a| > {LARGE:g} and at least "
        f"{TIMES:g} times the median [sun24]; the repetition of token types, whose frequencies are far from equal; and "
        f'positions. "{CLEANED}" is without them. Types with fewer than {SHARED} tokens in the sample are left out; if '
        f"less than {REPEATED:g} of the tokens would remain, the means of types are not subtracted. Neighbouring "
        f"positions are pooled until {SHARED} tokens share a mean. Subtracting the mean of k tokens lowers their "
        "variance; the differences are therefore multiplied by 1 / sqrt(1 - 1/k). A depth at which types and positions "
        "explain almost all variance, such as the sum of two embeddings, has no value.",
        f"Gaussian samples: {DRAWS} samples ({FEWER} for all tokens) over the same documents, "
        "with the covariances of the tokens between and within documents, cleaned likewise. They reproduce the "
        "similarity of tokens within a text, but no repeated words. These samples are the null of every statistic that "
        "compares the tokens with a Gaussian; their mean is subtracted from the excess of cleaned tokens and from that "
        "of each sample, so that the null of the excess is 0 with a band.",
        "Confidence intervals of excess and trend are from the jackknife over groups, with fixed axes; those "
        "of the trend are computed for Fisher's z = artanh(trend), so that they do not exceed ±1, and missing if no "
        "group changes the order of the depths. W² of a Gaussian "
        "sample is inversely proportional to its number of tokens. For a jackknife sample of n' of the n tokens, the "
        "mean over Gaussian samples is therefore multiplied by n / n'.",
    ),
    decision_rule=(
        "The value of the model is its trend. For comparison, W² to the normal distribution is 0.008 for a logistic, "
        "0.04 for a Laplace or uniform, and 0.19 for an exponential distribution. The maximum over directions is used "
        "because every projection of a Gaussian must be Gaussian. Clusters in a plane, for example, change only two "
        "axes and hardly show in the mean over axes."
    ),
    quantities={
        TREND: Quantity("1", "Spearman's ρ of depth and excess"),
        MEAN: Quantity("1", "|E x|² / E|x|²"),
        SHARE: Quantity("share of tokens", f"P(|a| > {LARGE:g} and > {TIMES:g} × median)"),
        SELF: Quantity("weight", "aᵢᵢ"),
        **{f"{name}, {CLEANED}": quantity for name, quantity in _SHAPES.items()},
        **{f"{EXCESS}, {which}": _EXCESS for which in (CLEANED, ALL)},
    },
    references=("sun24", "anderson54", "mardia74"),
    statistic="rank correlation of depth and excess of the max-sliced W²",
    null_reason=(
        f"Excesses are compared with {DRAWS} Gaussian samples over the same documents. The trend has no null: "
        "neighbouring depths are alike, so that a random order of depths is none, and the trend of one "
        "untrained model moves with its seed."
    ),
    unit="",
    details={
        CLEANED: Label("median excess", "{:.3f}", "Gaussian samples"),
        ALL: Label("median excess for all tokens", "{:.3f}"),
        SELF: Label("median attention weight of a token on itself"),
        MEAN: Label("median share of the mean token in the mean squared norm"),
    },
    remarks={NOTHING_MEASURED: "No residual stream was recognised, or too few tokens were read."},
    labels={
        "excess, cleaned": "excess of max-sliced W², cleaned tokens",
        "excess, all tokens": "excess of max-sliced W², all tokens",
        "self weight": "attention weight of a token on itself",
        "mean fraction": "share of the mean token in the mean squared norm",
        "trend": "rank correlation of depth and excess",
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
    """Trends and excesses (jackknife over groups), shape statistics and mean fractions, self weights (bootstrap)."""
    rows, excesses = [], []
    for layer, tokens in _layers(state):
        rows += _beside(layer, tokens, state)
        projected = tokens.cleaned(model.computed)
        if projected is None:
            rows.append(absent(layer, f"{EXCESS}, {CLEANED}"))
        else:
            parts = _parts(projected, shape)
            excesses.append(excess(parts, _gaussian(projected, model)[LARGEST].mean()))
            rows += _shapes(layer, parts) + _excess(layer, CLEANED, excesses[-1])
        everything = tokens.all()
        if everything is not None:
            rows += _excess(layer, ALL, _mean_excess(everything, model.seed))
    return rows + _trend(excesses)


def null(state: State, model: Probed, baseline: Baseline[State] | None) -> list[Measured]:
    """Gaussian samples; none for the trend, the mean fraction and the self weight."""
    rows = []
    for layer, tokens in _layers(state):
        projected = tokens.cleaned(model.computed)
        for name, draws in {} if projected is None else _gaussian(projected, model).items():
            low, usual, high = (float(end) for end in band_of_draws(_unsquared(name, draws), level=0.95))
            rows.append(Measured(layer, None, f"{name}, {CLEANED}", usual, low, high))
            if name == LARGEST:
                low, _, high = (float(end) for end in band_of_draws(draws - draws.mean(), level=0.95))
                rows.append(Measured(layer, None, f"{EXCESS}, {CLEANED}", 0.0, low, high))
    return rows


def verdict(findings: list[Finding]) -> Judgement:
    """Describe the trend over depth."""
    reported = {CLEANED: f"{EXCESS}, {CLEANED}", ALL: f"{EXCESS}, {ALL}", SELF: SELF, MEAN: MEAN}
    details = [median_detail(key, findings, name) for key, name in reported.items()]
    trend = [f for f in findings if f.quantity == TREND]
    judgement = describe(findings, TREND, details=details)
    return judgement._replace(low=trend[0].low, high=trend[0].high) if len(trend) == 1 else judgement


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
        ids = batch.inputs.get("input_ids")
        types = ids.cpu().flatten() if ids is not None and ids.shape == mask.shape else torch.arange(mask.numel())
        about = (keys.repeat_interleave(n)[rows], positions, torch.full_like(rows, batch.group), types[rows])
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
    types: Int[Tensor, " n"]
    massive: Bool[Tensor, " n"]

    def all(self) -> ProjectedTokens | None:
        """All tokens, projected; None if they are too few."""
        return project(self.x, self.documents, self.groups) if len(self.x) >= FEWEST else None

    def cleaned(self, computed: Computed) -> ProjectedTokens | None:
        """Tokens without the four artefacts, projected; None if too few tokens or too little variance remain."""
        return computed.once(self.x, CLEANED, self._cleaned)  # values and nulls want the same

    def _cleaned(self) -> ProjectedTokens | None:
        keep = (self.positions > 0) & ~self.massive
        again = keep & repeated(torch.where(keep, self.types, -1))
        by_type = int(again.sum()) >= max(REPEATED * int(keep.sum()), FEWEST)
        keep = again if by_type else keep
        if int(keep.sum()) < FEWEST:
            return None
        places = places_of(self.positions[keep])
        types = self.types[keep].unique(return_inverse=True)[1]
        classes = (types, places) if by_type else (places,)
        return project(self.x[keep], self.documents[keep], self.groups[keep], classes)


def _layers(state: State) -> Iterator[tuple[str, _Tokens]]:
    for sample in state.samples.values():
        for layer, x in sample.vectors.items():
            if layer not in ABOUT and len(x) > 1:
                documents, positions, groups, types = (sample.vectors[name].to(x.device) for name in ABOUT)
                large = x.abs().amax(1)
                massive = large > LARGE
                if bool(massive.any()):
                    massive = massive & (large >= TIMES * x.float().abs().median())
                yield layer, _Tokens(x, documents, positions, groups, types, massive)


def _gaussian(projected: ProjectedTokens, model: Probed) -> dict[str, Tensor]:
    """Shape statistics of Gaussian samples, drawn once."""

    def compute() -> dict[str, Tensor]:
        drawn = gaussian_samples(projected, DRAWS, torch.Generator().manual_seed(model.seed))
        return shape(drawn, projected.axes)

    return model.computed.once(projected.features, "Gaussian samples", compute)


class _Parts(NamedTuple):
    """Statistics of all tokens, and without each group of documents; number of tokens of each, and of each group."""

    statistics: dict[str, Float[Tensor, " v"]]
    sizes: Int[Tensor, " v"]
    counts: Int[Tensor, " g"]


def _parts(projected: ProjectedTokens, function: Callable[[Tensor, int], dict[str, Tensor]]) -> _Parts:
    counts, masks = _without_groups(projected.groups)
    each = [function(projected.features[keep], projected.axes) for keep in masks]
    statistics = {name: torch.stack([part[name] for part in each]) for name in each[0]}
    return _Parts(statistics, torch.stack([keep.sum() for keep in masks]), counts)


def excess(parts: _Parts, of_samples: Float[Tensor, ""]) -> tuple[Float[Tensor, " v"], _Parts]:
    """Largest W² minus its mean over Gaussian samples, which is scaled to the size of each jackknife sample."""
    return parts.statistics[LARGEST] - of_samples.double() * (parts.sizes[0] / parts.sizes), parts


def _mean_excess(projected: ProjectedTokens, seed: int) -> tuple[Float[Tensor, " v"], _Parts]:
    drawn = gaussian_samples(projected, FEWER, torch.Generator().manual_seed(seed))
    parts = _parts(projected, lambda features, axes: {LARGEST: largest_square(features, axes)})
    return excess(parts, largest_square(drawn, projected.axes).mean())


def _excess(layer: str, which: str, versions: tuple[Float[Tensor, " v"], _Parts]) -> list[Measured]:
    values, parts = versions
    return measured(layer, f"{EXCESS}, {which}", jackknifed(values[0], values[1:], parts.counts), parts.sizes[0])


def _shapes(layer: str, parts: _Parts) -> list[Measured]:
    """All shape statistics of a sample, with jackknife intervals."""
    rows = []
    for name, statistic in parts.statistics.items():
        values = _unsquared(name, statistic)
        estimate = jackknifed(values[0], values[1:], parts.counts)
        rows += measured(layer, f"{name}, {CLEANED}", estimate, parts.sizes[0])
    return rows


def _trend(excesses: list[tuple[Float[Tensor, " v"], _Parts]]) -> list[Measured]:
    """Spearman's rank correlation of depth and excess; from three depths on, of the same groups of documents."""
    if len({len(values) for values, _ in excesses}) != 1 or len(excesses) < 3:
        return [absent("", TREND)] if excesses else []
    _, parts = excesses[0]
    ranks = torch.stack([values for values, _ in excesses], -1).argsort(-1).argsort(-1).double()  # [v, depths]
    depths = torch.arange(len(excesses), dtype=torch.float64)
    centre = (len(excesses) - 1) / 2
    trend = ((ranks - centre) * (depths - centre)).sum(-1) / (depths - centre).square().sum()
    return measured("", TREND, _correlation(trend, parts.counts, len(excesses)), parts.sizes[0])


def _correlation(values: Float[Tensor, " v"], counts: Int[Tensor, " g"], n: int) -> Estimate:
    """Rank correlation of n values with its jackknife interval on the scale of Fisher's z = artanh, within ±1.

    Correlations of ±1 are taken half a step inwards; a step is the effect of one exchange of neighbours, 12/(n³ - n).
    Where no group changes the order of the depths, the jackknife knows no variance, and there is no interval.
    """
    estimate = jackknifed(values[0], values[1:], counts)
    if bool((values == values[0]).all()):
        unknown = torch.full_like(estimate.value, torch.nan)
        return estimate._replace(low=unknown, high=unknown, replicates=values.new_empty(0))
    most = 1 - 6 / (n**3 - n)
    z = values.clamp(-most, most).atanh()
    _, low, high, *_ = jackknifed(z[0], z[1:], counts)
    return estimate._replace(low=torch.minimum(low.tanh(), values[0]), high=torch.maximum(high.tanh(), values[0]))


def _unsquared(name: str, value: Tensor) -> Tensor:
    """Distances in place of squared distances; other statistics unchanged."""
    return value.sqrt() if name in (LARGEST, SLICED, AXES, PROJECTIONS) else value


def _beside(layer: str, tokens: _Tokens, state: State) -> list[Measured]:
    """Mean fraction, share of massive activations and self weight."""
    counts, masks = _without_groups(tokens.groups)
    n, x = len(tokens.x), tokens.x.double()
    members = torch.stack(masks).double()
    size = members.sum(-1)
    mean, square = members @ x / size.unsqueeze(-1), members @ x.square().sum(-1) / size
    values = mean.square().sum(-1) / square.clamp(min=torch.finfo(x.dtype).tiny)
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
