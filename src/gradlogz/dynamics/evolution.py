"""Evolve a cloud of tokens under repeated attention and normalisation.

    x_i' = N(x_i + tau W_v sum_j a_ij k_j),    a_ij = softmax_j(beta <x_i, B k_j>)      an ascent, then a contraction N

With W_v = B the ascent is a gradient step on log sum_j exp(beta <x, B k_j>) / beta [shim22, section 3.3]. The keys are
the tokens themselves, fixed points or a measure. tau < 0 descends.

Read next: attention_step.py (the step), contraction.py (N), trained_heads.py and layer_norms.py (weights of a trained
layer), observables.py (recorded quantities), growth.py (theory).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from .._errors import InputTypeError, InputValueError, check_floats, present, shape_of
from .._progress import Progress, reporter
from .._typing import Float, Int, Tensor
from ..kernels.attention.operator import attention
from ..kernels.attention.reference import Statistics
from ..kernels.attention.scoring import Scoring, Sight
from ..measures.measure import Measure
from .attention_step import AttentionStep
from .contraction import Contraction, ContractionLike
from .intervals import ConfidenceBand, band_of_draws, band_of_mean
from .layer_norms import LayerNorms, ResolvedNorms, norms_of
from .observables import OBSERVABLES, AttentionRecord, CloudStep
from .trained_heads import TrainedHeads
from .verdict import CloudVerdict, cloud_verdict

Placement = Literal["post", "pre", "peri"]


@dataclass(frozen=True)
class Ascent(AttentionStep):
    """Parameters of one attention step.

    Args:
        tau: step size; negative descends. A tensor [*b] sets one for each cloud.
        beta: inverse temperature; a number or a tensor [*b].
        B: bilinear form of the logits [d, d], or [h, d, d] for heads, whose outputs are averaged; default: identity.
        W_v: value matrix; default: B, which makes the step a gradient step.
        keys: fixed keys: points [*b, k, d], or a `Measure` such as Gaussian(mean, covariance); default: the tokens.
        causal: apply a causal mask; not supported with fixed keys.
        residual: add the token itself; without it the step is tau times attention.
        feed_forward: map of tokens, added after attention as a residual.
        precision: dtype of the attention call, such as torch.bfloat16 on a GPU; the cloud keeps its dtype.
        natural: follow the natural gradient of the log normaliser; W_v must be None.
        draws: replace attention by the mean of so many keys drawn by their attention weights; default: attention
            itself. Keys are drawn once for each head of B. With residual=False, tau=1 and draws=1, n tokens generate n
            tokens by resampling.
        generator: source of these draws.
        heads: heads of a trained layer, in place of B and W_v; not supported with fixed keys.

    Law: tests/laws/test_ascents_follow_their_measures.py.
    """

    def _attended_to_points(self, cloud: Tensor, keys: Tensor, *, statistics: bool) -> tuple[Tensor, AttentionRecord]:
        lead, (n, d) = cloud.shape[:-2], cloud.shape[-2:]
        keys = keys.expand(*lead, *keys.shape[-2:])
        x, k = cloud.reshape(-1, 1, n, d), keys.reshape(-1, 1, keys.shape[-2], d)
        form = None if self.B is None else self.B.reshape(-1, d, d)
        q = x if form is None else x @ form
        k = k.expand(-1, q.shape[1], -1, -1)
        scale, beta = (self.beta, None) if not isinstance(self.beta, Tensor) else (1.0, self.beta)
        if beta is not None:
            q = q * beta.to(q).expand(lead).reshape(-1, 1, 1, 1)
        if self.precision is not None:
            q, k = q.to(self.precision), k.to(self.precision)
        scoring = Scoring(float(scale), None, None, 0 if self.causal else None)
        result = Statistics(*(t.to(x) for t in attention(q, k, k, Sight(), scoring, statistics=statistics)))
        out = self._values(result.output)
        G = result.log_normalizer.reshape(*lead, -1, n)
        self_logit = None
        if self.keys is None:
            self_logit = float(scale) * (q.to(x) * k.to(x)).sum(-1).reshape(*lead, -1, n)
        record = AttentionRecord(G, result.entropy.reshape(*lead, -1, n) if statistics else None, self_logit)
        return out.mean(1).reshape(*lead, n, d), record

    def _attended_by(self, heads: TrainedHeads, cloud: Tensor, *, statistics: bool) -> tuple[Tensor, AttentionRecord]:
        beta, rows = float(self.beta), (*cloud.shape[:-2], -1, cloud.shape[-2])
        q, k, v = (t.to(self.precision or t.dtype) for t in heads.projected(cloud.reshape(-1, *cloud.shape[-2:])))
        scoring = Scoring(beta, None, None, 0 if self.causal else None)
        result = Statistics(*(t.to(cloud) for t in attention(q, k, v, Sight(), scoring, statistics=statistics)))
        self_logit = beta * (q.to(cloud) * k.to(cloud)).sum(-1).reshape(rows)
        entropy = result.entropy.reshape(rows) if statistics else None
        record = AttentionRecord(result.log_normalizer.reshape(rows), entropy, self_logit)
        return heads.joined(result.output).reshape(cloud.shape), record


class Trajectory(NamedTuple):
    """Result of `evolve`: the final clouds and the recorded observables.

    Attributes:
        cloud: final cloud; for a cloud that blew up, the last finite one.
        observed: each observable at `times`, [t, *b].
        times: steps at which observables were recorded.
        step: number of steps made.
        blown: step at which a cloud became infinite or NaN, [*b]; -1 if it stayed finite.
        ascent: the ascent of the last call.
    """

    cloud: Float[Tensor, "*b n d"]
    observed: dict[str, Float[Tensor, "t *b"]]
    times: Int[Tensor, " t"]
    step: int
    blown: Int[Tensor, "*b"]
    ascent: Ascent

    @property
    def verdict(self) -> CloudVerdict:
        """Verdict on the final cloud; for a batch use `verdicts`."""
        if self.cloud.ndim != 2:
            problem = f"verdict needs one cloud, but the trajectory has a batch of shape {tuple(self.cloud.shape[:-2])}"
            raise InputValueError("Trajectory.verdict", "cloud", problem, "Use trajectory.verdicts.")
        return self.verdicts[0]

    @property
    def verdicts(self) -> list[CloudVerdict]:
        """Verdict on each final cloud, with the batch flattened."""
        with torch.no_grad():
            _, record = self.ascent.attended(self.cloud, statistics=True)
        clouds = self.cloud.reshape(-1, *self.cloud.shape[-2:])
        n = clouds.shape[-2]
        flat = [None if t is None else t.reshape(-1, t.shape[-2], n) for t in record]
        return [
            cloud_verdict(
                cloud, AttentionRecord._make(None if t is None else t[i] for t in flat), int(self.blown.reshape(-1)[i])
            )
            for i, cloud in enumerate(clouds)
        ]

    def band(
        self,
        name: str,
        *,
        level: float = 0.95,
        of: Literal["mean", "cloud"] = "mean",  # plain-words: ok
    ) -> ConfidenceBand:
        """Interval of an observable at each time, from the clouds of the batch: low, middle and high [t].

        Args:
            of: "mean" for the confidence interval of the mean over clouds (Student's t); "cloud" for the interval that
                contains one more cloud (order statistics; at least 39 clouds for a level of 0.95). For a single cloud
                evolve `bootstrap_clouds` of it and use "cloud".

        Law: tests/laws/test_bands_hold_what_they_say.py.
        """
        if name not in self.observed or of not in ("mean", "cloud"):
            condition = 'name must be a recorded observable and of must be "mean" or "cloud"'
            remedy = f"Recorded: {', '.join(self.observed) or 'none'}; add others to observe= of evolve."
            raise InputValueError("Trajectory.band", "name", f"{condition}, got {name!r} and {of!r}", remedy)
        values = self.observed[name]
        draws = values.reshape(values.shape[0], -1).mT.to(self.cloud.dtype)
        return band_of_mean(draws, level=level) if of == "mean" else band_of_draws(draws, level=level)


def evolve(
    cloud: Float[Tensor, "*b n d"] | Trajectory,
    ascent: Ascent,
    *,
    contraction: ContractionLike | LayerNorms = "none",
    steps: int,
    placement: Placement = "post",
    observe: Iterable[str] = (),
    every: int = 1,
    progress: Progress = False,
) -> Trajectory:
    """Repeat an ascent and a contraction, and record observables.

    A step costs one attention call of the cloud on itself, in linear memory; the observables that depend on its log
    normalisers (pair energy, self weight, entropy) come from the same call. Leading dimensions are a batch of clouds,
    such as seeds or, with tensors for tau and beta, parameters.

    A `Trajectory` in place of the cloud is continued: new records are appended for the observables of both calls (for
    those of the new call alone if they have none in common), and without new records the earlier ones are kept.

    A cloud that becomes infinite or NaN, or leaves the domain of a measure of keys, keeps its last finite state, and
    the step is recorded in `blown`.

    Args:
        contraction: a name (see contraction.py), a function of the cloud, or a tuple of these, applied in order;
            `LayerNorms` for a contraction of its own at each place of the step.
        steps: number of steps.
        placement: "post" N(x + tau A(x)), "pre" x + tau A(N(x)), "peri" x + tau N(A(N(x))), as normalisations are
            placed in transformers.
        observe: names of observables (see observables.py), recorded at the start and after every `every` steps.
        every: recording interval, in steps.
        progress: True shows a bar on standard error; a function is called with (steps made, steps) after each step.

    Law: tests/theorems/test_theory_5_3_pair_energy_never_decreases.py.

    >>> import torch
    >>> x = torch.nn.functional.normalize(torch.randn(64, 3, dtype=torch.float64), dim=-1)
    >>> t = evolve(x, Ascent(tau=0.5, beta=1.0), contraction="sphere", steps=200, observe=["log_pair_energy"])
    >>> bool((t.observed["log_pair_energy"].diff() > -1e-12).all()), t.verdict.kind
    (True, 'collapsed')
    """
    before = cloud if isinstance(cloud, Trajectory) else None
    x: Tensor = cloud.cloud if isinstance(cloud, Trajectory) else cloud
    names = tuple(observe)
    _check(x, ascent, steps, every, names, placement)
    norms = norms_of(contraction, ascent.tau, ascent)
    blown = torch.full(x.shape[:-2], -1, device=x.device) if before is None else before.blown
    first = 0 if before is None else before.step
    unrecorded = before is None or not len(before.times)  # a continued trajectory has recorded its end
    series: dict[str, list[Tensor]] = {name: [] for name in names}
    times: list[int] = []
    statistics = "entropy" in names
    placeholder = _placeholder(x)
    show = reporter(progress, "steps")

    def observe_cloud(time: int, x: Tensor, record: AttentionRecord, step: CloudStep | None) -> None:
        times.append(time)
        for name in names:
            series[name].append(OBSERVABLES[name](x, record, step))

    last: CloudStep | None = None
    end = first
    while end < first + steps:
        y, ascended, record, attended = _stepped(x, ascent, norms, placement, statistics, placeholder)
        if names and end % every == 0 and (unrecorded or end > first):
            observe_cloud(end, attended, record, last)
        end += 1
        finite = torch.isfinite(y).all((-2, -1)) & torch.isfinite(record.log_normalizer).all((-2, -1))
        blown = blown.masked_fill(~finite & (blown < 0), end)  # torch.where with a number would synchronise the GPU
        last = CloudStep(x, ascended, torch.where((blown < 0)[..., None, None], y, x))
        x = last.after
        show(end - first, steps)
        if end % 64 == 0 and bool((blown >= 0).all()):  # checked rarely: it synchronises the GPU
            break
    if names and end % every == 0 and (unrecorded or end > first):
        attended = x if placement == "post" else norms.before_attention(x)
        observe_cloud(end, attended, ascent.attended(attended, statistics=statistics)[1], last)
    observed = {name: torch.stack(values) for name, values in series.items() if values}
    trajectory = Trajectory(x, observed, torch.tensor(times, dtype=torch.long), end, blown, ascent)
    return trajectory if before is None else _continued(before, trajectory)


def _continued(before: Trajectory, after: Trajectory) -> Trajectory:
    """The second part of a trajectory with the records of both."""
    if not len(after.times):
        return after._replace(observed=before.observed, times=before.times)
    both = {
        name: torch.cat((before.observed[name], v)) for name, v in after.observed.items() if name in before.observed
    }
    return after._replace(observed=both, times=torch.cat((before.times, after.times))) if both else after


def _stepped(
    x: Tensor, ascent: Ascent, norms: ResolvedNorms, placement: Placement, statistics: bool, placeholder: Tensor
) -> tuple[Tensor, Tensor, AttentionRecord, Tensor]:
    """The cloud after the step, the cloud after its ascent, the attention record, and the cloud that attended."""
    tau = ascent.tau if not isinstance(ascent.tau, Tensor) else ascent.tau.to(x).expand(x.shape[:-2])[..., None, None]
    attended = x if placement == "post" else norms.before_attention(x)
    direction, record = ascent.direction(attended, statistics=statistics)
    y = tau * (norms.after_attention(direction) if placement == "peri" else direction)
    ascended = y = x + y if ascent.residual else y
    if placement == "post":
        y = _contracted(y, norms.after_attention, placeholder)
    if ascent.feed_forward is not None:
        change = ascent.feed_forward(y if placement == "post" else norms.before_feed_forward(y))
        y = _contracted(y + change, norms.after_feed_forward, placeholder) if placement == "post" else y + change
    return y, ascended, record, attended


def _contracted(y: Tensor, N: Contraction, placeholder: Tensor) -> Tensor:
    """N(y) for finite clouds; the others are returned unchanged, since N might raise an error for them.

    A mask replaces a branch, which would synchronise the GPU.
    """
    finite = torch.isfinite(y).all((-2, -1), keepdim=True)
    return torch.where(finite, N(torch.where(finite, y, placeholder)), y)


def _placeholder(like: Tensor) -> Tensor:
    """A cloud of this size that every contraction accepts; its coordinates are uncorrelated if n > d."""
    n, d = like.shape[-2:]
    i, j = torch.arange(n, device=like.device).unsqueeze(-1), torch.arange(d, device=like.device)
    return torch.cos((2 * i + 1) * (1 + j % max(1, n - 1)) * (math.pi / (2 * n))).to(like)


def _check(x: Tensor, ascent: Ascent, steps: int, every: int, names: tuple[str, ...], placement: str) -> None:
    keys = ascent.keys
    tensors = {"B": ascent.B, "W_v": ascent.W_v, "keys": None if isinstance(keys, Measure) else keys}
    check_floats("evolve", cloud=x, **present(**tensors))
    if x.ndim < 2 or x.numel() == 0:
        remedy = "Pass at least one cloud, of at least one token in at least one dimension."
        raise InputValueError("evolve", "cloud", f"cloud must be [*b, n, d], got shape {shape_of(x)}", remedy)
    d, lead = x.shape[-1], x.shape[:-2]
    for name, t in present(**tensors).items():
        square = name != "keys"
        if t.ndim < 2 or t.shape[-1] != d or (square and t.shape[-2] != d):
            shapes = f"[{d}, {d}] or [h, {d}, {d}]" if square else f"[*b, k, {d}]"
            condition = f"{name} must be {shapes} to match the cloud"
            raise InputValueError(
                "evolve",
                name,
                f"{condition}, got shape {shape_of(t)}",
                "Project one of them to the dimension of the other.",
            )
    _check_heads(ascent, d)
    for name, number in (("tau", ascent.tau), ("beta", ascent.beta)):
        sizes = shape_of(number) if isinstance(number, Tensor) else ()
        if len(sizes) > len(lead) or any(n not in (1, b) for n, b in zip(sizes[::-1], lead[::-1], strict=False)):
            problem = (
                f"{name} must be a number, or a tensor that broadcasts against the batch {tuple(lead)} of the cloud"
            )
            raise InputValueError("evolve", name, f"{problem}, got shape {sizes}", "Pass one for each cloud.")
    if isinstance(keys, Measure):
        batch = tuple(keys.batch_shape)
        if keys.dim != d or batch != lead[: len(batch)]:
            begins = f"begins the batch {tuple(lead)} of the cloud"
            condition = f"keys must be a measure on R^{d} whose batch is empty or {begins}"
            fact = f"dimension {keys.dim} and batch {batch}"
            raise InputValueError("evolve", "keys", f"{condition}, got {fact}", "Match the measure to the cloud.")
    if ascent.causal and keys is not None:
        fact = type(keys).__name__ if isinstance(keys, Measure) else f"shape {shape_of(keys)}"
        problem = f"fixed keys have no order, so causal=True needs keys=None, got {fact}"
        raise InputValueError("evolve", "keys", problem, "Drop causal= or keys=.")
    if ascent.natural and (ascent.W_v is not None or ascent.draws is not None):
        problem = "a natural-gradient step has no value matrix and no draws, got natural=True with W_v= or draws="
        raise InputValueError("evolve", "natural", problem, "Drop natural=, or both others.")
    draws = ascent.draws
    if draws is not None and (isinstance(draws, bool) or not isinstance(draws, int) or draws < 1):
        problem = f"draws must be an integer of at least 1, got {ascent.draws!r}"
        raise InputValueError("evolve", "draws", problem, "Pass the number of keys that each token draws.")
    if ascent.precision is not None and (isinstance(keys, Measure) or ascent.natural or ascent.draws is not None):
        problem = "precision applies to attention to points, not to measures, natural gradients or draws"
        raise InputValueError("evolve", "precision", problem, "Drop precision=.")
    if ascent.precision not in (None, torch.float16, torch.bfloat16, torch.float32, torch.float64):
        condition, remedy = "precision must be a floating dtype", "Use torch.bfloat16."
        raise InputTypeError("evolve", "precision", f"{condition}, got {ascent.precision!r}", remedy)
    for name, count in (("steps", steps), ("every", every)):
        if isinstance(count, bool) or not isinstance(count, int) or count < (1 if name == "every" else 0):
            least = 1 if name == "every" else 0
            remedy = f"Pass an integer of at least {least}."
            raise InputValueError("evolve", name, f"{name} must be an integer >= {least}, got {count!r}", remedy)
    unknown = [name for name in names if name not in OBSERVABLES]
    if unknown:
        remedy = f"Choose from {', '.join(OBSERVABLES)}."
        raise InputValueError(
            "evolve", "observe", f"observe must list names of observables, got {unknown[0]!r}", remedy
        )
    if placement not in ("post", "pre", "peri"):
        remedy = "Use post for normalisation after the step, pre before attention, peri for both."
        raise InputValueError(
            "evolve", "placement", f'placement must be "post", "pre" or "peri", got {placement!r}', remedy
        )


def _check_heads(ascent: Ascent, d: int) -> None:
    heads = ascent.heads
    if heads is None:
        return
    others = [name for name in ("B", "W_v", "keys", "draws") if getattr(ascent, name) is not None]
    others += ["natural"] if ascent.natural else []
    if others or isinstance(ascent.beta, Tensor):
        other = (others or ["a tensor beta"])[0]
        problem = f"heads= replaces B, W_v, keys and other steps and takes one number beta, got also {other}"
        raise InputValueError("evolve", "heads", problem, "Drop the others, or scale heads.query.")
    (h, D, e), v = heads.query.shape if heads.query.ndim == 3 else (-1, -1, -1), heads.value.shape[-1]
    shapes = [(h, D, e), (h, e), (h, D, e), (h, e), (h, D, v), (h, v), (h, v, D), (D,)]
    for name, expected, t in zip(heads._fields, shapes, heads, strict=False):
        if isinstance(t, Tensor) and t.shape != expected:
            problem = f"heads.{name} must be of shape {expected} to match heads.query and heads.value"
            remedy = "Repeat shared keys and values for each head, and pass zeros for no bias."
            raise InputValueError("evolve", "heads", f"{problem}, got shape {shape_of(t)}", remedy)
    if heads.query.shape[-2] != d:
        problem = f"heads must act on tokens of dimension {d}, got {heads.query.shape[-2]}"
        raise InputValueError("evolve", "heads", problem, "Pass a cloud of that dimension.")
