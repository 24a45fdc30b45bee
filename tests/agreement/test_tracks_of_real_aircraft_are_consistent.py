"""Levels learned on some real aircraft predict others: 93 to 97 % of their detections lie in the 95 % band.

The flights are those of the package traffic, as in benchmarks/aircraft.py, whose reduced form this is.
"""

import importlib.util
import sys
from pathlib import Path

import pytest

from gradlogz.tracking import track

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def aircraft():
    """The benchmark as a module."""
    pytest.importorskip("pandas")
    spec = importlib.util.spec_from_file_location("aircraft", ROOT / "benchmarks" / "aircraft.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["aircraft"] = module
    spec.loader.exec_module(module)
    if module.samples() is None:
        pytest.skip("the package traffic, whose flights are read, is not installed")
    return module


def test_other_aircraft_are_consistent_with_levels_that_some_have_taught(aircraft):
    rows = aircraft.flights(aircraft.samples() / "collections" / "switzerland.json.gz")
    training, testing = aircraft.halves(rows)
    assert not set(training.icao24) & set(testing.icao24)
    # Every few flights: addresses are in order of countries.
    some = [part[part.target.isin(part.target.unique()[::step])] for part, step in ((training, 6), (testing, 5))]
    learned = track(aircraft.positions(some[0]), model="cv3", fit=True)
    found = track(aircraft.positions(some[1]), model="cv3", levels=learned.levels)
    assert learned.levels.jitter > 0.1  # seconds
    assert 0.93 < found.consistency.value < 0.97
    plain = track(aircraft.positions(some[1]), jitter=0.0)
    assert plain.consistency.value < 0.9
    assert found.log_score.nanmean() > plain.log_score.nanmean() + 0.5
