"""GroupMoments, fits, quantiles, hashes and tests of hypotheses against the raw data in numpy and scipy."""

import functools
import hashlib
import itertools

import numpy as np
import pytest
import torch
from scipy import stats

from gradlogz.probing.statistics import (
    GROUPS,
    REPLICATES,
    affine_fit,
    affine_fits,
    benjamini_hochberg,
    bootstrap,
    bootstrap_weights,
    comoments_of,
    correlation,
    documents,
    group_of,
    hash_of,
    histogram_of,
    jackknife,
    mean,
    merge,
    moment_columns,
    quantiles,
    ratio,
    solve,
    sums_of,
    token_hashes,
    variance,
)
from support.measure_registry import Source
from support.scales import close


def keys_of(count):
    return torch.tensor([hash_of(f"document {i}") for i in range(count)], dtype=torch.int64)


# Hashes and weights ---------------------------------------------------------------------------------------------------


def splitmix64(seed, index):
    """Output `index` of the published generator, in Python's integers."""
    word = 2**64 - 1
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & word
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & word
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & word
    return z ^ (z >> 31)


def test_a_name_has_the_same_hash_everywhere():
    for name in ("", "a", "Zoë/text.txt", "\udcff"):
        digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        assert hash_of(name) == int.from_bytes(digest, "little") % 2**63
    assert hash_of("gradlogz") == 931388263455935152  # from b2sum -l 64, read from the right


def test_the_hashes_of_tokens_are_those_of_splitmix64():
    # The first output of the generator seeded with 1234567 is in the test vectors that its ports share.
    assert splitmix64(1234567, 0) == 6457827717110365317
    keys = keys_of(3)
    found = token_hashes(keys, torch.arange(5).expand(3, 5))
    seeds = [splitmix64(int(k) ^ 0x13198A2E03707344, 0) for k in keys]
    assert found.tolist() == [[splitmix64(s, i) % 2**63 for i in range(5)] for s in seeds]


def test_hashes_are_uniform():
    positions = torch.arange(400).expand(50, 400)
    uniform = token_hashes(keys_of(50), positions).flatten().double().numpy() / 2**63
    assert stats.kstest(uniform, "uniform").pvalue > 0.01
    assert stats.kstest(np.modf(uniform * 2**20)[0], "uniform").pvalue > 0.01  # the lower bits too


def test_groups_are_equally_likely():
    groups = [group_of(int(key)) for key in keys_of(4000)]
    assert set(groups) == set(range(GROUPS))
    assert stats.chisquare(np.bincount(groups)).pvalue > 0.01


def test_weights_are_poisson():
    w = bootstrap_weights(keys_of(4000)).numpy()
    assert w.shape == (4000, REPLICATES)
    counts = np.bincount(w.astype(int).ravel(), minlength=9)
    observed = np.append(counts[:7], counts[7:].sum())
    expected = np.append(stats.poisson.pmf(np.arange(7), 1), stats.poisson.sf(6, 1)) * w.size
    assert stats.chisquare(observed, expected).pvalue > 0.01
    assert w.mean() == pytest.approx(1, abs=4 / np.sqrt(w.size))
    assert w.var() == pytest.approx(1, abs=4 * np.sqrt(3 / w.size))  # Var((w - 1)²) = 3


def test_weights_are_independent_of_each_other_and_of_the_groups():
    w = bootstrap_weights(keys_of(4000)).numpy()
    between_replicates = np.corrcoef(w.T)[np.triu_indices(REPLICATES, 1)] * np.sqrt(4000)
    between_documents = np.corrcoef(w[:300])[np.triu_indices(300, 1)] * np.sqrt(REPLICATES)
    for z in (between_replicates, between_documents):
        assert z.std() == pytest.approx(1, abs=0.02)  # of 19900 and 44850 correlations
        assert abs(z).max() < 5.5
    groups = np.array([group_of(int(key)) for key in keys_of(4000)])
    z = [(w[groups == g].mean() - 1) * np.sqrt((groups == g).sum() * REPLICATES) for g in range(GROUPS)]
    assert max(map(abs, z)) < 3.5


# Sums -----------------------------------------------------------------------------------------------------------------


