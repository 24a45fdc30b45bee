"""Coherence: the cost of weighting the heads of a layer equally.

    g_k = G_k - <mu_k, q_k>  log normaliser of head k, with centred keys
    log sum_k exp(g_k)       log normaliser of one softmax over the centred keys of all heads; in its gradient head k
                             has the weight r_k = softmax_k(g_k)
    cost                     KL(uniform‖r) = log sum_k exp(g_k) - log H - mean_k g_k,  in nats            [theory 6.2]

Read next: entropy.py, ../../measures/mixture.py (the bound and its Jensen gap).
"""

import math
from typing import NamedTuple

import torch

from ..._typing import Float, Tensor
from ..batch_pass import BatchPass
from ..hypothesis_tests import (
    NOTHING_MEASURED,
    absent,
    bootstrapped,
    describe,
    matched_null,
    measured,
    median_detail,
)
from ..inside.events import Attended, Event, ForwardOutput
from ..prediction import Baseline, Prediction, Probed
from ..runs.judgement import Judgement, Measured
from ..runs.records import DESCRIPTIVE, Declaration, Finding, Label, Quantity
from ..statistics import Estimate, Sums, ratio, sums_of
from .observables.attention_rows import applies, rows_of

COST, SHIFTED, RAW = "cost", "cost, other tokens", "raw cost"
LABELS = {
    COST: "cost of weighting heads equally",
    SHIFTED: "cost with log normalisers of other tokens",
    RAW: "cost without centring of the keys",
}
COLUMNS = {COST: (1, 0), SHIFTED: (2, 0), RAW: (4, 3)}  # name: columns of numerator and denominator

FORMULAS = """\
    g_k = G_k - <mu_k, q_k>  log normaliser of head k, with centred keys
    log sum_k exp(g_k)       log normaliser of one softmax over the centred keys of all heads; in its gradient head k
                             has the weight r_k = softmax_k(g_k)
    mean_k g_k + log H       its lower bound (Jensen); in the gradient of this bound, as in multi-head attention, all H
                             heads have equal weight
    cost                     KL(uniform‖r) = log sum_k exp(g_k) - log H - mean_k g_k,  in nats           [theory 6.2]"""

DECLARATION = Declaration(
    title="Coherence of heads",
    kind=DESCRIPTIVE,
    claim=(
        "Cost of weighting all heads equally, compared with one softmax over the centred keys of all heads of a layer."
    ),
    formula=(
        "cost = KL(uniform‖r) in nats, mean over rows; r = softmax_k(G_k - <mu_k, q_k>) over the heads k of a layer: "
        "the weight of head k in one softmax over the keys of all heads, after the keys of each head are centred at "
        "their mean mu_k. Centring subtracts <mu_k, q_k> from G_k. In multi-head attention all heads have equal "
        "weight. G_k: log normaliser, q_k: scaled query of head k"
    ),
    refutes="",
    method=(
        FORMULAS,
        "An offset c of all keys adds <q, c> to a log normaliser and leaves the attention weights unchanged. The keys "
        "of each row are therefore centred, which subtracts <mu_k, q_k> from G_k. The sample is a random subset of the "
        f'rows; the "{LABELS[RAW]}" is that of all rows. Layers whose heads differ in visible keys or biases are '
        "not tested, because their log normalisers are not comparable; nor are layers whose queries and keys are "
        "unknown.",
        f'The "{LABELS[SHIFTED]}" takes the log normaliser of each head (minus log n) from a different row of the same '
        "text, one row for each head: the cost if heads were independent.",
        "Null: the matched baseline, with the 95 % prediction band of one more draw. Untrained heads cost almost "
        "nothing, because their logits are small.",
        "The theory has two readings. In one, heads are one mixture, and equal weights cost KL(uniform‖r) [theory "
        "6.2]; in the other each head is a family of its own, and there is no cost [theory 3.9]. The cost is therefore "
        "described and not tested.",
    ),
    decision_rule="The value of the model is the median over its attention layers.",
    quantities={
        COST: Quantity("nats", "KL(uniform‖softmax_k(G_k − ⟨μ_k, q_k⟩))"),
        SHIFTED: Quantity("nats", "KL(uniform‖softmax_k(G_k − ⟨μ_k, q_k⟩))"),
        RAW: Quantity("nats", "KL(uniform‖softmax_k(G_k))"),
    },
    statistic="median cost of weighting heads equally",
    null_reason=(
        "The cost follows the scale of the logits: the matched baseline (20 draws by default) keeps tokens and spectra."
    ),
    null="matched baseline",
    unit="attention layer",
    number="{:.3f} nats",
    details={SHIFTED: Label("median cost with log normalisers of other tokens", "{:.3f} nats", "matched baseline")},
    remarks={NOTHING_MEASURED: "No attention layer has heads with comparable log normalisers."},
    labels=LABELS,
)


