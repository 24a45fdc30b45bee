"""attend(query, key, value) reads the empirical measure of the keys at eta = scale query: mean, entropy, covariance."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from gradlogz import Empirical, attend, merge
from support.scales import close

sizes = st.integers(1, 6)


@given(m=sizes, n=sizes, d=sizes, scale=st.floats(-3, 3), seed=st.integers(0, 1000), masked=st.booleans())
def test_attend_is_the_empirical_measure(m, n, d, scale, seed, masked):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, size, d, dtype=torch.float64, generator=generator) for size in (m, n, n))
    mask = torch.rand(2, m, n, generator=generator) > 0.5 if masked else None
    found = attend(q, k, v, scale=scale, attn_mask=mask, statistics="moments")
    h, eta = Empirical(k, mask), q * scale
    covariance = h.covariance(eta)
    size = (1 + (eta @ k.mT).abs().max()) * (1 + k.abs().max()) ** 2
    close(found.log_normalizer, h.log_normalizer(eta), size)
    close(found.entropy, h.entropy(eta), size)
    close(found.key_mean, h.mean(eta), size)
    close(found.output, h.expect(v, eta), size * (1 + v.abs().max()))
    close(found.key_variance, covariance.diagonal(dim1=-2, dim2=-1).sum(-1), size)
    # The variance of the logit <k, eta> is the covariance along eta: the Fisher information of the temperature.
    close(
        found.logit_variance, (eta * h.covariance_product(eta, eta)).sum(-1), size * (1 + eta.norm(dim=-1).amax()) ** 2
    )


@given(n=st.integers(2, 8), cut=st.integers(1, 7), seed=st.integers(0, 1000), masked=st.booleans())
def test_results_over_blocks_of_keys_merge(n, cut, seed, masked):
    """merge(a, b) is attention over both blocks: commutative, associative, with every statistic."""
    cut = min(cut, n - 1)
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, size, 3, dtype=torch.float64, generator=generator) for size in (4, n, n))
    mask = torch.rand(2, 4, n, generator=generator) > 0.6 if masked else torch.ones(2, 4, n, dtype=torch.bool)

    def part(first, last):
        return attend(q, k[:, first:last], v[:, first:last], attn_mask=mask[..., first:last], statistics="moments")

    whole = part(0, n)
    for joined in (merge(part(0, cut), part(cut, n)), merge(part(cut, n), part(0, cut))):
        for actual, expected in zip(joined[:9], whole[:9], strict=True):
            close(actual, expected, 100.0)
    single = [part(j, j + 1) for j in range(n)]
    for actual, expected in zip(merge(*single)[:9], whole[:9], strict=True):
        close(actual, expected, 100.0)
    if n > 2:
        for actual, expected in zip(merge(single[0], merge(*single[1:]))[:9], whole[:9], strict=True):
            close(actual, expected, 100.0)
