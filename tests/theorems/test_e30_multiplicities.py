"""On distinct points with multiplicities m_n, p(x_n) = m_n exp<y, x_n> / sum m exp.   [theory E30]

Eq. 4 of the note on exponential families prints exp<y, x> / sum_j exp<y, x_j>, which loses m_n when a point repeats.
"""

import torch
from hypothesis import given

import gradlogz as gz
from support.attention_strategies import attentions
from support.scales import close, scale_of


@given(attentions(scales=(1e-3, 1.0)))
def test_the_mass_of_a_point_is_its_multiplicity_times_its_exponential(attention):
    points, y, s = attention
    m = torch.poisson(s.positive(len(points), low=1.0, high=3.0), generator=s.generator) + 1
    repeated = points.repeat_interleave(m.long(), 0)
    mass = m * torch.exp(points @ y)
    # h counts every copy; the mass of a distinct point is that of all its copies.
    copies = gz.Empirical(repeated).probabilities(y)
    owner = torch.arange(len(points)).repeat_interleave(m.long())
    collected = torch.zeros(len(points), dtype=y.dtype).index_add(0, owner, copies)
    h = gz.Empirical.weighted(points, m)
    close(collected, mass / mass.sum(), scale_of(h, y, 0))
    close(h.probabilities(y), mass / mass.sum(), scale_of(h, y, 0))


def test_the_printed_mass_function_does_not_sum_to_one_over_distinct_points():
    distinct, m = torch.tensor([[0.0], [1.0]]), torch.tensor([3.0, 1.0])
    y = torch.zeros(1)
    listed = distinct.repeat_interleave(m.long(), 0)
    printed = torch.exp(distinct @ y) / torch.exp(listed @ y).sum()
    assert abs(float(printed.sum()) - 0.5) < 1e-6
    assert abs(float(gz.Empirical.weighted(distinct, m).probabilities(y).sum()) - 1) < 1e-6
