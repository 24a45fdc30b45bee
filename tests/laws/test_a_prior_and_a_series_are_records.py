"""A prior and a series are frozen pytrees, a tensor is a series, and numbers are taken where scalar tensors are."""

import dataclasses

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

from gradlogz.filters import (
    BetaBinomial,
    GammaPoisson,
    Generator,
    InverseWishartNormal,
    Prior,
    Series,
    SwitchingModel,
    attentive_imm,
    discretize,
    discretize_chain,
    imm,
)
from support.switching_oracles import F64, beginning, observed, same, system


def test_a_tensor_is_a_series_of_observations_alone():
    model, prior = system(2), beginning(2)
    y = observed(model, 5, 3)
    same(imm(model, y, prior), imm(model, Series(y), prior))


def test_they_are_frozen_pytrees_without_what_they_lack():
    prior, series = beginning(2), Series(torch.zeros(4, 1, dtype=F64), lengths=torch.tensor(3))
    assert len(tree_leaves(prior)) == 3
    assert len(tree_leaves(series)) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        series.mask = None
    half = tree_map(lambda t: t.to(torch.float32) if t.is_floating_point() else t, series)
    assert half.observations.dtype == torch.float32
    assert torch.equal(half.lengths, series.lengths)


def test_they_may_be_mapped_over():
    model, prior = system(2, 2, 2), beginning(2)
    y, mask = observed(model, 5, 3), torch.rand(3, 5) < 0.7
    many = Series(y, mask=mask)
    mapped = torch.func.vmap(lambda series: imm(model, series, prior).mean)(many)
    torch.testing.assert_close(mapped, imm(model, many, prior).mean, rtol=0, atol=1e-12)


def test_a_generator_is_part_of_its_model():
    rate = torch.tensor([[-0.1, 0.1], [0.2, -0.2]], dtype=F64)
    fields = {name: t for name, t in system(2).fields().items() if name != "transition"}
    model = SwitchingModel(Generator(rate), **fields)
    assert model.continuous
    assert any(leaf is rate for leaf in tree_leaves(model))
    assert not model.at(torch.ones(3, dtype=F64)).continuous


def test_inputs_reach_a_filter_whose_chain_attends():
    model = system(2, 2, 1, B=torch.randn(2, 2, 1, dtype=F64))
    series = Series(observed(model, 4, 3), inputs=torch.randn(4, 1, dtype=F64))
    prior, none = beginning(2), torch.zeros(2, 2, dtype=F64)
    same(attentive_imm(model, series, prior, eta=none), imm(model, series, prior), 100.0)


def test_numbers_are_taken_where_scalar_tensors_are():
    number = torch.tensor
    A, C = number([[0.0, 1.0], [0.0, 0.0]], dtype=F64), torch.eye(2, dtype=F64)
    for ours, theirs in (
        (GammaPoisson().prior(2.0, 1), GammaPoisson().prior(number(2.0), number(1.0))),
        (BetaBinomial(3).prior(2, number(1.5, dtype=F64)), BetaBinomial(3).prior(*number([[2.0], [1.5]], dtype=F64))),
        (InverseWishartNormal(2).prior(5, C), InverseWishartNormal(2).prior(number(5.0, dtype=F64), C)),
        (discretize(A, C, 0.1)[1], discretize(A, C, number(0.1, dtype=F64))[1]),
        (discretize_chain(A - A.mT, 0.5), discretize_chain(A - A.mT, number(0.5, dtype=F64))),
    ):
        assert torch.equal(ours.flatten(), theirs.flatten())
    y, seen = number([3.0], dtype=F64), torch.ones(1, dtype=torch.bool)
    exposed = GammaPoisson(0.1).likelihood(y, seen), GammaPoisson(number(0.1, dtype=F64)).likelihood(y, seen)
    assert all(torch.equal(a, b) for a, b in zip(*exposed, strict=True))


def test_a_prior_needs_a_mean_and_a_covariance():
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'covariance'"):
        Prior(torch.zeros(2))