def test_columns_of_moments_give_means_variances_and_correlations():
    s = Source(0)
    x, y = s.normal(9, 2, 11), s.normal(9, 2, 11)
    y = 0.5 * x + y
    valid = s.normal(9, 11) > -0.5
    columns = moment_columns(x + 1e6, y - 1e6, valid=valid, shift=1e6, shift_y=torch.full((2,), -1e6).double())
    sums = sums_of(columns, keys_of(9))
    for head in range(2):
        a, b = (t[:, head][valid].numpy() for t in (x, y))
        assert float(sums.totals[0, head, 0]) == len(a)
        assert float(mean(sums.totals)[0, head]) == pytest.approx(a.mean(), abs=1e-9)
        assert float(variance(sums.totals)[0, head]) == pytest.approx(a.var(), abs=1e-9)
        assert float(correlation(sums.totals)[0, head]) == pytest.approx(np.corrcoef(a, b)[0, 1], abs=1e-9)
        assert float(ratio(sums.totals, 3, 1)[0, head]) == pytest.approx(b.sum() / a.sum(), abs=1e-7)


def test_replicates_are_weighted_sums():
    values, keys = Source(0).normal(9, 2, 3), keys_of(9)
    w = bootstrap_weights(keys).numpy()
    expected = np.einsum("br,bsk->rsk", np.concatenate((np.ones((9, 1)), w), 1), values.numpy())
    close(sums_of(values, keys).totals, torch.from_numpy(expected), 100.0)


def test_the_number_of_documents_is_that_of_kish():
    s = Source(0)
    weights = s.positive(50, low=0.1, high=5.0)
    found = float(documents(sums_of(weights.unsqueeze(-1), keys_of(50))))
    assert found == pytest.approx(float(weights.sum() ** 2 / weights.square().sum()), rel=0.3)  # three errors of 10 %


def test_one_document_has_no_interval():
    values = torch.tensor([[5.0, 3.0]])
    estimate = bootstrap(mean, sums_of(values, keys_of(1)))
    assert float(estimate.value) == pytest.approx(0.6)
    assert bool(estimate.low.isnan() and estimate.high.isnan())
    none = bootstrap(mean, sums_of(torch.zeros(0, 2), keys_of(0)))
    assert bool(none.value.isnan() and none.low.isnan())


def test_functions_may_join_entries():
    values, keys = Source(0).normal(40, 3, 2), keys_of(40)
    values[..., 0] = 1.0
    joined = bootstrap(lambda totals: mean(totals).mean(-1), sums_of(values, keys))
    alone = bootstrap(mean, sums_of(values.mean(1), keys))
    for one, other in zip(joined, alone, strict=True):
        close(one, other, 10.0)


# Comoments ------------------------------------------------------------------------------------------------------------


def grouped(x, y, groups, **options):
    """Comoments of raw tokens [*h, t, p], of which token t is of groups[t], in batches of at most 50."""
    state = None
    for g in range(GROUPS):
        for part in (groups == g).nonzero().squeeze(-1).split(50):
            if len(part):
                other = None if y is None else y[..., part, :]
                state = merge(state, comoments_of(x[..., part, :], other, group=g, **options))
    return state


def raw(seed, tokens=900, dtype=torch.float64, offset=100.0):
    s = Source(seed)
    x = s.normal(2, tokens, 5) @ s.normal(5, 5) + offset
    y = x @ s.normal(5, 3) + s.normal(2, tokens, 3) - offset
    groups = (s.positive(tokens, low=0.0, high=1.0).square() * GROUPS).long()  # of unequal sizes
    return x.to(dtype), y.to(dtype), groups


@pytest.mark.parametrize("yy", ["full", "diagonal", "trace"])
def test_moments_are_those_of_numpy(yy):
    x, y, groups = raw(0)
    c = grouped(x, y, groups, yy=yy)
    unions = [(c.total(), groups >= 0), (c.only(3), groups == 3), (c.without(0), groups != 0)]
    unions += zip(stacked(c.versions()), [groups >= 0, *(groups != g for g in range(GROUPS))], strict=True)
    for moments, kept in unions:
        assert float(moments.tokens) == int(kept.sum())
        for head in range(2):
            a, b = (t[head, kept].numpy() for t in (x, y))
            whole = np.cov(np.concatenate((a, b), 1).T, bias=True) * len(a)
            full = torch.from_numpy(whole[5:, 5:])
            expected = {"full": full, "diagonal": full.diagonal(), "trace": full.trace()}[yy]
            close(moments.mean_x[head], torch.from_numpy(a.mean(0)), 100.0)
            close(moments.mean_y[head], torch.from_numpy(b.mean(0)), 100.0)
            for found, exact in ((moments.xx, whole[:5, :5]), (moments.xy, whole[:5, 5:]), (moments.yy, expected)):
                # 1e-10: the data lie 100 spreads off, and 900 products are summed.
                close(found[head], torch.as_tensor(exact), abs(whole).max(), tolerance=1e-10)


