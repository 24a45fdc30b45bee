"""Geometry of QK matrices: symmetry, positivity, and alignment with covariances.

    logit     = beta (x W_q)·(y W_k) = beta x B yᵀ, B = W_q W_kᵀ, the QK matrix                          [theory E13]
    B         = c F, c > 0                          first conjecture [shim22]; F = ∇²log Z: Cov of attended tokens
    B         = c Cov⁻¹, c > 0                      second conjecture; Cov: covariance of the tokens       [theory E13]

Both make B positive semidefinite, and so do equal query and key matrices without any training. A head therefore
supports the claim only if B is also more aligned with one of these targets than under random rotations.

All matrices are represented by factors of d columns. No value changes with the basis of queries and keys, W_q to W_q M
and W_k to W_k M^-T.

Read next: symmetry.py (published scores), tie.py.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ..._typing import Float, Tensor
from ..batch_pass import BatchPass
from ..computed import Computed
from ..hypothesis_tests import (
    NOTHING_MEASURED,
    TEST_DETAILS,
    Bounds,
    absent,
    against_null,
    band,
    conclude,
    head_of,
    is_majority,
    judge,
    measured,
    median_detail,
    outside,
    practically_null,
)
from ..inside.events import Attended, Event, ForwardOutput, Passed
from ..inside.head_weights import HeadWeights, Turning, centred, still_share
from ..planted_power import planted_power
from ..prediction import Baseline, Prediction, Probed
from ..runs.judgement import Judgement, Measured
from ..runs.records import PREDICTED, Declaration, Finding, Label, Quantity, Remark
from ..statistics import GROUPS, Comoments, GroupMoments, Sums, jackknife, jackknifed, prediction_band
from .observables.attention_distance import (
    OVER,
    OVER_DETAILS,
    OVER_METHOD,
    OVER_REMARKS,
    STILL,
    distances,
    mean_rotations,
    over_distances,
)
from .observables.attention_rows import applies, rows_of
from .observables.batch_moments import matrices_of_attention_inputs, on_cpu, token_moments

POSITIVE, SYMMETRIC, SHARE = "positive cosine", "symmetric share", "positive share"
WITH_I, WITH_C, WITH_INVERSE = (f"cosine with the {t}" for t in ("identity", "covariance", "inverse covariance"))
WHITENED, FISHER = "whitened cosine with the inverse covariance", "cosine with the Fisher information"
TARGETS = WITH_C, WITH_INVERSE, FISHER
SUPPORTS = 0.9
LEAST = 0.025  # smallest difference of the positive cosine to that of random matrices
VARIANCE = 0.9  # share of the leading components
DRAWS = 20  # of random rotations; the band allows for their number
RANK = 1e-6  # the root of the rounding of a Gram matrix, with a margin
DEFECT = 1e-12  # relative shift that keeps Gram matrices of dependent columns positive definite

FORMULAS = f"""\
    logit     = beta (x W_q)·(y W_k) = beta x B yᵀ, B = W_q W_kᵀ, the QK matrix                          [theory E13]
    B         = c F, c > 0                          first conjecture [shim22]; F = ∇²log Z: Cov of attended tokens
    B         = c Cov⁻¹, c > 0                      second conjecture; Cov: covariance of the tokens       [theory E13]

    positive cosine   |B₊| / |B|,  B₊ the positive part of B_s = (B + Bᵀ)/2     cosine of B with the nearest such matrix
    symmetric share   |B_s|² / |B|²
    positive share    sum of positive eigenvalues of B_s over the sum of absolute eigenvalues
    cosine with T     <B_s, T> / |B_s| |T|,  T = I, Cov, Cov⁻¹ of the tokens, restricted to the leading principal
                      components that hold {100 * VARIANCE:g} % of the variance, no fewer than d (head dimension);
                      otherwise Cov⁻¹ would be dominated by the smallest components
    whitened          cosine of C^½ B_s C^½ with I, C = Cov on these components: 1 if B_s = c Cov⁻¹; each direction is
                      weighted by the variance of the tokens along it
    Fisher            T = P F P, compared with P B_s P;  F = mean of Cov_a(z) over sampled queries, z: tokens;  P: the
                      projection of the stream onto the directions that keys read, the columns of W_k. With W_k = Q R
                      (QR decomposition) and F_k = mean Cov_a(k) they are R^-T F_k R^-1 and Qᵀ B_s Q; not defined with
                      rotary embeddings, which rotate the keys"""

_OF_FORMS = {
    POSITIVE: Quantity("1", "|B₊| / |B|,  B = W_q W_kᵀ"),
    SYMMETRIC: Quantity("1", "|B + Bᵀ|² / 4|B|²"),
    SHARE: Quantity("1", "Σ λ₊ / Σ |λ|,  λ of (B + Bᵀ)/2"),
    WITH_I: Quantity("1", "cos((B + Bᵀ)/2, I)"),
    WITH_C: Quantity("1", "cos((B + Bᵀ)/2, C)"),
    WITH_INVERSE: Quantity("1", "cos((B + Bᵀ)/2, C⁻¹)"),
    WHITENED: Quantity("1", "cos(C^½ (B + Bᵀ)/2 C^½, I)"),
}

DECLARATION = Declaration(
    title="Positive QK matrices",
    kind=PREDICTED,
    claim=(
        "The QK matrix W_q W_k^T of each head is symmetric positive semidefinite and aligned with the Fisher "
        "information of its attended tokens, or with the covariance of the tokens or its inverse."
    ),
    formula=(
        "positive cosine = |B_+| / |B| of the QK matrix B = W_q W_k^T of a head, where B_+ is the positive "
        "semidefinite part of (B + B^T)/2: the cosine of B with the nearest positive semidefinite matrix (Frobenius "
        "norm)"
    ),
    supports=(
        f"The positive cosine is above {SUPPORTS:g} and above the random-rotation null, and the cosine of B with one "
        "of the three targets is above its own random-rotation null."
    ),
    refutes=(
        f"Opposed: the positive cosine is more than {LEAST:g} below the random-rotation null, and below its band: B is "
        "closer to a negative matrix than random ones are."
    ),
    method=(
        FORMULAS,
        "Both conjectures make B symmetric and positive semidefinite. The scale parameters of the normalisation layer "
        "are part of W_q and W_k, so that B acts on normalised tokens. A direction that normalisation removes, as "
        "LayerNorm removes the mean over coordinates, is projected out. If a layer normalises queries and keys (QK "
        "norm), the scale parameters of these norms are part of W_q and W_k, but the division of each query and key by "
        "its norm is left out.",
        "Nulls. In what follows, r is the number of rows of B_s: the number of principal components, or for the Fisher "
        "information the head dimension. For the positive cosine, the symmetric share and the positive share the null "
        f"is P S O S Q^T in place of B = P S Q^T (singular value decomposition), with {DRAWS} random rotations O. On "
        "average it has the second moments B B^T and B^T B of B, up to a factor: both sides read the same axes of the "
        "stream as those of B and are unrelated otherwise. Rotations of the whole stream would also destroy common "
        "axes, which untrained matrices share where tokens have few directions. For the cosine with I and the whitened "
        "cosine the null is B R, with a random rotation R of the inputs of the keys: mean 0, standard deviation "
        "sqrt(2) / r. For the cosines with Cov, with Cov⁻¹ and with the Fisher information the null "
        "is R B_s Rᵀ, with a random rotation R. Such a cosine has mean tr B_s tr T / (r |B_s| |T|) and variance 2 "
        "|B_0|² |T_0|² / ((r - 1)(r + 2) |B_s|² |T|²), where B_0 and T_0 are the traceless parts of B_s and T.",
        "Positivity is necessary for both conjectures and not sufficient: W_q = W_k gives it without any training, and "
        "so does an architecture that shares both matrices. Their positive directions are not those of the tokens, "
        "which is what the null of the targets tells: it keeps all eigenvalues of B_s. A head is tested against three "
        "targets, so that the smallest of three p-values is multiplied by 3 (Bonferroni).",
        OVER_METHOD,
    ),
    decision_rule=(
        "The positive cosine depends on the weights alone and has no sampling error, so it is compared with the bounds "
        "directly. Support needs both conditions (intersection–union test: the larger p-value counts). A head that is "
        "no more positive than random matrices neither supports nor refutes the claim; if its positive cosine is "
        f"within {LEAST:g} of their mean, it is counted as unrelated. The verdict on the model is that of more than "
        "half of its heads."
    ),
    bounds={
        f"{SUPPORTS:g}": (
            f"At least {SUPPORTS**2:.2f} of the squared norm of B is then in its positive part. Heads of width 256 "
            "with W_k = 0.75 W_q + noise, planted, lie near this bound."
        ),
        f"{LEAST:g}": (
            f"Half of {2 * LEAST:g}, the difference that a cosine of W_q and W_k of ±{4 * LEAST:g} makes, the smallest "
            "one called interesting: with W_k = c W_q + sqrt(1 - c²) noise the eigenvalues of (B + B^T)/2 are (c ± "
            "1)/2 in a wide stream, and the positive cosine is (1 + c)/2."
        ),
    },
    interesting=(
        "Support: a cosine of W_q and W_k of 0.85 on the principal axes of the tokens; refutation: one of -0.1. "
        "Random matrices have a positive cosine of 0.5, symmetric matrices with as many positive as negative "
        "eigenvalues 0.71."
    ),
    power=planted_power("qk_geometry"),
    quantities={
        **_OF_FORMS,
        FISHER: Quantity("1", "cos(P (B + Bᵀ)/2 P, P E Cov_a(z) P)"),
        **{name + OVER: quantity for name, quantity in _OF_FORMS.items()},
        STILL: Quantity("1", "|M_s|² / (|M_s|² + |M_t|²),  unrotated and rotated coordinates"),
    },
    statistic="median cosine of QK matrices with their positive part",
    null_reason=(
        f"{DRAWS} rotations between queries and keys keep the axes of the stream that each of both sides reads, and "
        "destroy the relation of the sides; a cosine does not depend on scale."
    ),
    null="random-rotation null",
    outcomes=("support the claim", "are opposed"),
    details={
        "unrelated": Label("unrelated heads"),
        **{name: Label(f"median {name}", null="rotation null", counted="above the rotation null") for name in TARGETS},
        **OVER_DETAILS,
        **TEST_DETAILS,
    },
    remarks={
        NOTHING_MEASURED: "No self-attention layer has matrices that act on its input.",
        "unrelated": "Most heads are no more positive than random matrices.",
        **OVER_REMARKS,
    },
    labels={
        "share without rotation": "share of the squared norm without rotation",
    },
)


class LayerState(NamedTuple):
    """Moments of the inputs and of the attended keys of a self-attention layer; attention distances, by group."""

    read: Comoments | None = None
    fisher: Comoments | None = None
    distances: dict[int, Sums] | None = None


@dataclass
class _Memory:
    crosses: dict[str, bool] = field(default_factory=dict)


def statistics(event: Event | ForwardOutput, batch_pass: BatchPass) -> dict[str, LayerState] | None:
    """Covariances of the inputs and of the attended keys of self-attention layers, and attention distances."""
    crosses = batch_pass.memory(_Memory).crosses
    if isinstance(event, Attended):
        crosses[event.layer] = event.crosses
        fisher = None if event.crosses or not applies(event, batch_pass) else _fisher(event, batch_pass)
        return {event.layer: LayerState(fisher=fisher, distances=distances(event, batch_pass))}
    if not isinstance(event, Passed) or event.sublayer.kind != "attention" or crosses.get(event.sublayer.name):
        return None
    read = token_moments(event.input, batch_pass=batch_pass, mask=batch_pass.real(event))
    return {event.sublayer.name: LayerState(read=read)}


def evaluate(state: dict[str, LayerState], model: Probed) -> list[Measured]:
    """Values of each head; functions of the weights alone have no sampling error."""
    rows = []
    for layer in model.architecture.attention:
        weights, layer_state = model.weights.get(layer), state.get(layer, LayerState())
        read, fisher = on_cpu(layer_state.read), on_cpu(layer_state.fisher)
        if not isinstance(weights, HeadWeights) or read is None:
            rows.append(absent(layer, POSITIVE))
            continue
        U, V = forms(weights)
        for quantity, values in zip((POSITIVE, SYMMETRIC, SHARE), _alone(_gram(U, V)), strict=True):
            rows += [Measured(layer, h, quantity, v, v, v) for h, v in enumerate(values.tolist())]
        R = mean_rotations(layer_state.distances, weights, read.present()) if weights.rotary else None
        rows += _compared(layer, weights, read, _components(read, weights, model.computed), R)
        if fisher is not None and not weights.rotary:
            form, triangular = _read_by_keys(U, V)
            estimate = jackknife(lambda m: _cosine(form, _lifted(m.covariance, triangular)), fisher)  # noqa: B023
            rows += measured(layer, FISHER, estimate, fisher.tokens.sum())
    return rows


def null(
    state: dict[str, LayerState],
    model: Probed,
    baseline: Baseline[dict[str, LayerState]] | None,
) -> list[Measured]:
    """Values under random rotations."""
    rows = []
    for number, layer in enumerate(model.architecture.attention):
        weights, layer_state = model.weights.get(layer), state.get(layer, LayerState())
        read, fisher = on_cpu(layer_state.read), on_cpu(layer_state.fisher)
        if not isinstance(weights, HeadWeights) or read is None:
            continue
        U, V = forms(weights)
        E = _components(read, weights, model.computed)
        R = mean_rotations(layer_state.distances, weights)
        in_metrics = _InMetrics(E.mT @ U, E.mT @ V, _covariance(read.total(), weights, E).unsqueeze(0))
        for name, turn in (("", None), *(() if R is None else ((OVER, R[:1]),))):
            generator = torch.Generator().manual_seed(model.seed + number)
            sides = _sides(_gram(U if turn is None else U @ turn[0], V))
            draws = [_alone(_unrelated(sides, turned)) for turned in _rotations(U.shape[-1], generator)]
            for quantity, values in zip((POSITIVE, SYMMETRIC, SHARE), zip(*draws, strict=True), strict=True):
                mean, arm = prediction_band(torch.stack(values))
                rows += _rows(layer, quantity + name, mean, arm)
            for quantity, pairs in in_metrics.rotation_nulls(turn).items():
                rows += [Measured(layer, h, quantity + name, *band(*each)) for h, each in enumerate(pairs)]
        if fisher is not None and not weights.rotary:
            form, triangular = _read_by_keys(U, V)
            lifted = _lifted(fisher.total().covariance, triangular)
            pairs = _turned(_sizes(form), _sizes(lifted), form.shape[-1])
            rows += [Measured(layer, h, FISHER, *band(*each)) for h, each in enumerate(pairs)]
    return rows


def verdict(findings: list[Finding]) -> Judgement:
    """Judge every head by its positive cosine and its targets; count heads that are unrelated, or above a null."""
    judged = judge(findings, POSITIVE, _bounds, needs=_aligned(findings))
    unrelated, cosines = practically_null("unrelated", judged.findings, POSITIVE, LEAST), []
    for quantity in TARGETS:
        rows = [f for f in findings if f.quantity == quantity]
        if rows:
            above = sum(stands and f.value > f.null for f, stands in zip(rows, outside(rows), strict=True))
            cosines.append(median_detail(quantity, rows, quantity)._replace(count=above, total=len(rows)))
    details, remarks = over_distances(findings, POSITIVE + OVER)
    if is_majority(unrelated):
        remarks = (Remark("unrelated"), *remarks)
    return conclude(judged, POSITIVE, details=(unrelated, *cosines, *details), remarks=remarks)


def _bounds(f: Finding) -> Bounds:
    if math.isnan(f.null_high):
        return Bounds(math.inf, -math.inf)
    return Bounds(max(SUPPORTS, f.null_high), min(f.null - LEAST, f.null_low))


def _aligned(findings: Sequence[Finding]) -> Float[Tensor, " n"]:
    """p-value of each head that its QK matrix is not more aligned with any of the targets than at random."""
    heads = [head_of(f) for f in findings if f.quantity == POSITIVE]
    smallest = dict.fromkeys(heads, math.nan)
    for quantity in TARGETS:
        rows = [f for f in findings if f.quantity == quantity]
        for f, p in zip(rows, against_null(rows)[0].tolist(), strict=True):
            smallest[head_of(f)] = min(p, smallest.get(head_of(f), math.nan), key=lambda x: (math.isnan(x), x))
    return (len(TARGETS) * torch.tensor([smallest[head] for head in heads], dtype=torch.float64)).clamp(max=1.0)


def _compared(layer: str, weights: HeadWeights, read: Comoments, E: Tensor, R: Tensor | None) -> list[Measured]:
    """Cosines with all targets, and all values with the rotations R between queries and keys."""
    U, V = forms(weights)
    C = _covariance(read.versions(), weights, E)
    groups = read.present()
    left, tokens = read.tokens[groups if len(groups) > 1 else []], read.tokens.sum()
    in_metrics = _InMetrics(E.mT @ U, E.mT @ V, C)
    values = in_metrics.cosines()
    if R is not None and isinstance(weights.turning, Turning):
        alone = _alone(_turned_gram(_gram(U, V), R))
        values |= {q + OVER: v for q, v in zip((POSITIVE, SYMMETRIC, SHARE), alone, strict=True)}
        values |= {q + OVER: v for q, v in in_metrics.cosines(R).items()}
    rows = []
    for quantity, versions in values.items():
        rows += measured(layer, quantity, jackknifed(versions[0], versions[1:], left), tokens)
    if R is not None and isinstance(weights.turning, Turning):
        share = still_share(weights.turning, U, V)
        rows += [] if share is None else [Measured(layer, h, STILL, v, v, v) for h, v in enumerate(share.tolist())]
    elif weights.rotary:
        rows.append(absent(layer, POSITIVE + OVER))
    return rows


# Matrices ------------------------------------------------------------------------------------------------------------


def forms(weights: HeadWeights) -> tuple[Tensor, Tensor]:
    """U, V [h, D, d] with B = U Vᵀ on normalised tokens, without the direction that a centring norm removes."""
    norm, folded = weights.norm, weights.folded
    U, V = folded.query, folded.key
    return (centred(U, -2), centred(V, -2)) if norm is not None and norm.centres else (U, V)


def _gram(U: Tensor, V: Tensor) -> Tensor:
    """Gram matrix of the columns of U and V, [h, 2d, 2d]."""
    across = U.mT @ V
    return torch.cat((torch.cat((U.mT @ U, across), -1), torch.cat((across.mT, V.mT @ V), -1)), -2)


class _Sides(NamedTuple):
    """Singular values S and overlaps PᵀQ of B = P S Qᵀ, which do not depend on the basis of both factors of B."""

    singular: Float[Tensor, "h d"]
    overlap: Float[Tensor, "h d d"]


def _sides(gram: Tensor) -> _Sides:
    """Sides of U Vᵀ from the Gram matrix of the columns of U and V."""
    d = gram.shape[-1] // 2
    root_u, root_v = _root(gram[..., :d, :d]), _root(gram[..., d:, d:])
    a, S, b = torch.linalg.svd(root_u @ root_v)  # U = X root_u and V = Y root_v with orthonormal X and Y
    XY = _inverse_root(root_u) @ gram[..., :d, d:] @ _inverse_root(root_v)
    overlap = a.mT @ XY @ b.mT
    # Singular vectors have a sign for each pair: those of the first row of the overlap are made positive.
    sign = torch.where(overlap[..., 0, :] < 0, -1.0, 1.0) * torch.where(overlap[..., :1, 0] < 0, -1.0, 1.0)
    return _Sides(S, sign.unsqueeze(-1) * overlap * sign.unsqueeze(-2))


def _inverse_root(root: Tensor) -> Tensor:
    """Pseudo-inverse of the root of a Gram matrix, whose null directions are the root of rounding."""
    return torch.linalg.pinv(root, rtol=RANK, hermitian=True)


def _unrelated(sides: _Sides, turned: Float[Tensor, "d d"]) -> Float[Tensor, "h k k"]:
    """Gram matrix of P S O and Q S: both sides of B read the same directions as before, in another relation."""
    S = sides.singular
    across = turned.mT @ (S.unsqueeze(-1) * sides.overlap * S.unsqueeze(-2))
    square = (S.square().unsqueeze(-2) * turned.mT) @ turned
    return torch.cat((torch.cat((square, across), -1), torch.cat((across.mT, S.square().diag_embed()), -1)), -2)


def _turned_gram(gram: Tensor, R: Tensor) -> Tensor:
    """Gram matrix of the columns of U R and V, from that of U and V."""
    d = R.shape[-1]
    both = torch.eye(2 * d, dtype=gram.dtype).repeat(*R.shape[:-2], 1, 1)
    both[..., :d, :d] = R
    return both.mT @ gram @ both


def _alone(gram: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Positive cosine, symmetric share and positive share of U Vᵀ, from the Gram matrix of their columns."""
    d = gram.shape[-1] // 2
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    lengths = torch.stack((diagonal[..., :d].sum(-1), diagonal[..., d:].sum(-1)), -1).sqrt().repeat_interleave(d, -1)
    lengths = lengths.clamp(min=torch.finfo(gram.dtype).tiny ** 0.25)  # for a head whose weights are 0
    gram = gram / (lengths.unsqueeze(-1) * lengths.unsqueeze(-2))  # the results do not depend on the norms of U and V
    size = (gram[..., :d, :d] * gram[..., d:, d:]).sum((-2, -1))  # |U Vᵀ|²
    L = torch.linalg.cholesky(gram + DEFECT * torch.eye(2 * d, dtype=gram.dtype))
    half = torch.zeros(2 * d, 2 * d, dtype=gram.dtype)
    half[:d, d:] = half[d:, :d] = torch.eye(d, dtype=gram.dtype) / 2
    # Nonzero eigenvalues of [U V] half [U V]ᵀ.
    eigenvalues = torch.linalg.eigvalsh(L.mT @ half @ L)
    positive = eigenvalues.clamp(min=0.0)
    symmetric = eigenvalues.square().sum(-1) / size
    return (positive.square().sum(-1) / size).sqrt(), symmetric, positive.sum(-1) / eigenvalues.abs().sum(-1)


