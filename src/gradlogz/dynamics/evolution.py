"""A cloud of tokens under repeated attention.

    x_i' = N(x_i + tau W_v sum_j a_ij k_j),    a_ij = softmax_j(beta <x_i, B k_j>)      an ascent, then a contraction N

With W_v = B the ascent is a gradient step on log sum_j exp(beta <x, B k_j>) / beta [shim22, section 3.3]. The keys are
the tokens themselves, which move, or a frozen set. tau < 0 descends.

Read next: contraction.py (N), observables.py (what is recorded), growth.py (what theory says).
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
from .contraction import Contraction, Given, contraction_of
from .intervals import ConfidenceBand, band_of_draws, band_of_mean
from .observables import OBSERVABLES, AttentionRecord, CloudStep
from .verdict import CloudVerdict, verdict_of

Placement = Literal["post", "pre", "peri"]


@dataclass(frozen=True)
class Ascent:
    """One step along attention.

    Args:
        tau: the step; negative descends. A tensor [*b] gives every cloud its own.
        beta: the inverse temperature; likewise.
        B: the form in the logits [d, d], or [h, d, d] for heads, whose outputs are averaged; the identity by default.
        W_v: what is done to the average of the keys; B by default, so that the step is a gradient.
        keys: frozen keys [*b, k, d]; by default the tokens are the keys.
        causal: a token sees those before it and itself; not with frozen keys, which have no order among the tokens.
        residual: whether the token itself is added; without it the step is tau times attention.
        feed_forward: a map of tokens that is added after attention, as a residual.
        precision: the dtype in which tokens meet keys, torch.bfloat16 for the speed of a GPU; the cloud keeps its own.
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
        """W_v sum_j a_ij k_j of every token, and what was seen on the way."""
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
        found = Statistics(*(t.to(x) for t in attention(q, k, k, Sight(), scoring, statistics=statistics)))
        out = found.output if map_ is None else found.output @ map_.mT
        G = found.log_normalizer.reshape(*lead, -1, n)
        own = None
        if self.keys is None:
            own = float(scale) * (q.to(x) * k.to(x)).sum(-1).reshape(*lead, -1, n)
        seen = AttentionRecord(G, found.entropy.reshape(*lead, -1, n) if statistics else None, own)
        return out.mean(1).reshape(*lead, n, d), seen


class Trajectory(NamedTuple):
    """Where a cloud went.

    cloud: at the end; of a cloud that blew up, before it did.
    observed: each observable at the times `times`, [t, *b].
    step: how many steps were made.
    blown: the step in which a cloud left the finite numbers, [*b]; -1 if it did not.
    """

    cloud: Float[Tensor, "*b n d"]
    observed: dict[str, Float[Tensor, "t *b"]]
    times: Int[Tensor, " t"]
    step: int
    blown: Int[Tensor, "*b"]
    ascent: Ascent

    @property
    def verdict(self) -> CloudVerdict:
        """What has become of it; for a batch of clouds see `verdicts`."""
        if self.cloud.ndim != 2:
            remedy = "Take trajectory.verdicts."
            fact = f"a batch of shape {tuple(self.cloud.shape[:-2])}"
            raise InputValueError("Trajectory.verdict", "there", f"there must be one cloud, got {fact}", remedy)
        return self.verdicts[0]

    @property
    def verdicts(self) -> list[CloudVerdict]:
        """What has become of each cloud, the batch flattened."""
        with torch.no_grad():
            _, seen = self.ascent.attended(self.cloud, statistics=True)
        clouds = self.cloud.reshape(-1, *self.cloud.shape[-2:])
        n = clouds.shape[-2]
        flat = [None if t is None else t.reshape(-1, t.shape[-2], n) for t in seen]
        return [
            verdict_of(
                cloud, AttentionRecord._make(None if t is None else t[i] for t in flat), int(self.blown.reshape(-1)[i])
            )
            for i, cloud in enumerate(clouds)
        ]

    def band(self, name: str, *, level: float = 0.95, of: Literal["mean", "cloud"] = "mean") -> ConfidenceBand:
        """Where an observable lies at each time, from the clouds of the batch: low, middle and high [t].

        Args:
            of: "mean", where the mean over all clouds of this kind lies (Student's interval); "cloud", where one more
                cloud lies (order statistics: 39 clouds for a level of 0.95). For one cloud evolve `bootstrap_clouds` of
                it and ask for the cloud.

        Law: tests/laws/test_bands_hold_what_they_say.py.
        """
        if name not in self.observed or of not in ("mean", "cloud"):
            condition, fact = 'name must be observed and of be "mean" or "cloud"', f"{name!r} and {of!r}"
            remedy = f"Observed were {', '.join(self.observed) or 'none'}: ask evolve to observe it."
            raise InputValueError("Trajectory.band", "name", f"{condition}, got {fact}", remedy)
        values = self.observed[name]
        draws = values.reshape(values.shape[0], -1).mT.to(self.cloud.dtype)
        return band_of_mean(draws, level=level) if of == "mean" else band_of_draws(draws, level=level)


