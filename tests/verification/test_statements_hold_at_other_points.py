"""A statement is no accident of its numbers: each holds at three other random points, and at ten in the long suite.

Keys, queries, covariances and weights are drawn anew; their number and dimension stay. What depends on those, or on
their scale, is in tests/theorems.
"""

import pytest
import torch

from gradlogz.verification.definition import normal, other_numbers
from gradlogz.verification.program import statements, verify

DRAWS = [range(1, 4), pytest.param(range(4, 11), marks=pytest.mark.long)]


@pytest.mark.parametrize("draws", DRAWS, ids=["few", "more"])
@pytest.mark.parametrize("one", statements(), ids=lambda s: s.key)
def test_a_corrected_statement_holds_at_every_draw(one, draws):
    for draw in draws:
        with other_numbers(draw):
            (result,) = verify([one])
        # Another draw may have a larger scale or a worse condition than the one the tolerance was written for.
        assert result.residual <= 10 * one.tolerance, result.error or f"draw {draw}: residual {result.residual:.1e}"


def test_other_numbers_are_other_numbers_and_end_with_their_block():
    before = normal(3, seed=1)
    with other_numbers(1):
        assert not torch.equal(normal(3, seed=1), before)
    assert torch.equal(normal(3, seed=1), before)
