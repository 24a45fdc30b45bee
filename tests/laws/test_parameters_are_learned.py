"""Learning ends where the likelihood is stationary, climbs on the way, and recovers what was planted."""

import dataclasses
import itertools

import pytest
import torch

from gradlogz import Prior, Series, SwitchingFilter, SwitchingModel, fit
from gradlogz.filters import Generator, enumerate_modes
from gradlogz.filters.fitting.parametrization import FitPlan
from gradlogz.filters.fitting.preparation import in_order
from support.scales import close
from support.switching_oracles import chain, positive

F64 = torch.float64
START = Prior(torch.zeros(2, dtype=F64), torch.eye(2, dtype=F64))


def number(x):
    return torch.tensor(x, dtype=F64)


def system(k, *, seed=0):
    torch.manual_seed(seed)
    turn = number([[0.8, 0.4], [-0.3, 0.7]])
    return SwitchingModel(
        transition=chain(k),
        F=turn + 0.2 * torch.randn(k, 2, 2, dtype=F64),
        Q=positive(k, 2, scale=0.3),
        H=torch.eye(2, dtype=F64) + 0.2 * torch.randn(k, 2, 2, dtype=F64),
        R=positive(k, 2, scale=0.2),
        b=0.5 * torch.randn(k, 2, dtype=F64),
        d=0.5 * torch.randn(k, 2, dtype=F64),
    )


