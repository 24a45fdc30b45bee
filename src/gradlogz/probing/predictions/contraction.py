"""Contraction: the share of the expansion by attention that the norm after it takes back.

    x'        = x + u                                            u: update of a sublayer, x: residual stream
    before    = log tr Cov(x + u) - log tr Cov(x + u')           u': update of another token, of the norm of u
    after     = log tr Cov N(x + u) - log tr Cov N(x + u')       N: projection to the unit sphere of the norm
    share     = 1 - after / before

tr Cov is half the mean squared distance of two tokens. A sum of uncorrelated vectors spreads, and a norm undoes it,
whatever the weights are: both are subtracted with u'.

Read next: expansion.py (expansion of volumes), observables/moved_tokens.py (spheres of norms).
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from ..._typing import Float, Tensor
from ..batch_pass import BatchPass
from ..hypothesis_tests import (
    NOTHING_MEASURED,
    absent,
    beyond_the_null,
    describe,
    judge,
    measured,
    median,
    median_detail,
    random_band,
)
from ..inside.architecture import Sublayer
from ..inside.events import Event, ForwardOutput, Passed
from ..inside.norm_sphere import centred, norm_of_updates
from ..prediction import Baseline, Prediction, Probed
from ..runs.judgement import Judgement, Measured
from ..runs.records import DESCRIPTIVE, Declaration, Detail, Finding, Label, Quantity, Remark
from ..statistics import GROUPS, Comoments, Estimate, GroupMoments, Sums, jackknife
from .observables.attention_rows import at, chosen
from .observables.moved_tokens import DRAWS, LEAST, PART, massive, other_places, rotated, scaled
from .observables.residual_stream import in_sequences

CLOUDS = ("x", "u", "x + u", "u'", "x + u'", "N(x + u)", "N(x + u')")
SHARE, READ = "share taken back", "share removed where it is read"
SHARE_FEED_FORWARD, READ_FEED_FORWARD = f"{SHARE}, feed-forward", f"{READ}, feed-forward"
CLEANED = f"{SHARE}, cleaned"
CORRELATION, BEFORE, AFTER = "correlation of update and token", "excess before the norm", "excess after the norm"
OF_FEED_FORWARD = {name: f"{name}, feed-forward" for name in (CORRELATION, BEFORE, AFTER)}

FORMULAS = """\
    before       = log tr Cov(x + u) - log tr Cov(x + u')            x: residual stream, u: update of a sublayer
    after        = log tr Cov N(x + u) - log tr Cov N(x + u')        N: projection to the unit sphere of the norm
    share        = 1 - after / before                                u': update of another token, of the norm of u
    correlation  = [tr Cov(x, u) - tr Cov(x, u')] / sqrt(tr Cov(x) tr Cov(u))"""

_EXCESS = Quantity("nats", "log tr Cov(x + u) − log tr Cov(x + u′)")
_AFTER = Quantity("nats", "log tr Cov N(x + u) − log tr Cov N(x + u′)")
_CORRELATION = Quantity("1", "[tr Cov(x, u) − tr Cov(x, u′)] / √(tr Cov(x) tr Cov(u))")
_SHARE = Quantity("1", "1 − after / before")

DECLARATION = Declaration(
    title="Contraction by norms",
    kind=DESCRIPTIVE,
    claim="Attention spreads tokens more than uncorrelated updates do, and the norm that follows takes this back.",
    formula=(
        "share taken back = 1 - after / before; before = log tr Cov(x + u) - log tr Cov(x + u'): excess of the spread "
        "of the tokens x with their updates u over their spread with the updates u' of other tokens, scaled to the "
        "norm of u; after: the same for N(x + u) and N(x + u'), N the projection to the unit sphere of the norm that "
        "follows. tr Cov is half the mean squared distance of two tokens. The share has a value where the excess "
        "before the norm differs significantly from 0. Attention spreads tokens where the correlation of update and "
        "token, [tr Cov(x, u) - tr Cov(x, u')] / sqrt(tr Cov(x) tr Cov(u)), is above "
        f"{LEAST:g} and above its null, the correlation of randomly rotated updates"
    ),
    refutes="",
    method=(
        FORMULAS,
        "An ascent step moves tokens apart, and a norm brings them back to its sphere [shim22, abstract]. A sum of "
        "uncorrelated vectors has the sum of their variances, and every norm undoes that growth, in random networks, "
        "too. Updates of other tokens of the same sequence have the same norms and do both; their spread, before and "
        "after the norm, is subtracted. What is left before the norm is correlation of the update with its token: "
        "exactly so for the trace, to first order 2 r times the correlation, r² = tr Cov(u) / tr Cov(x).",
        "On the unit sphere tr Cov = 1 - |mean|²: what the norm leaves is motion towards or from the mean token. "
        "Lengthening of tokens, u = c x, is taken back entirely (share 1), spreading along the sphere not at all "
        "(share 0), and a share above 1 means that tokens gather along the sphere while they lengthen. The norm is "
        "used without its gain and bias; where it subtracts the mean over features, x and u are without it.",
        "The claim is about post-norm models, in which the norm acts on the residual stream. In pre-norm models the "
        "stream keeps its expansion, and the norm is on the branch: the share that the next sublayer does not see is "
        "reported, and the claim is not applicable. The same numbers are reported for feed-forward sublayers, about "
        "which the theory says nothing.",
        f"The sample is one token in {PART}, the same tokens in every layer. Null of the correlation: {DRAWS} random "
        "rotations of the updates, one for all tokens of a layer. Confidence intervals: jackknife over groups of "
        "documents. Cleaned: without first tokens and massive activations.",
    ),
    decision_rule=(
        f"The value of the model is the median over its attention sublayers. {LEAST:g} is the smallest cosine of "
        "updates that counts in `ascent` and `tie`."
    ),
    quantities={
        SHARE: _SHARE,
        CLEANED: _SHARE,
        CORRELATION: _CORRELATION,
        BEFORE: _EXCESS,
        AFTER: _AFTER,
        READ: _SHARE,
        SHARE_FEED_FORWARD: _SHARE,
        READ_FEED_FORWARD: _SHARE,
        OF_FEED_FORWARD[CORRELATION]: _CORRELATION,
        OF_FEED_FORWARD[BEFORE]: _EXCESS,
        OF_FEED_FORWARD[AFTER]: _AFTER,
    },
    references=("shim22",),
    statistic="median share of the excess spread that the norm takes back",
    null_reason=(
        f"The share has none. Its correlation is compared with {DRAWS} rotations of the updates, and the "
        "spread with updates of other tokens."
    ),
    null="",
    unit="attention sublayer",
    details={
        "spreading": Label("sublayers that spread"),
        "gathering": Label("sublayers that gather"),
        CORRELATION: Label("median correlation of update and token", null="random-rotation null"),
        BEFORE: Label("median excess of log tr Cov before the norm", "{:.3f}"),
        AFTER: Label("after the norm", "{:.3f}"),
        CLEANED: Label("median share without first tokens and massive activations"),
        SHARE_FEED_FORWARD: Label("median share for feed-forward sublayers"),
        READ: Label("median share that the next sublayer does not see"),
    },
    remarks={
        NOTHING_MEASURED: "No norm follows an attention sublayer: the residual stream is not contracted.",
        "pre-norm": (
            "Norms are on the branches of this model: the residual stream keeps its expansion, and the claim does not "
            "apply."
        ),
    },
    labels={
        CLEANED: "share taken back, without first tokens and massive activations",
        READ: "share of the excess that the next sublayer does not see",
    },
    places=dict.fromkeys((*OF_FEED_FORWARD.values(), SHARE_FEED_FORWARD, READ_FEED_FORWARD), "feed-forward sublayers"),
)


class LayerState(NamedTuple):
    """Moments of the vectors of a sublayer, of all sampled and of cleaned tokens; sums of <x, R(u - u')>, [1, 1, r]."""

    vectors: Comoments
    cleaned: Comoments
    rotations: Sums


def statistics(event: Event | ForwardOutput, batch_pass: BatchPass) -> dict[str, LayerState] | None:
    """Means and spreads of tokens, of their updates and of their sums, before and after the norm."""
    if not isinstance(event, Passed) or norm_of_updates(event.sublayer) is None:
        return None
    passed = in_sequences(event, batch_pass)
    if passed is None:
        return None
    places, valid = chosen(passed, batch_pass, 1 / PART)
    others = other_places(places, batch_pass.real(passed))
    wide = torch.promote_types(passed.stream.dtype, torch.float32)
    x, u, other = (
        at(t.unsqueeze(1), index).squeeze(1).to(wide)
        for t, index in ((passed.stream, places), (passed.update, places), (passed.update, others))
    )
    ordinary = valid & (places > 0) & ~massive(x)
    norm = norm_of_updates(passed.sublayer)
    x, u, other = (centred(t, norm) for t in (x, u, other))
    other = scaled(other, u.norm(dim=-1, keepdim=True))
    sums = [x + u, x + other]
    vectors = torch.stack((x, u, sums[0], other, sums[1], *map(_on_unit_sphere, sums)), 2).flatten(0, 1).double()
    all_tokens, cleaned = (mask.flatten().double() for mask in (valid, ordinary))
    products = (x.unsqueeze(-2) * rotated(u - other)).sum(-1).flatten(0, 1).double()
    group = batch_pass.batch.group
    state = LayerState(
        _moments(vectors, all_tokens, group),
        _moments(vectors, cleaned, group),
        Sums((all_tokens @ products).reshape(1, 1, -1)),
    )
    return {event.sublayer.name: state}


def evaluate(state: dict[str, LayerState], model: Probed) -> list[Measured]:
    """Correlation, excess before and after the norm, and share taken back, of each sublayer with a norm."""
    rows = []
    for sublayer in model.architecture.sublayers:
        name, attention = sublayer.name, sublayer.kind == "attention"
        if name not in state:
            if attention and sublayer.follows is not None:
                rows.append(absent(name, SHARE))
            continue
        vectors, cleaned, _ = state[name]
        tokens = vectors.tokens.sum()
        rows += measured(name, _share_of(sublayer), _shares(vectors), tokens)
        if attention and sublayer.follows is not None:
            rows += measured(name, CLEANED, _shares(cleaned), cleaned.tokens.sum())
        for quantity in (CORRELATION, BEFORE, AFTER):
            named = quantity if attention else OF_FEED_FORWARD[quantity]
            rows += measured(name, named, jackknife(FUNCTIONS[quantity], vectors), tokens)
    return rows


def null(
    state: dict[str, LayerState], model: Probed, baseline: Baseline[dict[str, LayerState]] | None
) -> list[Measured]:
    """Correlations of rotated updates with their tokens."""
    rows = []
    for sublayer in model.architecture.sublayers:
        if sublayer.name in state:
            quantity = CORRELATION if sublayer.kind == "attention" else OF_FEED_FORWARD[CORRELATION]
            draws = _rotated_correlations(state[sublayer.name])
            rows.append(random_band(sublayer.name, None, quantity, draws))
    return rows


def verdict(findings: list[Finding]) -> Judgement:
    """Describe the share of the attention sublayers that spread and that a norm follows; count them."""
    post = {(f.layer, f.call) for f in findings if f.quantity == SHARE}
    judged = judge(findings, CORRELATION, lambda f: beyond_the_null(f, LEAST)).findings
    spreads = [f.verdict for f in judged if f.quantity == CORRELATION and (f.layer, f.call) in post]
    keys = [key for key in (CORRELATION, BEFORE, AFTER, CLEANED, SHARE_FEED_FORWARD, READ) if _known(findings, key)]
    medians = [median_detail(key, findings, key) for key in keys]
    judgement = describe(findings, SHARE)
    if spreads:  # without a sublayer that spreads there is no share, and still a description
        pairs = (("spreading", "supported"), ("gathering", "refuted"))
        counts = [Detail(key, count=spreads.count(ruling), total=len(spreads)) for key, ruling in pairs]
        return judgement._replace(verdict="described", details=(*counts, *medians), remarks=())
    if any(f.quantity == READ for f in findings):
        return judgement._replace(details=(*medians,), remarks=(Remark("pre-norm"),))
    return judgement


def _known(findings: list[Finding], quantity: str) -> bool:
    return not math.isnan(median(f.value for f in findings if f.quantity == quantity))


def _share_of(sublayer: Sublayer) -> str:
    """Name of the share of a sublayer: taken back from the residual stream, or removed on the branch that reads it."""
    attention = sublayer.kind == "attention"
    if sublayer.follows is not None:
        return SHARE if attention else SHARE_FEED_FORWARD
    return READ if attention else READ_FEED_FORWARD


# Moments -------------------------------------------------------------------------------------------------------------


def _on_unit_sphere(x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
    return x / x.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)


def _moments(vectors: Float[Tensor, "t 7 D"], weights: Float[Tensor, " t"], group: int) -> Comoments:
    """Means and sums of squared deviations of the vectors, as moments of y; there is no x."""
    n = weights.sum()
    means = torch.tensordot(weights, vectors, 1) / n.clamp(min=1.0)
    squares = weights @ (vectors - means).square().sum(-1)
    nothing = means.new_zeros(len(CLOUDS), 1)
    moments = GroupMoments(n, nothing, nothing.unsqueeze(-1), means, torch.zeros_like(means).unsqueeze(-2), squares)
    return Comoments(tuple(moments if g == group else None for g in range(GROUPS)))


def _spreads(m: GroupMoments) -> tuple[Tensor, ...]:
    """Traces of the covariances of the vectors, in their order."""
    return m.divided(m.yy).unbind(-1)


def _before(m: GroupMoments) -> Tensor:
    _, _, moved, _, permuted, _, _ = _spreads(m)
    return moved.log() - permuted.log()


def _after(m: GroupMoments) -> Tensor:
    *_, moved, permuted = _spreads(m)
    return moved.log() - permuted.log()


def _correlation(m: GroupMoments) -> Tensor:
    """tr Cov(x, u) = [tr Cov(x + u) - tr Cov(x) - tr Cov(u)] / 2, less that of the updates of other tokens."""
    x, u, moved, other, permuted, _, _ = _spreads(m)
    return (moved - u - permuted + other) / (2 * (x * u).sqrt())


FUNCTIONS: dict[str, Callable[[GroupMoments], Tensor]] = {
    CORRELATION: _correlation,
    BEFORE: _before,
    AFTER: _after,
    SHARE: lambda m: 1 - _after(m) / _before(m),
}


def _shares(vectors: Comoments) -> Estimate:
    """Share taken back; NaN unless the 95 % confidence interval of the excess before the norm excludes 0."""
    share, before = jackknife(FUNCTIONS[SHARE], vectors), jackknife(_before, vectors)
    return (
        share
        if bool((before.low > 0) | (before.high < 0))
        else Estimate(*(torch.full_like(t, torch.nan) for t in share[:4]))
    )


def _rotated_correlations(layer_state: LayerState) -> Float[Tensor, " r"]:
    """tr Cov(x, R(u - u')) / sqrt(tr Cov(x) tr Cov(u)) for the random rotations R."""
    total = layer_state.vectors.total()
    x, u, _, other, *_ = total.mean_y
    products = layer_state.rotations.totals[0, 0] / total.tokens - rotated(u - other) @ x
    return products / (total.yy[0] * total.yy[1]).sqrt() * total.tokens


PREDICTION = Prediction(__name__, DECLARATION, statistics, evaluate, null, verdict, order=75)
