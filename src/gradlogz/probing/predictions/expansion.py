"""Expansion: growth of the variance of tokens by attention updates, and by norms.

    x'        = x + u                                         u: update of a sublayer, x: residual stream
    excess    = log tr Cov(x') - log(tr Cov(x) + tr Cov(u))   0 if u and x are uncorrelated

Read next: linearity.py, ../../dynamics/contraction.py (the contraction by norms).
"""

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import torch

from ..._typing import Bool, Float, Int, Tensor
from ..batch_pass import BatchPass
from ..hypothesis_tests import NOTHING_MEASURED, Bounds, absent, band, conclude, judge, measured, median_detail
from ..inside.events import Event, ForwardOutput, Normed, Passed
from ..prediction import Baseline, Prediction, Probed
from ..runs.judgement import Judgement, Measured
from ..runs.records import PREDICTED, Declaration, Finding, Label, Quantity
from ..statistics import GROUPS, Comoments, Estimate, GroupMoments, comoments_of, jackknife
from .observables.attention_rows import at, chosen

GROWTH, VOLUME, VOLUME_EXCESS = "growth of log trace", "growth of log det", "excess of log det"
EXCESS = {"attention": "excess of log trace", "feed_forward": "excess of log trace of the feed-forward"}
REST = {kind: f"{name} without first tokens" for kind, name in EXCESS.items()}
BOUND = 0.01
DIRECTIONS = 32
PART = 4  # one token in PART is sampled

FORMULAS = """\
    x'                     = x + u                                     u: update of a sublayer, x: residual stream
    growth of log trace    = log tr Cov(x') - log tr Cov(x)
    excess of log trace    = growth - log(1 + r²) = log(1 + 2 tr Cov(x, u) / (tr Cov(x) + tr Cov(u)))
    log(1 + r²)            growth if u and x are uncorrelated          r² = tr Cov(u) / tr Cov(x)
    growth of log det      = (log det Cov(x') - log det Cov(x)) / k
    excess of log det      = (log det Cov(x') - log det(Cov(x) + Cov(u))) / k"""

_OF_TRACE = Quantity("nats", "log tr Cov(x + u) − log(tr Cov(x) + tr Cov(u))")

DECLARATION = Declaration(
    title="Expansion by attention",
    kind=PREDICTED,
    claim="Attention updates increase the variance of tokens more than uncorrelated updates would.",
    formula=(
        "excess = log tr Cov(x + u) - log(tr Cov(x) + tr Cov(u)) of an attention sublayer, without the first token of "
        "each sequence; x: residual stream, u: update; 0 if they are uncorrelated"
    ),
    supports=(
        f"The excess is above {BOUND:g} and above two nulls: the random-weights baseline, and updates permuted between "
        "tokens."
    ),
    refutes=f"The excess is below {-BOUND:g}: attention updates contract the tokens.",
    method=(
        FORMULAS,
        "An ascent step of a log normaliser moves no two tokens closer: gradients of convex functions are monotone, so "
        "that tr Cov(x, u) = E<x - y, u(x) - u(y)> / 2 >= 0 for tokens x, y with the same visible keys [theory 5.1, "
        "E15]. The growth itself is uninformative, since any added vector increases the variance. A few massive tokens "
        "or coordinates can dominate a trace: traces are computed with and without the first token of each sequence. "
        f"Log determinants weight all directions equally; they are computed in k = {DIRECTIONS} random directions, or "
        f"in all if the residual stream has at most {DIRECTIONS} dimensions. The growth of log trace and of log det is "
        f"also reported for normalisation layers. The sample is one token in {PART}, the same tokens in every layer.",
        "Nulls: for the growth in a sublayer, an uncorrelated update; for all else, the random-weights baseline. For "
        "the excess of log trace, the band of this null is widened where needed to cover a second null, updates "
        "permuted between tokens: its excess has mean 0 and standard deviation at most 2 r / ((1 + r²) sqrt(n)) for n "
        "tokens.",
    ),
    decision_rule="The verdict on the model is that of more than half of its attention sublayers.",
    quantities={
        GROWTH: Quantity("nats", "log tr Cov(x + u) − log tr Cov(x)"),
        **dict.fromkeys((*EXCESS.values(), *REST.values()), _OF_TRACE),
        VOLUME: Quantity("nats per direction", "(log det Cov(x + u) − log det Cov(x)) / k"),
        VOLUME_EXCESS: Quantity("nats per direction", "(log det Cov(x + u) − log det(Cov(x) + Cov(u))) / k"),
    },
    statistic="median excess of log tr Cov over an uncorrelated update, without first tokens",
    null="random-weights baseline",
    unit="attention sublayer",
    details={GROWTH: Label("median growth of log tr Cov", null="uncorrelated update")},
    remarks={NOTHING_MEASURED: "No attention sublayer adds to a residual stream."},
    places={
        **dict.fromkeys((GROWTH, VOLUME), "sublayers and normalisation layers"),
        VOLUME_EXCESS: "sublayers",
        **dict.fromkeys((EXCESS["feed_forward"], REST["feed_forward"]), "feed-forward sublayers"),
    },
)


