"""Parameters of switching systems from series: expectation and maximisation, or the gradient of the log likelihood.

    E   P(s_t-1 = i, s_t = j | y), E[x_t x_t^T | s_t = j, y], E[x_t x_t-1^T | s_t = j, y]            `smooth`
    M   T_ij ∝ sum_t P(s_t-1 = i, s_t = j | y)
        [F_j b_j] = (sum g_tj E[x_t z_t-1^T]) (sum g_tj E[z_t-1 z_t-1^T])⁻¹,  z = (x, 1),  g_tj = P(s_t = j | y)
        Q_j = sum g_tj E[r r^T] / sum g_tj,   r = x_t - F_j x_t-1 - b_j;    H, d and R likewise from y

What is missing of an observation is a hidden variable too, and enters by its mean and covariance given the rest. With
one mode, and with an exact smoother, every round raises the likelihood; with the others nearly every round does, and
the best model is what is returned.

Read next: smoother.py (the E step), parametrization.py (the gradient).
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch

from .._errors import check_floats, present, sentence, shape_of
from .._typing import Bool, Float, Int, Tensor
from .border import arranged
from .merging import symmetric
from .model import ENDS, SwitchingModel
from .parametrization import MATRICES, NAMES, PLAIN, Beginning, Free, Plan, Structure, constrained, freed
from .smoother import Method, smooth
from .switching import SwitchingFilter

CELLS = 1 << 23  # numbers of smoothed pairs of states that are held at a time


class Fitted(NamedTuple):
    """What was learned.

    Attributes:
        model: the likeliest that was found.
        mean, covariance, log_mode_probability: at time 0, for the filters; as given unless "initial" was learned.
        log_likelihood: of all series under that model.
        history: the log likelihood after each round, from the model given on; of the start that was kept.
        converged: whether the last round changed less than the tolerance.
        starts: the log likelihood that each start ended with.
        standard_error: of every parameter learned, by its name, from the curvature of the log likelihood; None unless
            asked for. Twice it on either side is an interval of 95 %; inf of what the series say nothing of,
            and where the end is no maximum.
    """

    model: SwitchingModel
    mean: Float[Tensor, "k s"]
    covariance: Float[Tensor, "k s s"]
    log_mode_probability: Float[Tensor, "k"]
    log_likelihood: Float[Tensor, ""]
    history: Float[Tensor, "n"]
    converged: bool
    starts: Float[Tensor, "r"]
    standard_error: dict[str, Tensor] | None


class Data(NamedTuple):
    """Series, all of one shape."""

    y: Float[Tensor, "b t o"]
    mask: Bool[Tensor, "b t o"] | None
    lengths: Int[Tensor, "b"] | None
    times: Float[Tensor, "b t"] | None

    def chunks(self, size: int) -> "Iterator[Data]":
        """Some series at a time."""
        for i in range(0, len(self.y), size):
            y, *rest = (None if part is None else part[i : i + size] for part in self)
            assert y is not None  # only what follows may be
            yield Data(y, *rest)

    @property
    def counted(self) -> Bool[Tensor, "b t"]:
        """Steps before the end of their series."""
        b, t = self.y.shape[:2]
        if self.lengths is None:
            return torch.ones(b, t, dtype=torch.bool, device=self.y.device)
        return torch.arange(t, device=self.y.device) < self.lengths.unsqueeze(-1)

    @property
    def seen(self) -> Bool[Tensor, "b t o"]:
        seen = ~self.y.isnan() & self.counted.unsqueeze(-1)
        return seen if self.mask is None else seen & self.mask


def fit(
    model: SwitchingModel,
    observations: Float[Tensor, "*b t o"],
    *,
    mean: Float[Tensor, "*k s"],
    covariance: Float[Tensor, "*k s s"],
    log_mode_probability: Float[Tensor, "k"] | None = None,
    learn: Sequence[str] = ("transition", "Q", "R"),
    structure: Mapping[str, Structure] | None = None,
    shared: Sequence[str] = (),
    method: Literal["em", "gradient"] = "em",
    smoother: Method = "gpb2",
    mask: Bool[Tensor, "*b t"] | Bool[Tensor, "*b t o"] | None = None,
    lengths: Int[Tensor, "*b"] | None = None,
    times: Float[Tensor, "*#b t"] | None = None,
    starts: int = 1,
    max_rounds: int = 200,
    tolerance: float = 1e-7,
    errors: bool = False,
    progress: Callable[[int, float], None] | None = None,
    generator: torch.Generator | None = None,
) -> Fitted:
    """Learn parameters of a switching system from one series or many.

    Args:
        model: where learning begins; what is not learned stays as it is here.
        observations: all series; NaN, mask, lengths and times as of `imm`.
        mean: at time 0, [s] or [k, s], the same for all series; covariance and log_mode_probability likewise.
        learn: of "transition", "F", "Q", "H", "R", "b", "d" and "initial", what is believed at time 0.
        structure: of Q and R: "full" (by default), "diagonal", or "scale", a factor of each mode's matrix.
        shared: which of them all modes have in common; F and b with Q, H and d with R.
        method: "em", or "gradient", quasi-Newton steps up the log likelihood of the filter the smoother begins with.
        smoother: "gpb2", "imm", "kim", or "exact" for series of a few steps.
        starts: how many: the first is the model, the others are changed at random; the likeliest end is kept.
        max_rounds: of each start; of "gradient", a round is ten steps.
        tolerance: nats a step that a round must gain.
        errors: whether to compute standard errors.
        progress: called after each round with its number and the log likelihood.

    Modes keep their order: where nothing but learned parameters tells them apart, they are brought back to the order of
    the model given. Cost of a round: one smoother of every series, in linear memory.
    Law: tests/laws/test_parameters_are_learned.py.

    >>> import torch
    >>> from gradlogz import KalmanModel, SwitchingModel
    >>> walk = [KalmanModel(*torch.tensor([[[1.0]], [[q]], [[1.0]], [[0.1]]])) for q in (0.1, 3.0)]
    >>> model = SwitchingModel.of(walk, transition=torch.tensor([[0.9, 0.1], [0.1, 0.9]]))
    >>> y = torch.randn(30, 10, 1, generator=torch.Generator().manual_seed(0)).cumsum(1)
    >>> options = {"learn": ["Q"], "shared": ["Q"], "tolerance": 1e-4}
    >>> found = fit(model, y, mean=torch.zeros(1), covariance=torch.eye(1), **options)
    >>> found.converged, bool(found.log_likelihood > found.history[0])
    (True, True)
    """
    call = "fit"
    plan = _planned(call, model, learn, structure or {}, shared, method)
    begin = _begun(call, model, mean, covariance, log_mode_probability)
    data = _arranged(call, model, observations, mask, lengths, times)
    free_fields = _tell_apart(model, plan)
    given, model = model, _restricted(model, plan)
    if starts < 1 or max_rounds < 1:
        fact = f"{starts} and {max_rounds}"
        raise ValueError(
            sentence(call, "starts and max_rounds must be at least 1", fact, "1 start is the model itself.")
        )
    climb = _maximised if method == "em" else _climbed
    ends = []
    for start in range(starts):
        begun = (model, begin) if start == 0 else _changed(model, begin, plan, generator)
        ends.append(climb(*begun, data, plan, smoother, max_rounds, tolerance * float(data.counted.sum()), progress))
    best = max(ends, key=lambda end: end.log_likelihood)
    learned, begun_at = best.model, best.begin
    if free_fields:
        learned, begun_at = _in_order(given, learned, begun_at, plan)
    standard = _standard_errors(call, learned, begun_at, data, plan, smoother) if errors else None
    return Fitted(
        dataclasses.replace(learned, validate=model.validate),
        *begun_at,
        log_likelihood=torch.tensor(best.log_likelihood, dtype=data.y.dtype),
        history=torch.tensor(best.history, dtype=data.y.dtype),
        converged=best.converged,
        starts=torch.tensor([end.log_likelihood for end in ends], dtype=data.y.dtype),
        standard_error=standard,
    )


# What learning begins with -----------------------------------------------------------------------------------------


def _planned(
    call: str,
    model: SwitchingModel,
    learn: Sequence[str],
    structure: Mapping[str, Structure],
    shared: Sequence[str],
    method: str,
) -> Plan:
    unknown = [name for name in learn if name not in NAMES]
    if unknown or not learn:
        condition = f"learn must name some of {', '.join(NAMES)}"
        raise ValueError(sentence(call, condition, f"{list(learn)}", "What is not named stays as it is."))
    if method not in ("em", "gradient"):
        raise ValueError(sentence(call, 'method must be "em" or "gradient"', f"{method!r}", "em needs no step size."))
    missing = [name for name in learn if name in PLAIN and getattr(model, name) is None]
    if missing:
        remedy = "Give zeros to begin with."
        raise ValueError(sentence(call, f"the model must have {missing[0]} to learn it", "None", remedy))
    wrong = [n for n in structure if n not in MATRICES or structure[n] not in ("full", "diagonal", "scale")]
    if wrong:
        condition = 'structure must say "full", "diagonal" or "scale" of Q and R'
        raise ValueError(sentence(call, condition, f"{dict(structure)}", "Other parameters have no structure."))
    partner = {"F": "Q", "b": "Q", "H": "R", "d": "R"}
    alone = [n for n in shared if n not in learn or n in ("transition", "initial")]
    alone += [n for n in shared if n in partner and partner[n] not in shared and method == "em"]
    if alone:
        condition = "shared must name parameters that are learned, F and b together with Q, H and d together with R"
        remedy = "What weighs the errors of several modes must be common to them too."
        raise ValueError(sentence(call, condition, f"{list(shared)}", remedy))
    plan = Plan(tuple(learn), {name: structure.get(name, "full") for name in MATRICES}, tuple(shared))
    if any(t.ndim > len(ENDS[name]) + 1 for name, t in model.fields().items()):
        remedy = "Learn from series that share a model."
        raise ValueError(sentence(call, "the model must be one for all series", "one for each target", remedy))
    changes = model.rate is not None or model.steps is not None
    fixed = {name for name in plan.learn if name in MATRICES and plan.structure[name] == "scale"}
    if changes and set(plan.learn) - fixed - {"initial"}:
        condition = 'learn must be Q and R as "scale", or "initial", of a model that changes in time'
        remedy = 'Pass learn=["Q", "R"] and structure={"Q": "scale", "R": "scale"}.'
        raise ValueError(sentence(call, condition, f"learn={list(plan.learn)}", remedy))
    if model.B is not None or model.D is not None or model.components is not None:
        remedy = "Fold inputs into b and d; learn modes of one size."
        raise ValueError(sentence(call, "the model must have no inputs and no components", "some", remedy))
    return plan


def _begun(call: str, model: SwitchingModel, mean: Tensor, covariance: Tensor, log_pi: Tensor | None) -> Beginning:
    k, s = model.modes, model.state_size
    check_floats(call, mean=mean, covariance=covariance, model=model.R, **present(log_mode_probability=log_pi))
    if mean.shape not in ((s,), (k, s)) or covariance.shape not in ((s, s), (k, s, s)):
        condition = f"mean must be [{s}] or [{k}, {s}] and covariance [{s}, {s}] or [{k}, {s}, {s}]"
        fact = f"shapes {shape_of(mean)} and {shape_of(covariance)}"
        raise ValueError(sentence(call, condition, fact, "All series begin alike."))
    log_pi = mean.new_zeros(k).log_softmax(-1) if log_pi is None else log_pi.log_softmax(-1)
    if log_pi.shape != (k,):
        condition, fact = f"log_mode_probability must be [{k}]", f"shape {shape_of(log_pi)}"
        raise ValueError(sentence(call, condition, fact, "None is uniform."))
    return Beginning(mean.expand(k, s), covariance.expand(k, s, s), log_pi)


def _arranged(
    call: str,
    model: SwitchingModel,
    y: Tensor,
    mask: Tensor | None,
    lengths: Tensor | None,
    times: Tensor | None,
) -> Data:
    """Series as [b, t, o], checked once."""
    arranged(call, model, y, mask=mask, lengths=lengths, times=times, validate=model.validate)
    batch = y.shape[:-2]
    count = batch.numel()
    if mask is not None:
        mask = (mask if mask.ndim == y.ndim else mask.unsqueeze(-1).expand(y.shape)).reshape(count, *y.shape[-2:])
    lengths = None if lengths is None else lengths.reshape(count)
    times = None if times is None else times.expand(y.shape[:-1]).reshape(count, y.shape[-2])
    data = Data(y.reshape(count, *y.shape[-2:]), mask, lengths, times)
    if not bool(data.seen.any()):
        remedy = "Pass series with observations."
        raise ValueError(sentence(call, "observations must hold something seen", "gaps alone", remedy))
    return data


def _tell_apart(model: SwitchingModel, plan: Plan) -> bool:
    """Whether learned parameters alone tell modes apart, so that their order is a matter of chance.

    Modes that nothing tells apart at the beginning would stay alike for ever.
    """

    def differs(name: str) -> bool:
        field = getattr(model, name)
        if field is None or name == "transition":
            return False
        at = field.ndim - (2 if name in ("b", "d") else 3)
        return bool((field != field.narrow(at, 0, 1)).any())

    different = [name for name in ("F", "Q", "H", "R", "b", "d") if differs(name)]
    own = [name for name in plan.learn if name not in (*plan.shared, "transition", "initial")]
    if model.modes > 1 and not different and own:
        remedy = f"Begin with different {own[0]}."
        raise ValueError(sentence("fit", "modes must differ at the beginning", "modes that are all alike", remedy))
    return model.modes > 1 and bool(different) and all(name in own for name in different)


def _restricted(model: SwitchingModel, plan: Plan) -> SwitchingModel:
    """The start as what is learned allows it: what modes share as their average, diagonal noise without the rest."""
    fields: dict[str, Any] = {}
    for name in plan.learn:
        if name in ("transition", "initial"):
            continue
        field = getattr(model, name)
        if name in MATRICES and plan.structure[name] == "diagonal":
            field = torch.diag_embed(field.diagonal(dim1=-2, dim2=-1))
        if name in plan.shared:
            at = -len(ENDS[name])
            field = field.mean(at, keepdim=True).expand_as(field)
        fields[name] = field
    return dataclasses.replace(model, **fields)


def _changed(
    model: SwitchingModel, begin: Beginning, plan: Plan, generator: torch.Generator | None
) -> tuple[SwitchingModel, Beginning]:
    """Another start: matrices scaled by up to four times either way, maps and offsets moved, the chain loosened."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=model.R.dtype, device=model.R.device, generator=generator)

    fields: dict[str, Any] = {}
    for name in plan.learn:
        field: Any = getattr(model, name, None)
        if name == "transition":
            noise = normal(*field.shape).exp() * (field > 0)
            fields[name] = 0.5 * field + 0.5 * noise / noise.sum(-1, keepdim=True)
        elif name in MATRICES:
            factor = (0.7 * normal(1 if name in plan.shared else model.modes)).exp()
            fields[name] = factor[:, None, None] * field
        elif name in PLAIN:
            size = 0.3 * (field.abs().mean() + 0.1)
            fields[name] = field + size * normal(*(field[:1] if name in plan.shared else field).shape)
    return dataclasses.replace(model, **fields, validate=False), begin