def drawn(model, n, t, *, seed=1, start=START):
    """Series of a model, by its definition."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, dtype=F64, generator=g)

    root_Q, root_R = torch.linalg.cholesky(model.Q), torch.linalg.cholesky(model.R)
    mode = torch.randint(model.modes, (n,), generator=g)
    x = start.mean + normal(n, model.state_size) @ torch.linalg.cholesky(start.covariance).mT
    series = []
    for _ in range(t):
        mode = torch.multinomial(model.transition[mode], 1, generator=g).squeeze(-1)
        moved = (model.F[mode] @ x.unsqueeze(-1)).squeeze(-1) + (0 if model.b is None else model.b[mode])
        x = moved + (root_Q[mode] @ normal(n, model.state_size, 1)).squeeze(-1)
        seen = (model.H[mode] @ x.unsqueeze(-1)).squeeze(-1) + (0 if model.d is None else model.d[mode])
        series.append(seen + (root_R[mode] @ normal(n, model.observation_size, 1)).squeeze(-1))
    return torch.stack(series, 1)


def slopes(found, names, y, likelihood):
    """The gradient of the log likelihood in some fields of a model, along the directions that its constraints leave."""
    fields = {name: getattr(found.model, name).detach().clone().requires_grad_() for name in names}
    made = dataclasses.replace(found.model, **fields, validate=False)
    likelihood(made, y, found.prior).sum().backward()
    result = {}
    for name, t in fields.items():
        g = t.grad
        if name == "transition":  # rows sum to one
            g = g - (g * t.detach()).sum(-1, keepdim=True)
            g = g * t.detach()
        elif name in ("Q", "R"):
            g = t.detach() @ (g + g.mT) / 2 @ t.detach()
        result[name] = float(g.abs().max())
    return result


def gpb2_likelihood(model, y, prior):
    return SwitchingFilter(model, "gpb").filter(y, prior).log_likelihood


def exact_likelihood(model, y, prior):
    return enumerate_modes(model, y, prior).filtered.log_likelihood


ALL = ["transition", "F", "Q", "H", "R", "b", "d"]


@pytest.mark.parametrize(
    ("names", "known"), [(["F", "Q", "b"], {"R": 1e-2}), (["H", "R", "d"], {"Q": 1e-3})], ids=["moves", "looks"]
)
def test_with_one_mode_every_round_climbs_and_the_end_is_stationary(names, known):
    """What is not learned is nearly without noise, so that few rounds end it; gaps in all and in some dimensions."""
    eye = torch.eye(2, dtype=F64).unsqueeze(0)
    fixed = {name: size * eye for name, size in known.items()}
    model = dataclasses.replace(system(1), **fixed)
    y = drawn(model, 25, 6)
    y[0, 2] = torch.nan
    y[1, 3:5, 0] = torch.nan
    y[2:6, 4, 1] = torch.nan
    other = system(1, seed=5)
    start = dataclasses.replace(model, **{name: getattr(other, name) for name in names})
    found = fit(start, y, START, learn=names, method="em", tolerance=1e-12, max_iterations=100)
    assert bool((found.history.diff() >= -1e-8).all())
    begun = slopes(found._replace(model=start), names, y, gpb2_likelihood)
    ended = slopes(found, names, y, gpb2_likelihood)
    for name in names:
        assert ended[name] < 1e-3 * begun[name], name


@pytest.mark.parametrize("name", ["transition", "Q", "R", "b", "d"])
def test_a_round_is_the_step_along_the_gradient_that_fisher_s_identity_gives(name):
    """Exact smoother, two modes, gaps. The gradient of log p(y) is that of the expected complete likelihood, so that

    T' ∝ T dl/dT,   b' = b + Q dl/db / n,   d' = d + R dl/dd / n,   Q' = Q + 2 Q dl/dQ Q / n,   R' likewise,

    where n_j = sum_i T_ij dl/dT_ij is the expected number of steps in mode j; l by enumeration of histories.
    """
    model = system(2)
    y = drawn(model, 6, 4)
    y[3, 1] = torch.nan
    y[4, 2, 0] = torch.nan
    fields = {f: getattr(model, f).clone().requires_grad_() for f in ("transition", name)}
    exact_likelihood(dataclasses.replace(model, **fields, validate=False), y, START).sum().backward()
    pairs = model.transition * fields["transition"].grad
    n, slope, old = pairs.sum(0), fields[name].grad, getattr(model, name)
    if name == "transition":
        want = pairs / pairs.sum(-1, keepdim=True)
    elif name in ("b", "d"):
        noise = model.Q if name == "b" else model.R
        want = old + (noise @ slope.unsqueeze(-1)).squeeze(-1) / n.unsqueeze(-1)
    else:
        want = old + old @ (slope + slope.mT) @ old / n[:, None, None]
    found = fit(model, y, START, learn=[name], method="em", smoother="enumerate", max_iterations=1)
    close(getattr(found.model, name), want, 1.0, tolerance=1e-9)
    assert float(found.history.diff()) > 0


@pytest.mark.parametrize("structure", ["full", "diagonal", "scale"])
@pytest.mark.parametrize(("name", "known"), [("Q", {"R": 1e-2}), ("R", {"Q": 1e-3})])
def test_noise_of_every_structure_ends_where_the_gradient_ends(structure, name, known):
    """One mode: the end of EM is the end of quasi-Newton steps."""
    eye = torch.eye(2, dtype=F64).unsqueeze(0)
    model = dataclasses.replace(system(1), **{other: size * eye for other, size in known.items()})
    y = drawn(model, 20, 5)
    y[0, 3, 1] = torch.nan
    start = dataclasses.replace(model, **{name: 2.5 * getattr(model, name)})
    options = {"learn": [name], "structure": {name: structure}, "max_iterations": 60, "tolerance": 1e-11}
    em, gradient = (fit(start, y, START, method=m, **options) for m in ("em", "gradient"))
    ours, theirs = getattr(em.model, name), getattr(gradient.model, name)
    close(ours, theirs, 1.0, tolerance=1e-4)
    close(em.log_likelihood, gradient.log_likelihood, 1.0, tolerance=1e-5)
    if structure == "diagonal":
        assert float(ours[0, 0, 1]) == 0
    if structure == "scale":
        factor = ours / getattr(start, name)
        close(factor, factor[:, :1, :1].expand_as(factor))


def test_what_modes_share_is_the_same_for_all():
    model = system(2)
    y = drawn(model, 12, 3)
    for method in ("em", "gradient"):
        found = fit(model, y, START, learn=["R", "d", "H"], shared=["R", "d", "H"], method=method, max_iterations=2)
        for name in ("R", "d", "H"):
            field = getattr(found.model, name)
            close(field[1], field[0])
        assert bool((found.history.diff() > -1e-9).all())


def test_planted_parameters_are_recovered_within_their_intervals():
    """Two modes of a walk, 150 series of 25 steps: within four standard errors, learned by GPB2."""
    one = torch.ones(2, 1, 1, dtype=F64)
    true = SwitchingModel(
        transition=number([[0.95, 0.05], [0.2, 0.8]]),
        F=number([[[0.9]], [[0.5]]]),
        Q=number([[[0.1]], [[2.0]]]),
        H=one,
        R=0.3 * one,
        b=number([[0.0], [1.5]]),
    )
    begin = Prior(torch.zeros(1, dtype=F64), torch.eye(1, dtype=F64))
    y = drawn(true, 150, 25, start=begin)
    start = SwitchingModel(
        transition=number([[0.8, 0.2], [0.2, 0.8]]),
        F=0.7 * one,
        Q=number([[[0.3]], [[1.0]]]),
        H=one,
        R=0.5 * one,
        b=number([[0.0], [0.5]]),
    )
    names = ["transition", "F", "Q", "R", "b"]
    found = fit(start, y, begin, learn=names, shared=["R"], tolerance=1e-5, errors=True)
    assert found.converged
    for name in names:
        off = (getattr(found.model, name) - getattr(true, name)).abs()
        assert bool((off < 4 * found.standard_error[name]).all()), name
        assert bool((found.standard_error[name] < 0.2).all()), name


def test_standard_errors_of_scores_and_of_curvature_agree():
    """A mean of Gaussians: the standard error of d is sqrt(S / n), known in closed form."""
    n = 60
    model = SwitchingModel(
        transition=torch.ones(1, 1, dtype=F64),
        F=torch.zeros(1, 1, 1, dtype=F64),
        Q=0.5 * torch.ones(1, 1, 1, dtype=F64),
        H=torch.ones(1, 1, 1, dtype=F64),
        R=0.7 * torch.ones(1, 1, 1, dtype=F64),
        d=torch.zeros(1, 1, dtype=F64),
    )
    begin = Prior(torch.zeros(1, dtype=F64), torch.eye(1, dtype=F64))
    y = drawn(model, n, 1, start=begin)
    scores = fit(model, y, begin, learn=["d"], errors=True, tolerance=1e-14)
    close(scores.model.d[0, 0], y.mean(), tolerance=1e-6)
    spread = (y - y.mean()).square().mean()  # what the scores see in place of S = 1.2
    close(scores.standard_error["d"][0, 0], (1.2**2 / spread / n).sqrt(), tolerance=1e-5)
    curvature = fit(model, y.transpose(0, 1), begin, learn=["d"], errors=True)  # one long series of white noise
    close(curvature.standard_error["d"][0, 0], number(1.2 / n).sqrt(), tolerance=1e-8)


def test_series_that_end_teach_nothing_after_their_end():
    model = system(2)
    y = drawn(model, 6, 8)
    lengths = torch.tensor([8, 5, 8, 3, 8, 8])
    padded = y.clone()
    for i, n in enumerate(lengths):
        padded[i, n:] = 1e3
    options = {"learn": ALL, "max_iterations": 3, "tolerance": 0.0}
    found = fit(model, Series(padded, lengths=lengths), START, **options)
    same = fit(model, Series(y, lengths=lengths), START, **options)
    close(found.history, same.history, 100.0)
    doubled = fit(model, Series(torch.cat((padded, padded)), lengths=lengths.repeat(2)), START, **options)
    for name in ALL:
        close(getattr(found.model, name), getattr(same.model, name), 10.0)
        close(getattr(doubled.model, name), getattr(found.model, name), 10.0, tolerance=1e-10)


def test_noise_levels_are_learned_at_irregular_times():
    """A Wiener process seen with noise: factors of both, in continuous time; a round by Fisher's identity."""
    g = torch.Generator().manual_seed(0)
    n, t = 60, 12
    times = torch.rand(n, t, dtype=F64, generator=g).cumsum(-1)
    steps = times.diff(dim=-1, prepend=torch.zeros(n, 1, dtype=F64))
    x = (2.0 * steps).sqrt().mul(torch.randn(n, t, dtype=F64, generator=g)).cumsum(-1)
    y = (x + 0.5 * torch.randn(n, t, dtype=F64, generator=g)).unsqueeze(-1)
    one = torch.ones(1, 1, 1, dtype=F64)
    model = SwitchingModel(transition=Generator(torch.zeros(1, 1, dtype=F64)), F=0 * one, Q=one, H=one, R=one)
    begin = Prior(torch.zeros(1, dtype=F64), 1e-6 * torch.eye(1, dtype=F64))
    series, options = Series(y, times=times), {"learn": ["Q", "R"], "structure": {"Q": "scale", "R": "scale"}}
    q, r = (torch.ones(1, 1, 1, dtype=F64, requires_grad=True) for _ in range(2))
    gpb2_likelihood(dataclasses.replace(model, Q=q, R=r, validate=False), series, begin).sum().backward()
    once = fit(model, series, begin, **options, method="em", max_iterations=1)
    close(once.model.Q, 1 + 2 * q.grad / (n * t), tolerance=1e-9)
    close(once.model.R, 1 + 2 * r.grad / (n * t), tolerance=1e-9)
    found = fit(model, series, begin, **options, method="gradient", errors=True)
    assert abs(float(found.model.Q) - 2.0) < 4 * float(found.standard_error["Q"]) < 1.5
    assert abs(float(found.model.R) - 0.25) < 4 * float(found.standard_error["R"]) < 0.3


