"""Evolve a cloud of tokens under repeated attention and normalisation.

    x_i' = N(x_i + tau W_v sum_j a_ij k_j),    a_ij = softmax_j(beta <x_i, B k_j>)      an ascent, then a contraction N

With W_v = B the ascent is a gradient step on log sum_j exp(beta <x, B k_j>) / beta [shim22, section 3.3]. The keys are
the tokens themselves or a frozen set. tau < 0 descends.

Read next: contraction.py (N), observables.py (recorded quantities), growth.py (theory).
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from .._errors import InputTypeError, InputValueError, check_floats, present, shape_of
from .._progress import Progress, reporter
from .._typing import Float, Int, Tensor
from ..kernels.attention.operator import attention
from ..kernels.attention.reference import Statistics
from ..kernels.attention.scoring import Scoring, Sight
from .contraction import Contraction, ContractionLike, contraction_of
from .intervals import ConfidenceBand, band_of_draws, band_of_mean
from .observables import OBSERVABLES, AttentionRecord, CloudStep
from .verdict import CloudVerdict, cloud_verdict

Placement = Literal["post", "pre", "peri"]


@dataclass(frozen=True)
class Ascent:
    """Parameters of one attention step.

    Args:
        tau: step size; negative descends. A tensor [*b] sets one for each cloud.
        beta: inverse temperature; a number or a tensor [*b].
        B: bilinear form of the logits [d, d], or [h, d, d] for heads, whose outputs are averaged; default: identity.
        W_v: value matrix; default: B, which makes the step a gradient step.
        keys: fixed keys [*b, k, d]; default: the tokens.
        causal: apply a causal mask; not supported with fixed keys.
        residual: add the token itself; without it the step is tau times attention.
        feed_forward: map of tokens, added after attention as a residual.
        precision: dtype of the attention call, such as torch.bfloat16 on a GPU; the cloud keeps its dtype.
    """

    tau: float | Tensor = 1.0
    beta: float | Tensor = 1.0
    B: Tensor | None = None
    W_v: Tensor | None = None
    keys: Tensor | None = None
    causal: bool = False
    residual: bool = True
    feed_forward: Callable[[Tensor], Tensor] | None = None
    precision: torch.dtype | None = None

    def attended(self, cloud: Float[Tensor, "*b n d"], *, statistics: bool = False) -> tuple[Tensor, AttentionRecord]:
        """Attention output W_v sum_j a_ij k_j of every token, and the statistics of the call."""
        lead, (n, d) = cloud.shape[:-2], cloud.shape[-2:]
        keys = cloud if self.keys is None else self.keys.expand(*lead, *self.keys.shape[-2:])
        x, k = cloud.reshape(-1, 1, n, d), keys.reshape(-1, 1, keys.shape[-2], d)
        form = None if self.B is None else self.B.reshape(-1, d, d)
        map_ = form if self.W_v is None else self.W_v.reshape(-1, d, d)
        q = x if form is None else x @ form
        k = k.expand(-1, q.shape[1], -1, -1)
        scale, beta = (self.beta, None) if not isinstance(self.beta, Tensor) else (1.0, self.beta)
        if beta is not None:
            q = q * beta.to(q).expand(lead).reshape(-1, 1, 1, 1)
        if self.precision is not None:
            q, k = q.to(self.precision), k.to(self.precision)
        scoring = Scoring(float(scale), None, None, 0 if self.causal else None)
        result = Statistics(*(t.to(x) for t in attention(q, k, k, Sight(), scoring, statistics=statistics)))
        out = result.output if map_ is None else result.output @ map_.mT
        G = result.log_normalizer.reshape(*lead, -1, n)
        self_logit = None
        if self.keys is None:
            self_logit = float(scale) * (q.to(x) * k.to(x)).sum(-1).reshape(*lead, -1, n)
        record = AttentionRecord(G, result.entropy.reshape(*lead, -1, n) if statistics else None, self_logit)
        return out.mean(1).reshape(*lead, n, d), record


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
    contraction: ContractionLike = "none",
    steps: int,
    placement: Placement = "post",
    observe: Iterable[str] = (),
    every: int = 1,
    progress: Progress = False,
) -> Trajectory:
    """Repeat an ascent and a contraction, and record observables.

    A step costs one attention call of the cloud on itself, in linear memory; the observables that depend on its log
    normalisers (pair energy, self weight, entropy) come from the same call. Leading dimensions are a batch of clouds,
    such as seeds or, with tensors for tau and beta, parameters. A `Trajectory` in place of the cloud is continued.

    A cloud that becomes infinite or NaN keeps its last finite state, and the step is recorded in `blown`.

    Args:
        contraction: a name (see contraction.py), a function of the cloud, or a tuple of these, applied in order.
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
    N = contraction_of(contraction, ascent.tau)
    blown = torch.full(x.shape[:-2], -1, device=x.device) if before is None else before.blown
    first = 0 if before is None else before.step
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
        y, ascended, record, attended = _stepped(x, ascent, N, placement, statistics, placeholder)
        if end % every == 0 and (before is None or end > first):
            observe_cloud(end, attended, record, last)
        end += 1
        finite = torch.isfinite(y).all((-2, -1)) & torch.isfinite(record.log_normalizer).all((-2, -1))
        blown = blown.masked_fill(~finite & (blown < 0), end)  # torch.where with a number would synchronise the GPU
        last = CloudStep(x, ascended, torch.where((blown < 0)[..., None, None], y, x))
        x = last.after
        show(end - first, steps)
        if end % 64 == 0 and bool((blown >= 0).all()):  # checked rarely: it synchronises the GPU
            break
    if names and end % every == 0:
        attended = x if placement == "post" else N(x)
        observe_cloud(end, attended, ascent.attended(attended, statistics=statistics)[1], last)
    observed = {name: torch.stack(values) for name, values in series.items() if values}
    all_times = torch.tensor(times)
    if before is not None:
        observed = {
            name: torch.cat((before.observed[name], v)) for name, v in observed.items() if name in before.observed
        }
        all_times = torch.cat((before.times, all_times))
    return Trajectory(x, observed, all_times, end, blown, ascent)


