"""Mixtures of Gaussians: attended means and log normalisers of keys, against those of a mixture of few Gaussians.

    k ~ h = sum_k pi_k N(mu_k, Sigma_k):   attended mean = sum_k r_k(q) (mu_k + Sigma_k q)                   [shim22, 6]
                                           G = log n + log sum_k pi_k exp(<mu_k, q> + <q, Sigma_k q> / 2)  [theory 6.1]

Read next: observables/gaussian_mixture.py (the fit), observables/visible_keys.py (the rows), gaussian_measure.py (one
Gaussian for every row).
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from ..._typing import Bool, Float, Tensor
from ..batch_pass import BatchPass
from ..hypothesis_tests import NOTHING_MEASURED, absent, describe, measured, median_detail
from ..inside.events import Attended, Event, ForwardOutput
from ..prediction import Baseline, Prediction, Probed
from ..runs.judgement import Judgement, Measured
from ..runs.records import DESCRIPTIVE, Declaration, Detail, Finding, Label, Quantity
from ..statistics import Sums, bootstrap, sums_of
from .observables.gaussian_mixture import COMPONENTS, NU, FittedMixture, features_of, fit_mixtures
from .observables.visible_keys import DRAWN, FEWEST, ROWS, LayerRows, VisibleKeys, layer_rows, visible_keys

EXPLAINED, NORMALIZER, INFORMATION = "mean explained", "log normalizer explained", "information"
DEFICIT, OF_NORMALIZER = "mean deficit", "log normalizer deficit"
LIKELIHOOD, SELECTED, HELD = "held-out likelihood", "components", "logit variance in the fitted directions"
BOUND = 0.1  # of deficits, up to which heads are counted as near a mixture
DIRECTIONS = 8  # in which the components differ
SETS = 8  # of keys drawn from a mixture
LEAST = 8  # rows of each half


def _of(quantity: str, K: int) -> str:
    """Name of a quantity with a fixed number of components."""
    return f"{quantity}, {K} component{'s' if K > 1 else ''}"


FORMULAS = f"""\
    k, q                visible keys of a row, relative to their mean, and its scaled query
    h                   = sum_k pi_k N(mu_k, Sigma_k), K components: one mixture for all rows of a head, fitted by EM
    G_K(q)              = log sum_k pi_k exp(<mu_k, q> + <q, Sigma_k q> / 2),  ∇G_K = sum_k r_k(q) (mu_k + Sigma_k q)
    |x|²                = mean <q', x>² over the queries q' of the head: the squared error of logits

    attended mean       1 - sum |m - ∇G_K(q) + ∇G_K(0)|² / sum |m|²         m: attended mean of the row's keys
    log normaliser      1 - sum (g - G_K(q) + <∇G_K(0), q>)² / sum g²       g = G - log n
    keys of the mixture the same for n keys drawn from h instead of the row's, relative to their mean
    deficit             = explained variance of keys of the mixture - explained variance of the keys
    likelihood          mean log h(k) - mean log N(k), per direction, in nats;  N: one Gaussian
    components          the K of largest held-out likelihood among {", ".join(map(str, COMPONENTS))}"""

_EACH = {
    EXPLAINED: Quantity("1", "1 − sum|m − ∇G_K(q) + ∇G_K(0)|² / sum|m|²"),
    NORMALIZER: Quantity("1", "1 − sum(g − G_K(q) + ⟨∇G_K(0), q⟩)² / sum g²,  g = G − log n"),
    DEFICIT: Quantity("1", "explained variance of keys of the mixture − that of the keys"),
    OF_NORMALIZER: Quantity("1", "explained variance of keys of the mixture − that of the keys"),
}
_NAMES = {
    EXPLAINED: "explained variance of the attended mean",
    NORMALIZER: "explained variance of the log normaliser",
    DEFICIT: "deficit of the attended mean",
    OF_NORMALIZER: "deficit of the log normaliser",
    LIKELIHOOD: "held-out log likelihood over one Gaussian",
}

DECLARATION = Declaration(
    title="Mixture of Gaussian keys",
    kind=DESCRIPTIVE,
    claim=(
        f"Keys act on a query like a sample of one mixture of at most {COMPONENTS[-1]} Gaussians, the same for all "
        "texts."
    ),
    formula=(
        "deficit = explained variance expected for keys of the mixture - explained variance of the keys. Explained "
        "variance of the attended mean m (deficit shown as the result): 1 - sum |m - ∇G_K(q) + ∇G_K(0)|² / sum |m|²; "
        "of the log normaliser: 1 - sum (g - G_K(q) + <∇G_K(0), q>)² / sum g², g = G - log n; "
        "sums over rows, keys relative to the mean of the visible keys of a row. G_K: log normaliser of a mixture of "
        "K Gaussians, fitted to keys of other documents, K of 1, 2, 4 and 8 by held-out likelihood. Expected: the "
        "same for as many keys drawn from the mixture"
    ),
    refutes="",
    method=(
        FORMULAS,
        f"Rows: at most {ROWS} with at least {FEWEST} visible keys, and {DRAWN} keys drawn from each, in the frame of "
        "the query if there are rotary embeddings. The documents are halved: mixtures are fitted to the keys of one "
        "half and compared with the rows of the other, both ways. Everything is therefore held out, and more "
        "components explain more only if they are there.",
        "Coordinates: keys are whitened and turned onto the principal axes of the queries, so that logits have "
        f"variance lambda_a along axis a. Components differ along the {DIRECTIONS} axes of largest lambda; along the "
        "others all are the same Gaussian. Attention weights depend on keys through logits only, so that axes of "
        "small lambda hardly matter; the share of the logit variance in the fitted ones is reported. EM starts from "
        f"one Gaussian and splits every component in two; {NU:g} pseudo-observations of the common covariance "
        "regularise each covariance.",
        "Null: keys drawn from the mixture itself, as many as the row has, for the same queries. The deficit of keys "
        "that come from such a mixture is 0 for any number of keys, dimension and logit variance. The expected error "
        "of a covariance estimated from N independent keys, (<q, Sigma q> E <q', Sigma q'> + |Sigma q|²) / N, is part "
        "of what is left unexplained of keys of the mixture.",
        "Intervals are conditional on the fitted mixtures: the bootstrap draws the documents of the rows, and not "
        "those of the fit. With few documents the deficit contains the error of a mixture fitted to other documents, "
        "and falls as more are read, farther than the intervals allow.",
        "Nothing is tested for the same reason: heads of exact mixtures have large deficits where logits are large and "
        "documents few. There is no null of training, either: neither untrained models, whose logits are smaller, nor "
        "draws of the matched baseline, which have too few rows for a fit, are comparable.",
    ),
    decision_rule=(
        f"Heads are counted whose deficits are both below {BOUND:g}, by value: an error of the attended mean of a "
        "third of its length. Keys of a mixture with a rare component far from the others explain little, because "
        "some rows have none of it and some have two. An attention sink is such a component and is in every row; its "
        "deficit is then negative. The description is wider than one Gaussian by the number of components and "
        "narrower by their being the same for all texts: `gaussian_measure` has a mean and a covariance for every "
        "row. The number of components is chosen by the likelihood of keys, not by what is described."
    ),
    quantities={
        **_EACH,
        **{_of(name, K): quantity for K in COMPONENTS for name, quantity in _EACH.items()},
        **{_of(LIKELIHOOD, K): Quantity("nats per direction", "E log h(k) − E log N(k)") for K in COMPONENTS[1:]},
        SELECTED: Quantity("components", "argmax_K of the held-out likelihood"),
        INFORMATION: Quantity("nats", "log n − H"),
        HELD: Quantity("1", f"Σ_(a≤{DIRECTIONS}) λ_a / Σ_a λ_a"),
    },
    references=("shim22", "dempster77"),
    statistic="median deficit of the explained variance of the attended mean",
    null_reason=(
        "Keys drawn from the fitted mixture, as many as the row has, are the claim itself: the deficit is "
        "measured from them, and its null is 0."
    ),
    null="keys of the mixture",
    details={
        EXPLAINED: Label("median explained variance of the attended mean", null="keys of the mixture"),
        NORMALIZER: Label("median explained variance of the log normaliser", null="keys of the mixture"),
        **{
            f"within_{K}": Label(f"heads within both bounds with {K} component{'s' if K > 1 else ''}")
            for K in COMPONENTS
        },
        SELECTED: Label("median number of components", "{:.0f}"),
    },
    remarks={
        NOTHING_MEASURED: (
            "No attention layer exposes enough queries and keys whose products are its logits and whose rotations are "
            "known."
        ),
    },
    labels={
        **_NAMES,
        **{_of(name, K): _of(text, K) for K in COMPONENTS for name, text in _NAMES.items()},
        SELECTED: "number of components",
    },
)


def statistics(event: Event | ForwardOutput, batch_pass: BatchPass) -> dict[str, LayerRows] | None:
    """Sampled rows of every layer."""
    return layer_rows(event, batch_pass) if isinstance(event, Attended) else None


def evaluate(state: dict[str, LayerRows], model: Probed) -> list[Measured]:
    """Explained variances, deficits and likelihoods for each number of components (bootstrap)."""
    measurements = []
    for layer in state:
        compared = _compared(state, model, layer)
        if compared is None:
            measurements.append(absent(layer, DEFICIT))
            continue
        of_heads = []
        for quantity, function in compared.functions().items():
            of_heads += measured(layer, quantity, bootstrap(function, compared.sums), compared.number)
        for quantity, values in ((SELECTED, compared.selected), (HELD, compared.held)):
            of_heads += [
                Measured(layer, h, quantity, float(v), tokens=int(n))
                for h, (v, n) in enumerate(zip(values, compared.number, strict=True))
            ]
        measurements += compared.rows.without_singular(of_heads)
    return measurements


def null(state: dict[str, LayerRows], model: Probed, baseline: Baseline[dict[str, LayerRows]] | None) -> list[Measured]:
    """Explained variances of keys of the mixture, whose deficits are 0."""
    rows = []
    for layer in state:
        compared = _compared(state, model, layer)
        if compared is not None:
            for quantity, function in compared.functions(drawn=True).items():
                rows += measured(layer, quantity, bootstrap(function, compared.sums), compared.number)
            rows += [Measured(layer, h, q, 0.0) for q in (DEFICIT, OF_NORMALIZER) for h in range(len(compared.number))]
    return rows


def verdict(findings: list[Finding]) -> Judgement:
    """Describe every head by its deficits, and count those within the bound by the number of components."""
    by_head = {(f.quantity, f.layer, f.call, f.head): f for f in findings}
    details = [median_detail(quantity, findings, quantity) for quantity in (EXPLAINED, NORMALIZER)]
    for K in COMPONENTS:
        rows = [f for f in findings if f.quantity == _of(DEFICIT, K)]
        beside = [by_head[_of(OF_NORMALIZER, K), f.layer, f.call, f.head] for f in rows]
        within = sum(f.value < BOUND and g.value < BOUND for f, g in zip(rows, beside, strict=True))
        details.append(Detail(f"within_{K}", count=within, total=len(rows)))
    details.append(median_detail(SELECTED, findings, SELECTED))
    return describe(findings, DEFICIT, details=details)


# Columns of the sums -------------------------------------------------------------------------------------------------

_ROWS, _MOVED, _G, _INFORMATION = range(4)
_LEFT, _G_LEFT, _MOVED_0, _LEFT_0, _G_0, _G_LEFT_0, _DENSITY = range(7)  # of each number of components


class _Compared(NamedTuple):
    """Sums over the rows of a layer, with the number of components and the logit variance held by each head."""

    sums: Sums
    selected: Float[Tensor, " h"]
    held: Float[Tensor, " h"]
    rows: VisibleKeys

    @property
    def number(self) -> Float[Tensor, " h"]:
        """Number of rows of each head."""
        return self.sums.totals[0, :, _ROWS]

    def functions(self, *, drawn: bool = False) -> Mapping[str, Callable[[Tensor], Tensor]]:
        """Functions of the totals by quantity; with `drawn` the explained variances of keys of the mixture."""
        chosen = torch.tensor([COMPONENTS.index(int(K)) for K in self.selected])
        functions: dict[str, Callable[[Tensor], Tensor]] = {}
        for quantity, function in (_DRAWN if drawn else _OF_KEYS).items():
            functions[quantity] = _at(function, chosen)
            for i, K in enumerate(COMPONENTS):
                functions[_of(quantity, K)] = _at(function, torch.full_like(chosen, i))
        if not drawn:
            one = torch.zeros_like(chosen)
            for i, K in enumerate(COMPONENTS[1:], 1):
                functions[_of(LIKELIHOOD, K)] = _gain(torch.full_like(chosen, i), one)
            functions[INFORMATION] = lambda t: t[..., _INFORMATION] / t[..., _ROWS]
        return functions


def _columns(t: Tensor, place: Tensor) -> Tensor:
    """Columns of one number of components for each head, [..., h, 7]."""
    each = t[..., 4:].unflatten(-1, (len(COMPONENTS), -1))
    index = place.reshape(-1, 1, 1).expand(*each.shape[:-2], 1, each.shape[-1])
    return each.gather(-2, index).squeeze(-2)


def _at(function: Callable[[Tensor, Tensor], Tensor], place: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda t: function(t, _columns(t, place))


def _gain(place: Tensor, one: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda t: (_columns(t, place)[..., _DENSITY] - _columns(t, one)[..., _DENSITY]) / t[..., _ROWS]


_OF_KEYS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    EXPLAINED: lambda t, c: 1 - c[..., _LEFT] / t[..., _MOVED],
    NORMALIZER: lambda t, c: 1 - c[..., _G_LEFT] / t[..., _G],
    DEFICIT: lambda t, c: c[..., _LEFT] / t[..., _MOVED] - c[..., _LEFT_0] / c[..., _MOVED_0],
    OF_NORMALIZER: lambda t, c: c[..., _G_LEFT] / t[..., _G] - c[..., _G_LEFT_0] / c[..., _G_0],
}
_DRAWN: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    EXPLAINED: lambda t, c: 1 - c[..., _LEFT_0] / c[..., _MOVED_0],
    NORMALIZER: lambda t, c: 1 - c[..., _G_LEFT_0] / c[..., _G_0],
}


# From the rows to the sums -------------------------------------------------------------------------------------------


def _compared(state: dict[str, LayerRows], model: Probed, layer: str) -> _Compared | None:
    """Rows of both halves compared with the mixtures of the other; None without enough rows. Computed once."""
    sample = state[layer].rows

    def compute() -> _Compared | None:
        rows = visible_keys(sample, model.weights.get(layer))
        if rows is None:
            return None
        half = rows.group % 2 == 0
        if min(int(half.sum()), int((~half).sum())) < max(LEAST, 2 * rows.query.shape[-1] // DRAWN):
            return None
        compared = [_of_half(rows, half, model.seed), _of_half(rows, ~half, model.seed)]
        halves = [each for each in compared if each is not None]
        if len(halves) < 2:
            return None
        columns = torch.cat([each for each, _ in halves])
        documents = torch.cat([rows.document[~half], rows.document[half]])
        sums = sums_of(columns, documents)
        density = sums.totals[0, :, 4:].unflatten(-1, (len(COMPONENTS), -1))[..., _DENSITY]
        selected = torch.tensor(COMPONENTS)[density.argmax(-1)].double()
        return _Compared(sums, selected, torch.stack([held for _, held in halves]).mean(0), rows)

    return model.computed.once(sample, ("mixture", layer), compute)


def _of_half(
    rows: VisibleKeys, fitted: Bool[Tensor, " t"], seed: int
) -> tuple[Float[Tensor, "o h k"], Float[Tensor, " h"]] | None:
    """Columns of the rows outside a half, with the mixtures fitted to the keys in it; logit variance held."""
    h, hk = len(rows.query), len(rows.visible)
    keys, queries = rows.visible[:, fitted].flatten(1, 2).double(), rows.query[:, fitted].double()
    axes = _axes(keys, queries)
    if axes is None:
        return None
    mixtures = fit_mixtures(((keys - axes.centre) @ axes.of_keys)[..., :DIRECTIONS])
    out = ~fitted
    q, m = (rows.query[:, out].double() @ axes.repeated(axes.of_queries, h)), rows.moved[:, out].double()
    m = m @ axes.repeated(axes.of_keys, h)
    g, size = rows.log_normalizer[:, out].double(), rows.size[:, out].double()
    x = ((rows.visible[:, out].flatten(1, 2).double() - axes.centre) @ axes.of_keys)[..., :DIRECTIONS]
    features = features_of(x)
    weight = axes.repeated(axes.variance, h).unsqueeze(-2)
    dtype = rows.query.dtype
    random = _RandomNumbers.drawn(seed, int(size.max().ceil()), q.shape[-1], dtype)

    def square(v: Tensor) -> Tensor:
        return (weight * v.square()).sum(-1)

    columns = [torch.ones_like(g), square(m), g.square(), rows.information[:, out].double()]
    for mixture in mixtures.values():
        each = FittedMixture(*(t.repeat_interleave(h // hk, 0) for t in mixture))
        step, height = _tilted(each, q)
        drawn_m, drawn_g = (t.double() for t in _attended(each.to(dtype), random, q.to(dtype), size.to(dtype)))
        drawn_left = square(drawn_m - step) + (q.square().sum(-1) * weight.sum(-1) + square(q)) / keys.shape[1]
        density = mixture.log_density(features).unflatten(1, (-1, DRAWN)).mean(-1) / x.shape[-1]
        columns += [
            square(m - step), (g - height).square(), square(drawn_m), drawn_left, drawn_g.square(),
            (drawn_g - height).square(), density.repeat_interleave(h // hk, 0),
        ]  # fmt: skip
    held = axes.variance[:, :DIRECTIONS].sum(-1) / axes.variance.sum(-1)
    return torch.stack(columns, -1).transpose(0, 1), held.repeat_interleave(h // hk, 0)


class _Axes(NamedTuple):
    """Coordinates in which keys have mean 0 and covariance I, and the products of queries are diagonal.

    variance: lambda, the variance of logits along each axis, in descending order.
    """

    centre: Float[Tensor, "hk 1 d"]
    of_keys: Float[Tensor, "hk d d"]
    of_queries: Float[Tensor, "hk d d"]
    variance: Float[Tensor, "hk d"]

    def repeated(self, t: Tensor, heads: int) -> Tensor:
        """Repeat a tensor of key heads for the heads that share them."""
        return t.repeat_interleave(heads // len(t), 0)


def _axes(keys: Float[Tensor, "hk n d"], queries: Float[Tensor, "h t d"]) -> _Axes | None:
    """Axes with signs of positive skewness, which do not depend on the basis; None if keys are in a subspace."""
    centre = keys.mean(1, keepdim=True)
    away = keys - centre
    L, failed = torch.linalg.cholesky_ex(away.mT @ away / keys.shape[1])
    if bool(failed.any()):
        return None
    shared = queries.unflatten(0, (len(keys), -1)).flatten(1, 2)
    products = L.mT @ (shared.mT @ shared / shared.shape[1]) @ L
    values, vectors = torch.linalg.eigh(products)
    values, vectors = values.flip(-1).clamp(min=0.0), vectors.flip(-1)
    of_keys = torch.linalg.solve_triangular(L.mT, vectors, upper=True)
    sign = torch.where((away @ of_keys).pow(3).sum(1, keepdim=True) < 0, -1.0, 1.0)
    return _Axes(centre, of_keys * sign, L @ vectors * sign, values)


class _RandomNumbers(NamedTuple):
    """Random numbers from which the keys of all mixtures are drawn, the same for all heads."""

    uniform: Float[Tensor, "s n"]
    normal: Float[Tensor, "s n d"]

    @staticmethod
    def drawn(seed: int, n: int, d: int, dtype: torch.dtype) -> "_RandomNumbers":
        generator = torch.Generator().manual_seed(seed)
        uniform = torch.rand(SETS, n, generator=generator, dtype=torch.float64)
        normal = torch.randn(SETS, n, d, generator=generator, dtype=torch.float64)
        return _RandomNumbers(uniform.to(dtype), normal.to(dtype))


def _tilted(mixture: FittedMixture, q: Float[Tensor, "h t d"]) -> tuple[Float[Tensor, "h t d"], Float[Tensor, "h t"]]:
    """∇G_K(q) - ∇G_K(0) and G_K(q) - <∇G_K(0), q>; beyond the fitted axes the Gaussian N(0, I)."""
    r = mixture.means.shape[-1]
    measure, inner, rest = mixture.measure, q[..., :r], q[..., r:]
    mean = measure.mean(torch.zeros_like(inner[:, :1]))
    height = measure.log_normalizer(inner) - (mean * inner).sum(-1) + rest.square().sum(-1) / 2
    return torch.cat((measure.mean(inner) - mean, rest), -1), height


def _attended(
    mixture: FittedMixture, random: _RandomNumbers, q: Float[Tensor, "h t d"], size: Float[Tensor, "h t"]
) -> tuple[Float[Tensor, "h t d"], Float[Tensor, "h t"]]:
    """Attended mean and log normaliser of as many keys as each row has, drawn from the mixture; row i has set i."""
    r = mixture.means.shape[-1]
    keys = torch.cat(
        (mixture.drawn(random.uniform, random.normal[..., :r]), random.normal[..., r:].expand(len(q), -1, -1, -1)), -1
    )
    moved, height = torch.empty_like(q), torch.empty_like(size)
    places = torch.arange(keys.shape[2])
    for each in range(SETS):
        k, n = keys[:, each], size[:, each::SETS].round().unsqueeze(-1)
        hidden = places >= n
        base = (~hidden).to(k.dtype) / n
        mean = base @ k
        u = (q[:, each::SETS] @ k.mT).masked_fill_(hidden, -torch.inf)
        top = u.amax(-1, keepdim=True)
        e = u.sub_(top).exp_()
        Z = e.sum(-1, keepdim=True)
        moved[:, each::SETS] = e @ k / Z - mean
        height[:, each::SETS] = (Z.log() + top - n.log()).squeeze(-1) - (mean * q[:, each::SETS]).sum(-1)
    return moved, height


PREDICTION = Prediction(__name__, DECLARATION, statistics, evaluate, null, verdict, order=65)
