"""Pair energy of the tokens of a sequence: its change by tied attention, where a theorem holds, and over depth.

    E_B      = sum_ij exp(beta <x_i, B x_j>)       tokens of one sequence that attention with QK matrix B reads
    change   = log E_B after attention - before    >= 0 for one head, B symmetric and positive, OV = tau B, no mask
    E        = sum_ij exp(<u_i, u_j>)              u = x / |x|: the same tokens on the unit sphere, over depth

Read next: observables/residual_stream.py (the sublayer boundaries), ../../dynamics/observables.py.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch

from ..._typing import Bool, Float, Int, Tensor
from ...dynamics.intervals import band_of_mean
from ..batch_pass import BatchPass
from ..corpus.batching import Batch
from ..hypothesis_tests import (
    NOTHING_MEASURED,
    TEST_DETAILS,
    Bounds,
    absent,
    beyond_the_null,
    bootstrapped,
    conclude,
    judge,
    measured,
    median_detail,
    random_band,
)
from ..inside.architecture import Sublayer
from ..inside.events import Attended, AttentionArguments, Event, ForwardOutput, Passed
from ..inside.head_weights import centred
from ..inside.norm_sphere import norm_of_updates, on_sphere, tangential
from ..planted_power import planted_power
from ..prediction import Baseline, Prediction, Probed
from ..runs.judgement import Judgement, Measured
from ..runs.records import PREDICTED, Declaration, Detail, Finding, Label, Quantity, Remark
from ..statistics import Estimate, Sample, Sums, bootstrap, mean, sample_of, sums_of, token_hashes
from .observables.attention_rows import keys_seen
from .observables.head_factors import Factors, cosine, factors_of, positive_cosine, products
from .observables.moved_tokens import DRAWS, rotated
from .observables.residual_stream import Depth, depth_of

TOKENS = 64  # compared in each sequence
SEQUENCES = 16  # stored for statistics that are no sums
LEAST = 0.001  # smallest relevant change of log E
TIED, VISIBLE_ALL = 0.9, 0.999  # the conditions of the theorem, as measured
UPDATE = " update"  # of a layer, in the stored sequences
JUDGED, REVERSED = "change by tied attention", "change by reversed attention"
HEADS, POSITIVE, TIE, VISIBLE = "heads", "smallest positive cosine", "smallest tie", "visible keys"
ENERGY = "log pair energy"
CHANGE, RISES, BY_ATTENTION = "change", "sequences that rise", "change by attention"
TOTAL = "change over depth"
COUNT = "tokens"

FORMULAS = """\
    E_B      = sum_ij exp(beta <x_i, B x_j>)       x: tokens that a layer reads, B: QK matrix of a head
    E        = sum_ij exp(beta <u_i, u_j>)         u = x / |x|: the tokens of one sequence, on the unit sphere
    change   = log E after a block - log E before  mean over sequences; block: up to the next attention layer"""

DECLARATION = Declaration(
    title="Pair energy by attention",
    kind=PREDICTED,
    claim="One unmasked head with tied, symmetric positive matrices increases the pair energy of its tokens.",
    formula=(
        "change = log E_B after the tangential part of the attention update and the projection to the sphere of the "
        "norm - log E_B before, mean over sequences; E_B = sum_ij exp(beta <x_i, B x_j>): pair energy of a sequence "
        "under the QK matrix B of the head and its scale beta. Only layers that satisfy the conditions of the theorem "
        "are judged"
    ),
    supports=(
        f"The change is above {LEAST:g}, above the null (the change by randomly rotated updates of equal norm), and "
        "above the change by the reversed update."
    ),
    refutes=f"The change is below {-LEAST:g} and below that null.",
    method=(
        FORMULAS,
        "If B is symmetric and positive semidefinite, W_v W_o = tau B with tau > 0 and no key is masked, the attention "
        "of one head alone never decreases E_B, with or without projection to the sphere, for any tau > 0 of each "
        "token [theory 5.3]. Nothing is claimed for several heads, for other matrices or through feed-forward maps. "
        "The conditions are measured: the number of heads, the smallest positive cosine |B_+| / |B| and the smallest "
        "cosine of OV and transposed QK matrices over the heads of a layer, and the share of its keys that a query "
        f"sees. A layer is judged if it has one head, both cosines are at least {TIED:g} and all keys are visible; "
        "without such a layer the claim is not applicable.",
        f"Null: {DRAWS} random rotations of the updates, which preserve the spectrum of the OV matrices.",
        "Descriptive, and not judged: the pair energy E of tokens on the unit sphere. Tokens are projected to the "
        "sphere because the norm of the residual stream grows with depth; beta is 1. log E is computed at every "
        "sublayer boundary of the residual stream: before each sublayer, and at the end. A block is an attention layer "
        "and all that follows it, up to the next attention layer or the end of the model. In a sequence of n tokens a "
        f"random subset of m = min({TOKENS}, n) tokens is compared, and sum_{{i != j}} is scaled by n (n - 1) / (m "
        "(m - 1)). Nearly uniform averages over tokens, as in untrained models, can also increase the pair energy: "
        "these values have no null.",
        f"The changes of E_B are means over {SEQUENCES} sequences.",
    ),
    decision_rule="The verdict on the model is that of more than half of the judged layers.",
    bounds={
        f"{LEAST:g}": (
            f"Half of {2 * LEAST:g}, the smallest change called interesting: the rise by a planted step size of about "
            "0.025, a fortieth of the attended mean."
        ),
        f"{TIED:g} (both cosines)": (
            "The theorem needs 1. At this cosine more than four fifths of the squared norm of a matrix is that of the "
            "matrix that the theorem assumes, and the increase is of first order in it."
        ),
        f"{VISIBLE_ALL:g} (visible keys)": "All keys, up to the rounding of a mean over rows.",
    },
    interesting=f"A change of {2 * LEAST:g} nats.",
    power=planted_power("pair_energy"),
    quantities={
        JUDGED: Quantity("nats", "Δ log Σᵢⱼ exp(β⟨xᵢ, Bxⱼ⟩) over attention"),
        REVERSED: Quantity("nats", "Δ log Σᵢⱼ exp(β⟨xᵢ, Bxⱼ⟩) over attention with −W_v W_o"),
        HEADS: Quantity("count", "heads of the layer"),
        POSITIVE: Quantity("1", "min over heads |B₊| / |B|"),
        TIE: Quantity("1", "min over heads cos(W_v W_o, W_k W_qᵀ)"),
        VISIBLE: Quantity("share of keys", "visible keys / n"),
        ENERGY: Quantity("nats", "log Σᵢⱼ exp⟨uᵢ, uⱼ⟩,  u = x / |x|"),
        CHANGE: Quantity("nats", "Δ log Σᵢⱼ exp⟨uᵢ, uⱼ⟩ over a block"),
        BY_ATTENTION: Quantity("nats", "Δ log Σᵢⱼ exp⟨uᵢ, uⱼ⟩ over attention"),
        TOTAL: Quantity("nats", "Δ log Σᵢⱼ exp⟨uᵢ, uⱼ⟩ over all blocks"),
        RISES: Quantity("share of sequences", "P(Δ log E > 0)"),
    },
    statistic="median change of log pair energy by attention",
    null_reason=(
        f"{DRAWS} rotations keep the norms of the updates and the spectra of the matrices, and destroy their "
        "relation to the tokens; the reversed update shows that the sign matters."
    ),
    null="random-rotation null",
    unit="attention layer",
    number="{:.3f}",
    outcomes=("increase the pair energy", "decrease it"),
    details={
        REVERSED: Label("median change by reversed updates", "{:.3f}"),
        HEADS: Label("median over layers of the number of heads", "{:.0f}"),
        POSITIVE: Label("of the smallest positive cosine of QK matrices"),
        TIE: Label("of the smallest cosine of OV and transposed QK matrices"),
        VISIBLE: Label("of the share of visible keys"),
        "rising_blocks": Label("blocks that increase the pair energy on the unit sphere (descriptive)"),
        **TEST_DETAILS,
    },
    remarks={
        NOTHING_MEASURED: "No residual stream was recognised.",
        "conditions": (
            "No attention layer satisfies the conditions of the theorem: one head, both cosines at least "
            f"{TIED:g}, no masked keys."
        ),
    },
    labels={
        POSITIVE: "smallest positive cosine of the QK matrices of a layer",
        TIE: "smallest cosine of OV and transposed QK matrices of a layer",
        VISIBLE: "share of visible keys",
        "change": "change of log pair energy over a block",
        "change by attention": "change of log pair energy by attention",
        "change over depth": "change of log pair energy over all blocks",
        "sequences that rise": "share of sequences whose pair energy increases",
    },
    places={
        ENERGY: "sublayer boundaries",
        **dict.fromkeys((CHANGE, RISES), "blocks"),
    },
)


class State(NamedTuple):
    """Sums over sequences by layer, and sampled sequences by stack.

    energies: log pair energies at every sublayer boundary; steps, attention: their changes over a block and over
    attention; visible: the share of visible keys, and the scale of the logits.
    """

    energies: Mapping[str, Sums] = {}
    steps: Mapping[str, Sums] = {}
    attention: Mapping[str, Sums] = {}
    visible: Mapping[str, Sums] = {}
    samples: Mapping[str, Sample] = {}


class _Before(NamedTuple):
    layer: str
    stack: str
    log_energy: Float[Tensor, " b"]


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
        _add_visible(event, batch_pass, columns)
        return None
    depth = depth_of(event, batch_pass)
    if depth is not None:
        taken = _taken(depth, batch_pass, memory)
        block = depth.attention or isinstance(event, ForwardOutput)
        log_E = log_energy(taken)
        columns["energies", depth.layer] = _columns(log_E, taken)
        before = memory.before
        if before is not None and before.stack == depth.stack:
            change = log_E - before.log_energy
            columns["steps" if block else "attention", before.layer] = _columns(change, taken)
        if depth.attention:
            memory.before = _Before(depth.layer, depth.stack, log_E)
        if depth.attention and isinstance(event, Passed):
            _keep(depth.layer, taken.x, depth, memory)
            update = depth._replace(stream=event.update)
            _keep(depth.layer + UPDATE, _taken(update, batch_pass, memory).x, update, memory)
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
    """Energies and changes (bootstrap); changes of E_B of single sequences (t interval of their mean)."""
    rows = []
    columns = (
        (state.energies, {ENERGY: 1}),
        (state.steps, {CHANGE: 1, RISES: 2}),
        (state.attention, {BY_ATTENTION: 1}),
    )
    for of_layers, quantities in columns:
        sums = {layer: Sums(each.totals.unsqueeze(1)) for layer, each in of_layers.items()}
        for quantity, column in quantities.items():
            for layer, estimate in bootstrapped(sums, partial(mean, column=column)).items():
                one = Estimate(*(t.squeeze(0) for t in estimate))
                rows += measured(layer, quantity, one, sums[layer].totals[0, 0, 3])
    steps = list(state.steps.values())
    if steps:
        tokens = int(steps[0].totals[0, 3])
        total = Sums(torch.stack([sums.totals for sums in steps]).mean(0))
        rows += measured("", TOTAL, bootstrap(lambda totals: len(steps) * mean(totals), total), tokens)
    for each in _judged(state, model):
        rows += each.conditions
        if each.changes is None:
            rows.append(absent(each.layer, JUDGED))
            continue
        for quantity, changes in zip((JUDGED, REVERSED), each.changes, strict=False):
            rows.append(Measured(each.layer, None, quantity, *_interval(changes), each.tokens, len(changes) - 1.0))
    return rows


def null(state: State, model: Probed, baseline: Baseline[State] | None) -> list[Measured]:
    """Changes by rotated updates."""
    rows = []
    for each in _judged(state, model):
        if each.changes is not None:
            draws = each.changes[2:].mean(1)
            rows.append(random_band(each.layer, None, JUDGED, draws))
    return rows


def verdict(findings: list[Finding]) -> Judgement:
    """Judge every layer that satisfies the conditions of the theorem by its change of the pair energy."""
    reversed_ = {(f.layer, f.call): f.high for f in findings if f.quantity == REVERSED}

    def bounds(f: Finding) -> Bounds:
        bounds = beyond_the_null(f, LEAST)
        return bounds._replace(supports=max(bounds.supports, reversed_.get((f.layer, f.call), LEAST)))

    judgement = conclude(judge(findings, JUDGED, bounds), JUDGED)
    conditions = [median_detail(key, findings, key) for key in (HEADS, POSITIVE, TIE, VISIBLE)]
    if all(math.isnan(detail.value) for detail in conditions):
        return judgement
    steps = [f.value > 0 for f in findings if f.quantity == CHANGE]
    descriptive = Detail("rising_blocks", count=sum(steps), total=len(steps))
    if not judgement.judged:
        return judgement._replace(details=(*conditions, descriptive), remarks=(Remark("conditions"),))
    details = (median_detail(REVERSED, findings, REVERSED), *conditions, descriptive, *judgement.details)
    return judgement._replace(details=details)


class _Judged(NamedTuple):
    """Conditions of the theorem in a layer; changes by its update, reversed and rotated, if they hold."""

    layer: str
    conditions: list[Measured]
    changes: Float[Tensor, "k s"] | None
    tokens: int


def _judged(state: State, model: Probed) -> list[_Judged]:
    """Conditions and changes of every attention layer whose matrices and tokens are known."""

    def compute() -> list[_Judged]:
        return [each for sample in state.samples.values() for each in _of_sample(sample, state.visible, model)]

    return model.computed.once(state, "judged", compute)


def _of_sample(sample: Sample, visible: Mapping[str, Sums], model: Probed) -> Iterator[_Judged]:
    counts = sample.vectors[COUNT].tolist()
    for layer in model.weights:
        factors, sublayer = factors_of(model, layer), model.architecture.branch_of(layer)
        if factors is None or sublayer is None or layer not in visible or layer + UPDATE not in sample.vectors:
            continue
        f = _on_stream(factors, sublayer)
        share, scale = (float(mean(visible[layer].totals[0], column)) for column in (1, 2))
        heads, positive, tied = len(f.query), float(positive_cosine(f).min()), float(cosine(*products(f)).min())
        numbers = {HEADS: heads, POSITIVE: positive, TIE: tied, VISIBLE: share}
        conditions = [Measured(layer, None, name, value, value, value) for name, value in numbers.items()]
        # A layer that adds nothing has no cosine, and NaN satisfies no condition.
        if not (heads == 1 and positive >= TIED and tied >= TIED and share >= VISIBLE_ALL and counts):
            yield _Judged(layer, conditions, None, 0)
            continue
        sequences = zip(*(sample.vectors[name] for name in (layer, layer + UPDATE)), counts, strict=True)
        changes = [_changes(x[:m].cpu().double(), D[:m].cpu().double(), f, sublayer, scale) for x, D, m in sequences]
        yield _Judged(layer, conditions, torch.stack(changes, 1), sum(counts))


def _on_stream(f: Factors, sublayer: Sublayer) -> Factors:
    """Factors on the tokens of the residual stream, normalised without gain and bias by the norm before the layer."""
    norm = sublayer.reads
    if norm is None:
        return f
    value, key = norm.gain.unsqueeze(-1) * f.value, norm.gain.unsqueeze(-1) * f.key
    return (
        f._replace(value=centred(value, -2), key=centred(key, -2)) if norm.centres else f._replace(value=value, key=key)
    )


def _changes(
    x: Float[Tensor, "m D"], D: Float[Tensor, "m D"], f: Factors, sublayer: Sublayer, scale: float
) -> Float[Tensor, " k"]:
    """Changes of log E_B by the tangential update, by the reversed one and by rotated ones of equal norm."""
    norm = norm_of_updates(sublayer)
    T = tangential(x, D, norm)
    turned = tangential(x, rotated(T).movedim(-2, 0), norm)
    turned = turned * (T.norm(dim=-1, keepdim=True) / turned.norm(dim=-1, keepdim=True))
    moved = on_sphere(x, torch.cat((torch.stack((torch.zeros_like(T), T, -T)), turned)), norm)
    if sublayer.reads is not None:
        moved = moved - moved.mean(-1, keepdim=True) if sublayer.reads.centres else moved
        moved = moved * moved.square().mean(-1, keepdim=True).rsqrt()
    q, k = (torch.einsum("smD,hDd->shmd", moved, W) for W in (f.query, f.key))
    log_E = (scale * q @ k.mT).flatten(-2).logsumexp(-1).mean(-1)
    return log_E[1:] - log_E[0]


def _interval(values: Float[Tensor, " s"]) -> tuple[float, float, float]:
    """Mean over sequences with its t interval."""
    if len(values) < 2:
        return float(values.mean()), math.nan, math.nan
    low, _, high = (float(end) for end in band_of_mean(values, level=0.95))
    return float(values.mean()), low, high


def log_energy(taken: "Taken") -> Float[Tensor, " b"]:
    """log E - 2 log n of each sequence on the unit sphere."""
    u = taken.x / taken.x.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(taken.x.dtype).tiny)
    pairs = (taken.valid.unsqueeze(-1) & taken.valid.unsqueeze(-2)).float().triu(1).bool()
    m, n = taken.valid.sum(1).double(), taken.tokens
    scale = n * (n - 1) / (m * (m - 1)).clamp(min=1.0)
    others = 2 * (u @ u.mT - 1).exp().masked_fill(~pairs, 0.0).sum((-2, -1)).double()
    return 1 + (n + scale * others).log() - 2 * n.log()


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


def _keep(name: str, x: Float[Tensor, "b m D"], depth: Depth, memory: _Memory) -> None:
    """Store vectors of the sequences of smallest hash, in the precision of the stream, padded to one size."""
    chosen, held = memory.chosen[depth.stack], memory.sequences
    if depth.stack not in held:
        held[depth.stack] = (chosen.hashes, {COUNT: chosen.valid[chosen.sequences].sum(1)})
    x = x[chosen.sequences].to(depth.stream.dtype)
    # Valid tokens come first; all samples have one shape.
    order = (~chosen.valid[chosen.sequences]).int().argsort(dim=1, stable=True)
    x = x.gather(1, order.unsqueeze(-1).expand_as(x))
    held[depth.stack][1][name] = torch.nn.functional.pad(x, (0, 0, 0, TOKENS - x.shape[1]))


def _columns(values: Float[Tensor, " b"], taken: Taken) -> Float[Tensor, "b 4"]:
    """1, the value, whether it is positive, and the number of compared tokens, for sequences of two or more, else 0."""
    columns = torch.stack((torch.ones_like(values), values, (values > 0).to(values), taken.valid.sum(1).to(values)), 1)
    return columns.masked_fill(~(taken.tokens >= 2).unsqueeze(-1), 0.0)


def _add_visible(event: Attended, batch_pass: BatchPass, columns: dict[tuple[str, str], Tensor]) -> None:
    """Add the share of the keys that queries of a sequence see, and the scale of the logits."""
    real = batch_pass.real(event)
    if event.crosses or len(real) != len(batch_pass.batch.keys) or not isinstance(event.call, AttentionArguments):
        return
    tokens = real.sum(1, keepdim=True)
    share = (keys_seen(event, batch_pass).mean(1) * real).sum(1, keepdim=True) / tokens.square()
    one = torch.ones_like(share)
    columns["visible", event.layer] = torch.cat((one, share, event.call.scale * one, tokens), 1).double()


PREDICTION = Prediction(__name__, DECLARATION, statistics, evaluate, null, verdict, empty=State, order=110)