def evolve(
    cloud: Float[Tensor, "*b n d"] | Trajectory,
    ascent: Ascent,
    *,
    contraction: Given = "none",
    steps: int,
    placement: Placement = "post",
    observe: Iterable[str] = (),
    every: int = 1,
    progress: Progress = False,
) -> Trajectory:
    """Repeat an ascent and a contraction, and record what is asked for.

    A step costs one attention call of the cloud on itself, in linear memory; observables that are functions of its
    log normalisers (pair energy, self weight, entropy) come with it. Clouds are batched over leading dimensions, for
    seeds and, with tensors for tau and beta, for parameters. A `Trajectory` in place of the cloud goes on where it
    ended.

    A cloud that leaves the finite numbers is kept as it was before, and the step is in `blown`.

    Args:
        contraction: a name (see contraction.py), a function of the cloud, or several one after the other.
        placement: "post" N(x + tau A(x)), "pre" x + tau A(N(x)), "peri" x + tau N(A(N(x))), as normalisations are
            placed in transformers.
        observe: names of observables (see observables.py), recorded at the start and after each `every` steps.
        progress: True shows a bar on standard error; a function is called with (steps made, steps) after each.

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
    kept: dict[str, list[Tensor]] = {name: [] for name in names}
    times: list[int] = []
    statistics = "entropy" in names
    harmless = _harmless(x)
    show = reporter(progress, "steps")

    def record(at: int, x: Tensor, seen: AttentionRecord, step: CloudStep | None) -> None:
        times.append(at)
        for name in names:
            kept[name].append(OBSERVABLES[name](x, seen, step))

    made: CloudStep | None = None
    end = first
    while end < first + steps:
        y, ascended, seen, looked = _stepped(x, ascent, N, placement, statistics, harmless)
        if end % every == 0 and (before is None or end > first):
            record(end, looked, seen, made)
        end += 1
        finite = torch.isfinite(y).all((-2, -1)) & torch.isfinite(seen.log_normalizer).all((-2, -1))
        blown = blown.masked_fill(~finite & (blown < 0), end)  # torch.where would wait until the number is there
        made = CloudStep(x, ascended, torch.where((blown < 0)[..., None, None], y, x))
        x = made.after
        show(end - first, steps)
        if end % 64 == 0 and bool((blown >= 0).all()):  # asked for rarely: a GPU waits for the answer
            break
    if names and end % every == 0:
        looked = x if placement == "post" else N(x)
        record(end, looked, ascent.attended(looked, statistics=statistics)[1], made)
    observed = {name: torch.stack(values) for name, values in kept.items() if values}
    whole = torch.tensor(times)
    if before is not None:
        observed = {
            name: torch.cat((before.observed[name], v)) for name, v in observed.items() if name in before.observed
        }
        whole = torch.cat((before.times, whole))
    return Trajectory(x, observed, whole, end, blown, ascent)


def _stepped(
    x: Tensor, ascent: Ascent, N: Contraction, placement: Placement, statistics: bool, harmless: Tensor
) -> tuple[Tensor, Tensor, AttentionRecord, Tensor]:
    """The cloud after a step and after its ascent alone, what attention saw, and the cloud that it looked at."""
    tau = ascent.tau if not isinstance(ascent.tau, Tensor) else ascent.tau.to(x).expand(x.shape[:-2])[..., None, None]
    looked = x if placement == "post" else N(x)
    direction, seen = ascent.attended(looked, statistics=statistics)
    y = tau * (N(direction) if placement == "peri" else direction)
    ascended = y = x + y if ascent.residual else y
    if placement == "post":
        y = _contracted(y, N, harmless)
    if ascent.feed_forward is not None:
        change = ascent.feed_forward(y if placement == "post" else N(y))
        y = _contracted(y + change, N, harmless) if placement == "post" else y + change
    return y, ascended, seen, looked


def _contracted(y: Tensor, N: Contraction, harmless: Tensor) -> Tensor:
    """N(y) of the clouds that are finite; the others are kept from N, which may know all tokens and refuse them.

    A mask, where a question would do: for the answer a GPU waits.
    """
    finite = torch.isfinite(y).all((-2, -1), keepdim=True)
    return torch.where(finite, N(torch.where(finite, y, harmless)), y)


def _harmless(like: Tensor) -> Tensor:
    """A cloud that every contraction takes that takes any of this size: no two coordinates are correlated if n > d."""
    n, d = like.shape[-2:]
    i, j = torch.arange(n, device=like.device).unsqueeze(-1), torch.arange(d, device=like.device)
    return torch.cos((2 * i + 1) * (1 + j % max(1, n - 1)) * (math.pi / (2 * n))).to(like)


def _check(x: Tensor, ascent: Ascent, steps: int, every: int, names: tuple[str, ...], placement: str) -> None:
    tensors = {"B": ascent.B, "W_v": ascent.W_v, "keys": ascent.keys}
    check_floats("evolve", cloud=x, **present(**tensors))
    if x.ndim < 2 or x.shape[-2] == 0 or x.shape[-1] == 0:
        remedy = "Give at least one token of at least one dimension."
        raise InputValueError("evolve", "cloud", f"cloud must be [*b, n, d], got shape {shape_of(x)}", remedy)
    d = x.shape[-1]
    for name, t in present(**tensors).items():
        square = name != "keys"
        if t.ndim < 2 or t.shape[-1] != d or (square and t.shape[-2] != d):
            condition = f"{name} must {'be [d, d] or [h, d, d]' if square else 'end in d'} with d={d} of the cloud"
            raise InputValueError("evolve", name, f"{condition}, got shape {shape_of(t)}", "Project one of them first.")
    if ascent.causal and ascent.keys is not None:
        remedy = "Frozen keys have no order among the tokens: drop causal or keys."
        raise InputValueError(
            "evolve", "keys", f"keys must be None under a causal mask, got shape {shape_of(ascent.keys)}", remedy
        )
    if ascent.precision not in (None, torch.float16, torch.bfloat16, torch.float32, torch.float64):
        condition, remedy = "precision must be a floating dtype", "torch.bfloat16 is the usual one."
        raise InputTypeError("evolve", "precision", f"{condition}, got {ascent.precision!r}", remedy)
    for name, count in (("steps", steps), ("every", every)):
        if isinstance(count, bool) or not isinstance(count, int) or count < (1 if name == "every" else 0):
            remedy = "Count in whole steps."
            raise InputValueError("evolve", name, f"{name} must be a positive integer, got {count!r}", remedy)
    unknown = [name for name in names if name not in OBSERVABLES]
    if unknown:
        remedy = f"They are {', '.join(OBSERVABLES)}."
        raise InputValueError("evolve", "observe", f"observe must name observables, got {unknown[0]!r}", remedy)
    if placement not in ("post", "pre", "peri"):
        remedy = "post is that of the first transformer, pre that of most since."
        raise InputValueError(
            "evolve", "placement", f'placement must be "post", "pre" or "peri", got {placement!r}', remedy
        )
