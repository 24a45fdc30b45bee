"""Every measure gives the same numbers on the GPU as on the CPU, and stays there."""

import pytest
import torch
import torch.utils._pytree as pytree

from gradlogz import dual
from support.measure_registry import NAMES, case
from support.scales import close, scale_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def moved(measure):
    return pytree.tree_map(lambda t: t.cuda(), measure)


@pytest.mark.parametrize("name", NAMES)
def test_statistics_agree(name):
    measure, eta, source = case(name)
    v, w = source.normal(*eta.shape), source.normal(*eta.shape)
    there, e = moved(measure), eta.cuda()
    for order, here, far in (
        (0, measure.log_normalizer(eta), there.log_normalizer(e)),
        (1, measure.mean(eta), there.mean(e)),
        (2, measure.covariance(eta), there.covariance(e)),
        (2, measure.covariance_product(eta, v), there.covariance_product(e, v.cuda())),
        (3, measure.third_cumulant(eta, v, w), there.third_cumulant(e, v.cuda(), w.cuda())),
        (0, measure.kl(eta, 0 * eta), there.kl(e, 0 * e)),
        (0, measure.relative_entropy(eta), there.relative_entropy(e)),
        (1, measure.support(v), there.support(v.cuda())),
    ):
        assert far.is_cuda
        close(
            far.cpu(), here, 16 * scale_of(measure, eta, order) * max(1.0, float(here.abs().nan_to_num(0, 0, 0).max()))
        )


@pytest.mark.parametrize("name", NAMES)
def test_draws_stay_on_the_device(name):
    measure, eta, _ = case(name)
    generator = torch.Generator("cuda").manual_seed(0)
    draws = moved(measure).sample(eta.cuda(), (1000,), generator=generator)
    assert draws.is_cuda
    spread = measure.covariance(eta).diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt()
    error = (draws.mean(0).cpu() - measure.mean(eta)).abs()
    assert bool((error <= 6 * spread / 1000**0.5 + 1e-9 * (1 + measure.mean(eta).abs())).all())


@pytest.mark.parametrize("name", NAMES)
def test_the_dual_is_solved_on_the_device(name):
    measure, eta, _ = case(name)
    result = dual(moved(measure), measure.mean(eta).cuda())
    assert result.eta.is_cuda
    close(result.value.cpu(), dual(measure, measure.mean(eta)).value, scale_of(measure, eta, 0), tolerance=1e-8)
