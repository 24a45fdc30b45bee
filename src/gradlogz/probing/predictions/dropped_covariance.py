"""Dropped covariance: correlation of the covariance of attended values with the loss.

    message      P_i = sum_j a_ij (v_j - o_i)(v_j - o_i)ᵀ        the covariance that a filter propagates   [theory 8.3]
    correlation  of log sum_h tr P_i and the loss of the next token, given log n

Read next: ../passes/extreme_tokens.py (tokens of largest variance), ../../attention/layers (attention
that propagates it).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch.nn.functional import cross_entropy

from ..._typing import Bool, Float, Tensor
from ...attention.in_models.hidden_keys import HIDDEN
from ..batch_pass import BatchPass
from ..hypothesis_tests import NOTHING_MEASURED, Bounds, bootstrapped, conclude, judge, measured
from ..inside.events import Attended, AttentionArguments, Event, ForwardOutput
from ..prediction import Baseline, Prediction, Probed
from ..runs.judgement import Judgement, Measured
from ..runs.records import BEYOND, Declaration, Detail, Finding, Label, Quantity
from ..statistics import Estimate, Sums, sums_of
from .observables.attention_rows import keys_seen

PARTIAL, PLAIN, PSEUDO = "partial correlation", "correlation", "correlation with pseudo-loss"
LEAST, FLOOR = 0.05, 1e-6

FORMULAS = """\
    message      P_i = sum_j a_ij (v_j - o_i)(v_j - o_i)ᵀ        the covariance that a filter propagates   [theory 8.3]
    spread       log sum_h tr P_i                                of token i in a layer, summed over heads h
    loss         -log p(token i + 1)                             of the model at token i
    correlation  of spread and loss over tokens
    partial      the same, controlling for log n                 n: number of visible keys of the token"""

DECLARATION = Declaration(
    title="Covariance tracks loss",
    kind=BEYOND,
    claim="Attention discards the covariance of the values; this covariance is larger where the model is uncertain.",
    formula=(
        "partial correlation over tokens between (1) the log variance of the attended values, log sum_h tr Cov_a(v), "
        "averaged over layers, and (2) the loss of the next token, controlling for the log number of visible keys. "
        "Cov_a(v): covariance of the values of head h under the attention weights"
    ),
    supports=(
        f"The partial correlation is above {LEAST:g} and above the null, the correlation of the loss with the variance "
        "at another token."
    ),
    refutes=f"The partial correlation is below {LEAST:g}.",
    method=(
        FORMULAS,
        "The trace is taken before the output matrix W_o, where the variances of the values suffice; after W_o the "
        "full covariances P_i would be needed. "
        f"The trace is set to at least {FLOOR:g} sum_h (tr P_i + |o_i|²). Logarithms make layers of different size "
        "comparable. The sample is all rows with two or more visible keys and a next token. Early tokens have few "
        "visible keys and a high loss, which alone causes a correlation: the judged correlation is therefore "
        "partial. For masked "
        f'language models the loss of visible tokens is reported as "{PSEUDO}" and not judged, because such models '
        "mostly copy visible tokens. Without a language-model head there is no loss.",
        "Null: the same correlation with the spread of the token half a text away.",
    ),
    decision_rule=(
        "The average over layers is judged, for the model as a whole. Single layers are reported and not judged."
    ),
    quantities={
        PARTIAL: Quantity("1", "corr(log Σ_h tr P, loss | log n)"),
        PLAIN: Quantity("1", "corr(log Σ_h tr P, loss)"),
        PSEUDO: Quantity("1", "corr(log Σ_h tr P, loss of visible tokens)"),
    },
    statistic="partial correlation of log variance of attended values with next-token loss",
    null="permuted-token null",
    unit="",
    details={"largest": Label("largest partial correlation of a layer", null="permuted-token null")},
    remarks={NOTHING_MEASURED: "The model has no output layer that predicts the next token."},
)


class State(NamedTuple):
    """Products of spread, log n and loss over tokens, for every layer and for the average over layers.

    head: kind of the language-model head; None before any text.
    layers: names of the layers, separated by newlines.
    """

    head: Literal["causal", "masked", "none"] | None = None
    layers: str | None = None
    products: Sums | None = None


class _Rows(NamedTuple):
    """Properties of rows that all layers share: validity, log number of visible keys, and causality."""

    valid: Bool[Tensor, "b n"]
    log_n: Float[Tensor, "b n"]
    causal: bool


@dataclass
class _Memory:
    rows: _Rows | None = None
    spread: dict[str, Tensor] = field(default_factory=dict)


def statistics(event: Event | ForwardOutput, batch_pass: BatchPass) -> State | None:
    """Products of spread, log n and loss, summed over tokens at the end of the forward pass."""
    memory = batch_pass.memory(_Memory)
    if isinstance(event, Attended):
        _keep(event, batch_pass, memory)
        return None
    rows = memory.rows
    if not isinstance(event, ForwardOutput) or rows is None:
        return None
    loss = _loss(event, causal=rows.causal)
    if loss is None:
        return State("none")
    valid = rows.valid & _scored(rows.valid, causal=rows.causal)
    x = torch.stack(list(memory.spread.values()), 1).double()
    x = torch.cat((x, x.mean(1, keepdim=True)), 1)
    half = x.shape[-1] // 2
    other = valid & rows.valid.roll(half, -1)
    parts = [_products(a, rows.log_n, loss, b) for a, b in ((x, valid), (x.roll(half, -1), other))]
    sums = sums_of(torch.cat(parts, -1), batch_pass.documents)
    return State("causal" if rows.causal else "masked", "\n".join(memory.spread), sums)


def evaluate(state: State, model: Probed) -> list[Measured]:
    """Correlations of every layer, and of the average over layers (the row of the model)."""
    if state.products is None:
        return [Measured("", None, PARTIAL, math.nan)] if state.head else []
    if state.head != "causal":
        return [Measured("", None, PARTIAL, math.nan), *_rows(state, PSEUDO, _correlation, slice(0, 10))]
    plain, partial = (
        _rows(state, name, function, slice(0, 10)) for name, function in ((PLAIN, _correlation), (PARTIAL, _partial))
    )
    return plain + partial


def null(state: State, model: Probed, baseline: Baseline[State] | None) -> list[Measured]:
    """Correlations with the spread of another token of the same text."""
    if state.products is None:
        return []
    pairs = ((PLAIN, _correlation), (PARTIAL, _partial)) if state.head == "causal" else ((PSEUDO, _correlation),)
    return [m for name, function in pairs for m in _rows(state, name, function, slice(10, 20))]


def verdict(findings: list[Finding]) -> Judgement:
    """Judge the partial correlation of the average over layers."""
    of_model = [f for f in findings if not f.layer and f.quantity == PARTIAL]

    def bounds(f: Finding) -> Bounds:
        return Bounds(LEAST if math.isnan(f.null_high) else max(LEAST, f.null_high), LEAST)

    ruled = judge(of_model, PARTIAL, bounds)
    rest = [f for f in findings if f not in of_model]
    judgement = conclude(ruled, PARTIAL)._replace(findings=ruled + rest)
    if not judgement.judged:
        return judgement
    f = ruled[0]
    largest = max((g for g in rest if g.quantity == PARTIAL and not math.isnan(g.value)), key=lambda g: g.value)
    return judgement._replace(
        **{name: getattr(f, name) for name in ("low", "high", "null_low", "null_high")},
        details=(Detail("largest", largest.value, largest.low, largest.high, largest.null, layer=largest.layer),),
    )


def _keep(event: Attended, batch_pass: BatchPass, memory: _Memory) -> None:
    """Store the spreads of a layer, if its queries are the tokens of the input."""
    ids, variance = batch_pass.batch.inputs.get("input_ids"), event.attention.value_variance
    b, _, m = event.attention.log_normalizer.shape
    if variance is None or ids is None or event.crosses or (b, m) != tuple(ids.shape):
        return
    if memory.rows is None:
        n = keys_seen(event, batch_pass).amin(1)
        log_n = n.clamp(min=1).log().double().expand(b, m)
        memory.rows = _Rows(batch_pass.real(event) & (n > 1), log_n, _causal(event))
    trace = variance.sum((1, 3))
    second_moment = trace + event.attention.output.to(trace.dtype).square().sum((1, 3))
    least = FLOOR * second_moment + torch.finfo(trace.dtype).tiny
    memory.spread[event.layer] = torch.maximum(trace, least).log()


def _causal(event: Attended) -> bool:
    """True if no query attends to a later key; evaluated once for a batch because it synchronises with the GPU."""
    call = event.call
    if isinstance(call, AttentionArguments):
        if call.is_causal:
            return True
        if call.attn_mask is None:
            return False
        visible = call.attn_mask if call.attn_mask.dtype == torch.bool else call.attn_mask > HIDDEN
    else:
        visible = call > HIDDEN
    return visible.shape[-2] > 1 and not bool(visible.triu(1).any())


def _loss(event: ForwardOutput, *, causal: bool) -> Float[Tensor, "b n"] | None:
    """-log p of the next token (causal) or of the token itself; None if the model returns no token logits."""
    logits, ids = getattr(event.output, "logits", None), event.inputs.get("input_ids")
    if logits is None or ids is None or logits.ndim != 3 or logits.shape[:2] != ids.shape:
        return None
    if int(ids.max()) >= logits.shape[2]:
        return None
    ids = ids.to(logits.device).roll(-1, -1) if causal else ids.to(logits.device)
    # One sequence at a time: all at once would copy the logits.
    pairs = zip(logits, ids, strict=True)
    return torch.stack([cross_entropy(one.float(), to, reduction="none") for one, to in pairs]).double()


def _scored(valid: Bool[Tensor, "b n"], *, causal: bool) -> Bool[Tensor, "b n"]:
    """Mask of the tokens with a loss: those before another valid token."""
    if not causal:
        return valid
    after = valid.roll(-1, -1)
    after[:, -1] = False
    return after


def _products(
    x: Float[Tensor, "b l n"], z: Float[Tensor, "b n"], y: Float[Tensor, "b n"], valid: Bool[Tensor, "b n"]
) -> Float[Tensor, "b l k"]:
    """Sums of (1, x, z, y, xx, xz, xy, zz, zy, yy) over tokens, [b, l, 10]."""
    x, z, y = torch.broadcast_tensors(x, z.unsqueeze(1), y.unsqueeze(1))
    columns = [torch.ones_like(x), x, z, y, x * x, x * z, x * y, z * z, z * y, y * y]
    return torch.stack([(c * valid.unsqueeze(1)).sum(-1) for c in columns], -1)


def _covariances(t: Tensor) -> tuple[Tensor, ...]:
    x, z, y, xx, xz, xy, zz, zy, yy = (t[..., i] / t[..., 0] for i in range(1, 10))
    return xx - x * x, xz - x * z, xy - x * y, zz - z * z, zy - z * y, yy - y * y


def _correlation(t: Tensor) -> Tensor:
    xx, _, xy, _, _, yy = _covariances(t)
    return (xy / (xx * yy).sqrt()).clamp(-1.0, 1.0)


def _partial(t: Tensor) -> Tensor:
    xx, xz, xy, zz, zy, yy = _covariances(t)
    spread = (xx - xz.square() / zz) * (yy - zy.square() / zz)
    correlation = ((xy - xz * zy / zz) / spread.sqrt()).clamp(-1.0, 1.0)
    return torch.where(zz > 0, correlation, _correlation(t))


def _rows(state: State, name: str, function: Callable[[Tensor], Tensor], part: slice) -> list[Measured]:
    """Correlation of every layer; the last row is that of the average, for the model."""
    if state.products is None or state.layers is None:
        return []
    sums = Sums(state.products.totals[..., part])
    (estimate,) = bootstrapped({"": sums}, function).values()
    layers = [*state.layers.split("\n"), ""]
    rows = []
    for i, layer in enumerate(layers):
        rows += measured(layer, name, Estimate(*(t[i] for t in estimate)), sums.totals[0, i, 0])
    return rows


PREDICTION = Prediction(__name__, DECLARATION, statistics, evaluate, null, verdict, empty=State, order=120)
