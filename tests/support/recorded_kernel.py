"""Calls of a kernel of the filters, recorded, and results compared field by field."""

import math

import torch

from gradlogz.kernels.filters import dispatch

from .scales import close


def recorded(monkeypatch, kernel):
    """Let the kernel take every series; return the list of its results, in the order of its calls."""
    results, forward = [], kernel.forward
    monkeypatch.setattr(dispatch, "WORTH_FILTERING", 0)
    monkeypatch.setattr(kernel, "forward", lambda *a, **o: results.append(forward(*a, **o)) or results[-1])
    return results


def alike(ours, theirs):
    """Assert that all fields agree to 1e-12 of their scale, NaN and infinities included."""
    for name, a, b in zip(ours._fields, ours, theirs, strict=True):
        assert a.shape == b.shape, name
        assert torch.equal(a.isnan(), b.isnan()), name
        a, b = a.nan_to_num(0.0, posinf=math.inf, neginf=-math.inf), b.nan_to_num(0.0, math.inf, -math.inf)
        close(a, b, scale=float(torch.where(b.isfinite(), b, 0.0).abs().max()) + 1)
