"""Word vectors: is the partition function of a context nearly the same for all contexts?

    p(w | c)  = exp <c, v_w> / Z_c               Z_c = sum_w exp <c, v_w>                                    [arora16]
    sd        = sd_c(log Z_c) / s                c: uniform directions, of the norm at which logits have the sd s
    Z_c       ~ n exp(<c, Sigma c> / 2)          for many vectors N(0, Sigma): constant if Sigma is isotropic

Read next: ../inside/embeddings.py (the vectors), ../../contrastive (partition functions of candidates).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from ..._typing import Bool, Float, Int, Tensor
from ..batch_pass import BatchPass
from ..hypothesis_tests import NORMAL, NOTHING_MEASURED, describe, measured, median, median_detail
from ..inside.embeddings import WordVectors
from ..inside.events import Event, ForwardOutput, Passed
from ..prediction import Baseline, Prediction, Probed
from ..runs.judgement import Judgement, Measured
from ..runs.records import DESCRIPTIVE, Declaration, Finding, Label, Quantity
from ..statistics import Sums, bootstrap, correlation, mean, moment_columns, sums_of, variance
from .observables.attention_rows import at, chosen

PART = 16  # one token in PART is a context
FEWEST, MOST, LOGITS = 256, 4096, 2**24  # numbers of contexts, in pairs of opposite ones; logits of all contexts
UNIT = 1.0  # standard deviation of logits without a language-model head, in nats
NEAR = 0.1  # relative distance of Z_c from its mean

SD, SD_UNIT, SPECTRUM, RAW = (
    "sd of log Z",
    "sd of log Z at unit scale",
    "sd of log Z, Gaussian",
    "sd of log Z with mean",
)
WITHIN, COMMON, DIMENSION = "share of Z within a tenth", "share of the mean vector", "effective dimension"
SCALE, TEXT, EXPLAINED = "sd of logits", "sd of log Z over text", "R² of log Z over text"
LEVEL, LOOSE = "mean log Z of the model", "sd of log Z of the model"

FORMULAS = f"""\
    Z_c       = sum_w exp <c, v_w>                      v_w: word vectors, without their mean over words
    sd        = sd_c(log Z_c) / s                       c: uniform directions; |c|² tr Sigma / D = s², Sigma = Cov(v_w)
    s         = sd of the logits of words at tokens of the text (root mean square); {UNIT:g} without a head for words
    isotropic = the same for independent vectors of random directions and the norms of v_w
    Gaussian  = the same for independent vectors N(0, Sigma)
    over text = sd of log sum_w exp(l_w - mean l) over tokens, l_w: logits of the model"""

DECLARATION = Declaration(
    title="Concentration of log Z",
    kind=DESCRIPTIVE,
    claim="Word vectors are isotropic enough that the partition function of a context is nearly constant.",
    formula=(
        "sd = sd_c(log Z_c) / s, Z_c = sum_w exp <c, v_w>: standard deviation over contexts c of uniform directions, "
        "relative to the standard deviation s of the logits <c, v_w>. v_w: rows of the embedding or of the "
        "unembedding, without their mean. The norm of c is that at which logits have the standard deviation they have "
        f"at tokens of the text, for the unembedding of a language model; {UNIT:g} nat otherwise"
    ),
    refutes="",
    method=(
        FORMULAS,
        "In the context walk of Arora et al. (2016) [arora16] a text is emitted by a slowly moving context c, word w "
        "with probability exp<c, v_w> / Z_c, and isotropy of the word vectors makes Z_c nearly constant; the relation "
        "of word vectors to co-occurrence follows from this. They report that most Z_c of four word embeddings lie "
        "within a tenth of their mean. Shim (2022, appendix) draws a parallel to this walk; the theory of attention "
        "does not imply it. Independent random vectors, such as untrained embeddings, have a constant partition "
        "function: a small value means that training has preserved it.",
        "A vector added to all word vectors multiplies all probabilities of a context by the same number and changes "
        "Z_c; in many models an embedding of token types absorbs it as well. The mean over words is therefore "
        "subtracted, and the sd with the mean is reported beside. The scale of word vectors is fixed by that of the "
        "logits. The gain of the norm before an unembedding is part of v_w; where norms subtract the mean over "
        "features, v_w is without it. Biases are left out.",
        f"{FEWEST} to {MOST} contexts, the more the smaller the vocabulary, the same in every run. The relative error "
        "of a standard deviation over k contexts is 1 / sqrt(2 k); the band of the null contains that of both. Vectors "
        "N(0, Sigma) of the covariance of the word vectors show how much of the variation of Z_c is due to an uneven "
        "spectrum: log Z_c is then <c, Sigma c>/2 up to a constant.",
        f"Over text: contexts are one token in {PART}. If word vectors were isotropic, log Z_c would be a function of "
        "the norm of c, which is that of the variance of the logits; R² is the share of the variance of log Z_c that a "
        "linear function of this variance explains. Mean and sd of log Z of the model itself, without subtraction of "
        "the mean logit, show whether it normalises itself: both are 0 then.",
    ),
    decision_rule=(
        "The value of the model is the median over its embeddings: embedding and unembedding if the model has logits "
        "of words. At 0.1 the variance of log Z_c is a hundredth of that of a logit: log p(w | c) = <c, v_w> - log Z "
        "holds with constant Z up to a hundredth of its variance. Z_c of a small vocabulary, or of one with a few long "
        "vectors, varies by chance; where the null varies that much, isotropy does not make Z_c constant."
    ),
    quantities={
        SD: Quantity("1", "sd(log Z_c) / s"),
        SD_UNIT: Quantity("1", "sd(log Z_c),  s = 1"),
        SPECTRUM: Quantity("1", "sd(log Z_c) / s,  v ~ N(0, Σ)"),
        RAW: Quantity("1", "sd(log Z_c + ⟨c, v̄⟩) / s"),
        WITHIN: Quantity("share of contexts", "P(|Z_c / Z̄ − 1| < 0.1)"),
        COMMON: Quantity("1", "|v̄|² / E|v|²"),
        DIMENSION: Quantity("share of D", "(tr Σ)² / (D tr Σ²)"),
        SCALE: Quantity("nats", "s"),
        TEXT: Quantity("nats", "sd(log Σ_w exp(l_w − l̄))"),
        EXPLAINED: Quantity("1", "R² of log Σ_w exp(l_w − l̄) on Var_w(l_w)"),
        LEVEL: Quantity("nats", "E log Σ_w exp l_w"),
        LOOSE: Quantity("nats", "sd(log Σ_w exp l_w)"),
    },
    references=("arora16", "shim22"),
    statistic="median sd of log Z over random contexts, relative to logits",
    null_reason=(
        "Independent vectors of random directions with the norms of the word vectors: isotropic by "
        "construction, as finite in number."
    ),
    null="isotropic null",
    unit="embedding",
    correction="",
    details={
        SPECTRUM: Label("for Gaussian vectors of the same covariance"),
        RAW: Label("with the mean vector"),
        WITHIN: Label("share of contexts with Z within a tenth of the mean"),
        DIMENSION: Label("effective dimension relative to the width"),
        SD_UNIT: Label("sd at a logit sd of 1 nat"),
        SCALE: Label("sd of logits over text", "{:.1f}"),
        TEXT: Label("sd of log Z over text, nats"),
        EXPLAINED: Label("share of it that the variance of logits explains"),
        LEVEL: Label("mean log Z of the model over text, nats", "{:.1f}"),
        LOOSE: Label("its sd"),
    },
    remarks={NOTHING_MEASURED: "The model has no embedding of words."},
    labels={
        SD: "relative sd of log Z",
        SD_UNIT: "sd of log Z at a logit sd of 1 nat",
        SPECTRUM: "relative sd of log Z for Gaussian vectors of the same covariance",
        RAW: "relative sd of log Z with the mean vector",
        WITHIN: "share of contexts with Z within a tenth of its mean",
        COMMON: "share of the mean vector in the squared norm",
        DIMENSION: "effective dimension relative to the width",
        SCALE: "sd of logits over text",
        EXPLAINED: "share of the variance of log Z over text that the variance of logits explains",
    },
)


class State(NamedTuple):
    """Moments over text of log Z and of the variance of the logits, then of log Z of the model itself, as columns."""

    text: Sums | None = None


@dataclass
class _Memory:
    places: tuple[Int[Tensor, "b r"], Bool[Tensor, "b r"]] | None = None


def statistics(event: Event | ForwardOutput, batch_pass: BatchPass) -> State | None:
    """Moments of log Z and of the variance of logits over sampled tokens, of models with logits of words."""
    memory, ids = batch_pass.memory(_Memory), batch_pass.batch.inputs.get("input_ids")
    if isinstance(event, Passed) and memory.places is None and ids is not None and event.stream.shape[:2] == ids.shape:
        memory.places = chosen(event, batch_pass, 1 / PART)
    if not isinstance(event, ForwardOutput) or memory.places is None or ids is None:
        return None
    logits = getattr(event.output, "logits", None)
    if logits is None or logits.ndim != 3 or logits.shape[:2] != ids.shape:
        return None
    places, valid = (t.to(logits.device) for t in memory.places)
    chosen_logits = at(logits.unsqueeze(1), places).squeeze(1)
    wide = chosen_logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_Z = wide.logsumexp(-1)
    columns = moment_columns(log_Z - wide.mean(-1), wide.var(-1, correction=0), valid=valid)
    return State(sums_of(torch.cat((columns, moment_columns(log_Z, valid=valid)[..., 1:]), -1), batch_pass.documents))


class Concentration(NamedTuple):
    """Standard deviations of log Z_c relative to that of the logits, for the word vectors and for random vectors."""

    actual: float
    raw: float
    isotropic: float
    gaussian: float
    within: float


class Spectrum(NamedTuple):
    """Mean of the word vectors, their covariance, and the dimension of their space."""

    size: int
    mean: Float[Tensor, " D"]
    covariance: Float[Tensor, "D D"]
    dimension: int

    @property
    def trace(self) -> float:
        """Trace of the covariance."""
        return float(self.covariance.trace())


def spectrum_of(words: WordVectors) -> Spectrum:
    """Mean and covariance of word vectors over the vocabulary."""
    D = words.matrix.shape[1]
    total, products = (torch.zeros(*size, dtype=torch.float64, device=words.matrix.device) for size in ((D,), (D, D)))
    for v in words.blocks():
        total += v.double().sum(0)
        products += v.mT @ v
    n = len(words.matrix)
    middle = total / n
    return Spectrum(n, middle, products / n - torch.outer(middle, middle), D - words.centres)


def concentration(words: WordVectors, spectrum: Spectrum, scales: tuple[float, ...]) -> list[Concentration]:
    """Variation of log Z_c over contexts of uniform directions, at these standard deviations of the logits."""
    middle, D, trace = spectrum.mean, spectrum.dimension, spectrum.trace
    c = _directions(_contexts(spectrum.size), len(middle), words.centres).to(middle.device)
    c = c * math.sqrt(D / trace)  # logits of unit variance
    shift = c @ middle
    spread = torch.einsum("kd,de,ke->k", c, spectrum.covariance, c).clamp(min=0.0).sqrt()
    parts: list[list[Tensor]] = [[] for _ in range(3 * len(scales))]
    means = [
        torch.zeros(len(c), dtype=torch.float64, device=middle.device) for _ in range(3)
    ]  # random vectors have one
    generator = torch.Generator().manual_seed(len(middle))
    for v in words.blocks():
        centred = v - middle.to(v)
        draws = torch.randn(len(v), len(c), generator=generator).to(v)
        norms = centred.norm(dim=-1, keepdim=True) / math.sqrt(trace)
        kinds = (centred @ c.to(v).mT, norms * draws, spread.to(v) * draws)
        for total, kind in zip(means, kinds, strict=True):
            total += kind.double().sum(0) / spectrum.size
        for i, (s, kind) in enumerate((s, kind) for s in scales for kind in kinds):
            parts[i].append((s * kind).logsumexp(0).double())
    logs = [torch.stack(part).logsumexp(0) for part in parts]
    results = []
    for i, s in enumerate(scales):
        actual, isotropic, gaussian = (log - s * m for log, m in zip(logs[3 * i : 3 * i + 3], means, strict=True))
        Z = (actual - actual.logsumexp(0) + math.log(len(actual))).exp()
        variations = (actual, actual + s * shift, isotropic, gaussian)
        sds = torch.stack([t.std() / s for t in variations]).tolist()
        near = float(((Z - 1).abs() < NEAR).double().mean())
        results.append(Concentration(sds[0], sds[1], sds[2], sds[3], near))
    return results


def _contexts(vocabulary: int) -> int:
    """Even number of contexts."""
    return min(max(LOGITS // vocabulary, FEWEST), MOST) // 2 * 2


@lru_cache
def _directions(number: int, width: int, centres: bool) -> Float[Tensor, "k D"]:
    """Unit vectors of uniform directions in opposite pairs, orthogonal to (1, ..., 1) if norms remove it."""
    generator = torch.Generator().manual_seed(width)
    c = torch.randn(number // 2, width, generator=generator, dtype=torch.float64)
    c = c - c.mean(-1, keepdim=True) if centres else c
    c = c / c.norm(dim=-1, keepdim=True)
    return torch.cat((c, -c))


def _scale(words: WordVectors, state: State) -> float:
    """Standard deviation of the logits of contexts: that over text, for the unembedding."""
    if words.role == "input" or state.text is None:
        return UNIT
    return math.sqrt(float(_logit_variance(state.text.totals[0])))


def _concentrations(words: WordVectors, state: State, model: Probed) -> tuple[Spectrum, Concentration, Concentration]:
    """The spectrum of word vectors, and their concentration at the scale of the text and at unit scale."""

    def compute() -> tuple[Spectrum, Concentration, Concentration]:
        spectrum = spectrum_of(words)
        scale = _scale(words, state)
        actual, *unit = concentration(words, spectrum, (scale,) if scale == UNIT else (scale, UNIT))
        return spectrum, actual, (unit or [actual])[0]

    return model.computed.once(words.matrix, words.role, compute)


def evaluate(state: State, model: Probed) -> list[Measured]:
    """Variation of log Z_c of each embedding over random contexts; that of the model over text."""
    rows = []
    for name, words in model.words.items():
        spectrum, actual, unit = _concentrations(words, state, model)
        squares = float(spectrum.covariance.square().sum())
        values = {
            SD: actual.actual,
            SPECTRUM: actual.gaussian,
            RAW: actual.raw,
            WITHIN: actual.within,
            SD_UNIT: unit.actual,
        }
        values[COMMON] = (squared := float(spectrum.mean.square().sum())) / (squared + spectrum.trace)
        values[DIMENSION] = spectrum.trace**2 / (spectrum.dimension * squares) if squares else math.nan
        rows += [Measured(name, None, quantity, v, v, v) for quantity, v in values.items()]
        if words.role == "output" and state.text is not None:
            for quantity, function in OVER_TEXT.items():
                rows += measured(name, quantity, bootstrap(function, state.text), state.text.totals[0, 0])
    return rows


def _logit_variance(totals: Float[Tensor, "*r k"]) -> Float[Tensor, "*r"]:
    return mean(totals, 3)


OVER_TEXT: dict[str, Callable[[Tensor], Tensor]] = {
    SCALE: lambda totals: _logit_variance(totals).sqrt(),
    TEXT: lambda totals: variance(totals).sqrt(),
    EXPLAINED: lambda totals: correlation(totals).square(),
    LEVEL: lambda totals: mean(totals, 6),
    LOOSE: lambda totals: variance(totals[..., (0, 6, 7)]).sqrt(),
}


def null(state: State, model: Probed, baseline: Baseline[State] | None) -> list[Measured]:
    """Variation for independent vectors of random directions and the same norms, with its sampling error."""
    rows = []
    for name, words in model.words.items():
        _, actual, unit = _concentrations(words, state, model)
        error = NORMAL / math.sqrt(_contexts(len(words.matrix)))  # of the difference of two standard deviations
        for quantity, value in ((SD, actual.isotropic), (SD_UNIT, unit.isotropic)):
            rows.append(Measured(name, None, quantity, value, value * (1 - error), value * (1 + error)))
    return rows


def verdict(findings: list[Finding]) -> Judgement:
    """Describe the variation of the partition function of every embedding."""
    keys = (SPECTRUM, RAW, WITHIN, DIMENSION, SD_UNIT, *OVER_TEXT)
    known = [key for key in keys if not math.isnan(median(f.value for f in findings if f.quantity == key))]
    return describe(findings, SD, details=[median_detail(key, findings, key) for key in known])


PREDICTION = Prediction(__name__, DECLARATION, statistics, evaluate, null, verdict, empty=State, order=145)
