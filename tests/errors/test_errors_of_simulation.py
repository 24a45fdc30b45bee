"""simulate and sweep say what is wrong with a preset, an option, a cloud or a grid."""

import sys
from unittest import mock

import torch

from gradlogz import simulate, sweep
from support.error_form import each_of, refused


def without_jinja():
    with mock.patch.dict(sys.modules, {"jinja2": None}):
        simulate(tokens=20, dim=1, steps=1, seeds=1).page()


ERRORS = [
    (ValueError, "simulate: preset must be known; got 'nope'.", lambda: simulate("nope")),
    (TypeError, "simulate: options must be known; got 'temperature'.", lambda: simulate(temperature=1.0)),
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
    (
        ImportError,
        "simulate: jinja2 and plotly must be installed to make a page; got no jinja2.",
        without_jinja,
    ),
    (
        ValueError,
        "sweep: an axis must be one of beta, tau, dim, tokens, heads, contraction with its values; got 'gamma=1:2:3'.",
        lambda: sweep("gamma=1:2:3"),
    ),
    (
        ValueError,
        "sweep: values must be from:to:count or one|other, and numbers but for contraction; got '1:2'.",
        lambda: sweep("beta=1:2"),
    ),
    (
        ValueError,
        "sweep: there must be one or two different axes; got beta, tau, dim.",
        lambda: sweep("beta=1|2,tau=1|2,dim=1|2"),
    ),
]


@each_of(ERRORS)
def test_what_is_wrong_is_said(refusal):
    refused(refusal)
