"""Ascent: attention updates climb the log normaliser of the layer's keys, along the sphere of the norm.

    G(x)      = sum_h (1/beta) log sum_j exp(beta <q_h(x), k_hj - k_h>)   x: residual stream, normed; k_h: key of 0
    odd(T)    = G(N(x + T)) - G(N(x - T))                               N: projection to the sphere of the norm
    gain      = sum odd(T) / sum odd(|D| g/|g|)                         T: tangential part of the update D, g: of ∇G(x)
    excess    = gain - gain of the updates of other tokens, scaled to |T|

Read next: tie.py (the weights that make it exact), observables/moved_tokens.py (the sphere of the norm).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..._typing import Float, Tensor
from ..batch_pass import BatchPass
from ..hypothesis_tests import (
    NOTHING_MEASURED,
    TEST_DETAILS,
    beyond_the_null,
    conclude,
    judge,
    measured,
    median_detail,
    practically_null,
    random_band,
)
from ..inside.events import Event, ForwardOutput
from ..planted_power import planted_power
from ..prediction import Baseline, Prediction, Probed
from ..runs.judgement import Judgement, Measured
from ..runs.records import PREDICTED, Declaration, Finding, Label, Quantity
from ..statistics import Sums, bootstrap, sums_of
from .observables import rotated_sides
from .observables.moved_tokens import (
    DERIVATION,
    DRAWS,
    INTERESTING,
    LARGE,
    LEAST,
    PART,
    TIMES,
    Site,
    rotated,
    scaled,
    sites_of,
)

STEPS = ("best", "own", "permuted")
COLUMNS = ("tokens", *STEPS, "rises", "change", "radial", "lengths", *range(DRAWS))  # type: ignore[var-annotated]

GAIN, PERMUTED, RISES, RADIAL = "gain", "gain, permuted", "share of tokens that rise", "radial share"
EXCESS, ORDINARY = "gain, own minus permuted", "gain, own minus permuted, cleaned"

FORMULAS = """\
    G(x)      = sum_h (1/beta) log sum_j exp(beta <q_h(x), k_hj - k_h>)   x: residual stream, normed; k_h: key of 0
    odd(T)    = G(N(x + T)) - G(N(x - T))                               N: projection to the sphere of the norm
    gain      = sum odd(T) / sum odd(|D| g/|g|)                         T: tangential part of the update D, g: of ∇G(x)
    excess    = gain - gain of the updates of other tokens, scaled to |T|"""

DECLARATION = Declaration(
    title="Ascent of log normaliser",
    kind=PREDICTED,
    claim=(
        "The update of an attention sublayer climbs the log normaliser of its keys, along the sphere of the norm, more "
        "than updates of other tokens do."
    ),
    formula=(
        "excess = gain of the update - gain of the update of another token. gain = sum [G(N(x + T)) - G(N(x - T))] / "
        "sum [G(N(x + b)) - G(N(x - b))], sums over tokens x. T: tangential part of the update, without its component "
        "along the token, which the norm removes; b: steepest-ascent step of the norm of the whole update; N: "
        "projection to the sphere of the norm. G(x) = sum_h (1/beta) log sum_j exp(beta <q_h(x), k_hj - k_h>): log "
        "normalisers of the heads h of a layer; k_h: key of a zero token, beta: scale of the logits"
    ),
    supports=f"The excess is above {LEAST:g} and above the null, the excess of randomly rotated updates and heads.",
    refutes=f"The excess is below {-LEAST:g} and below that null: updates descend.",
    method=(
        FORMULAS,
        "With tied weights the attention update is an ascent step of G [theory E7]; trained layers need not be tied. "
        "The norm is the one before the sublayer or, in post-norm models, the one after the sum. It removes the "
        "component of an update along the token (and the mean over features if the norm centres); only the tangential "
        "part reaches the next sublayer. N is this norm without its gain and bias, so that N(x) = x. A vector that "
        "is added to all keys, such as a bias, changes no attention weight and adds a linear function of the query to "
        "G. The model leaves it open; as in `tie` and in the theory, keys are relative to that of a zero token, that "
        "is, without biases (but for those that rotary embeddings turn by position). G is convex in the query and "
        "rises under most steps; the difference of a step and its reverse removes this part. A gain of 1 is that of "
        "the steepest-ascent step of the norm of the whole update.",
        "The excess compares the update of a token with the update of another token of the same text, at the same "
        "token and with the same norm: what all tokens receive alike cancels. Both gains are sums over the same tokens "
        "with the same bootstrap weights.",
        f"Null: the wider of two bands. {DRAWS} random rotations of the updates, one for all tokens of a layer, "
        "preserve the spectrum of the OV matrices; their excess is computed to first order, as "
        "sum <g, R(T - T')> / sum |g||D|. Random rotations between what each head reads and what it writes, as for "
        "`tie`, also keep the axes of the stream that the weights of a model share. A layer whose output matrices are "
        "unknown, or are followed by a norm before the sum, has no null and is inconclusive.",
        f"Radial share: sum [G(x + R) - G(x)] / sum [G(x + D) - G(x)] for the radial part R = D - T of the update D, "
        "before the norm. Cleaned: without first tokens and massive activations, coordinates above "
        f"{LARGE:g} that are at least {TIMES:g} times the median of their token.",
        f"The sample is one token in {PART}, the same tokens in every layer, without padding.",
    ),
    decision_rule=(
        f"To first order the gain is the cosine of update and gradient; {LEAST:g} is the bound of the tie of the "
        "matrices, too. The excess may be positive because updates of other tokens descend: the gain is reported "
        "beside it. The verdict on the model is that of more than half of its layers."
    ),
    bounds={f"{LEAST:g}": DERIVATION},
    interesting=f"An excess of {INTERESTING:g}: a tenth of the update, by length, climbs straight up.",
    power=planted_power("ascent"),
    quantities={
        GAIN: Quantity("1", "Δ±G(T) / Δ±G(|D| ∇G/|∇G|)"),
        PERMUTED: Quantity("1", "Δ±G(T of another token) / Δ±G(|D| ∇G/|∇G|)"),
        **dict.fromkeys((EXCESS, ORDINARY), Quantity("1", "[Δ±G(T) − Δ±G(T of another token)] / Δ±G(|D| ∇G/|∇G|)")),
        RISES: Quantity("share of tokens", "P(Δ±G(T) > 0)"),
        RADIAL: Quantity("1", "ΔG(D − T) / ΔG(D)"),
    },
    statistic="median excess of the gain over permuted updates",
    null_reason=(
        f"{DRAWS} rotations keep the norms of the updates and the spectra of the matrices, and destroy their "
        "direction, which the claim is about. Rotations inside the heads also keep the axes that weights of a model "
        "share; the wider band counts. What all tokens receive alike is subtracted before. The scale of the weights "
        "cancels in the ratio, so that no untrained model is needed."
    ),
    null="random-rotation null",
    unit="attention layer",
    outcomes=("ascend", "descend"),
    details={
        GAIN: Label("median gain", null="permuted updates"),
        ORDINARY: Label("median excess without first tokens and massive activations"),
        RADIAL: Label("median radial share of the increase before the norm"),
        "equivalent": Label(f"layers whose 95 % confidence interval lies within ±{LEAST:g} of the null"),
        **TEST_DETAILS,
    },
    remarks={
        NOTHING_MEASURED: "No attention layer allows queries to be computed for moved tokens, or the text is too short."
    },
    labels={
        PERMUTED: "gain of permuted updates",
        EXCESS: "excess of the gain over permuted updates",
        ORDINARY: "excess without first tokens and massive activations",
        RISES: "share of tokens whose log normaliser increases",
        RADIAL: "radial share of the increase before the norm",
    },
)


class LayerState(NamedTuple):
    """Changes of G of a layer, of all sampled tokens and of cleaned ones; products of its heads."""

    changes: Sums
    products: Sums | None = None


def statistics(event: Event | ForwardOutput, batch_pass: BatchPass) -> dict[str, LayerState] | None:
    """Changes of G, summed over the sampled tokens of each row: all of them, and those that are cleaned."""
    moved = {name: _moved(site) for name, site in sites_of(event, batch_pass).items()}
    states = {
        name: LayerState(sums_of(each[0], batch_pass.documents), each[1])
        for name, each in moved.items()
        if each is not None
    }
    return states or None


def _moved(site: Site) -> tuple[Float[Tensor, "b 2 k"], Sums | None] | None:
    """Columns of each row for all sampled tokens and for the cleaned ones, and products of the heads.

    None if the layer computes its own logits.
    """
    with torch.no_grad():
        origin = site.origin()
    g = _gradient(site, origin)
    if g is None:
        return None
    with torch.no_grad():
        T, D = site.tangential(site.update), site.update
        g, length = site.tangential(g), D.norm(dim=-1, keepdim=True)
        elsewhere, size = site.tangential(site.other), T.norm(dim=-1, keepdim=True)
        other = scaled(elsewhere, size)
        steps = torch.stack((scaled(g, length), T, other))
        # All versions are computed at once, as additional tokens at the same positions.
        moved = torch.cat((site.on_sphere(steps), site.on_sphere(-steps)))
        raw = site.stream + torch.stack((torch.zeros_like(D), D, D - T))
        q = site.queries(torch.cat((moved, raw)))
        G = site.log_normalizers(q, origin).double()  # type: ignore[arg-type]
        odd, still = G[:3] - G[3:6], G[6]
        lengths = (g.norm(dim=-1) * length.squeeze(-1)).double()
        first_order = (g.unsqueeze(-2) * rotated(T - other)).sum(-1).double()
        one = torch.ones_like(still)
        change = torch.stack((one, *odd, (odd[1] > 0).double(), G[7] - still, G[8] - still, lengths), -1)
        change = torch.cat((change, first_order), -1)
        masks = torch.stack((site.valid, site.ordinary), 1).unsqueeze(-1)
        ratio = size / elsewhere.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(size.dtype).tiny)
        heads = site.heads - ratio.unsqueeze(1) * site.other_heads  # <g, T - other> = <g, heads W_o>: g is tangential
        products = rotated_sides.products_of(site, g.unsqueeze(0), heads.unsqueeze(0), site.valid)
        return torch.where(masks, change.unsqueeze(1), 0.0).sum(2), products


def _gradient(site: Site, origin: Float[Tensor, "#b h 1 d"]) -> Float[Tensor, "b r D"] | None:
    """Gradient of G in the residual stream; in a query it is the attended mean of keys, but for soft caps."""
    with torch.enable_grad():
        moved = site.stream.detach().requires_grad_()
        q = site.queries(moved.unsqueeze(0))
        if q is None:
            return None
        if site.key_mean is None:
            (g,) = torch.autograd.grad(site.log_normalizers(q, origin).sum(), moved)
        else:
            (g,) = torch.autograd.grad(q, moved, (site.key_mean - origin).to(q.dtype))
    return g


def evaluate(state: dict[str, LayerState], model: Probed) -> list[Measured]:
    """Gain of every layer and of permuted updates, their difference, and the parts of the update."""
    rows = []
    for layer, of_layer in state.items():
        every, cleaned = (Sums(part) for part in of_layer.changes.totals.unbind(1))
        for quantity, function in RATIOS.items():
            part = cleaned if quantity == ORDINARY else every
            rows += measured(layer, quantity, bootstrap(function, part), part.totals[0, 0])
    return rows


def _over(name: str, divisor: str, minus: str | None = None) -> Callable[[Tensor], Tensor]:
    def ratio(totals: Tensor) -> Tensor:
        above = totals[..., COLUMNS.index(name)]
        above = above if minus is None else above - totals[..., COLUMNS.index(minus)]
        return above / totals[..., COLUMNS.index(divisor)]

    return ratio


RATIOS = {
    GAIN: _over("own", "best"),
    PERMUTED: _over("permuted", "best"),
    EXCESS: _over("own", "best", "permuted"),
    ORDINARY: _over("own", "best", "permuted"),
    RISES: _over("rises", "tokens"),
    RADIAL: _over("radial", "change"),
}


def null(
    state: dict[str, LayerState], model: Probed, baseline: Baseline[dict[str, LayerState]] | None
) -> list[Measured]:
    """Excess of updates that are rotated, as a whole or head by head; gain of permuted ones."""
    rows = []
    for layer, (sums, products) in state.items():
        every = Sums(sums.totals[:, 0])
        rows += measured(layer, GAIN, bootstrap(RATIOS[PERMUTED], every), 0.0)
        for quantity, part in zip((EXCESS, ORDINARY), sums.totals[0], strict=True):
            draws = part[-DRAWS:] / part[COLUMNS.index("lengths")]
            rows.append(random_band(layer, None, quantity, draws))
        lengths = every.totals[0, COLUMNS.index("lengths")]
        rows[-2] = rotated_sides.widened(rows[-2], products, model, lengths)
    return rows


def verdict(findings: list[Finding]) -> Judgement:
    """Judge every layer by the excess of its gain."""
    judged = judge(findings, EXCESS, lambda f: beyond_the_null(f, LEAST))
    details = [median_detail(key, findings, key) for key in (GAIN, ORDINARY, RADIAL)]
    equivalent = practically_null("equivalent", judged.findings, EXCESS, LEAST)
    return conclude(judged, EXCESS, details=[*details, equivalent])


PREDICTION = Prediction(__name__, DECLARATION, statistics, evaluate, null, verdict, order=20)
