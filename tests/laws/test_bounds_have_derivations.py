"""Every number that a verdict depends on has a declared derivation, and the declared power is that of the benchmark."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from gradlogz.probing.predictions import known_predictions
from gradlogz.probing.runs.records import BEYOND, PREDICTED
from gradlogz.reporting.findings_wording import facts_of

ROOT = Path(__file__).parents[2]
NUMBER = re.compile(r"(?<![\w.^/(])\d+(?:\.\d+)?(?!\w|\.\d| %)")
TESTED = [p for p in known_predictions() if p.declaration.kind in (PREDICTED, BEYOND)]


def numbers(text):
    """Numbers of a condition, without the arguments of functions such as sqrt(1/2)."""
    return set(NUMBER.findall(text))


def test_numbers_of_conditions_are_recognised():
    assert numbers("The excess is above 0.05 and below -0.05.") == {"0.05"}
    assert numbers("Below 0.71 = sqrt(1/2): at most 64 rounding units.") == {"0.71", "64"}


def test_every_bound_has_a_derivation():
    missing = {}
    for prediction in known_predictions():
        declared = prediction.declaration
        derived = {match.group() for key in declared.bounds if (match := NUMBER.match(key))}
        lacking = numbers(f"{declared.supports} {declared.refutes}") - derived
        if lacking:
            missing[prediction.name] = sorted(lacking)
        assert all(len(reason.split()) >= 5 for reason in declared.bounds.values()), prediction.name
    assert not missing, f"Declaration.bounds lacks derivations: {missing}"


def test_every_tested_claim_names_its_smallest_interesting_effect():
    missing = [p.name for p in TESTED if not p.declaration.interesting]
    assert not missing, f"Declaration.interesting is empty: {missing}"


def tables():
    spec = importlib.util.spec_from_file_location("tables", ROOT / "benchmarks" / "tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_declared_power_is_that_of_the_benchmark():
    expected = tables().power_sentences()
    declared = {p.name: p.declaration.power for p in known_predictions()}
    for name, sentence in expected.items():
        assert declared[name] == sentence, name


def test_interesting_effects_are_found():
    """At the smallest effect called interesting: in at least 80 % of heads or layers, and of models."""
    counts = json.loads((ROOT / "benchmarks" / "results" / "probe_calibration.json").read_text())["counts"]
    for claim, setting, verdict in (
        ("tie", "tied, width 256: 0.1", "supported"),
        ("tie", "tied, width 256: -0.1", "refuted"),
        ("ascent", "tied, width 256: 0.1", "supported"),
        ("ascent", "tied, width 256: -0.1", "refuted"),
        ("expansion", "tied, width 256: 0.5", "supported"),
        ("expansion", "tied, width 256: -0.5", "refuted"),
        ("gaussian_measure", "heavy: 0.2", "refuted"),
        ("pair_energy", "attending: 0.02", "supported"),
        ("qk_geometry", "following: 0.85", "supported"),
        ("qk_geometry", "alike: -0.1", "refuted"),
        ("link", "linked: -0.2", "refuted"),
        ("entropy", "matching: 0.75", "supported"),
        ("feed_forward_hopfield", "maps: 0.2", "supported"),
        ("feed_forward_hopfield", "maps: -0.2", "refuted"),
        ("dropped_covariance", "unsure: 1", "supported"),
        ("dropped_covariance", "unsure: -1", "refuted"),
    ):
        for kind, judged in counts[f"planted: {setting}"][claim].items():
            if kind != "median value":
                assert judged.get(verdict, 0) >= 0.8 * sum(judged.values()), (claim, setting, kind, judged)


def test_equal_matrices_are_no_evidence():
    """Query and key matrices that are equal, without relation to the tokens: at most 5 % of heads support a claim."""
    counts = json.loads((ROOT / "benchmarks" / "results" / "probe_calibration.json").read_text())["counts"]
    for judged in (counts["planted: alike: 1"]["qk_geometry"][kind] for kind in ("models", "rows")):
        assert judged.get("supported", 0) <= 0.05 * sum(judged.values())


def test_random_models_have_no_verdict_more_often_than_the_level():
    """At least 100 of each family: at most 5 % of models have any false verdict, at most 5 % of heads or layers one."""
    counts = json.loads((ROOT / "benchmarks" / "results" / "probe_calibration.json").read_text())["counts"]
    families = {name: claims for name, claims in counts.items() if name.startswith("random: ")}
    assert len(families) == 4
    for claims in families.values():
        assert sum(claims["any of these"]["models"].values()) >= 100
        assert sum(claims["any of these"]["models"].get(v, 0) for v in ("supported", "refuted")) <= 5
        for claim in (
            "ascent", "tie", "qk_geometry", "link", "link, rotation null", "expansion", "feed_forward_hopfield",
            "entropy",
        ):  # fmt: skip
            rows = claims[claim]["rows"]
            assert max(rows.get(v, 0) for v in ("supported", "refuted")) <= 0.05 * sum(rows.values()), claim


@pytest.mark.parametrize("prediction", TESTED, ids=lambda p: p.name)
def test_pages_show_bounds_and_power(prediction):
    facts = facts_of({prediction.name: prediction.declaration}, prediction.name)
    assert facts["power"] == (prediction.declaration.power or "not measured")
    assert facts["smallest interesting effect"] == prediction.declaration.interesting
    for number, reason in prediction.declaration.bounds.items():
        assert f"{number}: {reason}" in facts["bounds"]