def _in_order(
    given: SwitchingModel, found: SwitchingModel, begin: Beginning, plan: Plan
) -> tuple[SwitchingModel, Beginning]:
    """Modes in the order in which they are nearest to those given."""
    k = given.modes
    cost = torch.zeros(k, k, dtype=given.R.dtype)
    for name in plan.learn:
        if name in (*MATRICES, *PLAIN) and name not in plan.shared:
            a, b = getattr(given, name).flatten(1), getattr(found, name).flatten(1)
            scale = torch.maximum(a.abs().mean(), b.abs().mean()).clamp(min=1e-300)
            cost = cost + ((a.unsqueeze(1) - b) / scale).square().sum(-1).cpu()
    rows = range(k)
    if k <= 7:
        order = min(itertools.permutations(rows), key=lambda p: sum(float(cost[i, p[i]]) for i in rows))
    else:  # the nearest first: 8! orders are too many to look at
        taken: list[int] = []
        for i in rows:
            taken.append(min((j for j in rows if j not in taken), key=lambda j, i=i: float(cost[i, j])))  # type: ignore[misc]
        order = tuple(taken)
    places = list(order)
    fields: dict[str, Any] = {
        name: field[places][:, places] if name == "transition" else field[places]
        for name, field in found.fields().items()
    }
    return dataclasses.replace(found, **fields), Beginning(*(part[places] for part in begin))