class StackState(NamedTuple):
    """Moments of the layers and norms of a stack, in the order of `names`, which newlines separate.

    spread, rest: traces of the covariances of x, u and x + u, with and without first tokens.
    volume: covariances of x and u in random directions.
    """

    names: str
    volume: Comoments
    spread: Comoments
    rest: Comoments


@dataclass
class _Memory:
    stacks: "dict[str, _Seen]" = field(default_factory=dict)


def statistics(event: Event | ForwardOutput, batch_pass: BatchPass) -> dict[str, StackState] | None:
    """Traces of the covariances of x, u and x + u, and covariances of x and u in random directions.

    Events are cheap: the layers of a stack, which share their tokens, are summed together at the end.
    """
    stacks = batch_pass.memory(_Memory).stacks
    if isinstance(event, ForwardOutput):
        return {stack: accumulated.summed(batch_pass.batch.group) for stack, accumulated in stacks.items()}
    if isinstance(event, Passed):
        name, x, u = event.sublayer.name, event.stream, event.update
    elif isinstance(event, Normed):
        name, x, u = _of_norm(event.norm.name, event.norm.call), event.input, event.result
    else:
        return None
    stack = _stack(name)
    if stack not in stacks:
        stacks[stack] = _Seen(*chosen(event, batch_pass, 1 / PART))
    stacks[stack].add(name, x, u)
    return None


def evaluate(state: dict[str, StackState], model: Probed) -> list[Measured]:
    """Growth and excess of each sublayer, growth of each norm."""
    estimates = _estimates(state)
    rows = []
    for sublayer in model.architecture.sublayers:
        if sublayer.name not in estimates:
            rows += [absent(sublayer.name, REST["attention"])] if sublayer.kind == "attention" else []
            continue
        of_sublayer = estimates[sublayer.name]
        for quantity, key in (
            (GROWTH, "growth"),
            (EXCESS[sublayer.kind], "excess"),
            (REST[sublayer.kind], "rest"),
            (VOLUME, "volume"),
            (VOLUME_EXCESS, "volume excess"),
        ):
            rows += measured(sublayer.name, quantity, *of_sublayer[key])
    for name in _norms(model):
        if name in estimates:
            rows += measured(name, GROWTH, *estimates[name]["change"])
            rows += measured(name, VOLUME, *estimates[name]["volume change"])
    return rows


def null(
    state: dict[str, StackState], model: Probed, baseline: Baseline[dict[str, StackState]] | None
) -> list[Measured]:
    """Uncorrelated updates, permuted updates, and the random-weights baseline."""
    estimates = _estimates(state)
    others = [] if baseline is None else evaluate(baseline.state, baseline.model)
    random = {(m.layer, m.quantity): m for m in others if m.tokens}
    rows = []
    for sublayer in model.architecture.sublayers:
        if sublayer.name not in estimates:
            continue
        of_sublayer = estimates[sublayer.name]
        for quantity, key in ((GROWTH, "chance"), (VOLUME, "volume chance")):
            rows += measured(sublayer.name, quantity, of_sublayer[key][0], 0)
        for quantity, key in ((EXCESS[sublayer.kind], "deviation"), (REST[sublayer.kind], "deviation of rest")):
            chance = Measured(sublayer.name, None, quantity, *band(0.0, float(of_sublayer[key][0].value)))
            rows.append(_wider(chance, random.get((sublayer.name, quantity))))
    norms = set() if baseline is None else set(_norms(baseline.model))
    return rows + [m for m in others if m.quantity == VOLUME_EXCESS or (m.layer in norms and m.tokens)]


