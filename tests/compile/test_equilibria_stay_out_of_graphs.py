"""A layer whose number of steps depends on numbers stays out of compiled graphs, and what is around it compiles."""

import pytest
import torch

from gradlogz.dynamics import EquilibriumAttention, MonotoneAttention
from support.scales import close


@pytest.mark.parametrize("moving", [False, True])
def test_it_stays_out_of_compiled_graphs(moving):
    layer = EquilibriumAttention(6, 2, moving=moving, tolerance=1e-13, dtype=torch.float64)
    s = torch.randn(2, 4, 6, dtype=torch.float64)
    compiled = torch.compile(lambda x: 2 * layer(2 * x), backend="aot_eager")
    with torch.no_grad():
        close(compiled(s), 2 * layer(2 * s), 10.0)


def test_a_monotone_layer_stays_out_of_compiled_graphs():
    layer = MonotoneAttention(6, 2, tolerance=1e-13, dtype=torch.float64)
    s = torch.randn(2, 4, 6, dtype=torch.float64)
    compiled = torch.compile(lambda x: 2 * layer(2 * x), backend="aot_eager")
    with torch.no_grad():
        close(compiled(s), 2 * layer(2 * s), 10.0)