# Expectation and maximisation --------------------------------------------------------------------------------------


class End(NamedTuple):
    """Where a start has led."""

    model: SwitchingModel
    begin: Beginning
    log_likelihood: float
    history: list[float]
    converged: bool


class Sums(NamedTuple):
    """What the M step needs of all series, for each mode: weights, moments of x, (x, x before), (y, x) and x_0."""

    pairs: Float[Tensor, "k k"]
    weight: Float[Tensor, "k"]
    x: Float[Tensor, "k s"]
    xx: Float[Tensor, "k s s"]
    p: Float[Tensor, "k s"]
    xp: Float[Tensor, "k s s"]
    pp: Float[Tensor, "k s s"]
    y: Float[Tensor, "k o"]
    yx: Float[Tensor, "k o s"]
    yy: Float[Tensor, "k o o"]
    Q_error: Float[Tensor, "k"]
    Q_count: Float[Tensor, "k"]
    R_error: Float[Tensor, "k"]
    R_count: Float[Tensor, "k"]
    weight_0: Float[Tensor, "k"]
    x_0: Float[Tensor, "k s"]
    xx_0: Float[Tensor, "k s s"]
    log_likelihood: Float[Tensor, ""]


def _maximised(
    model: SwitchingModel,
    begin: Beginning,
    data: Data,
    plan: Plan,
    smoother: Method,
    max_rounds: int,
    enough: float,
    progress: Callable[[int, float], None] | None,
) -> End:
    """Rounds of E and M until one gains too little."""
    best, history, converged = (model, begin), [], False
    with torch.no_grad():
        for i in range(max_rounds + 1):
            sums = _expected(model, begin, data, smoother)
            history.append(float(sums.log_likelihood))
            if history[-1] >= max(history):
                best = (model, begin)
            if progress is not None:
                progress(i, history[-1])
            converged = i > 0 and abs(history[-1] - history[-2]) <= enough
            if converged or i == max_rounds:
                break
            model, begin = _maximum(model, begin, sums, plan)
    return End(*best, max(history), history, converged)