def _wider(chance: Measured, random: Measured | None) -> Measured:
    """Value of the random-weights baseline, in a band that includes the permutation null."""
    if random is None:
        return chance
    low, high = (chance.low, random.value, random.low), (chance.high, random.value, random.high)
    return chance._replace(
        value=random.value,
        low=min(v for v in low if not math.isnan(v)),
        high=max(v for v in high if not math.isnan(v)),
    )


def verdict(findings: list[Finding]) -> Judgement:
    """Judge every attention sublayer by its excess without first tokens."""
    quantity = REST["attention"]
    findings = judge(findings, quantity, lambda f: Bounds(max(BOUND, f.null_high), -BOUND))
    attention = {(f.layer, f.call) for f in findings if f.quantity == quantity}
    growth = [f for f in findings if f.quantity == GROWTH and (f.layer, f.call) in attention]
    return conclude(findings, quantity, details=[median_detail(GROWTH, growth, GROWTH)])


# Moments -------------------------------------------------------------------------------------------------------------


class _Seen:
    """Accumulator of the layers of a stack during one batch."""

    def __init__(self, places: Int[Tensor, "b r"], valid: Bool[Tensor, "b r"]) -> None:
        self._places = places
        self._masks = torch.stack((valid, valid & (places > 0))).flatten(1)
        self._names: list[str] = []
        self._means: list[Tensor] = []
        self._products: list[Tensor] = []
        self._along: list[Tensor] = []

    def add(self, name: str, x: Float[Tensor, "b n D"], u: Float[Tensor, "b n D"]) -> None:
        """Add a layer: means under both masks, products of every sampled token, its coordinates in the directions."""
        wide = torch.promote_types(x.dtype, torch.float32)
        x, u = (at(t.unsqueeze(1), self._places).to(wide).flatten(0, 2) for t in (x, u))
        w = self._masks.to(wide)
        self._names.append(name)
        self._means += [w @ x, w @ u]
        self._products += [torch.linalg.vecdot(a, b) for a, b in ((x, x), (u, u), (x, u))]
        if x.shape[-1] > DIRECTIONS:
            directions = _directions(x.shape[-1], x.device, wide)
            x, u = x @ directions, u @ directions
        self._along += [x, u]

    def summed(self, group: int) -> StackState:
        """Statistics of all layers at once, in the order of their names."""
        L = len(self._names)
        w = self._masks.double()
        n = w.sum(-1)
        sums = torch.stack(self._means).unflatten(0, (L, 2)).double()  # [L, x and u, masks, D]
        products = torch.stack(self._products).unflatten(0, (L, 3)).double() @ w.mT  # [L, xx uu xu, masks]
        along = torch.stack(self._along).unflatten(0, (L, 2)).transpose(1, 2).flatten(2)
        volume = comoments_of(along, group=group, weights=self._masks[0])
        traces_of = []
        for k in range(2):  # with and without first tokens
            mean = sums[:, :, k] / n[k].clamp(min=1.0)
            clouds = torch.cat((mean, mean.sum(1, keepdim=True)), 1)
            xx, uu, xu = products[..., k].unbind(1)
            squares = torch.stack((xx, uu, xx.add(uu).add(xu, alpha=2)), 1)
            nothing = clouds.new_zeros(L, 3, 1)
            traces = squares - n[k] * clouds.square().sum(-1)
            empty = nothing.unsqueeze(-1), clouds, nothing.unsqueeze(-1) * clouds.unsqueeze(-2)
            each = GroupMoments(n[k], nothing, *empty, traces)
            traces_of.append(Comoments(tuple(each if g == group else None for g in range(GROUPS))))
        return StackState("\n".join(self._names), volume, *traces_of)