def _rotations(d: int, generator: torch.Generator) -> Float[Tensor, "r d d"]:
    """Random rotations of R^d."""
    Q, R = torch.linalg.qr(torch.randn(DRAWS, d, d, generator=generator, dtype=torch.float64))
    return Q * R.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)


def _root(symmetric: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(symmetric)
    return (vectors * values.clamp(min=0.0).sqrt().unsqueeze(-2)) @ vectors.mT


def _symmetric(U: Tensor, V: Tensor) -> Tensor:
    B = U @ V.mT
    return (B + B.mT) / 2


# Targets -------------------------------------------------------------------------------------------------------------


def _covariance(m: GroupMoments, weights: HeadWeights, E: Tensor | None = None) -> Tensor:
    """Covariance of normalised tokens, from that of the layer's inputs (gain x + bias); on components E if given."""
    C = m.covariance
    if weights.norm is not None:
        gain = weights.norm.gain.double()
        inverse = torch.where(gain == 0, 0.0, 1 / gain)
        C = inverse.unsqueeze(-1) * C * inverse
        if weights.norm.centres:
            C = centred(centred(C, -1), -2)
    return C if E is None else E.mT @ C @ E


def _components(read: Comoments, weights: HeadWeights, computed: Computed) -> Tensor:
    """Principal components [D, r] with 90 % of the variance of all tokens, at least d of them."""

    def compute() -> Tensor:
        values, vectors = torch.linalg.eigh(_covariance(read.total(), weights))
        share = values.flip(-1).cumsum(-1) / values.sum()
        r = max(int((share < VARIANCE).sum()) + 1, weights.query.shape[-1])
        return vectors[:, -r:]

    return computed.once(weights, "components", compute)


class _Products(NamedTuple):
    """UᵀTU, UᵀTV and VᵀTV of the factors of M = (U Vᵀ + V Uᵀ)/2 in a metric T, [v, h, d, d]."""

    queries: Tensor
    across: Tensor
    keys: Tensor

    def turned(self, R: Tensor | None) -> "_Products":
        """Products of U R and V."""
        return self if R is None else _Products(R.mT @ self.queries @ R, R.mT @ self.across, self.keys)

    @property
    def trace(self) -> Tensor:
        """tr T M, [v, h]."""
        return _trace(self.across)

    @property
    def size(self) -> Tensor:
        """|T^½ M T^½|, [v, h]."""
        same = (self.queries * self.keys).sum((-2, -1)) + (self.across * self.across.mT).sum((-2, -1))
        return (same.clamp(min=0.0) / 2).sqrt()


class _InMetrics:
    """The form M of every head in the metrics of the targets: I, C and C⁻¹; matrices r x r are formed once for all."""

    def __init__(self, U: Float[Tensor, "h r d"], V: Float[Tensor, "h r d"], C: Float[Tensor, "v r r"]) -> None:
        self._r, inverse = C.shape[-1], _inverse(C)
        self._plain = _Products(*(t.unsqueeze(0) for t in (U.mT @ U, U.mT @ V, V.mT @ V)))
        CV = C.unsqueeze(1) @ V
        self._by_C = _Products(U.mT @ (C.unsqueeze(1) @ U), U.mT @ CV, V.mT @ CV)
        self._by_inverse = U.mT @ (inverse.unsqueeze(1) @ V)
        self._targets = {WITH_C: _sizes(C), WITH_INVERSE: _sizes(inverse)}

    def cosines(self, R: Float[Tensor, "v h d d"] | None = None) -> dict[str, Float[Tensor, "v h"]]:
        """Cosines of M with I, C and C⁻¹, and of C^½ M C^½ with I; with rotations R between queries and keys."""
        plain, by_C = self._plain.turned(R), self._by_C.turned(R)
        by_inverse = self._by_inverse if R is None else R.mT @ self._by_inverse
        root, size = math.sqrt(self._r), plain.size
        return {
            WITH_I: (plain.trace / (size * root)).expand_as(by_C.trace),
            WITH_C: by_C.trace / (size * self._targets[WITH_C][1].unsqueeze(-1)),
            WITH_INVERSE: _trace(by_inverse) / (size * self._targets[WITH_INVERSE][1].unsqueeze(-1)),
            WHITENED: by_C.trace / (by_C.size * root),
        }

    def rotation_nulls(self, R: Float[Tensor, "1 h d d"] | None) -> dict[str, list[tuple[float, float]]]:
        """Mean and standard deviation of each cosine under random rotations."""
        plain, r = self._plain.turned(R), self._r
        # Invariant under rotations of M: the rotation acts between queries and keys.
        nulls = dict.fromkeys((WITH_I, WHITENED), [(0.0, math.sqrt(2) / r)] * plain.trace.shape[-1])
        for quantity, (trace, size) in self._targets.items():
            nulls[quantity] = _turned((plain.trace[0], plain.size[0]), (trace[0], size[0]), r)
        return nulls


def _inverse(C: Float[Tensor, "v r r"]) -> Float[Tensor, "v r r"]:
    """Inverse, or pseudo-inverse if there are fewer tokens than components."""
    L, failed = torch.linalg.cholesky_ex(C)
    return torch.linalg.pinv(C, hermitian=True) if bool(failed.any()) else torch.cholesky_inverse(L)


def _read_by_keys(U: Float[Tensor, "h D d"], V: Float[Tensor, "h D d"]) -> tuple[Tensor, Tensor]:
    """Qᵀ B_s Q of B = U Vᵀ, and R, for the decomposition V = Q R: B_s on the directions that keys read."""
    Q, R = torch.linalg.qr(V)
    return _symmetric(Q.mT @ U, R), R


def _lifted(F: Float[Tensor, "*v h d d"], R: Float[Tensor, "h d d"]) -> Float[Tensor, "*v h d d"]:
    """R^-T F R^-1: the covariance of tokens, from that of keys, on the directions that keys read."""
    half = torch.linalg.solve_triangular(R.mT, F, upper=False)
    return torch.linalg.solve_triangular(R.mT, half.mT, upper=False)


def _cosine(B: Tensor, T: Tensor) -> Tensor:
    """Cosines [..., h] of matrices [..., #h, r, r]."""
    return (B * T).sum((-2, -1)) / (B.norm(dim=(-2, -1)) * T.norm(dim=(-2, -1)))


def _sizes(X: Tensor) -> tuple[Tensor, Tensor]:
    """Trace and norm."""
    return _trace(X), X.norm(dim=(-2, -1))


def _trace(X: Tensor) -> Tensor:
    return X.diagonal(dim1=-2, dim2=-1).sum(-1)


def _turned(B: tuple[Tensor, Tensor], T: tuple[Tensor, Tensor], r: int) -> list[tuple[float, float]]:
    """Mean and standard deviation of the cosine of R B Rᵀ with T, for uniform rotations R, from traces and norms."""
    (b, size_b), (t, size_t) = B, T
    sizes = size_b * size_t
    apart = [(size.square() - trace.square() / r).clamp(min=0.0).sqrt() for trace, size in (B, T)]
    mean = b * t / (r * sizes)
    deviation = math.sqrt(2 / ((r - 1) * (r + 2))) * apart[0] * apart[1] / sizes if r > 1 else 0 * mean
    return list(zip(mean.tolist(), deviation.tolist(), strict=True))


def _rows(layer: str, quantity: str, values: Tensor, arms: Tensor) -> list[Measured]:
    pairs = zip(values.tolist(), arms.tolist(), strict=True)
    return [Measured(layer, h, quantity, v, v - arm, v + arm) for h, (v, arm) in enumerate(pairs)]


def _fisher(event: Attended, batch_pass: BatchPass) -> Comoments | None:
    """Sum over sampled queries of Cov_a(k), [h, d, d], stored as products of vectors of mean 0."""
    rows = rows_of(event, batch_pass)
    if rows is None:
        return None
    h = rows.query.shape[1]
    k = rows.key - rows.key.mean(-2, keepdim=True)  # centred, because products lose digits to an offset
    k = k.repeat_interleave(h // k.shape[1], 1)
    p = rows.logits.softmax(-1) * rows.valid[:, None, :, None]
    received, mean = p.sum(-2).unsqueeze(-1), p @ k
    products = torch.einsum("bhnd,bhne->hde", received * k, k) - torch.einsum("bhrd,bhre->hde", mean, mean)
    products = (products + products.mT).double() / 2
    moments = GroupMoments(rows.valid.sum().double(), products.new_zeros(h, k.shape[-1]), products)
    return Comoments(tuple(moments if g == batch_pass.batch.group else None for g in range(GROUPS)))


PREDICTION = Prediction(
    __name__,
    DECLARATION,
    statistics,
    evaluate,
    null,
    verdict,
    order=40,
    matrices=matrices_of_attention_inputs,
)
