"""Pair energy of the tokens of a sequence, and its changes over depth.

    E        = sum_ij exp(beta <u_i, u_j>)         u = x / |x|: the tokens of one sequence, on the unit sphere
    change   = log E after a block - log E before  mean over sequences; block: up to the next attention layer

Read next: observables/residual_stream.py (the sublayer boundaries), ../../dynamics/observables.py.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch

from ..._typing import Bool, Float, Int, Tensor
from ...dynamics.intervals import band_of_mean
from ...dynamics.observables import OBSERVABLES
from ..batch_pass import BatchPass
from ..corpus.batching import Batch
from ..hypothesis_tests import NOTHING_MEASURED, Bounds, bootstrapped, conclude, judge, measured
from ..inside.events import Attended, Event, ForwardOutput
from ..prediction import Baseline, Prediction, Probed
from ..runs.judgement import Judgement, Measured, Ruling
from ..runs.records import PREDICTED, Declaration, Detail, Finding, Label, Quantity, Remark
from ..statistics import Estimate, Sample, Sums, bootstrap, mean, sample_of, sums_of, token_hashes
from .observables.residual_stream import Depth, depth_of, stack_of

TOKENS = 64  # compared in each sequence
SEQUENCES = 16  # stored for statistics that are no sums
LEAST = 0.001  # smallest relevant change of log E
LEVEL = 0.05
ENERGY, SHARPER = "log pair energy", "log pair energy, beta = sqrt(D)"
CHANGE, RISES, BY_ATTENTION = "change", "sequences that rise", "change by attention"
NORMALIZER, OF_LOGITS = "log normalizer", "log pair energy of logits"
SHARE, TOTAL = "share of steps that rise", "change over depth"
BASELINE = "share of steps that rise, random weights"
OBSERVED = {"mean_fraction": "mean fraction", "rank_one_residual": "rank-one residual", "clusters": "clusters"}
RANK = "effective rank"
COUNT = "tokens"

FORMULAS = """\
    E        = sum_ij exp(beta <u_i, u_j>)         u = x / |x|: the tokens of one sequence, on the unit sphere
    change   = log E after a block - log E before  mean over sequences; block: up to the next attention layer

    log normaliser               sum_i G_i / n                     G_i: log normaliser of token i; mean over heads
    log pair energy of logits    log sum_i exp(G_i) - 2 log n      mean over heads
    share of the mean token      |m|² / E|x|²                      m: mean of the tokens of a sequence
    effective rank               exp H(λ / sum λ)                  λ: eigenvalues of their covariance, H: entropy
    rank-one residual            |X - 1 mᵀ| / |X|                  X: the tokens as rows; 0 if all tokens are equal
                                 |A| = sqrt(largest column sum x largest row sum of |a_ij|)
    clusters                     groups of tokens that are linked by distances of less than 5 % of sqrt(E|x|²)"""

DECLARATION = Declaration(
    title="Pair energy over depth",
    kind=PREDICTED,
    claim="The pair energy of the tokens of a sequence does not decrease from layer to layer.",
    formula=(
        "share of blocks with a positive change. Change of a block: log E after the block - log E before it, mean "
        "over sequences. E = sum_ij exp(<u_i, u_j>): pair energy of a sequence with tokens u_i = x_i / |x_i|. Block: "
        "an attention layer and all that follows it, up to the next attention layer or the end of the model"
    ),
    supports=(
        "No block decreases the pair energy, and so many blocks increase it that a random order of the depths is "
        f"rejected (permutation test on the number of these blocks, p <= {LEVEL:g}). A block increases it if its "
        f"change is above {LEAST:g} and above that of the random-weights baseline, at FDR 5 % over all blocks."
    ),
    refutes=f"A block decreases the pair energy: its change is below {-LEAST:g}, at FDR 5 % over all blocks.",
    method=(
        FORMULAS,
        "Attention whose values are its keys never decreases E, with or without projection to the sphere, if all "
        "layers share one symmetric positive QK matrix and no key is masked [theory 5.3]. Models whose layers share "
        "their weights come nearest to these assumptions; in other models, and through feed-forward maps, decreases "
        "are expected. Tokens are projected to the sphere because the norm of the residual stream grows with depth. "
        "beta is 1. The energy is also reported for beta = sqrt(D): then beta <u_i, u_j> is the logit <x_i, x_j> / "
        "sqrt(D) of tokens of norm sqrt(D). At this beta each token attends almost only to itself. log E is computed "
        "at every sublayer boundary of the residual stream: before each sublayer, and at the end. In a sequence of n "
        f"tokens a random subset of m = min({TOKENS}, n) tokens is compared, and sum_{{i != j}} is scaled by n (n - 1) "
        "/ (m (m - 1)).",
        "The share of the mean token, the effective rank, the rank-one residual and the number of clusters are means "
        f"over {SEQUENCES} sequences.",
        "Nulls: for changes, the random-weights baseline, whose nearly uniform averages over tokens can also increase "
        "the pair energy. For the share of increases, a random order of depths: the number of increases among L + 1 "
        "numbers in random order has the Eulerian distribution, with mean L/2.",
    ),
    decision_rule=(
        "A block whose 95 % confidence interval lies below "
        f"{-LEAST:g} is inconclusive if its p-value is too large for FDR 5 %: a single decrease among L blocks needs p "
        "<= 0.05 / L. The result states the number of such blocks. With fewer than three layers the permutation test "
        "cannot reject a random order."
    ),
    quantities={
        ENERGY: Quantity("nats", "log Σᵢⱼ exp⟨uᵢ, uⱼ⟩,  u = x / |x|"),
        SHARPER: Quantity("nats", "log Σᵢⱼ exp(√D ⟨uᵢ, uⱼ⟩),  u = x / |x|"),
        OF_LOGITS: Quantity("nats", "log Σᵢ exp Gᵢ − 2 log n"),
        CHANGE: Quantity("nats", "Δ log Σᵢⱼ exp⟨uᵢ, uⱼ⟩ over a block"),
        BY_ATTENTION: Quantity("nats", "Δ log Σᵢⱼ exp⟨uᵢ, uⱼ⟩ over attention"),
        TOTAL: Quantity("nats", "Δ log Σᵢⱼ exp⟨uᵢ, uⱼ⟩ over all blocks"),
        RISES: Quantity("share of sequences", "P(Δ log E > 0)"),
        SHARE: Quantity("share of blocks", "P(Δ log E > 0)"),
        BASELINE: Quantity("share of blocks", "P(Δ log E > 0)"),
        NORMALIZER: Quantity("nats", "Σᵢ Gᵢ / n"),
        OBSERVED["mean_fraction"]: Quantity("1", "|E x|² / E|x|²"),
        OBSERVED["rank_one_residual"]: Quantity("1", "|X − 1 x̄ᵀ| / |X|"),
        OBSERVED["clusters"]: Quantity("count", "linked at 5 % of √E|x|²"),
        RANK: Quantity("dimensions", "exp H(λ / Σλ),  λ of Cov(x)"),
    },
    statistic="share of blocks with increasing pair energy",
    null="random-order null",
    unit="block",
    outcomes=("increase the pair energy", "decrease it"),
    details={
        "p_value": Label("p-value of the permutation test over depths", "{:.2g}"),
        "baseline": Label("share of increasing blocks in the random-weights baseline"),
        "attention_alone": Label("blocks whose attention alone increases the pair energy"),
        "uncorrected": Label(
            f"blocks whose 95 % confidence interval lies below {-LEAST:g}, but whose decrease is not significant at "
            "FDR 5 % (inconclusive)"
        ),
    },
    remarks={
        NOTHING_MEASURED: "No residual stream was recognised.",
        "tied": "The theorem behind the claim assumes that all layers share their weights, as they do here.",
        "untied": "The theorem behind the claim assumes that all layers share their weights; here they do not.",
    },
    labels={
        "log normalizer": "log normaliser",
        "mean fraction": "share of the mean token in the mean squared norm",
        "change": "change of log pair energy over a block",
        "change by attention": "change of log pair energy by attention",
        "change over depth": "change of log pair energy over all blocks",
        "sequences that rise": "share of sequences whose pair energy increases",
        "share of steps that rise": "share of blocks with increasing pair energy",
        "share of steps that rise, random weights": "share of increasing blocks, random-weights baseline",
    },
    places={
        **dict.fromkeys((ENERGY, SHARPER), "sublayer boundaries"),
        **dict.fromkeys((*OBSERVED.values(), RANK), "depths"),
        **dict.fromkeys((NORMALIZER, OF_LOGITS, BY_ATTENTION), "attention layers"),
    },
)


class State(NamedTuple):
    """Sums over sequences by layer, and sampled sequences by stack.

    energies: log pair energies at every sublayer boundary; steps, attention: their changes over a block and over
    attention; logits: the log normalisers.
    """

    energies: Mapping[str, Sums] = {}
    steps: Mapping[str, Sums] = {}
    attention: Mapping[str, Sums] = {}
    logits: Mapping[str, Sums] = {}
    samples: Mapping[str, Sample] = {}


class _Before(NamedTuple):
    layer: str
    stack: str
    energies: Float[Tensor, "b 2"]


@dataclass
class _Memory:
    """Columns of each kind and layer; the last block; sampled tokens and sequences, by stack."""

    columns: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    before: _Before | None = None
    chosen: "dict[str, _Chosen]" = field(default_factory=dict)
    sequences: dict[str, tuple[Tensor, dict[str, Tensor]]] = field(default_factory=dict)


def statistics(event: Event | ForwardOutput, batch_pass: BatchPass) -> State | None:
    """Energies at every sublayer boundary and their changes, summed over sequences; sampled sequences."""
    memory = batch_pass.memory(_Memory)
    columns = memory.columns
    if isinstance(event, Attended):
        _of_logits(event, batch_pass, columns)
        return None
    depth = depth_of(event, batch_pass)
    if depth is not None:
        taken = _taken(depth, batch_pass, memory)
        block = depth.attention or isinstance(event, ForwardOutput)
        log_E = energies(taken)
        columns["energies", depth.layer] = _columns(log_E, taken)
        before = memory.before
        if before is not None and before.stack == depth.stack:
            change = log_E[:, :1] - before.energies[:, :1]
            columns["steps" if block else "attention", before.layer] = _columns(
                torch.cat((change, (change > 0).to(change)), 1), taken
            )
        if depth.attention:
            memory.before = _Before(depth.layer, depth.stack, log_E)
        if block:
            _keep(depth, taken, memory)
    if not isinstance(event, ForwardOutput) or not columns:
        return None
    # One sum over all layers costs as much as that of a single layer.
    totals = sums_of(torch.stack(list(columns.values()), 1), batch_pass.documents).totals.unbind(1)
    sums: dict[str, dict[str, Sums]] = {}
    for (name, layer), each in zip(columns, totals, strict=True):
        sums.setdefault(name, {})[layer] = Sums(each)
    sequences = memory.sequences.items()
    samples = {name: sample_of(vectors, hashes, size=SEQUENCES) for name, (hashes, vectors) in sequences}
    return State(samples=samples, **sums)


def evaluate(state: State, model: Probed) -> list[Measured]:
    """Energies and changes (bootstrap); statistics of sequences (t interval of their mean)."""
    rows = []
    columns = (
        (state.energies, {ENERGY: 1, SHARPER: 2}),
        (state.steps, {CHANGE: 1, RISES: 2}),
        (state.attention, {BY_ATTENTION: 1}),
        (state.logits, {NORMALIZER: 1, OF_LOGITS: 2}),
    )
    for of_layers, quantities in columns:
        sums = {layer: Sums(each.totals.unsqueeze(1)) for layer, each in of_layers.items()}
        for quantity, column in quantities.items():
            for layer, estimate in bootstrapped(sums, partial(mean, column=column)).items():
                one = Estimate(*(t.squeeze(0) for t in estimate))
                rows += measured(layer, quantity, one, sums[layer].totals[0, 0, 3])
    for sample in state.samples.values():
        rows += _observed(sample)
    steps = list(state.steps.values())
    if steps:
        tokens = int(steps[0].totals[0, 3])
        rising = [float(mean(sums.totals[0])) > 0 for sums in steps]
        rows.append(Measured("", None, SHARE, sum(rising) / len(rising), tokens=tokens))
        rows.append(Measured("", None, BASELINE, sum(rising) / len(rising), tokens=tokens))
        total = Sums(torch.stack([sums.totals for sums in steps]).mean(0))
        rows += measured("", TOTAL, bootstrap(lambda totals: len(steps) * mean(totals), total), tokens)
    return rows


def null(state: State, model: Probed, baseline: Baseline[State] | None) -> list[Measured]:
    """Values of the random-weights baseline; for the share of steps that rise, a random order of depths."""
    rows = []
    if steps := len(state.steps):
        chance = torch.tensor(_ascents_of(state.steps), dtype=torch.float64)
        low, high = (int((chance.cumsum(0) < p).sum()) for p in (0.025, 0.975))
        rows.append(Measured("", None, SHARE, 0.5, low / steps, high / steps))
    others = [] if baseline is None else evaluate(baseline.state, model)
    return rows + [m for m in others if m.quantity != SHARE]


def verdict(findings: list[Finding]) -> Judgement:
    """Judge every block by its change, and the model by the permutation test over depths."""

    def bounds(f: Finding) -> Bounds:
        return Bounds(LEAST if math.isnan(f.null_high) else max(LEAST, f.null_high), -LEAST)

    ruled = judge(findings, CHANGE, bounds)
    judgement = conclude(ruled, CHANGE)
    if not judgement.judged:
        return judgement
    of_model = {f.quantity: f for f in ruled if not f.layer}
    p = sum(_ascents_of(f.layer for f in ruled if f.quantity == CHANGE)[judgement.supported :])
    ruling: Ruling = "refuted" if judgement.refuted else "supported" if p <= LEVEL else "inconclusive"
    details = [Detail("p_value", p)]
    if not math.isnan(random := of_model[BASELINE].null):
        details.append(Detail("baseline", random))
    if alone := [f.value > 0 for f in ruled if f.quantity == BY_ATTENTION]:
        details.append(Detail("attention_alone", count=sum(alone), total=len(alone)))
    if uncorrected := sum(f.verdict == "inconclusive" and f.high < -LEAST for f in ruled if f.quantity == CHANGE):
        details.append(Detail("uncorrected", count=uncorrected, total=judgement.judged))
    f = of_model[SHARE]
    return judgement._replace(
        verdict=ruling,
        quantity=SHARE,
        **{name: getattr(f, name) for name in ("value", "low", "high", "null", "null_low", "null_high")},
        details=tuple(details),
        remarks=(Remark("tied" if any(f.call > 1 for f in ruled) else "untied"),),
    )


def energies(taken: "Taken") -> Float[Tensor, "b 2"]:
    """log E - 2 log n of each sequence, [b, 2], on the unit sphere, with beta 1 and sqrt(D)."""
    u = taken.x / taken.x.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(taken.x.dtype).tiny)
    g = u @ u.mT
    pairs = (taken.valid.unsqueeze(-1) & taken.valid.unsqueeze(-2)).float().triu(1).bool()
    m, n = taken.valid.sum(1).double(), taken.tokens
    scale = n * (n - 1) / (m * (m - 1)).clamp(min=1.0)
    log_energies = []
    for beta in (1.0, math.sqrt(u.shape[-1])):
        others = 2 * (beta * (g - 1)).exp().masked_fill(~pairs, 0.0).sum((-2, -1)).double()
        log_energies.append(beta + (n + scale * others).log() - 2 * n.log())
    return torch.stack(log_energies, -1)


def ascents(steps: int) -> list[float]:
    """Probabilities of 0, 1, ... rises among steps + 1 numbers in random order: Eulerian numbers / (steps + 1)!."""
    chance = [1.0]
    for n in range(2, steps + 2):
        padded = [0.0, *chance, 0.0]
        chance = [((k + 1) * padded[k + 1] + (n - k) * padded[k]) / n for k in range(n)]
    return chance


def _ascents_of(layers: Iterable[str]) -> list[float]:
    """Probabilities of 0, 1, ... rises over all steps of a model, with independent orders of its stacks."""
    chance = [1.0]
    for steps in Counter(stack_of(layer) for layer in layers).values():
        one = ascents(steps)
        both = [0.0] * (len(chance) + steps)
        for i, p in enumerate(chance):
            for k, q in enumerate(one):
                both[i + k] += p * q
        chance = both
    return chance


# In a batch ----------------------------------------------------------------------------------------------------------


class Taken(NamedTuple):
    """Sampled tokens of each sequence, and its number of tokens."""

    x: Float[Tensor, "b m D"]
    valid: Bool[Tensor, "b m"]
    tokens: Float[Tensor, " b"]


class _Chosen(NamedTuple):
    places: Int[Tensor, "b m"]
    valid: Bool[Tensor, "b m"]
    tokens: Float[Tensor, " b"]
    sequences: Int[Tensor, " s"]
    hashes: Int[Tensor, " s"]


def _taken(depth: Depth, batch_pass: BatchPass, memory: _Memory) -> Taken:
    """Tokens of smallest hash of each sequence, chosen once for a stack, on the CPU."""
    if depth.stack not in memory.chosen:
        memory.chosen[depth.stack] = _choose(depth, batch_pass.batch)
    chosen = memory.chosen[depth.stack]
    x = depth.stream.gather(1, chosen.places.unsqueeze(-1).expand(-1, -1, depth.stream.shape[2]))
    x = (x if x.dtype == torch.float64 else x.float()).masked_fill(~chosen.valid.unsqueeze(-1), 0.0)
    return Taken(x, chosen.valid, chosen.tokens)


def _choose(depth: Depth, batch: Batch) -> _Chosen:
    n, device = depth.stream.shape[1], depth.stream.device
    mask, keys, starts = depth.mask.cpu(), batch.keys.cpu(), batch.starts.cpu()
    hashes = token_hashes(keys, starts.unsqueeze(-1) + torch.arange(n)).masked_fill(~mask, 2**63 - 1)
    places = hashes.topk(min(TOKENS, n), dim=1, largest=False).indices.sort(1).values
    several = mask.sum(1) >= 2
    first = token_hashes(keys, starts.unsqueeze(-1)).squeeze(-1).masked_fill(~several, 2**63 - 1)
    least, sequences = first.topk(min(SEQUENCES, int(several.sum())), largest=False)
    tensors = (places, mask.gather(1, places), mask.sum(1).double(), sequences)
    places, valid, tokens, sequences = (t.to(device, non_blocking=True) for t in tensors)
    return _Chosen(places, valid, tokens, sequences, least)


def _keep(depth: Depth, taken: Taken, memory: _Memory) -> None:
    """Store the tokens of the sequences of smallest hash, in the precision of the stream, padded to one size."""
    chosen, held = memory.chosen[depth.stack], memory.sequences
    if depth.stack not in held:
        held[depth.stack] = (chosen.hashes, {COUNT: chosen.valid[chosen.sequences].sum(1)})
    x = taken.x[chosen.sequences].to(depth.stream.dtype)
    # Valid tokens come first; all samples have one shape.
    order = (~chosen.valid[chosen.sequences]).int().argsort(dim=1, stable=True)
    x = x.gather(1, order.unsqueeze(-1).expand_as(x))
    held[depth.stack][1][depth.layer] = torch.nn.functional.pad(x, (0, 0, 0, TOKENS - x.shape[1]))


def _columns(values: Float[Tensor, "b 2"], taken: Taken) -> Float[Tensor, "b 4"]:
    """1, the values and the number of compared tokens, [b, 4], for sequences of two or more tokens, else 0."""
    several = (taken.tokens >= 2).unsqueeze(-1)
    columns = torch.cat((torch.ones_like(values[:, :1]), values, taken.valid.sum(1, keepdim=True).to(values)), 1)
    return columns.masked_fill(~several, 0.0)


def _of_logits(event: Attended, batch_pass: BatchPass, columns: dict[tuple[str, str], Tensor]) -> None:
    """Add the mean log normaliser of each sequence, and the pair energy of its logits."""
    G = event.attention.log_normalizer
    if event.crosses or len(G) != len(batch_pass.batch.keys):
        return
    visible = batch_pass.real(event).unsqueeze(1) & event.attention.seen
    n = visible.sum(-1).to(G.dtype)
    total = G.masked_fill(~visible, 0.0).sum(-1) / n.clamp(min=1.0)
    energy = G.masked_fill(~visible, -torch.inf).logsumexp(-1) - 2 * n.clamp(min=1.0).log()
    one, tokens = torch.ones_like(n[:, :1]), n.amax(1, keepdim=True)
    row = torch.cat((one, total.mean(1, keepdim=True), energy.mean(1, keepdim=True), tokens), 1)
    columns["logits", event.layer] = row.masked_fill(~(n > 0).all(1, keepdim=True), 0.0).double()


# The merged sequences ------------------------------------------------------------------------------------------------


def _observed(sample: Sample) -> Iterator[Measured]:
    """Means over sequences of the observables of their tokens, at every depth."""
    counts = sample.vectors[COUNT].tolist()
    for layer, sequences in sample.vectors.items():
        if layer == COUNT or not counts:
            continue
        clouds = [x[:m].double() for x, m in zip(sequences, counts, strict=True)]
        values = {
            quantity_name: [OBSERVABLES[name](x, None, None) for x in clouds]
            for name, quantity_name in OBSERVED.items()
        }
        values[RANK] = [OBSERVABLES["effective_rank"](_turned(x), None, None) for x in clouds]
        for quantity, observed in values.items():
            each = torch.stack(observed).double()
            low, high = math.nan, math.nan
            if len(each) > 1:
                low, _, high = (float(end) for end in band_of_mean(each, level=0.95))
            yield Measured(layer, None, quantity, float(each.mean()), low, high, sum(counts))


def _turned(x: Float[Tensor, "m D"]) -> Float[Tensor, "m k"]:
    """Tokens in coordinates of their span, with the same eigenvalues: m tokens need no D x D matrix."""
    return torch.linalg.qr(x.mT).R.mT if len(x) < x.shape[1] else x


PREDICTION = Prediction(__name__, DECLARATION, statistics, evaluate, null, verdict, empty=State, order=110)