def test_modes_come_back_in_the_order_given_and_the_best_start_is_kept():
    one = torch.ones(2, 1, 1, dtype=F64)
    true = SwitchingModel(
        transition=number([[0.9, 0.1], [0.1, 0.9]]),
        F=0 * one,
        Q=0.1 * one,
        H=one,
        R=0.1 * one,
        b=number([[-2.0], [2.0]]),
    )
    begin = Prior(torch.zeros(1, dtype=F64), torch.eye(1, dtype=F64))
    y = drawn(true, 40, 10, start=begin)
    for low, high in ((-0.5, 0.5), (0.5, -0.5)):
        start = dataclasses.replace(true, b=number([[low], [high]]), Q=one)
        found = fit(
            start,
            y,
            begin,
            learn=["transition", "b", "Q"],
            starts=2,
            max_iterations=10,
            generator=torch.Generator().manual_seed(1),
        )
        assert found.starts.shape == (2,)
        assert found.log_likelihood == found.starts.max()
        close(found.model.b, number([[4 * low], [4 * high]]), 1.0, tolerance=0.2)
        close(found.model.transition.sum(-1), torch.ones(2, dtype=F64))


def test_a_generator_and_what_changes_in_time_come_back_in_the_order_given():
    """Rows and columns of rates change places, and modes of fields that begin with time do."""
    rate = number([[-0.1, 0.1], [0.4, -0.4]])
    one = torch.ones(2, 1, 1, dtype=F64)
    Q = one * number([1.0, 9.0])[:, None, None]
    given = SwitchingModel(Generator(rate), F=0 * one, Q=Q, H=one.expand(3, 2, 1, 1), R=one)
    swapped = dataclasses.replace(given, transition=Generator(rate.flip(0, 1)), Q=Q.flip(0))
    prior = Prior(*(number([[2.0], [1.0]]), number([[[2.0]], [[1.0]]]), number([0.4, 0.6]).log()))
    plan = FitPlan(("Q", "R"), {"Q": "scale", "R": "scale"}, ("R",))
    found, initial = in_order(given, swapped, prior, plan)
    close(found.transition.rate, rate)
    close(found.Q, Q)
    assert found.H.shape == (3, 2, 1, 1)
    close(initial.mean, number([[1.0], [2.0]]))