class LayerState(NamedTuple):
    """Costs summed over rows; None for a layer whose heads are not comparable."""

    costs: Sums | None


def statistics(event: Event | ForwardOutput, batch_pass: BatchPass) -> dict[str, LayerState] | None:
    """Costs summed over rows: sampled rows with centred keys, and all rows."""
    if not isinstance(event, Attended):
        return None
    if not applies(event, batch_pass) or not _comparable(event):
        return {event.layer: LayerState(None)}
    valid = batch_pass.real(event) & event.attention.seen[:, 0]
    every = _sum(cost(event.attention.log_normalizer), valid)
    sampled = every.new_zeros(len(every), 3)
    if (rows := rows_of(event, batch_pass)) is not None:
        visible = rows.log_weights > -torch.inf
        n = rows.visible
        G = rows.logits.logsumexp(-1) - n.log() - (rows.products * visible).sum(-1) / n
        # Head k takes the row k positions further, in the order of hashes within a text.
        several = rows.valid & (n[:, 0] > 1)
        mixed = _shifted(G, rows.valid)
        sampled = torch.cat((_sum(cost(G), several), _sum(cost(mixed), several)[:, 1:]), -1)
    return {event.layer: LayerState(sums_of(torch.cat((sampled, every), -1).unsqueeze(1), batch_pass.documents))}


def cost(G: Float[Tensor, "b h m"]) -> Float[Tensor, "b m"]:
    """KL(uniform‖softmax_h(G))."""
    return G.logsumexp(1) - math.log(G.shape[1]) - G.mean(1)


def evaluate(state: dict[str, LayerState], model: Probed) -> list[Measured]:
    """Mean costs of every layer, with bootstrap intervals."""
    rows = [absent(layer, COST) for layer, layer_state in state.items() if layer_state.costs is None]
    for name, (above, below) in COLUMNS.items():
        rows += _rows(state, name, above, below)
    return rows


def null(
    state: dict[str, LayerState],
    model: Probed,
    baseline: Baseline[dict[str, LayerState]] | None,
) -> list[Measured]:
    """Mean costs in the matched baseline."""
    return matched_null(baseline, COLUMNS)


def verdict(findings: list[Finding]) -> Judgement:
    """Describe every layer by its cost."""
    return describe(findings, COST, details=[median_detail(SHIFTED, findings, SHIFTED)])


def _comparable(event: Attended) -> bool:
    """True if there are two or more heads, all with the same visible keys and biases."""
    call = event.arguments
    shared = all(t is None or t.ndim < 3 or t.shape[-3] == 1 for t in (call.attn_mask, call.bias, call.segments))
    return shared and call.sinks is None and call.softcap is None and call.query.shape[1] > 1


def _sum(values: Float[Tensor, "b m"], valid: Tensor) -> Float[Tensor, "b 2"]:
    """Count and sum for each row of the batch, [b, 2]."""
    summands = values.masked_fill(~valid, 0.0)
    return torch.stack((valid.double().sum(-1), summands.double().sum(-1)), -1)


def _shifted(G: Float[Tensor, "b h r"], valid: Tensor) -> Float[Tensor, "b h r"]:
    """Log normalisers of head k at the row k positions further, cyclic over the valid rows of each sequence."""
    b, h, r = G.shape
    many = valid.sum(-1).clamp(min=1)[:, None, None]
    places = torch.arange(r, device=G.device) + torch.arange(h, device=G.device)[:, None]
    return G.gather(2, (places % many).expand(b, h, r))


def _rows(state: dict[str, LayerState], name: str, above: int, below: int) -> list[Measured]:
    sums = {layer: layer_state.costs for layer, layer_state in state.items() if layer_state.costs is not None}
    rows = []
    for layer, estimate in bootstrapped(sums, lambda t: ratio(t, above, below)).items():
        one = Estimate(*(t.squeeze(0) for t in estimate))
        rows += measured(layer, name, one, sums[layer].totals[0, 0, below])
    return rows


PREDICTION = Prediction(__name__, DECLARATION, statistics, evaluate, null, verdict, order=130, baseline="matched")
