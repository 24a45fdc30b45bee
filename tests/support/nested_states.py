"""Comparison of nested statistics, number by number."""

import torch


def numbers_in(state, path=()):
    """Yield the tensors and numbers of a nested state, with their paths."""
    if isinstance(state, torch.Tensor | float | int):
        yield path, torch.as_tensor(state, dtype=torch.float64)
    parts = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, tuple | list) else ()
    for name, part in parts:
        yield from numbers_in(part, (*path, name))


def alike(one, other, *, least=20):
    """Raise unless all numbers of two states agree to 1e-12 of their scale, and there are more than `least`."""
    expected, found = dict(numbers_in(one)), dict(numbers_in(other))
    assert expected.keys() == found.keys()
    assert len(expected) > least
    for path, value in expected.items():
        if path[0] == "identity" and value.ndim > 1:  # counts of rounding errors, which depend on the batches
            assert found[path].sum() == value.sum()
            continue
        scale = max(1.0, float(value.nan_to_num().abs().amax())) if value.numel() else 1.0
        torch.testing.assert_close(found[path], value, rtol=0.0, atol=1e-12 * scale, equal_nan=True)