def _stepped(
    x: Tensor, ascent: Ascent, N: Contraction, placement: Placement, statistics: bool, placeholder: Tensor
) -> tuple[Tensor, Tensor, AttentionRecord, Tensor]:
    """The cloud after the step, the cloud after its ascent, the attention record, and the cloud that attended."""
    tau = ascent.tau if not isinstance(ascent.tau, Tensor) else ascent.tau.to(x).expand(x.shape[:-2])[..., None, None]
    attended = x if placement == "post" else N(x)
    direction, record = ascent.attended(attended, statistics=statistics)
    y = tau * (N(direction) if placement == "peri" else direction)
    ascended = y = x + y if ascent.residual else y
    if placement == "post":
        y = _contracted(y, N, placeholder)
    if ascent.feed_forward is not None:
        change = ascent.feed_forward(y if placement == "post" else N(y))
        y = _contracted(y + change, N, placeholder) if placement == "post" else y + change
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
    tensors = {"B": ascent.B, "W_v": ascent.W_v, "keys": ascent.keys}
    check_floats("evolve", cloud=x, **present(**tensors))
    if x.ndim < 2 or x.shape[-2] == 0 or x.shape[-1] == 0:
        remedy = "Pass at least one token of at least one dimension."
        raise InputValueError("evolve", "cloud", f"cloud must be [*b, n, d], got shape {shape_of(x)}", remedy)
    d = x.shape[-1]
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
    if ascent.causal and ascent.keys is not None:
        problem = f"fixed keys have no order, so causal=True needs keys=None, got shape {shape_of(ascent.keys)}"
        raise InputValueError("evolve", "keys", problem, "Drop causal= or keys=.")
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