def stacked(moments):
    return [type(moments)(*(field[i] for field in moments)) for i in range(len(moments.tokens))]


def test_float32_batches_are_right_to_1e_5_though_far_from_the_origin():
    """Offsets of 100 spreads; 20000 tokens in one batch and in many."""
    s = Source(1, torch.float32)
    x = s.normal(2, 20000, 5) + 100 * (1 + s.normal(5).abs())
    y = x[..., :3] * 2 + s.normal(2, 20000, 3)
    groups = torch.arange(20000) % GROUPS
    one = merge(comoments_of(x, y, group=0), comoments_of(x[:, :0], y[:, :0], group=1))
    for c in (one, grouped(x, y, groups)):
        total = c.total()
        for head in range(2):
            exact = torch.from_numpy(np.cov(torch.cat((x, y), -1)[head].double().numpy().T, bias=True)) * 20000
            for found, expected in ((total.xx, exact[:5, :5]), (total.xy, exact[:5, 5:]), (total.yy, exact[5:, 5:])):
                close(found[head], expected, exact.diagonal().max(), tolerance=1e-5)
            close(total.mean_x[head], x[head].double().mean(0), 1.0, tolerance=1e-6)
        assert total.xx.dtype == torch.float64


def test_half_precision_is_computed_in_float32():
    x = (Source(2).normal(300, 4) + 3).bfloat16()
    found = comoments_of(x, group=0).total()
    expected = np.cov(x.double().numpy().T, bias=True)
    close(found.covariance, torch.from_numpy(expected), 1.0, tolerance=1e-5)


def test_products_are_whole_where_a_process_lets_them_be_rounded():
    x = Source(2, torch.float32).normal(500, 64)
    expected = comoments_of(x, group=0).total().xx
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu"):
            found = comoments_of(x, group=0).total().xx
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bool])
def test_weights_count_tokens(dtype):
    s = Source(3)
    x, y = s.normal(40, 3) + 10, s.normal(40, 2)
    w = s.positive(40) * (s.normal(40) > 0) if dtype == torch.float64 else s.normal(40) > 0
    x[w == 0] = torch.nan  # padding may hold anything
    found = comoments_of(x, y, group=0, weights=w).total()
    kept, weight = w != 0, w[w != 0].double().numpy()
    data = torch.cat((x, y), -1)[kept].numpy()
    exact = np.cov(data.T, aweights=weight, bias=True) * weight.sum()
    close(found.tokens, torch.tensor(weight.sum()), 40.0)
    close(found.xx, torch.from_numpy(exact[:3, :3]), 100.0)
    close(found.xy, torch.from_numpy(exact[:3, 3:]), 100.0)
    close(found.mean_x, torch.from_numpy(np.average(data[:, :3], axis=0, weights=weight)), 10.0)


def test_the_jackknife_is_that_over_raw_data():
    """Log determinants of covariances, recomputed from the tokens without each group."""
    x, _, groups = raw(4)
    found = jackknife(lambda m: m.covariance.logdet(), grouped(x, None, groups))
    for head in range(2):
        f = lambda kept: np.linalg.slogdet(np.cov(x[head, kept].numpy().T, bias=True))[1]  # noqa: E731, B023
        whole, left = f(groups >= 0), np.array([f(groups != g) for g in range(GROUPS)])
        sizes = np.bincount(groups.numpy())
        h = sizes.sum() / sizes
        pseudo = h * whole - (h - 1) * left
        v = np.mean((pseudo - (GROUPS * whole - ((1 - 1 / h) * left).sum())) ** 2 / (h - 1))
        assert float(found.value[head]) == pytest.approx(whole, abs=1e-9)
        assert float(found.high[head]) == pytest.approx(whole + stats.t.ppf(0.975, 7) * np.sqrt(v), abs=1e-8)
        assert float(found.low[head]) == pytest.approx(whole - stats.t.ppf(0.975, 7) * np.sqrt(v), abs=1e-8)


