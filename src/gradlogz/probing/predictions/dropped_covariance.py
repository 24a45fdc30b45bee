"""Dropped covariance: correlation of the covariance of attended values with the loss.

    message      P_i = sum_j a_ij (v_j - o_i)(v_j - o_i)ᵀ        the covariance that a filter propagates   [theory 8.3]
    correlation  of log sum_h tr W_oᵀ P_i W_o and the loss of the next token, given what else predicts a loss

Read next: ../passes/extreme_tokens.py (tokens of largest variance), ../../attention/layers (attention
that propagates it).
"""

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import nn
from torch.nn.functional import cross_entropy, pad

from ..._typing import Bool, Float, Int, Tensor
from ...attention.functional import attend
from ...attention.in_models.hidden_keys import HIDDEN
from ..batch_pass import BatchPass
from ..hypothesis_tests import NOTHING_MEASURED, TEST_DETAILS, beyond_the_null, conclude, judge, measured
from ..inside.events import Attended, AttentionArguments, Event, ForwardOutput
from ..planted_power import planted_power
from ..prediction import Baseline, Prediction, Probed
from ..runs.judgement import Judgement, Measured
from ..runs.records import BEYOND, Declaration, Detail, Finding, Label, Quantity
from ..statistics import Estimate, Sample, Sums, bootstrap, chosen, sample_of, sums_of, token_hashes
from .observables.attention_rows import keys_seen

PARTIAL, LENGTH, PLAIN = "partial correlation", "partial correlation given n", "correlation"
LEAST, FLOOR = 0.05, 1e-6
SAMPLE = 1 << 14  # tokens
NARROWEST = 16  # number of values below which attention on a GPU has no kernel
RIDGE = 1e-9  # relative; a control that is constant explains nothing
CONSTANT = 1e-10  # variance relative to the mean square below which numbers count as equal
CONTROLS = {PARTIAL: 4, LENGTH: 1, PLAIN: 0}  # the first so many of: log n, log f of both tokens, previous loss

FORMULAS = """\
    message      P_i = sum_j a_ij (v_j - o_i)(v_j - o_i)ᵀ        the covariance that a filter propagates   [theory 8.3]
    spread       log sum_h tr W_oᵀ P_i W_o                       of token i in a layer, summed over heads h
    loss         -log p(token i + 1)                             of the model at token i
    correlation  of spread and loss over tokens
    partial      the same, controlling for log n, log f(token i + 1), log f(token i) and the loss at token i - 1
                 n: number of visible keys of the token;  f: frequency of a token in the text"""

DECLARATION = Declaration(
    title="Covariance tracks loss",
    kind=BEYOND,
    claim="Attention discards the covariance of the values; this covariance is larger where the model is uncertain.",
    formula=(
        "partial correlation over tokens between (1) the log variance of the attended values in the residual stream, "
        "log sum_h tr W_o^T Cov_a(v) W_o, averaged over layers, and (2) the loss of the next token, controlling for "
        "the log number of visible keys, for the log frequencies of the next token and of the token itself in the "
        "text, and for the loss at the previous token. Cov_a(v): covariance of the values of head h under the "
        "attention weights; W_o: its output matrix"
    ),
    supports=(
        f"The partial correlation is above {LEAST:g} and above the null, the correlation of the loss with the variance "
        "at another token."
    ),
    refutes=f"The partial correlation is below {-LEAST:g} and below that null.",
    method=(
        FORMULAS,
        "The trace is taken in the residual stream, after the output matrix: before it, a change of basis of values "
        "and output matrix would change the trace and not the model. "
        f"The trace is set to at least {FLOOR:g} of the second moment. Logarithms make layers of different size "
        f"comparable. The sample is at most {SAMPLE:,} random tokens with two or more visible keys, a previous and a "
        "next token. Early tokens have few visible keys and a high loss, rare tokens a high loss and unusual values, "
        "and losses of neighbouring tokens are alike; each alone causes a correlation, and the judged correlation is "
        "therefore partial. Masked language models mostly copy visible tokens, so that their loss there says "
        "nothing; without a language-model head there is no loss.",
        "Null: the same correlation with the spread of the token half a text away.",
    ),
    decision_rule=(
        "The average over layers is judged, for the model as a whole. Single layers are reported and not judged."
    ),
    bounds={
        f"{LEAST:g}": (
            f"Half of {2 * LEAST:g}, the smallest correlation of interest, which explains "
            f"{(2 * LEAST) ** 2:.0%} of the variance of the loss that the controls leave."
        )
    },
    interesting=(
        "A partial correlation of 0.12 in support and of -0.2 in refutation, with 128 documents; what a run detects is "
        "beside its verdict."
    ),
    power=planted_power("dropped_covariance"),
    quantities={
        PARTIAL: Quantity("1", "corr(log Σ_h tr W_oᵀPW_o, loss | log n, log f, previous loss)"),
        LENGTH: Quantity("1", "corr(log Σ_h tr W_oᵀPW_o, loss | log n)"),
        PLAIN: Quantity("1", "corr(log Σ_h tr W_oᵀPW_o, loss)"),
    },
    statistic="partial correlation of log variance of attended values with next-token loss",
    null_reason=(
        "The loss is paired with the variance at another token of the same text, which keeps both "
        "distributions and the differences between texts, and destroys the pairing."
    ),
    null="permuted-token null",
    unit="",
    details={
        LENGTH: Label("partial correlation given the number of visible keys alone", null="permuted-token null"),
        "largest": Label("largest partial correlation of a layer", null="permuted-token null"),
        **TEST_DETAILS,
    },
    remarks={NOTHING_MEASURED: "The model has no output layer that predicts the next token, or its loss is constant."},
)


