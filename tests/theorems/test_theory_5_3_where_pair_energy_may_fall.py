"""What the theorem on the pair energy needs, and what it does not.   [theory 5.3, 5.5]

any weights w_i > 0       sum_ij w_i w_j k(x_i, x_j) never decreases either
B symmetric, any sign     in continuous time dE/dt = sum_i |∇_i E|² / (2 beta Z_i); a long step may lose energy
a causal mask             may lose energy
sum_i log Z_i             conjectured not to decrease; no case is known
"""

import torch
from hypothesis import given
from hypothesis import strategies as st

from gradlogz import Ascent, Empirical, evolve
from support.scales import close

STATEMENTS = ("5.3", "5.5")

F64 = torch.float64
seeds, dims, taus, betas = st.integers(0, 10_000), st.integers(1, 5), st.floats(0.01, 5.0), st.floats(0.05, 3.0)


def drawn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def directions(seed, n, d):
    return torch.nn.functional.normalize(drawn(seed, n, d), dim=-1)


def log_energy(x, beta, B=None, log_weights=0.0):
    logits = beta * (x if B is None else x @ B) @ x.mT
    return (logits + log_weights + torch.as_tensor(log_weights).unsqueeze(-1)).flatten().logsumexp(0)


@given(seed=seeds, d=dims, tau=taus, beta=betas)
def test_any_weights(seed, d, tau, beta):
    x, log_weights = directions(seed, 10, d), drawn(seed + 1, 10)
    for _ in range(4):
        before = log_energy(x, beta, log_weights=log_weights)
        x = torch.nn.functional.normalize(x + tau * Empirical(x, log_weights).mean(beta * x), dim=-1)
        assert float(log_energy(x, beta, log_weights=log_weights)) >= float(before) - 1e-12 * (1 + float(before.abs()))


@given(seed=seeds, d=dims, beta=st.floats(0.05, 1.0))
def test_in_continuous_time_a_symmetric_form_of_any_sign_gains(seed, d, beta):
    x, A = drawn(seed, 8, d), drawn(seed + 1, d, d)
    B = (A + A.mT) / 2
    E = torch.func.grad(lambda y: log_energy(y, beta, B).exp())(x)
    velocity = evolve(x, Ascent(tau=1.0, beta=beta, B=B, residual=False), steps=1).cloud  # B sum_j a_ij x_j
    Z = (beta * x @ B @ x.mT).exp().sum(-1)
    rate = (E.square().sum(-1) / (2 * beta * Z)).sum()
    close((E * velocity).sum(), rate, scale=10 * (1 + float(E.abs().max() * velocity.abs().max())))
    assert float(rate) >= 0


def falls(ascent, clouds):
    """Clouds that lose energy in one step on the sphere."""
    after = evolve(clouds, ascent, contraction="sphere", steps=1).cloud
    B = torch.eye(clouds.shape[-1], dtype=F64) if ascent.B is None else ascent.B
    before, then = ((ascent.beta * x @ B @ x.mT).flatten(-2).logsumexp(-1) for x in (clouds, after))
    return int((then < before - 1e-9).sum())


def test_an_indefinite_form_may_lose_energy_in_a_long_step_and_a_definite_one_not():
    clouds = torch.nn.functional.normalize(drawn(0, 500, 3, 2), dim=-1)
    indefinite, definite = (torch.diag(torch.tensor([1.0, b], dtype=F64)) for b in (-2.0, 2.0))
    assert falls(Ascent(tau=3.0, beta=1.0, B=indefinite), clouds) > 0
    assert falls(Ascent(tau=0.01, beta=1.0, B=indefinite), clouds) == 0, "nor in a short step"
    assert falls(Ascent(tau=3.0, beta=1.0, B=definite), clouds) == 0


def test_a_causal_mask_may_lose_energy_and_full_attention_not():
    clouds = torch.nn.functional.normalize(drawn(0, 20_000, 4, 2), dim=-1)
    assert falls(Ascent(tau=1.0, beta=4.0, causal=True), clouds) > 0
    assert falls(Ascent(tau=1.0, beta=4.0), clouds) == 0


@given(seed=seeds, d=dims, tau=taus, beta=betas)
def test_no_case_is_known_in_which_the_sum_of_log_normalizers_falls(seed, d, tau, beta):
    """A conjecture: should this fail, it is refuted."""
    found = evolve(
        directions(seed, 12, d), Ascent(tau=tau, beta=beta), contraction="sphere", steps=6, observe=["log_normalizers"]
    )
    sums = found.observed["log_normalizers"]
    assert bool((sums.diff() >= -1e-11 * (1 + sums[1:].abs())).all())


def test_without_a_residual_tokens_become_one_point_the_later_the_colder():
    """[theory 5.5]: at beta = 1 soon; at beta = 40 there are several after as many steps."""
    cloud = directions(0, 60, 2)
    warm = evolve(cloud, Ascent(beta=1.0, residual=False), steps=60)
    assert warm.verdict.kind == "collapsed"
    assert float(torch.cdist(warm.cloud, warm.cloud).max()) < 1e-6
    cold = evolve(cloud, Ascent(beta=40.0, residual=False), steps=60)
    assert cold.verdict.kind == "clusters"
