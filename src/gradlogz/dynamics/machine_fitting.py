"""Learning of Boltzmann machines: the gradient of the likelihood, and contrastive divergence in its place.

    log p(x)         = <a, x> + G_hidden(W^T x) - log Z                          spins x, hidden units y summed out
    d log p / d W    = x E[y | x]^T - E_model[x y^T]                             data minus model
    CD-k             = x E[y | x]^T - E[x_k E[y | x_k]^T]                        x_k: k rounds of Gibbs sampling from x
    persistent CD-k  the same with chains that continue from the last update                  [hinton02; tieleman08]

The model term needs the distribution of the machine. Contrastive divergence replaces it by a short chain from the data
and is a biased gradient, of no function; the bias is 0 for k → ∞. Contrastive learning (../contrastive) is another
thing: there the model term is an attention output, exact for finitely many candidates.   [theory E31]

Read next: ising.py (the machines), ../measures/gibbs.py (the chain).
"""

from typing import NamedTuple

import torch

from .._errors import InputTypeError, InputValueError, check_floats, has_values, shape_of
from .._typing import Float, Tensor
from ..measures.composed import Pushforward
from ..measures.exponential import Spins
from ..measures.gaussian import Gaussian
from ..measures.gibbs import Gibbs
from .ising import boltzmann_machine, spin_corners, visible_distribution


class MachineGradient(NamedTuple):
    """Gradient of the mean log likelihood of the data in the parameters of a machine, or an estimate of it.

    Attributes:
        weights: for W.
        visible_bias: for a.
        hidden_bias: for c; None for Gaussian hidden units, which have none.
        visible: last states of the chains, the start of the next persistent estimate; None for an exact gradient.
    """

    weights: Float[Tensor, "d e"]
    visible_bias: Float[Tensor, " d"]
    hidden_bias: Float[Tensor, " e"] | None
    visible: Float[Tensor, "m d"] | None


def contrastive_divergence(
    machine: Gibbs,
    data: Float[Tensor, "n d"],
    *,
    steps: int = 1,
    start: Float[Tensor, "m d"] | None = None,
    generator: torch.Generator | None = None,
) -> MachineGradient:
    """Contrastive divergence CD-k of a machine, k = steps: an estimate of the gradient of the mean log likelihood.

    Args:
        machine: a `boltzmann_machine` or `gaussian_machine`.
        data: visible spins, -1 or 1.
        steps: rounds of Gibbs sampling, hidden then visible.
        start: visible states at which the chains start; None for the data. With the field `visible` of the last
            estimate the chains persist between updates.

    Law: tests/laws/test_machines_are_learned.py.

    >>> import torch
    >>> machine = boltzmann_machine(torch.zeros(3, 2), torch.zeros(3), torch.zeros(2))
    >>> data = torch.tensor([[1.0, 1.0, -1.0], [1.0, -1.0, -1.0]])
    >>> estimate = contrastive_divergence(machine, data, steps=2)
    >>> persistent = contrastive_divergence(machine, data, steps=2, start=estimate.visible)
    >>> persistent.weights.shape
    torch.Size([3, 2])
    """
    call = "contrastive_divergence"
    parts = _parts(call, machine)
    _check_spins(call, "data", data, parts)
    if start is not None:
        _check_spins(call, "start", start, parts)
    if steps < 1:
        raise InputValueError(call, "steps", f"steps must be at least 1, got {steps}", "Use steps=1 for CD-1.")
    fields = machine.g.sample(data if start is None else start, generator=generator)
    visible = machine.chain(fields, steps, generator=generator).x[-1]
    return _difference(parts, data, visible, None)._replace(visible=visible)


def exact_gradient(machine: Gibbs, data: Float[Tensor, "n d"], *, steps: int | None = None) -> MachineGradient:
    """Exact gradient of the mean log likelihood, or the expectation of CD-k, by enumeration of the visible spins.

    Args:
        steps: None for the gradient; k for the expectation of `contrastive_divergence` with k steps from the data,
            by the transition matrix of the 2^d visible states, for machines with few hidden spins.
    """
    call = "exact_gradient"
    parts = _parts(call, machine)
    _check_spins(call, "data", data, parts)
    states = spin_corners(data.shape[-1], like=data)
    if steps is None:
        return _difference(parts, data, states, visible_distribution(machine).log_weights.softmax(-1))  # type: ignore[union-attr]
    if steps < 1 or not isinstance(parts.hidden, Spins):
        condition = "steps must be None, or at least 1 for a machine of hidden spins"
        fact = f"steps={steps} and hidden units {type(parts.hidden).__name__}"
        raise InputValueError(call, "steps", f"{condition}, got {fact}", "Draw with contrastive_divergence instead.")
    hidden = spin_corners(parts.hidden.dim, like=data)
    to_hidden = _independent(parts.hidden.mean(states @ parts.weights), hidden)
    round_trip = to_hidden @ _independent(machine.h.mean(hidden @ parts.weights.mT), states)
    at = (data.unsqueeze(-2) == states).all(-1).to(data.dtype)  # one-hot rows: the state of each observation
    return _difference(parts, data, states, at.mean(0) @ torch.linalg.matrix_power(round_trip, steps))


