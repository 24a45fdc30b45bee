"""simulate and sweep say what is wrong with a preset, an option, a cloud or a grid."""

import torch

from gradlogz import simulate, sweep
from gradlogz.simulation.grid import parse_grid
from support.error_form import each_of, refused

ERRORS = [
    (ValueError, "simulate: preset", "nope", lambda: simulate("nope")),
    (ValueError, "simulate: seeds", "integer", lambda: simulate(seeds=0)),
    (
        ValueError,
        "simulate: keys",
        "causal",  # some tokens would see no key at all
        lambda: simulate(tokens=20, steps=1, keys=5, causal=True),
    ),
    (
        ValueError,
        "simulate: cloud",
        "finite",
        lambda: simulate(torch.zeros(3)),
    ),
    (ValueError, "simulate: beta", "finite", lambda: simulate(beta="x")),
    (TypeError, "simulate: key_mean", "dict", lambda: simulate(key_mean={})),
    (TypeError, "simulate: qk_matrix", "list", lambda: simulate(qk_matrix=[[1.0, 2.0], [3.0]])),
    (TypeError, "simulate: ov_matrix", "shape (1, 2)", lambda: simulate(ov_matrix=torch.ones(1, 2))),
    (TypeError, "simulate: key_covariance", "bool", lambda: sweep({"tau": [0.1]}, key_covariance=True)),
    (ValueError, "simulate: key_mean", "nan", lambda: simulate(key_mean=float("nan"))),
    (TypeError, "sweep: grid", "str", lambda: sweep("beta=1:2:3")),
    (
        ValueError,
        "sweep: grid",
        "contraction",
        lambda: sweep({"gamma": [1.0, 2.0]}),
    ),
    (
        ValueError,
        "sweep: grid",
        "contraction",
        lambda: sweep({"beta": [1, 2], "tau": [1, 2], "dim": [1, 2]}),
    ),
    (ValueError, "sweep: grid", "numbers", lambda: sweep({"beta": []})),
    (
        ValueError,
        "sweep: grid",
        "names",
        lambda: sweep({"contraction": "zca"}),
    ),
    (
        ValueError,
        "sweep: grid",
        "contraction",
        lambda: parse_grid("gamma=1:2:3"),
    ),
    (
        ValueError,
        "sweep: grid",
        "from:to:count",
        lambda: parse_grid("beta=1:2"),
    ),
    (
        ValueError,
        "sweep: grid",
        "twice",
        lambda: parse_grid("beta=1|2,beta=3|4"),
    ),
]


@each_of(ERRORS)
def test_what_is_wrong_is_said(refusal):
    refused(refusal)
