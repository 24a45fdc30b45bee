"""Feed-forward maps as classical Hopfield layers: output vectors along the reading vectors of the hidden units.

    u         = sum_i a_i w2_i + b_2      a_i = f(<w1_i, z> + b_i): activation of hidden unit i, z: input of the map
    Phi(z)    = sum_i d_i F(<w1_i, z> + b_i)        F' = f, d_i = |w2_i| / |w1_i|; -Phi is the energy of the tied layer
    ∇Phi(z)   = sum_i a_i d_i w1_i                  = u - b_2 if W_2 = W_1ᵀ, unit by unit up to a positive factor
    cosine    = E cos(v, g)                         v, g: differences of u and ∇Phi of two tokens, along the sphere

Read next: tie.py (the same question about attention), ../inside/feed_forward.py (the matrices), linearity.py.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import NamedTuple

import torch

from ..._typing import Float, Int, Tensor
from ..batch_pass import BatchPass
from ..hypothesis_tests import (
    NOTHING_MEASURED,
    TEST_DETAILS,
    absent,
    beyond_the_null,
    conclude,
    is_majority,
    judge,
    measured,
    median_detail,
    practically_null,
    random_band,
)
from ..inside.architecture import Norm, Sublayer
from ..inside.events import Event, ForwardOutput, Passed
from ..inside.feed_forward import FeedForwardMap
from ..inside.norm_sphere import centred, norm_of_updates, on_sphere, tangential, tangential_to_both
from ..planted_power import planted_power
from ..prediction import Baseline, Prediction, Probed
from ..runs.judgement import Judgement, Measured
from ..runs.records import BEYOND, Declaration, Finding, Label, Quantity, Remark
from ..statistics import Sums, bootstrap, ratio, sums_of
from .observables.attention_rows import at, chosen
from .observables.moved_tokens import DERIVATION, DRAWS, INTERESTING, LEAST, other_places, rotated, scaled
from .observables.residual_stream import in_sequences

PART = 32  # one token in PART is sampled
COSINE, UNITS, GATE, GAIN = "cosine", "cosine of units", "cosine of gates", "energy gain"
COLUMNS = ("tokens", "cosine", "own", "permuted", "best", "units", "squares", "gates", "all")
TOKENS, COSINES, OWN, PERMUTED, BEST, OF_UNITS, SQUARES, OF_GATES, ALL = range(len(COLUMNS))
NODES = (0.06943184420297371, 0.33000947820757187)  # of Gauss and Legendre on [0, 1], with their mirror images
WEIGHTS = (0.17392742256872693, 0.32607257743127307)

FORMULAS = """\
    a_i       = f(<w1_i, z> + b_i)                     activation of hidden unit i, z: input of the sublayer
    a_i       = f(<wg_i, z>) (<w1_i, z> + b_i)         gated: W_1 is the matrix without the activation function
    u         = sum_i a_i w2_i + b_2                   update
    Phi(z)    = sum_i d_i F(<w1_i, z> + b_i)           F' = f; gated: d_i f(gate) (<w1_i, z> + b_i)²/2, gates fixed
    ∇Phi(z)   = sum_i a_i d_i w1_i                     d_i = |w2_i| / |w1_i|
    cosine    = E cos(v, g)                            v = P sum_i (a_i - a'_i) w2_i, g likewise of ∇Phi; ': at another
                                                       token; P: projection along the spheres of the norm at both
    gain      = sum [odd(u) - odd(u')] / sum odd(|u| ∇Phi/|∇Phi|)            u': update of another token
    odd(u)    = Phi(N(x + T)) - Phi(N(x - T))          T: part of u along the sphere, N: projection to the sphere
    units     = sum (a_i - a'_i)² |w2_i|² cos(w1_i, w2_i) / sum (a_i - a'_i)² |w2_i|²          over units and tokens
    gates     = sum a_i |a_i| |w2_i|² cos(wg_i, w2_i) / sum a_i² |w2_i|²"""

DECLARATION = Declaration(
    title="Feed-forward as Hopfield",
    kind=BEYOND,
    claim="Each feed-forward map acts as a classical Hopfield layer: updates are along the gradient of the tied layer.",
    formula=(
        "cosine = mean of cos(v, g) over tokens; v: difference of the updates sum_i a_i w2_i of a token and of another "
        "token, g: that of the gradients sum_i a_i d_i w1_i of Phi(z) = sum_i d_i F(<w1_i, z> + b_i), F' = f; updates "
        "and gradients along the sphere of the norm. -Phi is the energy of the tied layer, with the "
        "same activations a_i. w1_i, w2_i: reading and output vector of hidden unit i; d_i = |w2_i| / |w1_i|, so that "
        "units contribute to both with equal norms. In gated maps w1_i is the vector of the factor without activation "
        "function. 1 for a Hopfield layer, which descends its energy, -1 for one that ascends"
    ),
    supports=(
        f"Aligned: the cosine is above {LEAST:g} and above the null, which pairs reading and output vectors of "
        "different units at random, and rotates updates at random."
    ),
    refutes=f"Opposed: the cosine is below {-LEAST:g} and below that null.",
    method=(
        FORMULAS,
        "A layer x + W^T f(W x) descends the energy of a classical Hopfield network with continuous units [hopfield82, "
        "krotov16]. Shim (2022, appendix) suggests that feed-forward layers are such layers; the theory of attention "
        "does not imply it, so that the claim is beyond the theory. Units whose output vector is along or against "
        "their reading vector are known as enrichment and depletion neurons [gerstner25].",
        "Hidden units may be permuted; with relu, w1_i and b_i may be multiplied and w2_i divided by a positive "
        "number, and in gated maps w1_i and w2_i by any number but 0. None of this changes the update or the cosine. "
        "The gain of the norm before the sublayer is part of w1_i, that of a norm after it part of w2_i. In gated maps "
        "the sign of the gate vector relative to w2_i has no meaning: the cosine of gates takes it with the sign of "
        "a_i, and is positive if units excite their own gates.",
        "Differences of two tokens of the same sequence are free of what all tokens receive alike, such as b_2. All "
        "tokens have the same weight, so that a few with massive activations do not decide. The components of a "
        "difference along both tokens are removed, because the norm removes them, as in `ascent`. Single units may "
        "have other cosines than whole updates: those are reported, too. The energy gain is that "
        "of whole updates and finite steps: the change of Phi from N(x - T) to N(x + T), less that by the update of "
        "another token scaled to the norm of T, relative to a steepest-descent step of the norm of the whole update. "
        "The integral of f is by the rule of Gauss and Legendre with four nodes.",
        f"Null: {DRAWS} random permutations of the units of W_1 against those of W_2, with the same activations and "
        f"divided by the same norms, and {DRAWS} random rotations of the updates. The null value is the mean over "
        "permutations; its band covers those of permutations and of rotations. Permutations preserve both matrices, "
        "and thereby all directions that are common to many units.",
        f"The sample is one token in {PART}, the same tokens in every layer, without padding. Maps with several "
        "experts are not recognised.",
    ),
    decision_rule=(
        f"{LEAST:g} is the bound of the cosine in `tie` and of the gain in `ascent`: the same quantity for attention. "
        f"A map is unrelated if the 95 % confidence interval of its cosine lies within ±{LEAST:g} of the null. "
        "The verdict on the model is that of more than half of its feed-forward sublayers, aligned or opposed; "
        "unrelated ones are neither."
    ),
    quantities={
        COSINE: Quantity("1", "E cos(δ Σᵢ aᵢ w2ᵢ, δ Σᵢ aᵢ dᵢ w1ᵢ)"),
        GAIN: Quantity("1", "[Δ±Φ(u) − Δ±Φ(u′)] / Δ±Φ(|u| ∇Φ/|∇Φ|)"),
        UNITS: Quantity("1", "Σ δaᵢ² |w2ᵢ|² cos(w1ᵢ, w2ᵢ) / Σ δaᵢ² |w2ᵢ|²"),
        GATE: Quantity("1", "Σ aᵢ |aᵢ| |w2ᵢ|² cos(wgᵢ, w2ᵢ) / Σ aᵢ² |w2ᵢ|²"),
    },
    references=("shim22", "hopfield82", "krotov16", "gerstner25"),
    statistic="median cosine of feed-forward updates and gradients of the tied layer",
    null_reason=(
        "Permutations of the units keep the vectors, the activations and the norms, and destroy the pairing "
        f"of reading and output vectors; rotations of the updates keep their norms. {DRAWS} of each, and the "
        "wider band counts."
    ),
    null="unit-permutation null",
    bounds={
        f"{LEAST:g}": DERIVATION,
    },
    interesting=f"A cosine of {2 * INTERESTING:g}: a fifth of the update, by length, is along the gradient.",
    power=planted_power("feed_forward_hopfield"),
    unit="feed-forward sublayer",
    outcomes=("are aligned", "are opposed"),
    details={
        "unrelated": Label("unrelated sublayers"),
        GAIN: Label("median energy gain of updates, over those of other tokens"),
        UNITS: Label("median cosine of reading and output vectors of units"),
        GATE: Label("median cosine of gate and output vectors of units"),
        **TEST_DETAILS,
    },
    remarks={
        NOTHING_MEASURED: "No feed-forward sublayer has the form W_2 f(W_1 z), gated or not.",
        "unrelated": "Most feed-forward sublayers are neither aligned nor opposed.",
    },
    labels={
        UNITS: "mean cosine of reading and output vectors of units",
        GATE: "mean cosine of gate and output vectors of units",
        GAIN: "energy gain of the update over that of another token",
    },
)


class _Tokens(NamedTuple):
    """Sampled tokens, [0], and another token for each, [1]: residual stream, input of the map, update."""

    stream: Float[Tensor, "2 b r D"]
    input: Float[Tensor, "2 b r D"]
    update: Float[Tensor, "2 b r D"]


def statistics(event: Event | ForwardOutput, batch_pass: BatchPass) -> dict[str, Sums] | None:
    """Products of updates with gradients of the tied layer, and changes of its energy, at sampled tokens."""
    if not isinstance(event, Passed) or event.map is None:
        return None
    passed, layer = in_sequences(event, batch_pass), event.map
    if passed is None:
        return None
    places, valid = chosen(passed, batch_pass, 1 / PART)
    both = places, other_places(places, batch_pass.real(passed))
    tensors = passed.stream, passed.input, passed.update
    tokens = _Tokens(*(torch.stack([at(t.unsqueeze(1), index).squeeze(1) for index in both]) for t in tensors))
    columns = _columns(layer, event.sublayer, tokens).double()
    summed = torch.where(valid.unsqueeze(-1), columns, 0.0).sum(1)
    return {event.sublayer.name: sums_of(summed, batch_pass.documents)}


def _columns(layer: FeedForwardMap, sublayer: Sublayer, tokens: _Tokens) -> Float[Tensor, "b r k"]:
    """Columns of each token in the order of COLUMNS, then products of permuted units and of rotated updates."""
    form, norm, z = layer.form, norm_of_updates(sublayer), tokens.input
    wide, width = torch.promote_types(z.dtype, torch.float32), z.shape[-1]
    h = layer.read(form.first, z)
    gates = None if form.gate is None else layer.activation(layer.read(form.gate, z))
    a = (layer.activation(h) if gates is None else gates * h).to(wide)
    reading, size = _unit(_on_stream(layer.matrix(form.first, width).to(wide).mT, sublayer, norm))
    output, length = _unit(_of_update(layer.output.to(wide), sublayer, norm))
    x, c = tokens.stream.to(wide), a * length  # c: norms of the contributions of units, with signs
    change = c[0] - c[1]  # what all tokens receive cancels before the projection
    v, g = (tangential_to_both(x[0], x[1], change @ vectors, norm) for vectors in (output, reading))
    energy = _energy(
        layer,
        sublayer,
        tokens,
        tangential(x[0], c[0] @ reading, norm),
        None if gates is None else gates[0],
        length / size,
    )
    squares = change.square()
    units = [squares @ (reading * output).sum(-1), squares.sum(-1), torch.zeros_like(v[..., 0]), c[0].square().sum(-1)]
    if form.gate is not None:
        gate, _ = _unit(_on_stream(layer.matrix(form.gate, width).to(wide).mT, sublayer, norm))
        units[2] = (c[0] * c[0].abs()) @ (gate * output).sum(-1)
    along = v @ reading.mT
    permuted = [(change * along[..., order]).sum(-1) for order in _permutations(len(size), x.device)]
    turned = (rotated(v) * g.unsqueeze(-2)).sum(-1).unbind(-1)
    norms = (v.norm(dim=-1) * g.norm(dim=-1)).clamp(min=torch.finfo(wide).tiny)
    products = torch.stack([(v * g).sum(-1), *permuted, *turned], -1) / norms.unsqueeze(-1)
    columns = torch.stack([torch.ones_like(norms), products[..., 0], *energy, *units], -1)
    return torch.cat((columns, products[..., 1:]), -1)


def _on_stream(W: Float[Tensor, "H D"], sublayer: Sublayer, norm: Norm | None) -> Float[Tensor, "H D"]:
    """Reading vectors as vectors of the residual stream, with the gain of the norm before the sublayer."""
    return centred(W if sublayer.reads is None else W * sublayer.reads.beside(W)[0], norm)


def _of_update(W: Float[Tensor, "H D"], sublayer: Sublayer, norm: Norm | None) -> Float[Tensor, "H D"]:
    """Output vectors as parts of the update, with the gain of a norm after the sublayer."""
    closes = sublayer.closes
    return centred(W if closes is None else centred(W, closes) * closes.beside(W)[0], norm)


def _unit(vectors: Float[Tensor, "H D"]) -> tuple[Float[Tensor, "H D"], Float[Tensor, " H"]]:
    """Directions and norms."""
    size = vectors.norm(dim=-1).clamp(min=torch.finfo(vectors.dtype).tiny)
    return vectors / size.unsqueeze(-1), size


def _energy(
    layer: FeedForwardMap,
    sublayer: Sublayer,
    tokens: _Tokens,
    gradient: Float[Tensor, "b r D"],
    gates: Float[Tensor, "b r H"] | None,
    weights: Float[Tensor, " H"],
) -> Iterator[Float[Tensor, "b r"]]:
    """Odd changes of Phi along the update, along that of another token, and along the steepest step."""
    norm, dtype = norm_of_updates(sublayer), tokens.stream.dtype
    x, u, other = (t.to(gradient.dtype) for t in (tokens.stream[0], *tokens.update))
    T = tangential(x, u, norm)
    other = scaled(tangential(x, other, norm), T.norm(dim=-1, keepdim=True))
    steps = torch.stack((T, other, scaled(gradient, u.norm(dim=-1, keepdim=True))))
    ends = [layer.read(layer.form.first, _input(on_sphere(x, s, norm), sublayer).to(dtype)) for s in (-steps, steps)]
    low, high = (h.to(gradient.dtype) for h in ends)
    if gates is not None:
        integral = gates.to(gradient.dtype) * (high.square() - low.square()) / 2
    else:
        f, change = layer.activation, high - low
        nodes = zip(NODES, WEIGHTS, strict=True)
        integral = change * sum(w * (f(low + t * change) + f(high - t * change)) for t, w in nodes)
    yield from integral @ weights


def _input(x: Float[Tensor, "... D"], sublayer: Sublayer) -> Float[Tensor, "... D"]:
    """Input of the map at other tokens of the residual stream."""
    norm = sublayer.reads
    if norm is None:
        return x
    x = centred(x, norm)
    size = x.square().mean(-1, keepdim=True).sqrt().clamp(min=torch.finfo(x.dtype).tiny)
    gain, bias = norm.beside(x)
    return x / size * gain + bias


@lru_cache
def _permutations(units: int, device: torch.device) -> tuple[Int[Tensor, " H"], ...]:
    """Random permutations of hidden units, the same in every layer and run."""
    generator = torch.Generator().manual_seed(units)
    return tuple(torch.randperm(units, generator=generator).to(device) for _ in range(DRAWS))


def evaluate(state: dict[str, Sums], model: Probed) -> list[Measured]:
    """Cosine with the tied layer, energy gain, and cosines of units, of each feed-forward sublayer."""
    rows = []
    for sublayer in model.architecture.sublayers:
        if sublayer.kind != "feed_forward":
            continue
        sums = state.get(sublayer.name)
        if sums is None:
            rows.append(absent(sublayer.name, COSINE))
            continue
        gated = model.architecture.feed_forward[sublayer.name].gate is not None
        for quantity, function in FUNCTIONS.items():
            if quantity != GATE or gated:
                rows += measured(sublayer.name, quantity, bootstrap(function, sums), sums.totals[0, 0])
    return rows


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    COSINE: partial(ratio, above=COSINES, below=TOKENS),
    GAIN: lambda totals: (totals[..., OWN] - totals[..., PERMUTED]) / totals[..., BEST],
    UNITS: partial(ratio, above=OF_UNITS, below=SQUARES),
    GATE: partial(ratio, above=OF_GATES, below=ALL),
}


def null(state: dict[str, Sums], model: Probed, baseline: Baseline[dict[str, Sums]] | None) -> list[Measured]:
    """Cosines of permuted units; the band also covers those of rotated updates."""
    rows = []
    for layer, sums in state.items():
        total = sums.totals[0]
        draws = total[len(COLUMNS) :].unflatten(0, (2, DRAWS)) / total[TOKENS]
        permuted, turned = (random_band(layer, None, COSINE, each) for each in draws)
        low, high = min(permuted.low, turned.low), max(permuted.high, turned.high)
        rows.append(permuted._replace(low=low, high=high))
    return rows


def verdict(findings: list[Finding]) -> Judgement:
    """Judge every feed-forward sublayer as aligned, opposed or neither."""
    judged = judge(findings, COSINE, lambda f: beyond_the_null(f, LEAST))
    unrelated = practically_null("unrelated", judged.findings, COSINE, LEAST)
    keys = [key for key in (GAIN, UNITS, GATE) if any(f.quantity == key for f in findings)]
    details = [median_detail(key, findings, key) for key in keys]
    remarks = (Remark("unrelated"),) if is_majority(unrelated) else ()
    return conclude(judged, COSINE, details=[unrelated, *details], remarks=remarks)


PREDICTION = Prediction(__name__, DECLARATION, statistics, evaluate, null, verdict, order=95)
