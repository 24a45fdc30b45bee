"""simulate and sweep say what is wrong with a preset, an option, a cloud or a grid."""

import torch

from gradlogz import simulate, sweep
from gradlogz.simulation.grid import parse_grid
from support.error_form import each_of, refused

ERRORS = [
    (ValueError, "simulate: preset must be known; got 'nope'.", lambda: simulate("nope")),
    (ValueError, "simulate: seeds must be an integer from 1 on; got 0.", lambda: simulate(seeds=0)),
    (
        ValueError,
        "simulate: keys must be 0 under a causal mask; got 5.",  # some tokens would see no key at all
        lambda: simulate(tokens=20, steps=1, keys=5, causal=True),
    ),
    (
        ValueError,
        "simulate: a cloud must be [n, d] or [b, n, d] and finite; got shape (3,).",
        lambda: simulate(torch.zeros(3)),
    ),
    (ValueError, "simulate: beta and tau must be finite; got x and 0.5.", lambda: simulate(beta="x")),
    (TypeError, "sweep: grid must map names of axes to values; got str.", lambda: sweep("beta=1:2:3")),
    (
        ValueError,
        "sweep: the grid must have one or two axes of beta, tau, dim, tokens, heads, contraction; got gamma.",
        lambda: sweep({"gamma": [1.0, 2.0]}),
    ),
    (
        ValueError,
        "sweep: the grid must have one or two axes of beta, tau, dim, tokens, heads, contraction; got beta, tau, dim.",
        lambda: sweep({"beta": [1, 2], "tau": [1, 2], "dim": [1, 2]}),
    ),
    (ValueError, "sweep: values of beta must be finite numbers, at least one; got [].", lambda: sweep({"beta": []})),
    (
        ValueError,
        "sweep: values of contraction must be names, at least one; got 'zca'.",
        lambda: sweep({"contraction": "zca"}),
    ),
    (
        ValueError,
        "sweep: an axis must be one of beta, tau, dim, tokens, heads, contraction with its values; got 'gamma=1:2:3'.",
        lambda: parse_grid("gamma=1:2:3"),
    ),
    (
        ValueError,
        "sweep: values must be from:to:count or one|other, and numbers but for contraction; got '1:2'.",
        lambda: parse_grid("beta=1:2"),
    ),
    (
        ValueError,
        "sweep: there must be one or two different axes; got beta twice.",
        lambda: parse_grid("beta=1|2,beta=3|4"),
    ),
]


@each_of(ERRORS)
def test_what_is_wrong_is_said(refusal):
    refused(refusal)
