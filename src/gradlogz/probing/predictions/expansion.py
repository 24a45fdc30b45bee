"""Expansion: attention maps with positive divergence at fixed keys, and the spread of tokens.

    J         = du/dx                                         Jacobian of the update u of a token x, at fixed keys
    expansion = sum <v, J v> / sum |u|/|x|                    v: unit directions along the sphere of the norm
    x'        = x + u                                         u: update of a sublayer, x: residual stream
    excess    = log tr Cov(x') - log(tr Cov(x) + tr Cov(u))   0 if u and x are uncorrelated

Read next: observables/moved_tokens.py, ../../dynamics/contraction.py (the contraction by norms).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import torch

from ..._typing import Bool, Float, Int, Tensor
from ..batch_pass import BatchPass
from ..hypothesis_tests import (
    NOTHING_MEASURED,
    TEST_DETAILS,
    absent,
    beyond_the_null,
    conclude,
    judge,
    measured,
    median_detail,
    practically_null,
    random_band,
)
from ..inside.architecture import Norm
from ..inside.events import Event, ForwardOutput, Normed, Passed
from ..inside.norm_sphere import norm_of_updates, tangential
from ..planted_power import planted_power
from ..prediction import Baseline, Prediction, Probed
from ..runs.judgement import Judgement, Measured
from ..runs.records import PREDICTED, Declaration, Finding, Label, Quantity
from ..statistics import (
    GROUPS,
    Comoments,
    Estimate,
    GroupMoments,
    Sums,
    bootstrap,
    comoments_of,
    jackknife,
    ratio,
    sums_of,
)
from .observables import rotated_sides
from .observables.attention_rows import at, chosen
from .observables.moved_tokens import (
    DERIVATION,
    DRAWS,
    INTERESTING,
    LEAST,
    Site,
    rotated,
    sites_of,
)
from .observables.moved_tokens import PART as MOVED

EXPANSION, ORDINARY = "expansion", "expansion, cleaned"
GROWTH, VOLUME, VOLUME_EXCESS = "growth of log trace", "growth of log det", "excess of log det"
EXCESS = {"attention": "excess of log trace", "feed_forward": "excess of log trace of the feed-forward"}
REST = {kind: f"{name} without first tokens" for kind, name in EXCESS.items()}
ALONG = {
    "excess": "excess of log trace of the tangential update",
    "rest": "excess of log trace of the tangential update without first tokens",
    "volume excess": "excess of log det of the tangential update",
}
DIRECTIONS = 32
PART = 4  # one token in PART is sampled for covariances
PROBES, BANK = 2, 256  # directions per token; directions in all
STEP = 1e-2  # of the finite difference, relative to the norm of the token

FORMULAS = """\
    expansion              = sum <v, J v> / sum |u|/|x|                v: unit directions along the sphere of the norm
    J                      = du/dx                                     update u at a token x; keys and values fixed
    x'                     = x + u                                     u: update of a sublayer, x: residual stream
    growth of log trace    = log tr Cov(x') - log tr Cov(x)
    excess of log trace    = growth - log(1 + r²) = log(1 + 2 tr Cov(x, u) / (tr Cov(x) + tr Cov(u)))
    log(1 + r²)            growth if u and x are uncorrelated          r² = tr Cov(u) / tr Cov(x)
    growth of log det      = (log det Cov(x') - log det Cov(x)) / k
    excess of log det      = (log det Cov(x') - log det(Cov(x) + Cov(u))) / k"""

_OF_TRACE = Quantity("nats", "log tr Cov(x + u) − log(tr Cov(x) + tr Cov(u))")
_OF_VOLUME = Quantity("nats per direction", "(log det Cov(x + u) − log det(Cov(x) + Cov(u))) / k")
_RATE = Quantity("1", "Σ ⟨v, Jv⟩ / Σ |u|/|x|")

DECLARATION = Declaration(
    title="Expansion by attention",
    kind=PREDICTED,
    claim="At fixed keys, attention updates expand the volume of tokens along the sphere of the norm.",
    formula=(
        "expansion = sum <v, J v> / sum |u|/|x|, sums over tokens x and unit directions v along the sphere of the "
        "norm; J = du/dx: Jacobian of the update u at fixed keys and values, so that <v, J v> is the growth of the log "
        "volume per direction, to first order. 1 is the growth of a dilation by |u|/|x|"
    ),
    supports=f"The expansion is above {LEAST:g} and above the null, that of randomly rotated updates and heads.",
    refutes=f"The expansion is below {-LEAST:g} and below that null: attention contracts.",
    method=(
        FORMULAS,
        "An ascent step x + tau ∇G(x) has the Jacobian I + tau F, F the covariance of the keys under the attention "
        "weights: the differential entropy of the tokens grows by E log det(I + tau F) >= 0, tau E tr F to first order "
        "[theory 5.1, E15]. This is judged, because covariances of the tokens do not measure it. Their trace grows "
        "with every update that contains the token itself (u = c x), which a norm undoes; on the sphere of a norm it "
        "depends on the mean token only. Their log determinant after the norm falls in tied networks as well, whose "
        "tokens gather in clusters [theory 10.1], and in random ones. At fixed keys a token that attends to itself "
        "alone has J = 0.",
        f"<v, J v> is a central difference of {STEP:g} |x| in {PROBES} of {BANK} random directions, at one token in "
        f"{MOVED}. Norms: as for `ascent`. Null, as for `ascent`: the wider of two bands, of {DRAWS} random rotations "
        "of the updates, and of random rotations between what each head reads and what it writes, which keep all axes "
        "that weights share. Cleaned: without first tokens and massive activations.",
        "Reported: the growth of traces and log determinants of Cov(x), and their excess over an uncorrelated update, "
        "for updates and for their tangential parts, without the component along the token. A few massive tokens "
        "or coordinates can dominate a trace: traces are computed with and without the first token of each sequence. "
        f"Log determinants weight all directions equally; they are computed in k = {DIRECTIONS} random directions, or "
        f"in D - 1 if the residual stream has D <= {DIRECTIONS} dimensions: after a norm that subtracts the mean, "
        "tokens span no more. The growth of log trace and of log det is also reported for normalisation layers. The "
        f"sample is one token in {PART}, the same tokens in every layer. "
        "Null of growth and excess in a sublayer: an update that is uncorrelated with the token, whose excess is 0.",
    ),
    decision_rule=(
        f"{LEAST:g} is a twentieth of the growth by a dilation of equal length, as for `ascent`. The verdict on the "
        "model is that of more than half of its attention sublayers."
    ),
    bounds={f"{LEAST:g}": DERIVATION},
    interesting=(
        f"An expansion of {INTERESTING:g}, a tenth of the growth by a dilation of equal length. Keys span few "
        "directions of a wide stream, so that in planted models of width 256 it takes a cosine of 0.5 between OV and "
        "transposed QK matrices; tied models have 0.2."
    ),
    power=planted_power("expansion"),
    quantities={
        EXPANSION: _RATE,
        ORDINARY: _RATE,
        GROWTH: Quantity("nats", "log tr Cov(x + u) − log tr Cov(x)"),
        **dict.fromkeys((*EXCESS.values(), *REST.values(), ALONG["excess"], ALONG["rest"]), _OF_TRACE),
        VOLUME: Quantity("nats per direction", "(log det Cov(x + u) − log det Cov(x)) / k"),
        **dict.fromkeys((VOLUME_EXCESS, ALONG["volume excess"]), _OF_VOLUME),
    },
    statistic="median expansion relative to a dilation of equal length",
    null_reason=(
        f"{DRAWS} rotations keep the norms of the updates and the spectra of the matrices, and destroy the "
        "relation of an update to its token. Rotations inside the heads also keep the axes that the weights of a model "
        "share; the wider band counts. The divergence of such maps is 0 on average."
    ),
    null="random-rotation null",
    unit="attention sublayer",
    outcomes=("expand", "contract"),
    details={
        ORDINARY: Label("median without first tokens and massive activations"),
        ALONG["rest"]: Label("median excess of log tr Cov by tangential updates", null="uncorrelated updates"),
        ALONG["volume excess"]: Label(
            "median excess of log det Cov by tangential updates", null="uncorrelated updates"
        ),
        REST["attention"]: Label("by whole updates, of log tr Cov", null="uncorrelated updates"),
        "equivalent": Label(f"sublayers whose 95 % confidence interval lies within ±{LEAST:g} of the null"),
        **TEST_DETAILS,
    },
    remarks={NOTHING_MEASURED: "No attention sublayer allows its update to be computed for moved tokens."},
    labels={
        ORDINARY: "expansion without first tokens and massive activations",
    },
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


class State(NamedTuple):
    """Moments of the sublayers and norms of each stack; of each attention layer divergences and products of its heads.

    rates: of all and of cleaned tokens. products: observables/rotated_sides.py.
    """

    stacks: Mapping[str, StackState] = {}
    rates: Mapping[str, Sums] = {}
    products: Mapping[str, Sums] = {}


@dataclass
class _Memory:
    stacks: "dict[str, _Seen]" = field(default_factory=dict)


def statistics(event: Event | ForwardOutput, batch_pass: BatchPass) -> State | None:
    """Divergences of attention maps; traces of the covariances of x, u and x + u, and covariances in random directions.

    Events are cheap: the layers of a stack, which share their tokens, are summed together at the end.
    """
    sites, stacks = sites_of(event, batch_pass), batch_pass.memory(_Memory).stacks
    if isinstance(event, ForwardOutput):
        divergences = {name: _divergence(site) for name, site in sites.items()}
        measurable = {name: each for name, each in divergences.items() if each is not None}
        rates = {name: sums_of(columns, batch_pass.documents) for name, (columns, _) in measurable.items()}
        products = {name: each for name, (_, each) in measurable.items()}
        return State({stack: each.summed(batch_pass.batch.group) for stack, each in stacks.items()}, rates, products)
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
    if isinstance(event, Passed) and event.sublayer.kind == "attention":
        stacks[stack].add(_along(name), x, u, norm_of_updates(event.sublayer), part=True)
    return None


def evaluate(state: State, model: Probed) -> list[Measured]:
    """Expansion of each attention sublayer; growth and excess of each sublayer, growth of each norm."""
    estimates = _estimates(state.stacks)
    rows = []
    for sublayer in model.architecture.sublayers:
        name, kind = sublayer.name, sublayer.kind
        if name in state.rates:
            every, cleaned = state.rates[name].totals.unbind(1)
            for quantity, part in ((EXPANSION, every), (ORDINARY, cleaned)):
                rows += measured(name, quantity, bootstrap(ratio, Sums(part)), part[0, 0])
        elif kind == "attention":
            rows.append(absent(name, EXPANSION))
        spread = ((GROWTH, "growth"), (EXCESS[kind], "excess"), (REST[kind], "rest"), (VOLUME, "volume"))
        for quantity, key in (*spread, (VOLUME_EXCESS, "volume excess")) if name in estimates else ():
            rows += measured(name, quantity, *estimates[name][key])
        for key, quantity in ALONG.items() if _along(name) in estimates else ():
            rows += measured(name, quantity, *estimates[_along(name)][key])
    for name in _norms(model):
        if name in estimates:
            rows += measured(name, GROWTH, *estimates[name]["change"])
            rows += measured(name, VOLUME, *estimates[name]["volume change"])
    return rows


def null(state: State, model: Probed, baseline: Baseline[State] | None) -> list[Measured]:
    """Rotated updates; uncorrelated updates, whose excess is 0."""
    estimates = _estimates(state.stacks)
    rows = []
    for layer, sums in state.rates.items():
        every, cleaned = sums.totals[0]
        turned = random_band(layer, None, EXPANSION, every[-DRAWS:] / every[2])
        rows.append(rotated_sides.widened(turned, state.products[layer], model, every[2]))
        rows.append(random_band(layer, None, ORDINARY, cleaned[-DRAWS:] / cleaned[2]))
    kinds = {s.name: s.kind for s in model.architecture.sublayers}
    for name in kinds.keys() & estimates.keys():
        for quantity, key in ((GROWTH, "uncorrelated"), (VOLUME, "volume uncorrelated")):
            rows += measured(name, quantity, estimates[name][key][0], 0.0)
        excesses = (EXCESS[kinds[name]], REST[kinds[name]], VOLUME_EXCESS)
        rows += [Measured(name, None, quantity, 0.0) for quantity in excesses]
        rows += [Measured(name, None, quantity, 0.0) for quantity in ALONG.values() if _along(name) in estimates]
    return rows


def verdict(findings: list[Finding]) -> Judgement:
    """Judge every attention sublayer by its expansion."""
    judged = judge(findings, EXPANSION, lambda f: beyond_the_null(f, LEAST))
    keys = (ORDINARY, ALONG["rest"], ALONG["volume excess"], REST["attention"])
    equivalent = practically_null("equivalent", judged.findings, EXPANSION, LEAST)
    return conclude(judged, EXPANSION, details=[*(median_detail(k, findings, k) for k in keys), equivalent])


# Divergence -----------------------------------------------------------------------------------------------------------


def _divergence(site: Site) -> tuple[Float[Tensor, "b 2 k"], Sums] | None:
    """Columns (tokens, <v, J v>, |u|/|x|, those of rotated updates) of each row, for all and for cleaned tokens.

    With them the products of the changes of the heads with v.
    """
    with torch.no_grad():
        x = site.stream
        directions = _bank(x.shape[-1], x.device)
        index = (PROBES * site.places.unsqueeze(0) + torch.arange(PROBES, device=x.device).reshape(-1, 1, 1)) % BANK
        v = site.tangential(directions[index].to(x.dtype))  # [probes, b, r, D]
        v = v / v.norm(dim=-1, keepdim=True)
        length = site.centred(x).norm(dim=-1, keepdim=True)
        q = site.queries(torch.cat((x.unsqueeze(0), x + STEP * length * v, x - STEP * length * v)))
        heads = None if q is None else site.heads_of(q)
        u = None if heads is None else site.updates(heads)
        if heads is None or u is None:
            return None
        Jv = (u[1 : PROBES + 1] - u[PROBES + 1 :]) / (2 * STEP * length)
        of_heads = (heads[1 : PROBES + 1] - heads[PROBES + 1 :]) / (2 * STEP * PROBES * length.unsqueeze(1))
        products = rotated_sides.products_of(site, v, of_heads, site.valid)
        assert products is not None  # the output projection is known
        growth = (v * Jv).sum(-1).mean(0)
        turned = (v.unsqueeze(-2) * rotated(Jv)).sum(-1).mean(0)
        lengths = u[0].norm(dim=-1) / length.squeeze(-1)
        columns = torch.cat((torch.stack((torch.ones_like(growth), growth, lengths), -1), turned), -1).double()
        masks = torch.stack((site.valid, site.ordinary), 1).unsqueeze(-1)
        return torch.where(masks, columns.unsqueeze(1), 0.0).sum(2), products


@lru_cache
def _bank(width: int, device: torch.device) -> Float[Tensor, "k D"]:
    """Random directions, the same in every run; a token takes them by its position, so that batches do not matter."""
    return torch.randn(BANK, width, generator=torch.Generator().manual_seed(width)).to(device)


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

    def add(
        self,
        name: str,
        x: Float[Tensor, "b n D"],
        u: Float[Tensor, "b n D"],
        norm: Norm | None = None,
        *,
        part: bool = False,
    ) -> None:
        """Add a layer: means under both masks, products of every sampled token, its coordinates in the directions.

        part: add the part of u that this norm does not undo.
        """
        wide = torch.promote_types(x.dtype, torch.float32)
        x, u = (at(t.unsqueeze(1), self._places).to(wide).flatten(0, 2) for t in (x, u))
        u = tangential(x, u, norm) if part else u
        w = self._masks.to(wide)
        self._names.append(name)
        self._means += [w @ x, w @ u]
        self._products += [torch.linalg.vecdot(a, b) for a, b in ((x, x), (u, u), (x, u))]
        directions = _directions(x.shape[-1], x.device, wide)
        self._along += [x @ directions, u @ directions]

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
            means = torch.cat((mean, mean.sum(1, keepdim=True)), 1)
            xx, uu, xu = products[..., k].unbind(1)
            squares = torch.stack((xx, uu, xx.add(uu).add(xu, alpha=2)), 1)
            nothing = means.new_zeros(L, 3, 1)
            traces = squares - n[k] * means.square().sum(-1)
            empty = nothing.unsqueeze(-1), means, nothing.unsqueeze(-1) * means.unsqueeze(-2)
            each = GroupMoments(n[k], nothing, *empty, traces)
            traces_of.append(Comoments(tuple(each if g == group else None for g in range(GROUPS))))
        return StackState("\n".join(self._names), volume, *traces_of)


def _estimates(state: Mapping[str, StackState]) -> dict[str, dict[str, tuple[Estimate, float]]]:
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
    """Orthonormal columns, the same in every run; fewer than the width, since norms may leave one direction empty."""
    k = min(DIRECTIONS, width - 1)
    gaussian = torch.randn(width, k, generator=torch.Generator().manual_seed(width), dtype=torch.float64)
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


_ESTIMATES = {
    "growth": (_growth, "spread"),
    "excess": (_excess, "spread"),
    "uncorrelated": (lambda m: _growth(m) - _excess(m), "spread"),
    "change": (_change, "spread"),
    "rest": (_excess, "rest"),
    "volume": (_volume_growth, "volume"),
    "volume excess": (_volume_excess, "volume"),
    "volume uncorrelated": (lambda m: _volume_growth(m) - _volume_excess(m), "volume"),
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


def _along(name: str) -> str:
    return f"{name} tangential"


def _of_norm(name: str, call: int) -> str:
    return name if call == 1 else f"{name}#{call}"


def _norms(model: Probed) -> list[str]:
    """Names of the norms of the residual stream, each once, in the order of computation."""
    every = [n for s in model.architecture.sublayers for n in (s.norm_of_stream, s.reads, s.closes, s.follows)]
    return list(dict.fromkeys(_of_norm(n.name, n.call) for n in every if n is not None))


PREDICTION = Prediction(__name__, DECLARATION, statistics, evaluate, null, verdict, empty=State, order=70)