def test_progress_is_told():
    values, done = [], []
    model = system(1)
    calls = {"on_iteration": lambda i, v: values.append((i, v)), "progress": lambda *counts: done.append(counts)}
    fit(model, drawn(model, 3, 4), START, learn=["R"], method="em", max_iterations=4, tolerance=0.0, starts=2, **calls)
    assert [i for i, _ in values] == [0, 1, 2, 3, 4] * 2
    assert all(b >= a for (_, a), (_, b) in itertools.pairwise(values[:5]))
    assert all(total == 8 for _, total in done)
    assert [n for n, _ in done] == sorted(n for n, _ in done)
    assert done[-1] == (8, 8)


def walks(**fields):
    """Two random walks of different noise."""
    one = torch.ones(2, 1, 1, dtype=F64)
    given = {"transition": number([[0.9, 0.1], [0.2, 0.8]]), "F": 0.9 * one, "H": one, "R": 0.3 * one}
    return SwitchingModel(**{**given, "Q": one * number([0.1, 1.5])[:, None, None], **fields})


WALK = Prior(torch.zeros(1, dtype=F64), torch.eye(1, dtype=F64))


def test_what_the_series_say_nothing_of_has_no_finite_standard_error():
    """A mode that is never there; a chain between modes that are alike; a chain whose zeros stay."""
    y = drawn(walks(), 8, 20, start=WALK)
    options = {"max_iterations": 30, "tolerance": 1e-5, "errors": True}
    first = dataclasses.replace(WALK, log_mode_probability=number([0.0, -torch.inf]))
    alone = fit(walks(transition=torch.eye(2, dtype=F64)), y, first, **options)
    for name in ("Q", "R"):
        error = alone.standard_error[name].flatten()
        assert 0 < error[0] < 1
        assert error[1] == torch.inf
    close(alone.model.Q[1], number([[1.5]]), 1.0)
    assert (alone.standard_error["transition"] == 0).all()
    alike = fit(walks(), y, WALK, **options, shared=["Q", "R"])
    assert (alike.standard_error["transition"] == torch.inf).all()
    assert (alike.standard_error["Q"] < 1).all()


@pytest.mark.parametrize("method", ["em", "gradient"])
def test_series_that_never_move_are_told_without_end_and_stop_somewhere(method):
    found = fit(walks(), torch.zeros(3, 30, 1, dtype=F64), WALK, method=method, max_iterations=5)
    assert all(field.isfinite().all() for field in found.model.fields().values())
    assert found.log_likelihood.isfinite()
    assert found.log_likelihood > 0  # a density of nearly no width


def test_a_gradient_ends_with_the_likeliest_model_seen():
    y = drawn(walks(), 4, 15, start=WALK)
    found = fit(walks(), y, WALK, method="gradient", max_iterations=2)
    assert found.log_likelihood >= found.history.max() - 1e-9 * found.history.abs().max()
    close(found.log_likelihood, gpb2_likelihood(found.model, y, WALK).sum(), found.log_likelihood.abs())
