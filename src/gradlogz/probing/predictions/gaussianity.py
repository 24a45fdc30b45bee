"""Is the stream a Gaussian cloud?

    z         tokens on their 8 leading principal axes, whitened
    W²        squared distance of z along a direction, in order, to the quantiles of N(0, 1)
    sliced    = sqrt(mean W²) over 16 random directions; also over the axes, and over 8 projections of all coordinates
    largest   = sqrt(max W²) over the axes and the directions
    excess    = max W² - what Gaussian clouds of these documents show on average
    and       skewness and kurtosis of Mardia [mardia74], A²/n of Anderson and Darling [anderson54], and how much more
              likely the best logistic law makes a token than the best normal law

The source expects the fixed point of attention and normalisation to be Gaussian. It is an equilibrium, and an unstable
one, and clouds that look Gaussian are often frozen or far from 0 [theory 10.1]: self weight and mean fraction,
|E x|² / E|x|², are told beside it. Measured before every attention sublayer and at the end, on the tokens of least
hash, the same at every depth, kept in the precision of the stream; self weights on few (observables/attention_rows.py).

Three things fake other shapes: first tokens; massive activations, |a| > 100 and at least 1000 times the median [sun24];
and means of positions. Each is removed by itself, and all of them together: "cleaned". Positions share a mean with
their neighbours until 8 tokens have it, and k tokens without their mean are stretched by 1 / sqrt(1 - 1/k), so that a
Gaussian stays the one it was.

Null: 39 Gaussian clouds of the same documents, with the covariances between and within documents that the sample has,
cleaned likewise. They know that tokens of a text are alike, not that words come again. The null of the excess is that
of the random twin; its interval is of the jackknife over groups, with the axes held and the null scaled to the tokens.

Verdict: a depth supports the claim if the interval of its cleaned excess lies below BOUND, and refutes it if above. In
W² a logistic law is 0.008 from the normal one, a Laplace or uniform law 0.04, an exponential one 0.19. The largest is
taken because of a Gaussian all projections are: clusters in a plane are seen on two axes and hardly in the mean.

Read next: observables/gaussianity_tests.py (the numbers), pair_energy.py (the cloud over depth).
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ..._typing import Bool, Float, Int, Tensor
from ...dynamics.intervals import band_of_draws
from ...dynamics.observables import OBSERVABLES
from ..corpus.text import Batch
from ..findings import Finding
from ..inside.capturing import Attended, Event
from ..prediction import Finished, Judgement, Measured, Probed, Twin
from ..statistics import SAMPLE, Estimate, bootstrap, chosen, jackknifed, ratio, sample_of, sums_of, token_hashes
from ..testing import Bounds, count, judge, measured, middle
from .observables.attention_rows import applies, rows_of
from .observables.gaussianity_tests import (
    AXES,
    LARGEST,
    PROJECTIONS,
    SLICED,
    Cloud,
    cloud_of,
    gaussian_clouds,
    largest_square,
    shape,
)
from .observables.residual_stream import Depth, depth_of

claim = "The stream of tokens is a Gaussian cloud at every depth."
formula = "largest W² of the whitened leading components to N(0, 1) over directions, less that of a Gaussian cloud"
refutes = "A cleaned excess above 0.01, more than the distance of a logistic law to the normal one."

DRAWS = 39  # the fewest of which the extremes make a band of 95 %
BOUND = 0.01
FEWEST = 128  # tokens below which a shape is not asked for
NUMBERS = 1 << 21  # kept of a depth at most: 4096 tokens up to width 512, fewer above
LARGE, TIMES = 100.0, 1000.0  # a massive activation

ALL, CLEANED = "all tokens", "cleaned"
FIRST, MASSIVE, POSITIONS = "without first tokens", "without massive activations", "without position means"
REMOVED = {ALL: (), FIRST: (FIRST,), MASSIVE: (MASSIVE,), POSITIONS: (POSITIONS,), CLEANED: (FIRST, MASSIVE, POSITIONS)}
JUDGED = (ALL, CLEANED)  # of which all is told
EXCESS, OWN, MEAN, SHARE = "excess", "self weight", "mean fraction", "tokens with massive activations"
ABOUT = ("document", "position", "group")  # kept of a token beside the streams


def statistics(event: Event | Finished, batch: Batch, memory: dict[str, Any]) -> dict[str, Any] | None:
    """The tokens of the sample at every depth, and what tokens give themselves."""
    if isinstance(event, Attended):
        return _own_weight(event, batch, memory)
    depth = depth_of(event, batch, memory)
    if depth is not None and (depth.attention or isinstance(event, Finished)):
        _take(depth, batch, memory)
    if isinstance(event, Finished) and "samples" in memory:
        kept = memory["samples"].items()
        return {"samples": {stack: sample_of(taken, hashes, size=size) for stack, (hashes, _, taken, size) in kept}}
    return None


def evaluate(state: Mapping[str, Any], model: Probed) -> list[Measured]:
    """Shapes and mean fractions with the jackknife over groups, self weights with the bootstrap."""
    found = []
    for layer, tokens in _layers(state):
        found += _beside(layer, tokens, state)
        for which in REMOVED:
            cloud = tokens.cloud(which)
            if cloud is None:
                found.append(Measured(layer, None, f"{LARGEST}, {which}", math.nan))
            elif which in JUDGED:
                found += _shapes(layer, which, cloud)
                estimate = excess(cloud, _gaussian(cloud, model.seed)[LARGEST])
                found += measured(layer, f"{EXCESS}, {which}", estimate, len(cloud.features))
            else:
                value = float(largest_square(cloud.features, cloud.axes).sqrt())
                found.append(Measured(layer, None, f"{LARGEST}, {which}", value, tokens=len(cloud.features)))
    return found


def null(state: Mapping[str, Any], model: Probed, twin: Twin | None) -> list[Measured]:
    """What Gaussian clouds show; of the excess and of what is beside it, what the random twin does."""
    found = []
    for layer, tokens in _layers(state):
        for which in JUDGED:
            cloud = tokens.cloud(which)
            for name, draws in {} if cloud is None else _gaussian(cloud, model.seed).items():
                band = band_of_draws(_told(name, draws), level=0.95)
                low, usual, high = (float(end) for end in band)
                found.append(Measured(layer, None, f"{name}, {which}", usual, low, high))
    for layer, tokens in _layers({} if twin is None else twin.state):
        found += _beside(layer, tokens, twin.state)  # type: ignore[union-attr]
        for which in JUDGED:
            cloud = tokens.cloud(which)
            if cloud is not None:
                draws = gaussian_clouds(cloud, DRAWS, torch.Generator().manual_seed(model.seed))
                estimate = excess(cloud, largest_square(draws, cloud.axes))
                found += measured(layer, f"{EXCESS}, {which}", estimate, len(cloud.features))
    return found


def verdict(findings: list[Finding]) -> Judgement:
    """Depth by depth, and the model by the majority of its depths."""
    quantity = f"{EXCESS}, {CLEANED}"
    ruled = judge(findings, quantity, lambda f: Bounds(BOUND, BOUND), small=True)
    c = count(ruled, quantity)
    if not c.judged:
        return Judgement(ruled, "not applicable", "No stream was recognised, or too few tokens of it were read.")
    whole, own, mean = (middle(f.value for f in findings if f.quantity == q) for q in (f"{EXCESS}, {ALL}", OWN, MEAN))
    words = (
        f"Along its worst direction the cleaned cloud of the middle depth is {c.value:.3f} (W²) farther from a "
        f"Gaussian than a Gaussian sample is, {whole:.3f} with all tokens, {c.null:.3f} with random weights; "
        f"{c.supported} of {c.judged} depths are within {BOUND}, {c.refuted} beyond. Self weight {own:.2f}, mean "
        f"fraction {mean:.2f}."
    )
    return Judgement(ruled, c.verdict, words, c.value, null=c.null, quantity=quantity, note=c.note)


# In a batch ----------------------------------------------------------------------------------------------------------


def _take(depth: Depth, batch: Batch, memory: dict[str, Any]) -> None:
    """The tokens of least hash of a stream; all depths of a stack have the same ones, chosen once, on the CPU."""
    samples = memory.setdefault("samples", {})
    if depth.stack not in samples:
        n, width = depth.stream.shape[1:]
        mask, keys = depth.mask.cpu(), batch.keys.cpu()
        size = min(SAMPLE, NUMBERS // width)
        hashes = token_hashes(keys, batch.starts.cpu().unsqueeze(-1) + torch.arange(n)).flatten()
        rows = chosen(hashes, valid=mask.flatten(), size=size)
        positions = (mask.cumsum(1) - 1).flatten()[rows]
        about = (keys.repeat_interleave(n)[rows], positions, torch.full_like(rows, batch.group))
        taken = dict(zip(ABOUT, about, strict=True))
        samples[depth.stack] = (hashes[rows], rows.to(depth.stream.device, non_blocking=True), taken, size)
    _, rows, taken, _ = samples[depth.stack]
    taken[depth.layer] = depth.stream.flatten(0, 1)[rows]


def _own_weight(event: Attended, batch: Batch, memory: dict[str, Any]) -> dict[str, Any] | None:
    """Weights of tokens on themselves, mean over heads: sums and counts of each row."""
    if event.crosses or not applies(event, batch) or event.query.shape[2] != event.key.shape[2]:
        return None
    rows = rows_of(event, batch, memory)
    if rows is None:
        return None
    at = rows.places[:, None, :, None].expand(-1, event.query.shape[1], -1, 1)
    own = (rows.logits.gather(-1, at).squeeze(-1) - rows.of(event.attention.log_normalizer)).exp().mean(1)
    count = rows.valid.to(own.dtype).sum(1)
    values = torch.stack((count, own.masked_fill(~rows.valid, 0.0).sum(1), count), -1)
    return {"own": {event.layer: sums_of(values.double(), batch.keys)}}


# Of the merged sample ------------------------------------------------------------------------------------------------


class _Tokens(NamedTuple):
    """The sample at one depth."""

    x: Float[Tensor, "n D"]
    documents: Int[Tensor, " n"]
    positions: Int[Tensor, " n"]
    groups: Int[Tensor, " n"]
    massive: Bool[Tensor, " n"]

    def cloud(self, which: str) -> Cloud | None:
        """The cloud of the tokens that are left, None of too few."""
        any_massive = bool(self.massive.any())
        removed = tuple(each for each in REMOVED[which] if each != MASSIVE or any_massive)
        keep = torch.ones_like(self.massive)
        if FIRST in removed:
            keep = keep & (self.positions > 0)
        if MASSIVE in removed:
            keep = keep & ~self.massive
        if int(keep.sum()) < FEWEST:
            return None
        known = _clouds.setdefault(self.x, {})
        if removed not in known:
            positions = self.positions[keep] if POSITIONS in removed else None
            known[removed] = cloud_of(self.x[keep], self.documents[keep], self.groups[keep], positions)
        found: Cloud = known[removed]
        return found


# Values and nulls ask for the same clouds and draws, which follow from the sample alone.
_clouds: WeakIdKeyDictionary = WeakIdKeyDictionary()
_draws: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _layers(state: Mapping[str, Any]) -> Iterator[tuple[str, _Tokens]]:
    for sample in state.get("samples", {}).values():
        for layer, x in sample.vectors.items():
            if layer not in ABOUT and len(x) > 1:
                documents, positions, groups = (sample.vectors[name].to(x.device) for name in ABOUT)
                large = x.float().abs().amax(1)
                massive = (large > LARGE) & (large >= TIMES * x.float().abs().median())
                yield layer, _Tokens(x, documents, positions, groups, massive)


def _gaussian(cloud: Cloud, seed: int) -> dict[str, Tensor]:
    """The numbers of Gaussian clouds, drawn once."""
    if cloud.features not in _draws:
        drawn = gaussian_clouds(cloud, DRAWS, torch.Generator().manual_seed(seed))
        _draws[cloud.features] = shape(drawn, cloud.axes)
    found: dict[str, Tensor] = _draws[cloud.features]
    return found


def _shapes(layer: str, which: str, cloud: Cloud) -> list[Measured]:
    """All numbers of a cloud."""
    counts, kept = _without_groups(cloud.groups)
    parts = [shape(cloud.features[keep], cloud.axes) for keep in kept]
    found = []
    for name in parts[0]:
        values = torch.stack([_told(name, part[name]) for part in parts])
        found += measured(layer, f"{name}, {which}", jackknifed(values[0], values[1:], counts), len(cloud.features))
    return found


def excess(cloud: Cloud, draws: Float[Tensor, " m"]) -> Estimate:
    """The largest W² beyond the mean of Gaussian clouds; without a group these are farther from their law too."""
    counts, kept = _without_groups(cloud.groups)
    squares = torch.stack([largest_square(cloud.features[keep], cloud.axes) for keep in kept])
    sizes = torch.stack([keep.sum() for keep in kept])
    less = squares - draws.double().mean() * (sizes[0] / sizes)
    return jackknifed(less[0], less[1:], counts)


def _told(name: str, value: Tensor) -> Tensor:
    """Distances are told as such, not squared."""
    return value.sqrt() if name in (LARGEST, SLICED, AXES, PROJECTIONS) else value


def _beside(layer: str, tokens: _Tokens, state: Mapping[str, Any]) -> list[Measured]:
    """Mean fraction, massive activations and self weight."""
    counts, kept = _without_groups(tokens.groups)
    n, x = len(tokens.x), tokens.x.double()
    values = torch.stack([OBSERVABLES["mean_fraction"](x[keep], None, None) for keep in kept])
    found = measured(layer, MEAN, jackknifed(values[0], values[1:], counts), n)
    found.append(Measured(layer, None, SHARE, float(tokens.massive.double().mean()), tokens=n))
    own = state.get("own", {}).get(layer)
    return found if own is None else found + measured(layer, OWN, bootstrap(ratio, own), own.totals[0, 2])


def _without_groups(groups: Int[Tensor, " n"]) -> tuple[Int[Tensor, " g"], list[Bool[Tensor, " n"]]]:
    """How many tokens each group has; all tokens, and all but those of each group, if there are several."""
    present, counts = groups.unique(return_counts=True)
    every = torch.ones_like(groups, dtype=torch.bool)
    return counts, [every, *(groups != g for g in present if len(present) > 1)]
