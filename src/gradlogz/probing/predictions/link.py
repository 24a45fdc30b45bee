"""The QK matrix as a linear link: queries of tokens, against the natural parameters of their own keys.

    logit     = <f(mu_i), mu_j> ≈ <x_i W_q, x_j W_k>        f: canonical link, from means to natural parameters
    f         ≈ mu T + c, best linear approximation for the keys of the head, so that W_q = W_k T      [theory E57]

Read next: observables/key_link.py (the link of a head), qk_geometry.py (QK matrices in token space).
"""

import math
from typing import NamedTuple

import torch

from ..._typing import Bool, Float, Tensor
from ..batch_pass import BatchPass
from ..hypothesis_tests import (
    COMPATIBLE,
    NOTHING_MEASURED,
    TEST_DETAILS,
    absent,
    band,
    beyond_the_null,
    conclude,
    is_majority,
    judge,
    measured,
    median_detail,
    outside,
    practically_null,
)
from ..inside.events import Attended, Event, ForwardOutput
from ..planted_power import planted_power
from ..prediction import Baseline, Prediction, Probed
from ..runs.judgement import Judgement, Measured
from ..runs.records import PREDICTED, Declaration, Detail, Finding, Label, Quantity, Remark
from ..statistics import Estimate, bootstrap, jackknifed, ratio, sums_of
from .observables.key_link import KEYS, HeadLink, Products, WhiteRows, divergence, linear_links, products_of, whitened
from .observables.moved_tokens import DERIVATION, INTERESTING, LEAST
from .observables.visible_keys import FEWEST, ROWS, LayerRows, VisibleKeys, layer_rows, visible_keys

COSINE, GAUSSIAN = "cosine with the link", "cosine with the Gaussian link"
LINEAR, OF_LINEAR, OF_QK = "linear link R²", "linear link divergence", "QK divergence"
HALF = math.sqrt(0.5)

FORMULAS = """\
    k, q, o      visible keys, scaled query, and key of the query's own token, of a row, relative to its mean key
    G(q)         = log mean_j exp <q, k_j> over keys of all texts,   m(q) = ∇G(q): attended mean
    link         the map f from a mean m(q) to its natural parameter q
    T            q ≈ m(q) T + c, by least squares over the queries of the head; Gaussian keys: T = Sigma⁻¹
    cosine       = <S T, K> / sqrt(<Q, K> <Tᵀ P T, K>)      K, Q, P: covariances of k, q, o;  S = Cov(q, o)
                 = correlation of <q, k> and <o T, k> over tokens and independent keys; 1 if q = tau o T + c, tau > 0
    Gaussian     the same with T = K⁻¹
    R²           1 - sum |q - m T - c|² / sum |q - mean q|²,  |x|² = <x, K x>: squared error of logits; in-sample
    divergences  KL of the attention weights of q, over the keys of all texts, from those of m T + c, and from those of
                 tau o T + c', with the tau >= 0 and c' that fit queries best"""

