"""Every statistic, for every convention of masks, windows, segments, groups and sinks, against a loop over keys."""

import pytest
import torch

from gradlogz import attend
from support.enumerated_attention import FIELDS, NAMES, cases, enumerated

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1e-6}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_attend_agrees_with_enumeration(name, dtype):
    case = cases(dtype)[name]
    found = attend(*case[:3], **case.options, statistics="moments")
    for field, expected in enumerated(case).items():
        actual = getattr(found, field).double()
        size = 1 + float(expected[expected.isfinite()].abs().max())
        half = field == "output" and dtype == torch.bfloat16
        tolerance = size * (4e-3 if half else TOLERANCE[dtype])
        torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance, msg=lambda m, f=field: f"{f}: {m}")


@pytest.mark.parametrize("name", NAMES)
def test_each_choice_of_statistics_returns_its_fields(name):
    case = cases()[name]
    whole = attend(*case[:3], **case.options, statistics="moments")
    for choice, count in (("none", 2), ("scalar", 6)):
        found = attend(*case[:3], **case.options, statistics=choice)
        for field, actual, expected in zip(FIELDS[:count], found[:count], whole[:count], strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12, msg=field)
        assert found[count:] == (None,) * (12 - count)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_statistics_of_half_precision_are_float32(dtype):
    q, k, v = (torch.randn(1, 2, 6, 8).to(dtype) for _ in range(3))
    found = attend(q, k, v, statistics="moments")
    assert found.output.dtype == dtype
    assert {t.dtype for t in found[1:9]} == {torch.float32}