def _estimates(state: dict[str, StackState]) -> dict[str, dict[str, tuple[Estimate, float]]]:
    """Every estimate of every layer, with its number of tokens: {layer: {key: (estimate, tokens)}}."""
    estimates: dict[str, dict[str, tuple[Estimate, float]]] = {}
    for stack in state.values():
        tokens = float(stack.spread.tokens.sum())
        for key, (function, part) in _ESTIMATES.items():
            estimate = jackknife(function, getattr(stack, part))
            for i, name in enumerate(stack.names.split("\n")):
                estimates.setdefault(name, {})[key] = (Estimate(*(t[i] for t in estimate)), tokens)
    return estimates


@lru_cache
def _directions(width: int, device: torch.device, dtype: torch.dtype) -> Float[Tensor, "D k"]:
    """Orthonormal columns, the same in every run."""
    gaussian = torch.randn(width, DIRECTIONS, generator=torch.Generator().manual_seed(width), dtype=torch.float64)
    return torch.linalg.qr(gaussian).Q.to(device, dtype)


def _traces(m: GroupMoments) -> tuple[Tensor, Tensor, Tensor]:
    x, u, after = m.divided(m.yy).unbind(-1)
    return x, u, after


def _growth(m: GroupMoments) -> Tensor:
    x, _, after = _traces(m)
    return after.log() - x.log()


def _excess(m: GroupMoments) -> Tensor:
    x, u, after = _traces(m)
    return after.log() - (x + u).log()


def _change(m: GroupMoments) -> Tensor:
    """Growth of log tr Cov from the input to the output of a norm."""
    x, result, _ = _traces(m)
    return result.log() - x.log()


def _volumes(m: GroupMoments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log determinants divided by k of Cov(x), Cov(u), Cov(x + u) and Cov(x) + Cov(u); NaN if singular."""
    C = m.covariance
    k = C.shape[-1] // 2
    x, u, across = C[..., :k, :k], C[..., k:, k:], C[..., :k, k:]
    determinants = torch.linalg.slogdet(torch.stack((x, u, x + u + across + across.mT, x + u)))
    each = torch.where(
        (determinants.sign > 0) & determinants.logabsdet.isfinite(), determinants.logabsdet / k, torch.nan
    )
    return each[0], each[1], each[2], each[3]


def _volume_growth(m: GroupMoments) -> Tensor:
    x, _, after, _ = _volumes(m)
    return after - x


def _volume_excess(m: GroupMoments) -> Tensor:
    _, _, after, unrelated = _volumes(m)
    return after - unrelated


def _volume_change(m: GroupMoments) -> Tensor:
    x, result, _, _ = _volumes(m)
    return result - x


def _deviation(m: GroupMoments) -> Tensor:
    """Upper bound of the standard deviation of the excess under permuted updates."""
    x, u, _ = _traces(m)
    r = (u / x).sqrt()
    return 2 * r / ((1 + r.square()) * m.tokens.sqrt().reshape(-1, *(1,) * (r.ndim - 1)))


_ESTIMATES = {
    "growth": (_growth, "spread"),
    "excess": (_excess, "spread"),
    "chance": (lambda m: _growth(m) - _excess(m), "spread"),
    "deviation": (_deviation, "spread"),
    "change": (_change, "spread"),
    "rest": (_excess, "rest"),
    "deviation of rest": (_deviation, "rest"),
    "volume": (_volume_growth, "volume"),
    "volume excess": (_volume_excess, "volume"),
    "volume chance": (lambda m: _volume_growth(m) - _volume_excess(m), "volume"),
    "volume change": (_volume_change, "volume"),
}


def _stack(name: str) -> str:
    """Part of a name before the layer number; layers of one stack share their tokens."""
    head: list[str] = []
    for part in name.split("#")[0].split("."):
        if part.isdigit():
            return ".".join(head)
        head.append(part)
    return name


def _of_norm(name: str, call: int) -> str:
    return name if call == 1 else f"{name}#{call}"


def _norms(model: Probed) -> list[str]:
    """Names of the norms of the residual stream, each once, in the order of computation."""
    every = [n for s in model.architecture.sublayers for n in (s.norm_of_stream, s.reads, s.closes, s.follows)]
    return list(dict.fromkeys(_of_norm(n.name, n.call) for n in every if n is not None))


PREDICTION = Prediction(__name__, DECLARATION, statistics, evaluate, null, verdict, order=70)