DECLARATION = Declaration(
    title="QK matrix as linear link",
    kind=PREDICTED,
    claim=(
        "Queries and keys approximate the canonical link linearly: the query of a token is the natural parameter of "
        "the token's own key, under the linear link of the head's keys."
    ),
    formula=(
        "cosine = correlation of the logits <q, k> with the logits <o T, k> of the link, over tokens and independent "
        "keys k; q: query and o: key of the same token. T: best linear map from attended means m to queries, q ≈ m T "
        "+ c, the linear approximation of the canonical link of the keys. The cosine is 1 if W_q = tau W_k T with tau "
        "> 0, so that the QK matrix is tau W_k T W_k^T; its square is the share of the variance of logits that the "
        "link explains"
    ),
    refutes=(
        f"Opposed: the cosine is below {-LEAST:g} and below the random-rotation null, so that tokens avoid keys like "
        "their own."
    ),
    method=(
        FORMULAS,
        f"Rows: at most {ROWS} with at least {FEWEST} visible keys; {KEYS} keys drawn from each form the measure whose "
        "link is computed. Attention weights do not change if the same vector is added to all keys of a row, hence "
        "keys are relative to the mean of their row. With rotary embeddings all vectors are in the frame of the query, "
        "rotated back by its position: its own key is then not rotated, and the keys it sees are rotated by distance.",
        "No value depends on the basis of queries and keys: the cosine is a correlation of logits, and R² is measured "
        "in the metric of logits. In-sample R² exceeds that of other queries, since T has as many rows as the head "
        "has dimensions.",
        "Null of both cosines: random rotations of the queries in coordinates in which keys are white, which leave "
        "the variance of logits unchanged; mean 0, variance |S T|² / (d tr Q tr Tᵀ P T). Null of R² and of its "
        "divergence: the same queries with as many Gaussian keys. Null of the QK divergence: KL from the attention "
        "weights of the mean query, without a link.",
        f"Compatible heads: the cosine is significantly above {HALF:.2f} = sqrt(1/2), so that the link explains more "
        "than half of the variance of logits, and above the random-rotation null. They do not support the claim: any "
        "head with W_q = W_k S, S positive definite, has a positive cosine, and a change of basis turns it into W_q = "
        "W_k. An untrained model with equal matrices, or an architecture that shares them, is therefore compatible.",
    ),
    decision_rule=(
        "A model is refuted if more than half of its heads are opposed to the link; nothing supports the claim. Heads "
        "are counted that are compatible, because an approximation leaves less than it explains (below "
        f"{HALF:.2f} the error of the link is larger than the link); that are unrelated, with a 95 % confidence "
        f"interval within ±{LEAST:g} of the null; and that are above and below the rotation null (FDR 5 %), because "
        "they attend to keys like, or unlike, their own more than unrelated matrices do."
    ),
    quantities={
        COSINE: Quantity("1", "⟨S T, K⟩ / √(⟨Q, K⟩ ⟨TᵀPT, K⟩)"),
        GAUSSIAN: Quantity("1", "⟨S, I⟩ / √(⟨Q, K⟩ ⟨P, K⁻¹⟩)"),
        LINEAR: Quantity("1", "1 − sum|q − mT − c|² / sum|q − q̄|²"),
        OF_LINEAR: Quantity("nats", "KL(q‖mT + c)"),
        OF_QK: Quantity("nats", "KL(q‖τoT + c′)"),
    },
    references=("shim22",),
    bounds={
        f"{LEAST:g}": DERIVATION,
        f"{HALF:.2f} (compatible)": "sqrt(1/2): the link explains more than half of the variance of the logits.",
    },
    interesting=f"A correlation of {-2 * INTERESTING:g} with the logits of the link, 4 % of their variance.",
    power=planted_power("link"),
    statistic="median cosine of the logits with those of the linear link",
    null_reason=(
        "Rotations of the queries in white coordinates keep their distribution and destroy their relation to "
        "the own key. The variance over all rotations is known, so that nothing is drawn."
    ),
    null="random-rotation null",
    outcomes=("are compatible", "are opposed"),
    details={
        COMPATIBLE: Label("compatible heads"),
        "unrelated": Label("unrelated heads"),
        "above_rotations": Label("heads above the random-rotation null"),
        "below_rotations": Label("below"),
        GAUSSIAN: Label("median cosine with the Gaussian link", null="random-rotation null"),
        LINEAR: Label("median R² of the linear link", null="Gaussian keys"),
        OF_LINEAR: Label("median divergence of the linear link in nats", null="Gaussian keys"),
        OF_QK: Label("median divergence of the QK matrix in nats", null="mean query"),
        **TEST_DETAILS,
    },
    remarks={
        NOTHING_MEASURED: (
            "No self-attention layer exposes enough queries and keys whose products are its logits and whose rotations "
            "are known."
        ),
        "aligned": "Most heads are aligned with the link, but the link explains less than half of their logits.",
        "unrelated": "Most heads are unrelated to the link.",
        "opposed": "Most heads are opposed to the link: tokens avoid keys like their own.",
    },
    labels={
        LINEAR: "R² of the linear link",
        OF_LINEAR: "divergence of the linear link",
        OF_QK: "divergence of the QK matrix from the link",
    },
)


def statistics(event: Event | ForwardOutput, batch_pass: BatchPass) -> dict[str, LayerRows] | None:
    """Sampled rows of every layer but those of cross-attention, where queries have no keys of their own."""
    return layer_rows(event, batch_pass) if isinstance(event, Attended) and not event.crosses else None


def evaluate(state: dict[str, LayerRows], model: Probed) -> list[Measured]:
    """Cosines (jackknife), and R² and divergences (bootstrap)."""
    measurements = []
    for layer in state:
        each = _of_layer(state, model, layer)
        if each is None:
            measurements.append(absent(layer, COSINE))
            continue
        tokens, of_heads = float(each.white.query.shape[1]), []
        for quantity, T in ((COSINE, each.link.matrix), (GAUSSIAN, torch.linalg.inv(each.products.K))):
            of_heads += measured(layer, quantity, each.jackknifed(each.products.cosine(T)), tokens)
        for quantity, estimate in each.errors(each.white.key, each.link).items():
            of_heads += measured(layer, quantity, estimate, tokens)
        of_heads += measured(layer, OF_QK, each.mean(each.qk_divergence()), tokens)
        measurements += each.rows.without_singular(of_heads)
    return measurements


def null(state: dict[str, LayerRows], model: Probed, baseline: Baseline[dict[str, LayerRows]] | None) -> list[Measured]:
    """Random rotations, Gaussian keys, and the mean query."""
    rows = []
    for layer in state:
        each = _of_layer(state, model, layer)
        if each is None:
            continue
        query, tokens = each.white.query, float(each.white.query.shape[1])
        for quantity, T in ((COSINE, each.link.matrix), (GAUSSIAN, torch.linalg.inv(each.products.K))):
            spread = each.products.rotated(T)[0].tolist()
            rows += [Measured(layer, h, quantity, *band(0.0, s)) for h, s in enumerate(spread)]
        drawn = torch.randn(each.white.key.shape[1:], generator=torch.Generator().manual_seed(model.seed)).to(query)
        keys = drawn.expand(len(query), -1, -1)
        link = linear_links(query, keys, each.versions[:1], each.white.row)
        for quantity, estimate in each.errors(keys, link).items():
            rows += measured(layer, quantity, estimate, tokens)
        middle = query.mean(1, keepdim=True).expand_as(query)
        rows += measured(layer, OF_QK, each.mean(divergence(each.link, query, each.white.key, middle)), tokens)
    return rows


