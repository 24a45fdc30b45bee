"""Milliseconds of one series of a million steps, float64, state 4, observation 2, one thread, all in one run.

sequential   `imm` and `gpb2`, step by step
blocks       `filter_in_blocks`: blocks of 1024 steps in parallel, each begun 256 steps before

Means, covariances and mode probabilities. Milliseconds are processor time, medians of alternating rounds; the largest
difference of the means, in their standard deviations, is measured before timing.
"""

import time
from functools import partial

import torch

from filters import F64, START, assembled
from gradlogz import SwitchingModel, gpb2, imm
from gradlogz.filters import filter_in_blocks
from smoothers import one_mode
from timing import compare

STEPS = 1_000_000
FIELDS = ("mean", "covariance", "log_mode_probability")


def rows() -> list[dict[str, object]]:
    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(0)
    y = torch.randn(STEPS, 2, dtype=F64, generator=g).cumsum(0) + torch.randn(STEPS, 2, dtype=F64, generator=g)
    problems = {
        "imm, 3 modes": (assembled(3), imm, "imm"),
        "gpb2, 3 modes": (assembled(3), gpb2, "gpb2"),
        "Kalman filter": (one_mode(), imm, "imm"),
    }
    return [row(name, *problem, y) for name, problem in problems.items()]


def row(name: str, model: SwitchingModel, filter, method: str, y: torch.Tensor) -> dict[str, object]:
    blocked = filter_in_blocks(model, y, START, method=method)
    sequential = filter(model, y, START, fields=FIELDS)
    deviation = sequential.covariance.diagonal(dim1=-2, dim2=-1).sqrt()
    error = ((blocked.filtered.mean - sequential.mean).abs() / deviation).max()
    alternatives = {
        "blocks": partial(filter_in_blocks, model, y, START, method=method),
        "sequential": partial(filter, model, y, START, fields=FIELDS),
    }
    del sequential, deviation
    seconds = compare(alternatives, rounds=3, clock=time.process_time)
    again = seconds.pop("A/A")
    return {
        "problem": f"{name}, 1 series of {STEPS}",
        "milliseconds": {key: round(1e3 * t, 1) for key, t in seconds.items()},
        "ratios": {
            "sequential": round(seconds["sequential"] / seconds["blocks"], 2),
            "A/A": round(again / seconds["blocks"], 3),
        },
        "largest difference": float(error),
        "discrepancy": float(blocked.discrepancy.max()),
        "repairs": blocked.repairs,
    }
