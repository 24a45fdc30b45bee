"""Formulas of every chapter, and two ways to break one: its result changes sign, or is tripled.

Of a result with several fields one is changed, the first unless it is named. `users` are the statements of `gradlogz
verify` that call a formula, from one run in which every formula notes its calls.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from torch import Tensor

import gradlogz as gz
from gradlogz import attention, dynamics, filters, measures
from gradlogz.contrastive.likelihood import Likelihood
from gradlogz.contrastive.losses import one_positive, sampled_negatives, several_positives, two_views
from gradlogz.dynamics import attention_step, contraction
from gradlogz.filters.conjugate import attention_filter, conjugate_dynamics, conjugate_filter
from gradlogz.filters.gaussian import attentive_switching, enumeration, smoother, switching, switching_steps
from gradlogz.filters.models import switching_model
from gradlogz.measures import algebra
from gradlogz.measures.measure import Measure
from gradlogz.verification.program import statements, verify
from gradlogz.verification.statement import Statement


class Formula(NamedTuple):
    """A method of a class or a function of a module, by its name, and the field of its result."""

    owner: Any
    name: str
    field: str | None = None

    def __str__(self) -> str:
        names = (self.owner.__name__.removeprefix("gradlogz."), self.name, self.field)
        return ".".join(name for name in names if name)

    @property
    def function(self) -> Callable[..., Any]:
        return vars(self.owner)[self.name]


def formulas(owners: list[Any], names: list[str]) -> list[Formula]:
    return [Formula(owner, name) for owner in owners for name in names]


STATISTICS = ["log_normalizer", "mean", "covariance", "covariance_product"]
CONCRETE = [gz.Empirical, gz.Gaussian, gz.Mixture, gz.Sphere, gz.OneHot, gz.Wishart]
COMPOSED = [algebra.Tilted, algebra.Convolution, algebra.Sum, algebra.Product, algebra.Pushforward, algebra.Reweighted]
MEASURES = [
    *formulas(CONCRETE + COMPOSED, STATISTICS),
    *formulas([gz.Gamma, gz.InverseGaussian, gz.Poisson, gz.Spins], ["_g", "_g1", "_g2"]),
    *formulas([gz.Statistic, gz.ConjugatePrior], ["log_normalizer"]),
    *formulas([measures.Differentiated], ["mean", "covariance", "covariance_product"]),
    *formulas([measures.Separable], STATISTICS),
    *formulas([gz.Empirical], ["entropy", "probabilities", "support"]),
    *formulas([gz.Mixture], ["responsibilities", "lower_bound"]),
    *formulas([gz.ConjugatePrior], ["base_log_normalizer"]),
    *formulas([Measure], ["third_cumulant", "relative_entropy", "kl", "log_density", "natural_gradient", "expect"]),
    *formulas([measures], ["bregman", "dual", "mean_to_natural", "moment_project", "merge", "svec", "smat"]),
    *formulas([measures.Gibbs], ["transition", "stationary", "log_mass", "mean_field"]),
    *formulas([measures], ["anneal", "effective_sample_size", "resample_ancestors"]),
]
ATTENTION = [Formula(attention, "attend", field) for field in attention.Attention._fields[:9]]  # the rest: on request
ATTENTION += [
    *formulas([attention.MultiheadAttention, attention.GatedHeads, attention.MixtureAttention], ["attend"]),
    Formula(attention.MomentAttention, "attend"),
    Formula(attention.LinkAttention, "link"),
    *(Formula(attention, "linear_attend", field) for field in ("output", "log_normalizer")),
    *(Formula(attention, "sigmoid_attend", field) for field in ("output", "log_normalizer", "entropy")),
]
DYNAMICS = [
    *formulas([dynamics], ["evolve", "hermite_growth", "sphere_growth", "fastest_degree", "secular_equilibrium"]),
    *formulas([dynamics.GaussianCloud], ["evolve", "flow", "blow_up_time"]),
    *formulas([attention_step.AttentionStep], ["attended"]),
    *formulas([contraction.Whitening, contraction.BatchNorm, contraction.Scalar], ["_map"]),
    *formulas([contraction.LayerNorm, contraction.SphereProjection], ["__call__"]),
    *formulas([dynamics], ["equilibrium"]),
    *formulas([dynamics.EquilibriumAttention], ["settle"]),
    *formulas(
        [dynamics], ["hopfield_energy", "retrieve", "pattern_separation", "retrieval_bound", "capacity_constant"]
    ),
    *formulas([dynamics.HopfieldRetrieval], ["forward"]),
    *formulas([dynamics.Ising], ["energy", "settle", "mean_field", "bound"]),
    *formulas([dynamics], ["attention_certificate", "monotone_equilibrium"]),
    *formulas([dynamics.HopfieldFeedForward], ["forward", "potential", "energy", "step", "descent"]),
    *formulas([dynamics.EnergyBlock], ["energy", "attention_potential", "step", "descent"]),
    *formulas([dynamics.VectorSpins], ["energy", "update", "means", "mean_field", "bound"]),
]
FAMILIES = [
    filters.GammaPoisson, filters.GammaExponential, filters.BetaBinomial, filters.DirichletMultinomial,
    filters.InverseWishartNormal, filters.LinearGaussian,
]  # fmt: skip
FILTERS = [
    *(
        Formula(switching, name, field)
        for name in ("gpb1", "gpb2", "imm")
        for field in ("mode_mean", "mode_covariance", "log_mode_probability")
    ),
    *(Formula(smoother, "smooth", field) for field in ("log_pair_probability", "lag_covariance", "initial_mode_mean")),
    *formulas([switching_model], ["predict", "update"]),
    *formulas([switching_steps], ["weigh", "posterior", "collapse", "mix", "likelihood_of_modes"]),
    *formulas([enumeration], ["enumerate_modes", "weigh", "collapse"]),
    *formulas(FAMILIES, ["log_normalizer", "expectation", "natural", "likelihood", "moments"]),
    *formulas([filters.GammaPoisson], ["collapse"]),
    *formulas([filters.ConjugateFilter], ["_updated"]),
    *formulas([conjugate_filter], ["moved", "weigh"]),
    *formulas([conjugate_dynamics], ["is_closed_under"]),
    Formula(attentive_switching, "attentive_imm", "mode_mean"),
    *formulas([attention_filter], ["linear_link"]),
    *formulas([filters.AttentionFilter], ["step", "dropped", "chain", "_log_received", "_log_after", "_sinkhorn"]),
]
CONTRASTIVE = [
    *formulas([one_positive], ["info_nce", "n_pair"]),
    *formulas([two_views], ["nt_xent"]),
    *formulas([several_positives], ["nca"]),
    *formulas([sampled_negatives], ["skip_gram", "nce", "ranking_nce"]),
    *formulas([Likelihood], ["log_probability", "log_mass"]),
]
CHAPTERS = {
    "measures": MEASURES,
    "attention": ATTENTION,
    "dynamics": DYNAMICS,
    "filters": FILTERS,
    "contrastive": CONTRASTIVE,
}
FORMULAS = [formula for chapter in CHAPTERS.values() for formula in chapter]

Change = Callable[[Any], Any]


def negative(number: Any) -> Any:
    return not number if isinstance(number, bool) else -number


def triple(number: Any) -> Any:
    return not number if isinstance(number, bool) else 3 * number


def changed(result: Any, change: Change, field: str | None = None) -> Any:
    """The result with a field or its first number changed."""
    if field is not None:
        value = getattr(result, field)
        return result if value is None else result._replace(**{field: change(value)})
    if isinstance(result, (Tensor, float, int)):
        return change(result)
    parts = list(result)
    first = next(i for i, part in enumerate(parts) if isinstance(part, (Tensor, float, int, tuple)))
    parts[first] = changed(parts[first], change)
    return type(result)(*parts) if hasattr(result, "_fields") else type(result)(parts)


@contextmanager
def replaced(formula: Formula, function: Callable[..., Any]) -> Iterator[None]:
    """Another function in place of the formula, within this context."""
    original = formula.function
    setattr(formula.owner, formula.name, function)
    try:
        yield
    finally:
        setattr(formula.owner, formula.name, original)


def fails(one: Statement, formula: Formula, change: Change = negative) -> bool:
    """True if the statement fails while the result of the formula is changed."""
    original = formula.function
    with replaced(formula, lambda *args, **options: changed(original(*args, **options), change, formula.field)):
        (result,) = verify([one])
    return not result.holds


@functools.cache
def users() -> dict[Formula, list[Statement]]:
    """The statements that call each formula, the fastest first."""
    calls: dict[Formula, list[Statement]] = {formula: [] for formula in FORMULAS}
    called: set[Formula] = set()

    def noting(formula: Formula) -> Callable[..., Any]:
        original = formula.function

        @functools.wraps(original)
        def function(*args: Any, **options: Any) -> Any:
            called.add(formula)
            return original(*args, **options)

        return function

    results = []
    with ExitStack() as stack:
        for formula in FORMULAS:
            stack.enter_context(replaced(formula, noting(formula)))
        for one in statements():
            called.clear()
            (result,) = verify([one])
            results.append((result.seconds, one, set(called)))
    for _, one, used in sorted(results, key=lambda row: row[0]):
        for formula in used:
            calls[formula].append(one)
    return calls


@functools.cache
def used_by() -> dict[str, list[Formula]]:
    """The formulas that each statement calls, by its key, those with the fewest other users first."""
    ordered = sorted(FORMULAS, key=lambda formula: len(users()[formula]))
    return {one.key: [f for f in ordered if any(one is user for user in users()[f])] for one in statements()}