def verdict(findings: list[Finding]) -> Judgement:
    """Judge whether heads are opposed to the link; count those that are compatible, unrelated, or beyond the null."""
    judged = judge(findings, COSINE, lambda f: beyond_the_null(f, LEAST)._replace(supports=math.inf))
    rows = [f for f in judged.findings if f.quantity == COSINE and f.tokens]
    most_explained = judge(findings, COSINE, lambda f: beyond_the_null(f, HALF))
    compatible = sum(f.verdict == "supported" for f in most_explained.findings)
    unrelated = practically_null("unrelated", judged.findings, COSINE, LEAST)
    significant = [f for f, stands in zip(rows, outside(rows), strict=True) if stands]
    above = sum(f.value > f.null for f in significant)
    below = len(significant) - above
    details = [
        Detail(COMPATIBLE, count=compatible, total=len(rows)),
        unrelated,
        Detail("above_rotations", count=above, total=len(rows)),
        Detail("below_rotations", count=below, total=len(rows)),
        *(median_detail(quantity, findings, quantity) for quantity in (GAUSSIAN, LINEAR, OF_LINEAR, OF_QK)),
    ]
    conditions = {
        "aligned": 2 * above > len(rows) and 2 * compatible <= len(rows) and not is_majority(unrelated),
        "unrelated": is_majority(unrelated),
        "opposed": 2 * below > len(rows) and not is_majority(unrelated),
    }
    return conclude(
        judged, COSINE, details=details, remarks=[Remark(key) for key, holds in conditions.items() if holds]
    )


# The rows of a layer -------------------------------------------------------------------------------------------------


class _Layer(NamedTuple):
    """Rows of a layer in white coordinates, with moments and linear links of all rows and without each group."""

    white: WhiteRows
    versions: Bool[Tensor, "v t"]
    products: Products
    link: HeadLink
    rows: VisibleKeys

    def jackknifed(self, values: Float[Tensor, "v h"]) -> Estimate:
        """Estimate with its jackknife interval over groups."""
        present = self.rows.group.unique().tolist() if len(self.versions) > 1 else []
        sizes = (~self.versions[1:]).sum(-1).double()
        return jackknifed(values[0], values[1:], sizes, groups=present)

    def mean(self, values: Float[Tensor, "h t"], below: Float[Tensor, "h t"] | None = None) -> Estimate:
        """Mean over rows, or ratio of two sums over rows, with its bootstrap interval."""
        ones = torch.ones_like(values)
        columns = torch.stack((ones, values, ones if below is None else below), -1).transpose(0, 1).double()
        return bootstrap(ratio, sums_of(columns, self.rows.document))

    def errors(self, keys: Float[Tensor, "h n d"], link: HeadLink) -> dict[str, Estimate]:
        """R² and divergence of the linear link of keys at the queries."""
        q = self.white.query.double()
        fitted = link.mean.double() @ link.matrix[0] + link.offset[0].unsqueeze(1)
        left, away = (q - fitted).square().sum(-1), (q - q.mean(1, keepdim=True)).square().sum(-1)
        return {
            LINEAR: self.mean(away - left, away),
            OF_LINEAR: self.mean(divergence(link, self.white.query, keys, fitted)),
        }

    def qk_divergence(self) -> Float[Tensor, "h t"]:
        """KL of the attention weights of each query from those of the linear link of its own key."""
        q, o, T = self.white.query.double(), self.white.own_key.double(), self.link.matrix
        tau = (self.products.inner(T) / self.products.size(T))[0].clamp(min=0.0)[:, None, None]
        other = q.mean(1, keepdim=True) + tau * (o - o.mean(1, keepdim=True)) @ T[0]
        return divergence(self.link, self.white.query, self.white.key, other)


def _of_layer(state: dict[str, LayerRows], model: Probed, layer: str) -> _Layer | None:
    """Rows, moments and links of a layer, computed once; None without enough rows or known rotations."""
    sample = state[layer].rows

    def compute() -> _Layer | None:
        rows = visible_keys(sample, model.weights.get(layer))
        if rows is None or rows.own_key is None or rows.query.shape[1] < 2 * rows.query.shape[-1]:
            return None
        white = whitened(rows)
        if white is None:
            return None
        present = rows.group.unique()
        every = torch.ones_like(rows.group, dtype=torch.bool)
        left = [rows.group != g for g in present] if len(present) > 1 else []
        versions = torch.stack([every, *left])
        link = linear_links(white.query, white.key, versions, white.row)
        return _Layer(white, versions, products_of(white, versions), link, rows)

    return model.computed.once(sample, ("link", layer), compute)


PREDICTION = Prediction(__name__, DECLARATION, statistics, evaluate, null, verdict, order=45)