def visible_log_likelihood(machine: Gibbs, data: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
    """Exact log probability of each row of visible spins, by enumeration of the 2^d states."""
    call = "visible_log_likelihood"
    parts = _parts(call, machine)
    _check_spins(call, "data", data, parts)
    log_weight = data @ parts.visible_bias + machine.g.log_normalizer(data)
    return log_weight - visible_distribution(machine).log_normalizer(torch.zeros_like(data[0]))


def fit_machine(
    machine: Gibbs,
    data: Float[Tensor, "n d"],
    *,
    updates: int,
    rate: float = 0.05,
    steps: int | None = 1,
    persistent: bool = False,
    generator: torch.Generator | None = None,
) -> Gibbs:
    """Learn the parameters of a machine from visible spins by gradient steps of constant rate over all data.

    Args:
        machine: initial values. Zero weights are a saddle point: draw small ones at random.
        updates: number of gradient steps.
        rate: step size.
        steps: k of CD-k; None for the exact gradient, by enumeration.
        persistent: whether the chains of an update continue those of the last.
    """
    call = "fit_machine"
    _check_spins(call, "data", data, _parts(call, machine))
    if updates < 1 or (persistent and steps is None):
        condition = "updates must be at least 1, and persistent chains need steps"
        fact = f"updates={updates}, persistent={persistent} and steps={steps}"
        raise InputValueError(call, "updates", f"{condition}, got {fact}", "Pass steps=1 for persistent CD-1.")
    start = None
    for _ in range(updates):
        if steps is None:
            gradient = exact_gradient(machine, data)
        else:
            gradient = contrastive_divergence(machine, data, steps=steps, start=start, generator=generator)
            start = gradient.visible if persistent else None
        machine = _moved(machine, gradient, rate)
    return machine


class _Machine(NamedTuple):
    """Parameters of a machine and the measure of its hidden units."""

    weights: Tensor
    visible_bias: Tensor
    hidden: Spins | Gaussian


def _parts(call: str, machine: Gibbs) -> _Machine:
    h, g = machine.h, machine.g
    if (
        isinstance(h, Spins)
        and isinstance(g, Pushforward)
        and isinstance(g.h, Spins | Gaussian)
        and g.shift is None
        and not (h.batch_shape or g.batch_shape)
    ):
        return _Machine(g.matrix, h.bias, g.h)
    remedy = "Build it with boltzmann_machine or gaussian_machine."
    problem = f"machine must have visible spins and hidden units, got {type(h).__name__} and {type(g).__name__}"
    raise InputTypeError(call, "machine", problem, remedy)


def _check_spins(call: str, name: str, spins: Tensor, parts: _Machine) -> None:
    check_floats(call, **{name: spins, "machine": parts.weights})
    d = len(parts.weights)
    if spins.ndim != 2 or spins.shape[-1] != d or len(spins) == 0:
        condition = f"{name} must be [n, d={d}] with at least one row"
        raise InputValueError(call, name, f"{condition}, got shape {shape_of(spins)}", "Pass one row of spins each.")
    if has_values(spins) and bool((spins.abs() != 1).any()):
        remedy = "Pass 2 * bits - 1 for bits."
        raise InputValueError(call, name, f"{name} has entries other than -1 and 1", remedy)


def _difference(parts: _Machine, data: Tensor, visible: Tensor, probability: Tensor | None) -> MachineGradient:
    """Mean statistics of the data minus those of the model, which are weighted by probability if it is not None."""
    p = visible.new_full(visible.shape[:1], 1 / len(visible)) if probability is None else probability
    after, before = parts.hidden.mean(data @ parts.weights), parts.hidden.mean(visible @ parts.weights)
    W = data.mT @ after / len(data) - (p.unsqueeze(-1) * visible).mT @ before
    c = after.mean(0) - p @ before if isinstance(parts.hidden, Spins) else None
    return MachineGradient(W, data.mean(0) - p @ visible, c, None)


def _independent(mean: Tensor, states: Tensor) -> Tensor:
    """Probability [m, n] of each of n spin states for independent spins with means [m, e]."""
    return ((1 + mean.unsqueeze(-2) * states) / 2).prod(-1)


def _moved(machine: Gibbs, gradient: MachineGradient, rate: float) -> Gibbs:
    W, a, hidden = _parts("fit_machine", machine)
    W, a = W + rate * gradient.weights, a + rate * gradient.visible_bias
    if isinstance(hidden, Spins):
        assert gradient.hidden_bias is not None  # spins have one
        return boltzmann_machine(W, a, hidden.bias + rate * gradient.hidden_bias)
    return Gibbs(Spins(a), Pushforward(hidden, W))
