"""Parameters of switching systems from series: expectation and maximisation, or the gradient of the log likelihood.

What is not named stays as it is; what is named begins where the model given has it. One of two ways leads up from
there, from one start or several, and modes come back in the order in which they were given.

Read next: em.py (expectation and maximisation), gradient_fit.py (the gradient), training_data.py.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch

from ..._autocast import without_autocast
from ..._errors import InputTypeError, InputValueError, check_floats, present, sentence, shape_of
from ..._typing import Bool, Float, Int, Tensor
from ..gaussian.smoother import Method
from ..models.switching_model import ENDS, SwitchingModel
from ..validation import arranged
from .em import maximised
from .gradient_fit import climbed, standard_errors
from .parametrization import MATRICES, NAMES, PLAIN, Beginning, Plan, Structure
from .training_data import Data


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


@without_autocast
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
    if not isinstance(model, SwitchingModel):
        remedy = "What functions hold is learned by the gradient: imm(...).log_likelihood.backward()."
        raise InputTypeError(sentence(call, "model must be a SwitchingModel", type(model).__name__, remedy))
    plan = _planned(call, model, learn, structure or {}, shared, method)
    begin = _begun(call, model, mean, covariance, log_mode_probability)
    data = _arranged(call, model, observations, mask, lengths, times)
    free_fields = _tell_apart(model, plan)
    given, model = model, _restricted(model, plan)
    if starts < 1 or max_rounds < 1:
        fact = f"{starts} and {max_rounds}"
        raise InputValueError(
            sentence(call, "starts and max_rounds must be at least 1", fact, "1 start is the model itself.")
        )
    climb = maximised if method == "em" else climbed
    ends = []
    for start in range(starts):
        begun = (model, begin) if start == 0 else _changed(model, begin, plan, generator)
        ends.append(climb(*begun, data, plan, smoother, max_rounds, tolerance * float(data.counted.sum()), progress))
    best = max(ends, key=lambda end: end.log_likelihood)
    learned, begun_at = best.model, best.begin
    if free_fields:
        learned, begun_at = _in_order(given, learned, begun_at, plan)
    standard = standard_errors(call, learned, begun_at, data, plan, smoother) if errors else None
    return Fitted(
        dataclasses.replace(learned, validate=model.validate),
        *begun_at,
        log_likelihood=data.y.new_tensor(best.log_likelihood),
        history=data.y.new_tensor(best.history),
        converged=best.converged,
        starts=data.y.new_tensor([end.log_likelihood for end in ends]),
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
        raise InputValueError(sentence(call, condition, f"{list(learn)}", "What is not named stays as it is."))
    if method not in ("em", "gradient"):
        raise InputValueError(
            sentence(call, 'method must be "em" or "gradient"', f"{method!r}", "em needs no step size.")
        )
    missing = [name for name in learn if name in PLAIN and getattr(model, name) is None]
    if missing:
        remedy = "Give zeros to begin with."
        raise InputValueError(sentence(call, f"the model must have {missing[0]} to learn it", "None", remedy))
    wrong = [n for n in structure if n not in MATRICES or structure[n] not in ("full", "diagonal", "scale")]
    if wrong:
        condition = 'structure must say "full", "diagonal" or "scale" of Q and R'
        raise InputValueError(sentence(call, condition, f"{dict(structure)}", "Other parameters have no structure."))
    partner = {"F": "Q", "b": "Q", "H": "R", "d": "R"}
    alone = [n for n in shared if n not in learn or n in ("transition", "initial")]
    alone += [n for n in shared if n in partner and partner[n] not in shared and method == "em"]
    if alone:
        condition = "shared must name parameters that are learned, F and b together with Q, H and d together with R"
        remedy = "What weighs the errors of several modes must be common to them too."
        raise InputValueError(sentence(call, condition, f"{list(shared)}", remedy))
    plan = Plan(tuple(learn), {name: structure.get(name, "full") for name in MATRICES}, tuple(shared))
    if any(t.ndim > len(ENDS[name]) + 1 for name, t in model.fields().items()):
        remedy = "Learn from series that share a model."
        raise InputValueError(sentence(call, "the model must be one for all series", "one for each target", remedy))
    changes = model.rate is not None or model.steps is not None
    fixed = {name for name in plan.learn if name in MATRICES and plan.structure[name] == "scale"}
    if changes and set(plan.learn) - fixed - {"initial"}:
        condition = 'learn must be Q and R as "scale", or "initial", of a model that changes in time'
        remedy = 'Pass learn=["Q", "R"] and structure={"Q": "scale", "R": "scale"}.'
        raise InputValueError(sentence(call, condition, f"learn={list(plan.learn)}", remedy))
    if model.B is not None or model.D is not None or model.components is not None:
        remedy = "Fold inputs into b and d; learn modes of one size."
        raise InputValueError(sentence(call, "the model must have no inputs and no components", "some", remedy))
    return plan


def _begun(call: str, model: SwitchingModel, mean: Tensor, covariance: Tensor, log_pi: Tensor | None) -> Beginning:
    k, s = model.modes, model.state_size
    check_floats(call, mean=mean, covariance=covariance, model=model.R, **present(log_mode_probability=log_pi))
    if mean.shape not in ((s,), (k, s)) or covariance.shape not in ((s, s), (k, s, s)):
        condition = f"mean must be [{s}] or [{k}, {s}] and covariance [{s}, {s}] or [{k}, {s}, {s}]"
        fact = f"shapes {shape_of(mean)} and {shape_of(covariance)}"
        raise InputValueError(sentence(call, condition, fact, "All series begin alike."))
    log_pi = mean.new_zeros(k).log_softmax(-1) if log_pi is None else log_pi.log_softmax(-1)
    if log_pi.shape != (k,):
        condition, fact = f"log_mode_probability must be [{k}]", f"shape {shape_of(log_pi)}"
        raise InputValueError(sentence(call, condition, fact, "None is uniform."))
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
        raise InputValueError(sentence(call, "observations must hold something seen", "gaps alone", remedy))
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
        raise InputValueError(sentence("fit", "modes must differ at the beginning", "modes that are all alike", remedy))
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
    cost = torch.zeros(k, k, dtype=given.R.dtype, device="cpu")
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