class State(NamedTuple):
    """Sampled tokens with the spreads of every layer, and counts of all tokens.

    head: kind of the language-model head; None before any text. layers: names of the layers, separated by newlines.
    counts: [1, vocabulary, 1].
    """

    head: Literal["causal", "other"] | None = None
    layers: str | None = None
    tokens: Sample | None = None
    counts: Sums | None = None


class _Rows(NamedTuple):
    """Properties of rows that all layers share: validity, and the log number of visible keys."""

    valid: Bool[Tensor, "b n"]
    log_n: Float[Tensor, "b n"]


@dataclass
class _Memory:
    causal: bool | None = None
    rows: _Rows | None = None
    spread: dict[str, Tensor] = field(default_factory=dict)


def statistics(event: Event | ForwardOutput, batch_pass: BatchPass) -> State | None:
    """Sampled tokens with spreads, losses and controls, and counts of tokens, at the end of the forward pass."""
    memory = batch_pass.memory(_Memory)
    if isinstance(event, Attended):
        _keep(event, batch_pass, memory)
        return None
    if not isinstance(event, ForwardOutput) or memory.causal is None:
        return None
    loss = _loss(event) if memory.rows is not None else None
    if loss is None or memory.rows is None:
        return State("other")
    batch, rows = batch_pass.batch, memory.rows
    ids = batch.inputs["input_ids"].to(loss.device)
    real = _real(batch_pass, ids)
    enters = rows.valid & real & _moved(real, 1) & _moved(real, -1)
    spread = torch.stack(list(memory.spread.values()), -1).double()
    place, others = real.cumsum(1) - 1, (real.sum(1, keepdim=True) - 1).clamp(min=1)
    # Half a text away; the first token, which attends to itself alone, is left out.
    far = real.int().argmax(1, keepdim=True) + 1 + (place - 1 + others // 2) % others
    other = spread.gather(1, far.clamp(max=ids.shape[1] - 1).unsqueeze(-1).expand_as(spread))
    hashes = token_hashes(batch.keys.cpu(), batch.starts.cpu().unsqueeze(-1) + torch.arange(ids.shape[1])).flatten()
    taken = chosen(hashes, valid=enters.flatten().cpu(), size=SAMPLE)
    vectors = {
        "spread": spread,
        "other": other,
        "numbers": torch.stack((rows.log_n, loss.roll(1, 1), loss), -1),
        "ids": torch.stack((ids.roll(-1, 1), ids), -1),
        "document": batch.keys.to(loss.device).unsqueeze(-1).expand_as(ids),
    }
    at = taken.to(loss.device)
    tokens = sample_of({name: t.flatten(0, 1)[at] for name, t in vectors.items()}, hashes[taken], size=SAMPLE)
    counts = torch.bincount(ids[real], minlength=event.output.logits.shape[2]).double()
    return State("causal", "\n".join(memory.spread), tokens, Sums(counts.reshape(1, -1, 1)))


def evaluate(state: State, model: Probed) -> list[Measured]:
    """Correlations of every layer, and of the average over layers (the row of the model)."""
    if state.tokens is None:
        return [Measured("", None, PARTIAL, math.nan)] if state.head else []
    return _correlations(state, "spread")


def null(state: State, model: Probed, baseline: Baseline[State] | None) -> list[Measured]:
    """Correlations with the spread of another token of the same text."""
    return [] if state.tokens is None else _correlations(state, "other")


def verdict(findings: list[Finding]) -> Judgement:
    """Judge the partial correlation of the average over layers."""
    of_model = [f for f in findings if not f.layer and f.quantity == PARTIAL]

    ruled = judge(of_model, PARTIAL, lambda f: beyond_the_null(f, LEAST))
    rest = [f for f in findings if f not in of_model]
    judgement = conclude(ruled, PARTIAL)._replace(findings=ruled.findings + rest)
    if not judgement.judged:
        return judgement
    f = ruled.findings[0]
    details = [_detail(LENGTH, g) for g in rest if not g.layer and g.quantity == LENGTH]
    layers = [g for g in rest if g.quantity == PARTIAL and not math.isnan(g.value)]
    details += [_detail("largest", max(layers, key=lambda g: g.value))] if layers else []
    ends = {name: getattr(f, name) for name in ("low", "high", "null_low", "null_high")}
    return judgement._replace(**ends, details=(*details, *judgement.details))


def _detail(key: str, f: Finding) -> Detail:
    return Detail(key, f.value, f.low, f.high, f.null, layer=f.layer)


# In a batch ----------------------------------------------------------------------------------------------------------


def _keep(event: Attended, batch_pass: BatchPass, memory: _Memory) -> None:
    """Store the spreads of a causal layer, if its queries are the tokens of the input."""
    ids = batch_pass.batch.inputs.get("input_ids")
    b, _, m = event.attention.log_normalizer.shape
    if ids is None or event.crosses or (b, m) != tuple(ids.shape):
        return
    if memory.causal is None:
        memory.causal = _causal(event)
    if not memory.causal or not isinstance(event.call, AttentionArguments) or event.output_projection is None:
        return
    if memory.rows is None:
        n = keys_seen(event, batch_pass).amin(1)
        log_n = n.clamp(min=1).log().double().expand(b, m)
        memory.rows = _Rows((n > 1).expand(b, m), log_n)
    memory.spread[event.layer] = _spread(event, event.output_projection, batch_pass.real(event))


def _spread(event: Attended, projection: nn.Module, real: Bool[Tensor, "b m"]) -> Float[Tensor, "b m"]:
    """log sum_h tr W_oᵀ P W_o of every token; the trace is the mean of |(v - c) W_o|² less |(o - c) W_o|², any c."""
    call, wide = event.arguments, event.attention.log_normalizer.dtype
    v, o = call.value.to(wide), event.attention.output.to(wide)
    h, each = o.shape[1], o.shape[1] // v.shape[1]
    metric = _metric(projection, h, v.shape[-1], call.value).to(wide)  # W_o W_oᵀ, [h, v, v]
    # An offset loses digits. With a sink, whose value is 0, weights do not sum to 1 and the origin is fixed.
    share = (real / real.sum(1, keepdim=True).clamp(min=1)).to(wide)[:, None, None]
    centre = share @ v if call.sinks is None else torch.zeros_like(v[:, :, :1])
    v, o = v - centre, o - centre.repeat_interleave(each, 1)
    lengths = torch.einsum("bgnv,gevw,bgnw->bgne", v, metric.unflatten(0, (-1, each)), v)
    lengths = pad(lengths, (0, max(NARROWEST - each, 0)))
    options = call._asdict() | {"value": lengths.to(call.value.dtype), "dropout_p": 0.0, "statistics": "none"}
    means = attend(**options).output.to(wide).unflatten(1, (-1, each))[..., :each]  # [b, hk, each, m, each]
    second = means.diagonal(dim1=2, dim2=4).sum((1, 3))
    trace = second - torch.einsum("bhmv,hvw,bhmw->bm", o, metric, o)
    return torch.maximum(trace, FLOOR * second + torch.finfo(wide).tiny).log()


def _metric(projection: nn.Module, heads: int, size: int, like: Tensor) -> Float[Tensor, "h v v"]:
    """W_o W_oᵀ of each head, from the projection of unit vectors; `forward` passes by the hooks of the module."""
    unit = torch.eye(heads * size, dtype=like.dtype, device=like.device)
    W = (projection.forward(unit) - projection.forward(torch.zeros_like(unit[:1]))).unflatten(0, (heads, size))
    return W @ W.mT


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


def _loss(event: ForwardOutput) -> Float[Tensor, "b n"] | None:
    """-log p of the next token; None if the model returns no token logits."""
    logits, ids = getattr(event.output, "logits", None), event.inputs.get("input_ids")
    if logits is None or ids is None or logits.ndim != 3 or logits.shape[:2] != ids.shape:
        return None
    if int(ids.max()) >= logits.shape[2]:
        return None
    ids = ids.to(logits.device).roll(-1, -1)
    wide = torch.promote_types(logits.dtype, torch.float32)
    # One sequence at a time: all at once would copy the logits.
    pairs = zip(logits, ids, strict=True)
    return torch.stack([cross_entropy(one.to(wide), to, reduction="none") for one, to in pairs]).double()


def _real(batch_pass: BatchPass, ids: Int[Tensor, "b n"]) -> Bool[Tensor, "b n"]:
    """Mask of the tokens that are not padding."""
    mask = batch_pass.batch.inputs.get("attention_mask")
    return torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.to(ids.device).bool()


def _moved(mask: Bool[Tensor, "b n"], by: int) -> Bool[Tensor, "b n"]:
    """The mask of the neighbours, `by` places earlier; false beyond the ends."""
    moved = mask.roll(by, 1)
    moved[:, slice(by) if by > 0 else slice(by, None)] = False
    return moved


# The merged sample ---------------------------------------------------------------------------------------------------


def _correlations(state: State, name: str) -> list[Measured]:
    """All correlations of every layer; those of the average over layers are rows of the model."""
    if state.tokens is None or state.counts is None or state.layers is None:
        return []
    vectors = {key: t.cpu() for key, t in state.tokens.vectors.items()}
    counts = state.counts.totals[0, :, 0].cpu()
    frequency = (counts[vectors["ids"]] / counts.sum()).log()  # [t, 2]
    log_n, previous, loss = vectors["numbers"].unbind(-1)
    controls = torch.cat((log_n.unsqueeze(-1), frequency, previous.unsqueeze(-1)), -1)
    x = vectors[name]
    x = torch.cat((x, x.mean(-1, keepdim=True)), -1)
    t, layers = x.shape
    columns = torch.cat((controls, loss.unsqueeze(-1)), -1).unsqueeze(1).expand(t, layers, 5)
    columns = torch.cat((columns, x.unsqueeze(-1)), -1)
    mean = columns.mean(0)
    spread = (columns - mean).square().mean(0)
    constant = spread <= CONSTANT * columns.square().mean(0)
    columns = torch.where(constant, 0.0, (columns - mean) / spread.sqrt())
    columns = torch.cat((torch.ones(t, layers, 1, dtype=columns.dtype), columns), -1)  # [t, l, 7]
    documents, index = vectors["document"].unique(return_inverse=True)
    products = torch.zeros(len(documents), layers, 49, dtype=columns.dtype)
    products.index_add_(0, index, (columns.unsqueeze(-1) * columns.unsqueeze(-2)).flatten(-2))
    sums = sums_of(products, documents)
    rows = []
    for quantity, number in CONTROLS.items():
        estimate = bootstrap(partial(_correlation, controls=number), sums)
        for i, layer in enumerate([*state.layers.split("\n"), ""]):
            rows += measured(layer, quantity, Estimate(*(part[i] for part in estimate)), t)
    return rows


def _correlation(totals: Float[Tensor, "r l 49"], controls: int) -> Float[Tensor, "r l"]:
    """Correlation of the last two of (1, controls, ..., y, x), given 1 and the first of the controls."""
    products = totals.unflatten(-1, (7, 7))
    known = slice(0, 1 + controls)
    ridge = RIDGE * products[..., :1, :1].clamp(min=1.0) * torch.eye(1 + controls, dtype=totals.dtype)
    across = products[..., known, 5:]
    left = products[..., 5:, 5:] - across.mT @ torch.linalg.solve(products[..., known, known] + ridge, across)
    spread = (left[..., 0, 0] * left[..., 1, 1]).clamp(min=0.0)
    empty = spread <= CONSTANT * products[..., 0, 0].square()
    return torch.where(empty, math.nan, left[..., 0, 1] / spread.sqrt()).clamp(-1.0, 1.0)


PREDICTION = Prediction(__name__, DECLARATION, statistics, evaluate, null, verdict, empty=State, order=120)