def test_the_jackknife_of_a_mean_of_equal_groups_is_the_interval_of_student():
    means = Source(5).normal(8)
    c = functools.reduce(merge, (comoments_of(m.expand(5, 1), group=g) for g, m in enumerate(means)))
    found = jackknife(lambda m: m.mean_x[..., 0], c)
    expected = stats.t.interval(0.95, 7, loc=means.mean(), scale=stats.sem(means.numpy()))
    assert (float(found.low), float(found.high)) == pytest.approx(expected, rel=1e-10)


def test_one_group_has_no_interval():
    found = jackknife(lambda m: m.mean_x[..., 0], comoments_of(Source(0).normal(5, 1), group=6))
    assert bool(found.low.isnan() and found.high.isnan() and not found.value.isnan())


# Least squares --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("yy", ["full", "trace"])
def test_held_out_fits_are_those_on_raw_data(yy):
    x, y, groups = raw(6)
    fit = affine_fit(grouped(x, y, groups, yy=yy))
    for head in range(2):
        a, b = np.concatenate((np.ones((900, 1)), x[head].numpy()), 1), y[head].numpy()
        whole = np.linalg.lstsq(a, b, rcond=None)[0]
        E, S = np.zeros(GROUPS), np.zeros(GROUPS)
        for g in range(GROUPS):
            inside = groups.numpy() == g
            B = np.linalg.lstsq(a[~inside], b[~inside], rcond=None)[0]
            E[g] = ((b[inside] - a[inside] @ B) ** 2).sum()
            S[g] = ((b[inside] - b[~inside].mean(0)) ** 2).sum()
        in_sample = 1 - ((b - a @ whole) ** 2).sum() / ((b - b.mean(0)) ** 2).sum()
        close(fit.coefficients[head], torch.from_numpy(whole[1:]), 1.0, tolerance=1e-8)
        close(fit.intercept[head], torch.from_numpy(whole[0]), 100.0, tolerance=1e-8)
        assert float(fit.in_sample[head]) == pytest.approx(in_sample, abs=1e-8)
        assert float(fit.held_out.value[head]) == pytest.approx(1 - E.sum() / S.sum(), abs=1e-8)
        assert float(fit.held_out.low[head]) < 1 - E.sum() / S.sum() < float(fit.held_out.high[head])


@pytest.mark.parametrize("yy", ["full", "diagonal", "trace"])
def test_two_fits_are_those_of_y_and_of_the_sum(yy):
    x, y, groups = raw(12)
    y = torch.cat((y, x[..., y.shape[-1] :].square()), -1)
    fits = affine_fits(grouped(x, y, groups, yy=yy))
    for fit, alone in zip(
        fits, (affine_fit(grouped(x, y, groups)), affine_fit(grouped(x, x + y, groups))), strict=True
    ):
        close(fit.coefficients, alone.coefficients, tolerance=1e-9)
        close(fit.intercept, alone.intercept, 100.0, tolerance=1e-9)
        close(fit.in_sample, alone.in_sample, tolerance=1e-9)
        for one, other in ((fit.held_out, alone.held_out), (fit.extrapolated, alone.extrapolated)):
            close(one.value, other.value, tolerance=1e-9)
            close(one.low, other.low, tolerance=1e-9)
            close(one.replicates, other.replicates, tolerance=1e-9)


def test_noise_is_predicted_in_sample_and_not_held_out():
    """40 coordinates of noise explain 40/100 of 100 tokens, and cost as much on others."""
    s = Source(7)
    x, y = s.normal(20, 104, 40), s.normal(20, 104, 1)
    fit = affine_fit(grouped(x, y, torch.arange(104) % GROUPS))
    assert float(fit.in_sample.mean()) == pytest.approx(40 / 103, abs=0.05)
    assert float(fit.held_out.value.max()) < 0


