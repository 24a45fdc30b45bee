"""Every preset ends as theory expects of it; the quick ones in each run of the suite, the rest in the long one."""

import math

import pytest

from gradlogz import simulate
from gradlogz.simulation.presets import CONTRACTIONS, PRESETS, TABLE_10_1, meets
from gradlogz.simulation.wording import agreement

QUICK = [
    "whitening-1-1",
    "whitening-2-1",
    "batch-norm-8-0.354",
    "scalar-8-0.354",
    "centred-rms-8-0.354",
    "rms-8-0.354",
    "layer-norm-8-0.354",
    "rms-32-1",
    "descent-uniform-1",
    "circle-5",
    "slope-0.3",
    "riccati",
    "blow-up",
    "theorem-1",
    "hopfield",
    "hopfield-warm",
    "no-residual",
    "causal",
]


EXPECTED = [name for name, preset in PRESETS.items() if preset.expects]


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in EXPECTED]
)
def test_a_preset_ends_as_expected(name):
    preset = PRESETS[name]
    quick = {"seeds": 1, "every": max(preset.settings.steps, 1)} if name in QUICK else {}
    found = simulate(name, **quick)
    assert all(found.met), (preset.expects, [(v.kind, v.evidence) for v in found.verdicts])


def test_nothing_is_expected_where_theory_is_silent():
    assert [name for name in PRESETS if name not in EXPECTED] == ["heads"]
    found = simulate("heads", seeds=1, every=600)
    assert (found.preset.name, found.met, agreement(found)[0]) == ("heads", [], "silent")


def test_every_row_of_the_table_is_a_preset():
    """[theory 10.1]: three rows of one column, three of five, six of six."""
    assert sum(len(row) for row in TABLE_10_1.values()) == 3 + 3 * 5 + 6 * 6
    for (d, beta), row in TABLE_10_1.items():
        for word in list(CONTRACTIONS)[: len(row)]:
            assert (PRESETS[f"{word}-{d}-{beta:g}"].settings.dim, PRESETS[f"{word}-{d}-{beta:g}"].settings.beta) == (
                d,
                beta,
            )


@pytest.mark.parametrize(
    ("expects", "kind", "clusters", "values", "met"),
    [
        ("clusters 9", "clusters", 9.0, {}, True),
        ("clusters 9", "clusters", 10.0, {}, False),
        ("clusters 2-4", "clusters", 4.0, {}, True),
        ("clusters 2-4", "collapsed", 1.0, {}, False),
        ("clusters 2-3 or collapsed", "collapsed", 1.0, {}, True),
        ("frozen", "frozen", 600.0, {}, True),
        ("start slope 0.2-0.3", "other", 600.0, {"start slope": 0.25, "slope": 0.4}, True),
        ("start slope 0.2-0.3", "other", 600.0, {"start slope": 0.31}, False),
        ("radius 1-2", "other", 1.5, {"radius": math.nan}, False),
    ],
)
def test_expectations_are_read_as_they_are_written(expects, kind, clusters, values, met):
    assert meets(expects, kind, clusters, values) is met