def _expected(model: SwitchingModel, begin: Beginning, data: Data, smoother: Method) -> Sums:
    """The E step: sums over all series, some series at a time."""
    t, k, s = data.y.shape[1], model.modes, model.state_size
    size = max(1, CELLS // (t * k * k * 4 * s * s))
    total: Sums | None = None
    for part in data.chunks(size):
        sums = _expected_of(model, begin, part, smoother)
        total = sums if total is None else Sums(*(a + b for a, b in zip(total, sums, strict=True)))
    assert total is not None  # there is a series
    return total


def _expected_of(model: SwitchingModel, begin: Beginning, data: Data, smoother: Method) -> Sums:
    given: dict[str, Any] = {"mask": data.mask, "lengths": data.lengths, "times": data.times}
    found = smooth(model, data.y, **begin._asdict(), method=smoother, **given)
    now, y, _ = arranged("fit", model, data.y, validate=False, **given)
    F, Q, H, R = now.F, now.Q, now.H, now.R
    inside = data.counted
    g = found.log_mode_probability.exp() * inside.unsqueeze(-1)  # [b, t, k]
    m, P, before, P_before, lag = (
        found.mode_mean,
        found.mode_covariance,
        found.previous_mean,
        found.previous_covariance,
        found.lag_covariance,
    )
    # Moments of the state, its step and what is seen of it -----------------------------------------------------------
    seen = data.seen.unsqueeze(-2)
    A, a, C = _completed(y.unsqueeze(-2), seen, H, R, now.d)
    yx = A @ _second(m, P) + a.unsqueeze(-1) * m.unsqueeze(-2)
    Ax = (A @ m.unsqueeze(-1)).squeeze(-1)
    yy = A @ P @ A.mT + _outer(Ax + a) + C
    # Errors in units of what the model expects, for factors of Q and R -----------------------------------------------
    r = m - (F @ before.unsqueeze(-1)).squeeze(-1)
    r = r if now.b is None else r - now.b
    cross = F @ lag.mT
    S = P - cross - cross.mT + F @ P_before @ F.mT + _outer(r)
    inverse = torch.linalg.pinv(Q, hermitian=True)
    rank = torch.linalg.matrix_rank(Q, hermitian=True).to(m.dtype)
    Q_error = (inverse * S).sum((-2, -1))
    e = y.unsqueeze(-2) - (H @ m.unsqueeze(-1)).squeeze(-1)
    e = e if now.d is None else e - now.d
    both = seen.unsqueeze(-1) & seen.unsqueeze(-2)
    eye = torch.eye(R.shape[-1], dtype=R.dtype, device=R.device)
    weight = torch.linalg.inv(torch.where(both, R, eye)) * both
    R_error = (weight * (H @ P @ H.mT + _outer(e))).sum((-2, -1))

    def summed(value: Tensor) -> Tensor:
        return torch.einsum("btk,btk...->k...", g, value.expand(*g.shape, *value.shape[3:]))

    g_0 = found.initial_log_mode_probability.exp()
    return Sums(
        (found.log_pair_probability.exp() * inside[..., None, None]).sum((0, 1)),
        g.sum((0, 1)),
        summed(m),
        summed(_second(m, P)),
        summed(before),
        summed(lag + m.unsqueeze(-1) * before.unsqueeze(-2)),
        summed(_second(before, P_before)),
        summed(Ax + a),
        summed(yx),
        summed(yy),
        summed(Q_error),
        summed(rank.expand(g.shape)),
        summed(R_error),
        summed(seen.sum(-1).to(m.dtype).expand(g.shape)),
        g_0.sum(0),
        torch.einsum("bk,bks->ks", g_0, found.initial_mode_mean),
        torch.einsum("bk,bkse->kse", g_0, _second(found.initial_mode_mean, found.initial_mode_covariance)),
        found.filtered.log_likelihood.sum(),
    )


def _completed(
    y: Tensor, seen: Tensor, H: Tensor, R: Tensor, d: Tensor | None
) -> tuple[Float[Tensor, "b t k o s"], Float[Tensor, "b t k o"], Float[Tensor, "b t k o o"]]:
    """y given what was seen of it, x and the mode: N(A x + a, C); where all was seen, A = 0, a = y, C = 0."""
    k, o, s = H.shape[-3:]
    offset = y.new_zeros(k, o) if d is None else d
    missing = ~seen
    eye = torch.eye(o, dtype=R.dtype, device=R.device)
    both = seen.unsqueeze(-1) & seen.unsqueeze(-2)
    gain = (R * (missing.unsqueeze(-1) & seen.unsqueeze(-2))) @ (torch.linalg.inv(torch.where(both, R, eye)) * both)
    A = missing.unsqueeze(-1) * H - gain @ (seen.unsqueeze(-1) * H)
    rest = torch.where(seen, y - offset, 0.0)
    a = torch.where(seen, y, offset + (gain @ rest.unsqueeze(-1)).squeeze(-1))
    C = R * (missing.unsqueeze(-1) & missing.unsqueeze(-2)) - gain @ (R * (seen.unsqueeze(-1) & missing.unsqueeze(-2)))
    shape = (*y.shape[:2], k)
    return A.expand(*shape, o, s), a.expand(*shape, o), C.expand(*shape, o, o)


def _maximum(model: SwitchingModel, begin: Beginning, sums: Sums, plan: Plan) -> tuple[SwitchingModel, Beginning]:
    """The M step. A mode that no time belongs to keeps its parameters."""
    fields: dict[str, Any] = {}
    live = sums.weight > 1e-8
    if "transition" in plan.learn:
        assert model.transition is not None  # checked where learning begins
        rows = sums.pairs.sum(-1, keepdim=True)
        fields["transition"] = torch.where(rows > 1e-8, sums.pairs / rows.clamp(min=1e-300), model.transition)
    pooled = {name: name in plan.shared for name in (*MATRICES, *PLAIN)}
    # The state: regress x on (x before, 1) ---------------------------------------------------------------------------
    moved = _regressed(
        (model.F, model.b),
        (sums.xp, sums.x),
        (sums.pp, sums.p, sums.weight),
        sums.xx,
        ("F" in plan.learn, "b" in plan.learn),
        (pooled["F"], pooled["b"], pooled["Q"]),
    )
    fields |= {
        name: _kept(live, new, getattr(model, name))
        for name, new in zip(("F", "b"), moved, strict=False)
        if name in plan.learn
    }
    # What is seen: regress y on (x, 1) -------------------------------------------------------------------------------
    looked = _regressed(
        (model.H, model.d),
        (sums.yx, sums.y),
        (sums.xx, sums.x, sums.weight),
        sums.yy,
        ("H" in plan.learn, "d" in plan.learn),
        (pooled["H"], pooled["d"], pooled["R"]),
    )
    fields |= {
        name: _kept(live, new, getattr(model, name))
        for name, new in zip(("H", "d"), looked, strict=False)
        if name in plan.learn
    }
    # Their noise -----------------------------------------------------------------------------------------------------
    for name, spread, error, count in (
        ("Q", moved[2], sums.Q_error, sums.Q_count),
        ("R", looked[2], sums.R_error, sums.R_count),
    ):
        if name not in plan.learn:
            continue
        given = getattr(model, name)
        if plan.structure[name] == "scale":
            if pooled[name]:
                error, count = (
                    error.sum(-1, keepdim=True).expand_as(error),
                    count.sum(-1, keepdim=True).expand_as(count),
                )
            factor = torch.where(count > 1e-8, error / count.clamp(min=1e-300), 1.0)
            fields[name] = factor[:, None, None] * given
            continue
        if plan.structure[name] == "diagonal":
            spread = torch.diag_embed(spread.diagonal(dim1=-2, dim2=-1))
        fields[name] = _kept(live, spread, given)
    if "initial" in plan.learn:
        begin = _maximum_of_beginning(begin, sums)
    return dataclasses.replace(model, **fields, validate=False), begin


def _regressed(
    given: tuple[Tensor, Tensor | None],
    cross: tuple[Tensor, Tensor],
    inner: tuple[Tensor, Tensor, Tensor],
    outer: Tensor,
    learned: tuple[bool, bool],
    pooled: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Map and offset of least squares, and the mean square of what is left, from sums over times of each mode.

    Args:
        given: map and offset as they are.
        cross: sums of (response, regressor) and of the response.
        inner: of (regressor, regressor), of the regressor, and of 1.
        outer: of (response, response).
        pooled: whether modes share the map, the offset, the noise.
    """
    M, c = given
    yx, y = cross
    xx, x, n = inner
    c = y.new_zeros(y.shape) if c is None else c
    M, c = M.expand(len(n), *M.shape[-2:]), c.expand(len(n), c.shape[-1])

    def together(value: Tensor, whether: bool) -> Tensor:
        return value.sum(0, keepdim=True).expand_as(value) if whether else value

    n_ = n.clamp(min=1e-300)
    if all(learned):
        pool = pooled[0] or pooled[1]
        big = torch.cat((torch.cat((xx, x.unsqueeze(-1)), -1), torch.cat((x, n.unsqueeze(-1)), -1).unsqueeze(-2)), -2)
        both = torch.cat((yx, y.unsqueeze(-1)), -1)
        solved = torch.linalg.lstsq(together(big, pool), together(both, pool).mT).solution.mT
        M, c = solved[..., :-1], solved[..., -1]
    elif learned[0]:
        right = yx - c.unsqueeze(-1) * x.unsqueeze(-2)
        M = torch.linalg.lstsq(together(xx, pooled[0]), together(right, pooled[0]).mT).solution.mT
    elif learned[1]:
        right = y - (M @ x.unsqueeze(-1)).squeeze(-1)
        c = together(right, pooled[1]) / together(n_, pooled[1]).unsqueeze(-1)
    left = outer - M @ yx.mT - yx @ M.mT + M @ xx @ M.mT
    shift = c.unsqueeze(-1) * (y - (M @ x.unsqueeze(-1)).squeeze(-1)).unsqueeze(-2)
    left = left - shift - shift.mT + n[:, None, None] * _outer(c)
    return M, c, symmetric(together(left, pooled[2]) / together(n_, pooled[2])[:, None, None])


def _maximum_of_beginning(begin: Beginning, sums: Sums) -> Beginning:
    live = sums.weight_0 > 1e-8
    weight = sums.weight_0.clamp(min=1e-300)
    mean = sums.x_0 / weight.unsqueeze(-1)
    covariance = symmetric(sums.xx_0 / weight[:, None, None] - _outer(mean))
    return Beginning(
        _kept(live, mean, begin.mean),
        _kept(live, covariance, begin.covariance),
        sums.weight_0.log().log_softmax(-1),
    )


def _kept(live: Tensor, new: Tensor, old: Tensor | None) -> Tensor:
    """New parameters of modes that were there."""
    old = torch.zeros_like(new) if old is None else old
    return torch.where(live.unflatten(0, (-1, *[1] * (new.ndim - 1))), new, old)


def _second(mean: Tensor, covariance: Tensor) -> Tensor:
    return covariance + _outer(mean)


def _outer(vector: Tensor) -> Tensor:
    return vector.unsqueeze(-1) * vector.unsqueeze(-2)


class _LostError(ArithmeticError):
    """A step beyond what numbers can hold, as where noise of 0 would make the likelihood infinite."""


# The gradient ------------------------------------------------------------------------------------------------------


def _climbed(
    model: SwitchingModel,
    begin: Beginning,
    data: Data,
    plan: Plan,
    smoother: Method,
    max_rounds: int,
    enough: float,
    progress: Callable[[int, float], None] | None,
) -> End:
    """Rounds of ten quasi-Newton steps of the free numbers."""
    free = {name: t.requires_grad_() for name, t in freed("fit", model, begin, plan).items()}
    # One step a round would do, but torch's line search does not move on from where it begins anew each time.
    steps = torch.optim.LBFGS(free.values(), lr=1.0, max_iter=10, history_size=20, line_search_fn="strong_wolfe")
    size = max(1, CELLS // (8 * data.y.shape[1] * model.modes**2 * model.state_size**2))
    scale = float(data.counted.sum())
    best = (-torch.inf, {name: t.detach().clone() for name, t in free.items()})

    def total() -> float:
        """Minus the log likelihood a step, and its gradient, some series at a time."""
        steps.zero_grad()
        value = 0.0
        for part in data.chunks(size):
            loss = -_log_likelihood(*constrained(model, begin, plan, free), part, smoother).sum() / scale
            loss.backward()  # type: ignore[no-untyped-call]
            value += float(loss.detach())
        nonlocal best
        if not math.isfinite(value):
            raise _LostError
        if -value > best[0]:
            best = (-value, {name: t.detach().clone() for name, t in free.items()})
        for t in free.values():
            assert t.grad is not None  # every free number has a part in the likelihood
            t.grad = t.grad.nan_to_num(0.0, 0.0, 0.0)  # of logits at -inf
        return value

    history, converged = [], False
    for i in range(max_rounds):
        try:
            history.append(-float(steps.step(total)) * scale)  # type: ignore[no-untyped-call]
        except _LostError:
            break
        if progress is not None:
            progress(i, history[-1])
        converged = i > 0 and abs(history[-1] - history[-2]) <= enough
        if converged:
            break
    with torch.no_grad():
        found = constrained(model, begin, plan, best[1])
        value = sum(float(_log_likelihood(*found, part, smoother).sum()) for part in data.chunks(size))
    return End(*found, value, [*history, value], converged)


def _log_likelihood(model: SwitchingModel, begin: Beginning, data: Data, smoother: Method) -> Float[Tensor, "b"]:
    """Of each series, by the filter that the smoother begins with."""
    chosen = SwitchingFilter(model) if smoother == "imm" else SwitchingFilter(model, "gpb")
    begins = {
        name: t.unsqueeze(0) if t.ndim == n else t
        for (name, t), n in zip(begin._asdict().items(), (2, 3, 1), strict=True)
    }
    return chosen.filter(data.y, **begins, mask=data.mask, lengths=data.lengths, times=data.times).log_likelihood


def _standard_errors(
    call: str, model: SwitchingModel, begin: Beginning, data: Data, plan: Plan, smoother: Method
) -> dict[str, Tensor]:
    """Of the parameters themselves: the inverse information of the free numbers, carried over by the delta method.

    The information is minus the Hessian of the log likelihood; of more series than ten times the free numbers, the sum
    of the squares of their scores.
    """
    free = freed(call, model, begin, plan)
    moving = {name: t.isfinite() for name, t in free.items()}
    count = sum(int(m.sum()) for m in moving.values())

    def flat(parts: Mapping[str, Tensor], lead: int = 0) -> Tensor:
        return torch.cat([parts[name].flatten(lead)[..., moving[name].flatten()] for name in free], -1)

    def read(vector: Tensor) -> Free:
        parts, at = {}, 0
        for name, t in free.items():
            n = int(moving[name].sum())
            values = t.clone().masked_scatter(moving[name], vector[at : at + n])
            parts[name], at = values, at + n
        return parts

    point = flat(free)
    if len(data.y) > 10 * count:
        information = torch.zeros(count, count, dtype=point.dtype, device=point.device)
        size = max(1, CELLS // (32 * data.y.shape[1] * model.modes**2 * model.state_size**2))
        for part in data.chunks(size):
            own = {name: t.expand(len(part.y), *t.shape).clone().requires_grad_() for name, t in free.items()}
            likelihood = _log_likelihood(*constrained(model, begin, plan, own), part, smoother).sum()
            scores = torch.autograd.grad(likelihood, list(own.values()))
            each = flat(dict(zip(own, scores, strict=True)), 1)
            information = information + each.mT @ each
    else:

        def total(vector: Tensor) -> Tensor:
            return _log_likelihood(*constrained(model, begin, plan, read(vector)), data, smoother).sum()

        information = -torch.autograd.functional.hessian(total, point)
    # Directions of which the series say nothing, as of modes that are never there, have no error that could be said.
    curvature, ways = torch.linalg.eigh(symmetric(information))
    told = curvature > count * torch.finfo(point.dtype).eps * curvature.abs().amax()
    covariance = (ways * torch.where(told, 1 / torch.where(told, curvature, 1.0), 0.0)) @ ways.mT
    silent = ways * ~told

    def values(vector: Tensor) -> tuple[Tensor, ...]:
        made, begun = constrained(model, begin, plan, read(vector))
        named = {name: getattr(made, name) for name in plan.learn if name != "initial"}
        return tuple((named | (begun._asdict() if "initial" in plan.learn else {})).values())

    names = [name for name in plan.learn if name != "initial"]
    names += list(Beginning._fields) if "initial" in plan.learn else []
    slopes = torch.autograd.functional.jacobian(values, point)

    def error(J: Tensor) -> Tensor:
        known = torch.einsum("...a,ab,...b->...", J, covariance, J).clamp(min=0).sqrt()
        unknown = (J @ silent).norm(dim=-1) > torch.finfo(point.dtype).eps ** 0.5 * J.norm(dim=-1)
        return known.masked_fill(unknown, torch.inf)

    return {name: error(J) for name, J in zip(names, slopes, strict=True)}