def test_singular_fits_predict_as_well_as_regular_ones():
    x, y, groups = raw(8, offset=1.0)
    doubled = torch.cat((x, x[..., :2] + x[..., 2:4], torch.ones_like(x[..., :1])), -1)
    one, two = affine_fit(grouped(x, y, groups)), affine_fit(grouped(doubled, y, groups))
    close(two.in_sample, one.in_sample, tolerance=1e-6)
    close(two.held_out.value, one.held_out.value, tolerance=1e-6)
    rough = affine_fit(grouped(doubled.float(), y.float(), groups))
    close(rough.held_out.value, one.held_out.value, tolerance=1e-4)
    assert float(two.coefficients[..., -1, :].abs().max()) == 0.0  # of the constant


def test_regular_systems_are_solved_without_a_ridge():
    s = Source(9)
    scales = torch.logspace(-6, 6, 5, dtype=torch.float64)
    A = s.covariance(3, 5) * scales.unsqueeze(-1) * scales
    B = s.normal(3, 5, 2)
    expected = np.linalg.solve(A.numpy(), B.numpy())
    close(solve(A, B) * scales.unsqueeze(-1), torch.from_numpy(expected) * scales.unsqueeze(-1), 1e9)


def test_one_group_holds_nothing_out():
    s = Source(10)
    fit = affine_fit(comoments_of(s.normal(30, 2), s.normal(30, 1), group=1))
    assert bool(fit.held_out.value.isnan())
    assert 0 < float(fit.in_sample) < 1


# Histograms -----------------------------------------------------------------------------------------------------------


def test_counts_are_those_of_numpy():
    values, edges = Source(0).normal(2, 500), torch.linspace(-2, 2, 17, dtype=torch.float64)
    values[0, :3] = torch.tensor([-2.0, 2.0, 0.0])  # on edges
    values = values.mT.contiguous().mT  # as a slice of a larger tensor
    found = histogram_of(values, edges).counts
    for head in range(2):
        x = values[head].numpy()
        bounds = np.concatenate(([-np.inf], edges.numpy(), [np.inf]))
        expected = [((a <= x) & (x < b)).sum() for a, b in itertools.pairwise(bounds)]
        assert found[head].tolist() == [*expected, 0]
    valid = values[0] > 0
    assert histogram_of(values, edges, valid=valid).counts.sum(-1).tolist() == [int(valid.sum())] * 2


def test_quantiles_are_within_a_bin_of_those_of_numpy():
    values, edges = Source(1).normal(3, 4000), torch.linspace(-5, 5, 201, dtype=torch.float64)
    levels = torch.tensor([0.01, 0.25, 0.5, 0.9, 0.999], dtype=torch.float64)
    found = quantiles(histogram_of(values, edges), levels)
    expected = np.quantile(values.numpy(), levels.numpy(), axis=-1, method="inverted_cdf").T
    close(found, torch.from_numpy(expected), 1.0, tolerance=0.05)
    uniform = torch.arange(1000, dtype=torch.float64) / 1000 + 0.0005
    tenths = torch.linspace(0, 1, 11, dtype=torch.float64)
    close(quantiles(histogram_of(uniform, tenths), levels), levels)


def test_quantiles_of_nothing_and_of_nan_are_nan():
    edges, levels = torch.tensor([0.0, 1.0]), torch.tensor([0.5])
    assert bool(quantiles(histogram_of(torch.zeros(0), edges), levels).isnan())
    assert bool(quantiles(histogram_of(torch.tensor([0.5, torch.nan]), edges), levels).isnan())
    assert float(quantiles(histogram_of(torch.tensor([7.0, 8.0]), edges), levels)) == 1.0
    assert float(quantiles(histogram_of(torch.tensor([-7.0, -8.0]), edges), levels)) == 0.0


# Tests of hypotheses --------------------------------------------------------------------------------------------------


def test_benjamini_hochberg_is_that_of_scipy():
    p = Source(12).positive(6, 30, low=0.0, high=1.0)
    p[:, :8] *= 0.01
    adjusted = stats.false_discovery_control(p.flatten().numpy())
    for level in (0.01, 0.05, 0.2):
        assert benjamini_hochberg(p, level).flatten().tolist() == (adjusted <= level).tolist()
    p[0, 3] = torch.nan
    tested = ~p.flatten().isnan()
    adjusted = stats.false_discovery_control(p.flatten()[tested].numpy())
    assert benjamini_hochberg(p).flatten()[tested].tolist() == (adjusted <= 0.05).tolist()
    assert not bool(benjamini_hochberg(p)[0, 3])
    assert benjamini_hochberg(torch.zeros(0)).shape == (0,)
