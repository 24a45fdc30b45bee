"""Numbers on the pages of experiments are those of their results.json."""

import json
import math
import re
from dataclasses import asdict
from itertools import product
from pathlib import Path

import pytest

from experiments.__main__ import rounded
from experiments.ascent import experiment as tied
from experiments.ascent import page as ascent
from experiments.contraction import experiment as contractions
from experiments.contraction import page as contraction
from experiments.filtering import experiment as filters
from experiments.filtering import page as filtering
from experiments.intervals import student
from experiments.linearity import experiment as linear
from experiments.linearity import page as linearity
from experiments.metric import experiment as metrics
from experiments.metric import page as metric
from experiments.metric import training as metric_training
from experiments.needed import curvature as curvatures
from experiments.needed import experiment as weights
from experiments.needed import page as needed
from experiments.pages import read_table, replace_table
from experiments.published import experiment as published_numbers
from experiments.published import page as published
from experiments.rest import experiment as resting
from experiments.rest import page as rest
from experiments.specific_heat import experiment as heat
from experiments.specific_heat import page as specific_heat

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "experiments" / "metric.md"
DECISIONS = {
    "rest": resting.decisions,
    "linearity": linear.decisions,
    "needed": weights.decisions,
    "ascent": tied.decisions,
    "metric, training": metric_training.decisions,
    "needed, curvature": curvatures.decisions,
    "contraction": contractions.decisions,
}
FILES_OF_PUBLISHED = ("results.json", "replication.json")
RESULTS = json.loads((ROOT / "experiments" / "metric" / "results.json").read_text())


def test_the_table_of_the_metric_is_that_of_its_results():
    assert read_table(PAGE, "metric") == metric.table(RESULTS)


@pytest.mark.parametrize(
    ("hypothesis", "quantity", "row"),
    [
        ("H1 metric head", "cosine", "H1 metric head"),
        ("H2 dot product", "cosine", "H2 dot product"),
        ("H3 inverse covariance of the queries", "difference", "H3 dot product"),
        ("H4 gap, bernoulli", "difference of excess risks", "H4 gap of excess risk, Bernoulli"),
        ("H4 gap, poisson", "difference of excess risks", "H4 gap of excess risk, Poisson"),
    ],
)
def test_the_decisions_on_the_page_are_those_of_the_results(hypothesis, quantity, row):
    (line,) = re.findall(rf"^\| {re.escape(row)}.*$", PAGE.read_text(), re.MULTILINE)
    for cell, d in zip(line.split("|")[2:4], ("d = 8", "d = 32"), strict=True):
        decided = RESULTS["answer"][d][hypothesis]
        interval = decided[quantity]
        numbers = f"{interval['mean']:.3f} [{interval['low']:.3f}, {interval['high']:.3f}]"
        assert decided["verdict"] in cell
        assert numbers in cell, numbers


def test_no_head_prefers_the_attended_fisher_information():
    for rows in RESULTS["answer"].values():
        verdicts = [row["verdict"] for name, row in rows.items() if name.startswith("H5")]
        assert verdicts == ["refuted"] * 9


def test_the_page_of_specific_heat_is_that_of_its_results():
    page = ROOT / "docs" / "experiments" / "specific_heat.md"
    for form, prefix in (("primes", ""), ("delayed", "delayed ")):
        path = specific_heat.files_of(form)[0]
        if path.exists():
            results = json.loads(path.read_text())
            assert read_table(page, f"{prefix}heat") == specific_heat.summary(results)
            assert read_table(page, f"{prefix}decided") == specific_heat.decided(results)


@pytest.mark.parametrize("form", ["primes", "delayed"])
def test_the_curves_of_the_figure_have_the_onsets_of_the_results(form):
    results, curves = specific_heat.files_of(form)
    if not results.exists():
        pytest.skip("this form has not been run")
    drawn = {(run["kind"], run["p"], run["seed"]): run for run in json.loads(curves.read_text())}
    runs = json.loads(results.read_text())["runs"]
    assert len(drawn) == len(runs)
    for run in runs:
        curve = drawn[run["kind"], run["p"], run["seed"]]
        high = [step for step, a in zip(curve["step"], curve["test_accuracy"], strict=True) if a >= 0.9]
        below = [step for step in curve["step"] if run["onset"] is not None and step < run["onset"]]
        assert (run["onset"] is None) == (not high)
        if high:  # curves are thinned
            assert below[-1] < run["onset"] <= high[0]


def test_a_table_is_replaced_and_nothing_else(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- table x -->\nold\n<!-- end x -->\nafter\n")
    replace_table(page, "x", "| new |")
    assert page.read_text() == "before\n<!-- table x -->\n| new |\n<!-- end x -->\nafter\n"
    assert read_table(page, "x") == "| new |"


def results_of(name):
    return json.loads((ROOT / "experiments" / name / "results.json").read_text())


@pytest.mark.parametrize(
    ("name", "table", "make"),
    [
        ("published", "compared", published.compared),
        ("published", "networks", published.networks),
        ("rest", "measured", rest.measured),
        ("rest", "decided", rest.decided),
        ("linearity", "linearity", linearity.table),
        ("needed", "needed", needed.table),
        ("ascent", "measured", ascent.measured),
        ("ascent", "decided", ascent.decided),
        ("contraction", "decided", contraction.decided),
        ("contraction", "losses", contraction.losses),
        ("contraction", "budgets", contraction.budgets),
        ("contraction", "predicted", contraction.predicted),
        ("filtering", "errors", filtering.errors),
        ("filtering", "decided", filtering.decided),
        ("filtering", "read-outs", filtering.read_outs),
    ],
)
def test_tables_are_those_of_the_results(name, table, make):
    assert read_table(ROOT / "docs" / "experiments" / f"{name}.md", table) == make(results_of(name))


@pytest.mark.parametrize(("name", "make"), [("training", metric.trained), ("training decided", metric.judged)])
def test_tables_of_the_metric_through_training_are_those_of_the_results(name, make):
    assert read_table(PAGE, name) == make(json.loads(metric_training.RESULTS.read_text()))


def test_curvatures_are_those_of_the_results():
    results = json.loads(curvatures.RESULTS.read_text())
    page = ROOT / "docs" / "experiments" / "needed.md"
    assert read_table(page, "curvature") == needed.curvature(results)
    ratio = results["answer"]["flatter"]["log ratio of curvatures"]
    assert f"{ratio['mean']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]" in page.read_text()


@pytest.mark.parametrize("file", ascent.RUNS)
@pytest.mark.parametrize(("name", "make"), [("measured", ascent.measured), ("decided", ascent.decided)])
def test_tables_of_equal_compute_are_those_of_the_results(name, make, file):
    results = json.loads((ROOT / "experiments" / "ascent" / f"{file}.json").read_text())
    assert read_table(ROOT / "docs" / "experiments" / "ascent.md", f"{name}, {ascent.RUNS[file]}") == make(results)


def test_the_replication_of_equal_compute_shares_no_seed_with_the_other_runs():
    files = ("results", "compute", "replication")
    seeds = [
        {row["seed"] for row in json.loads((ROOT / "experiments" / "ascent" / f"{file}.json").read_text())["models"]}
        for file in files
    ]
    assert [len(each) for each in seeds] == [5, 8, 5]
    assert not seeds[2] & (seeds[0] | seeds[1])


def test_the_decisions_of_linearity_are_those_of_the_results():
    page = (ROOT / "docs" / "experiments" / "linearity.md").read_text()
    for name, decided in results_of("linearity")["answer"].items():
        if name.startswith("H"):
            (line,) = re.findall(rf"^\| {name[:2]} .*$", page, re.MULTILINE)
            interval = decided["value"]
            assert decided["verdict"] in line
            assert f"{interval['mean']:.2f} [{interval['low']:.2f}, {interval['high']:.2f}]" in line


def test_the_hypotheses_of_needed_are_those_of_the_results():
    page = (ROOT / "docs" / "experiments" / "needed.md").read_text()
    for name, decided in results_of("needed")["answer"].items():
        if name.startswith("H"):
            (line,) = re.findall(rf"^\| {name[:2]} .*$", page, re.MULTILINE)
            assert decided["verdict"] in line
            for interval in (value for value in decided.values() if isinstance(value, dict)):
                assert f"{interval['mean']:.2f} [{interval['low']:.2f}, {interval['high']:.2f}]" in line


def answer_of(name, results):
    """The answer, decided again from the rows of the results."""
    if name == "published":
        again = {"capacity": published_numbers.capacity(results["networks"])}
        spectra = published_numbers.SPECTRA
        return again | {
            each: published_numbers.compared(values, spectra[each.split()[0]])
            for each, values in results["regressions"].items()
        }
    if name.startswith("specific_heat"):
        again = heat.decisions(results["runs"], small_lags=name.endswith("delayed"))
        return again | ({"published onset": heat.published_onset(results["runs"])} if name.endswith("delayed") else {})
    if name == "filtering":
        return filters.decisions(results["models"], results["filters"])
    rows = next(results[part] for part in ("models", "layers") if part in results)
    return DECISIONS[name](rows)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        *((name, name.partition(", ")[2] or "results") for name in DECISIONS),
        *((name, "results") for name in ("published", "filtering", "specific_heat")),
        ("ascent", "compute"),
        ("ascent", "replication"),
        ("published", "replication"),
        ("specific_heat, delayed", "delayed"),
    ],
)
def test_verdicts_follow_from_the_rows_of_the_results(name, file):
    results = json.loads((ROOT / "experiments" / name.split(",")[0] / f"{file}.json").read_text())
    answer = answer_of(name, results)
    verdicts = assert_same(answer, results["answer"])
    assert verdicts > 0


@pytest.mark.parametrize("d", [8, 32])
def test_verdicts_of_the_metric_follow_from_its_cells(d):
    """Its results have means and intervals over distributions, and no rows of single heads."""
    cells = {(cell["family"], cell["head"]): cell for cell in RESULTS["cells"] if cell["d"] == d}
    answer = RESULTS["answer"][f"d = {d}"]
    exact = cells["gaussian", "exact"]
    control = exact[metrics.PRECISION]["cosine"]["mean"], exact["excess risk"]["64"]["mean"]
    assert answer["control"]["passed"] == (control[0] > metrics.CONTROL_COSINE and control[1] < metrics.CONTROL_RISK)
    for name, head in (("H1 metric head", "metric"), ("H2 dot product", "dot product")):
        measured = cells["gaussian", head][metrics.PRECISION]
        assert measured["cosine"]["low"] > max(metrics.SUPPORTS, measured["largest of the null"]["mean"])
        assert answer[name]["verdict"] == "supported"
    differences = {"H3 inverse covariance of the queries": (("gaussian", "dot product, identity"), metrics.QUERIES)}
    for family, head in product(metrics.FAMILIES, metrics.HEADS[:-1]):
        differences[f"H5 attended Fisher, {family}, {head}"] = ((family, head), metrics.FISHER)
    for name, (cell, target) in differences.items():
        interval = answer[name]["difference"]
        means = [cells[cell][each]["cosine"]["mean"] for each in (target, metrics.PRECISION)]
        assert interval["mean"] == pytest.approx(means[0] - means[1], abs=5e-6)
        assert answer[name]["verdict"] == sign(interval)
    for family in ("bernoulli", "poisson"):
        gap = answer[f"H4 gap, {family}"]
        risks = [cells[each, "metric"]["excess risk"]["64"]["mean"] for each in (family, "gaussian")]
        assert gap["difference of excess risks"]["mean"] == pytest.approx(risks[0] - risks[1], abs=5e-6)
        assert risks[0] - risks[1] > metrics.GAP
        assert gap["verdict"] == sign(gap["difference of excess risks"])


def sign(interval):
    return "supported" if interval["low"] > 0 else "refuted" if interval["high"] < 0 else "inconclusive"


def assert_same(actual, expected):
    """Assert that nested values agree to the digits that are written; return the number of verdicts."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        return sum(assert_same(actual[key], expected[key]) for key in expected) + ("verdict" in expected)
    if isinstance(expected, float):
        assert actual == pytest.approx(expected, rel=2e-3, abs=2e-4)
    else:
        assert actual == expected
    return 0


@pytest.mark.parametrize("file", ["results", "replication"])
def test_nothing_is_retrieved_from_a_network_that_stores_other_patterns(file):
    results = json.loads((ROOT / "experiments" / "published" / f"{file}.json").read_text())
    assert set(results["null"]) == {0.0}


def test_the_replication_of_published_numbers_shares_no_seed_with_the_first_runs():
    results, again = (json.loads((ROOT / "experiments" / "published" / f).read_text()) for f in FILES_OF_PUBLISHED)
    sets = [{(row["spins"], row["seed"]) for row in each["networks"]} for each in (results, again)]
    assert len(sets[0]) == len(sets[1]) == 18
    assert not sets[0] & sets[1]
    for name, first in results["regressions"].items():
        assert not {*first["error"]} & {*again["regressions"][name]["error"]}


SETTINGS = {  # results, and the settings that make them again
    "metric/results": metrics.FULL,
    "filtering/results": filters.FULL,
    "rest/results": resting.FULL,
    "needed/results": weights.EXTENDED,
    "linearity/results": linear.EXTENDED,
    "contraction/results": contractions.EXTENDED,
    "metric/training": metric_training.MODELS,
    "needed/curvature": curvatures.MODELS,
    "ascent/results": tied.EXTENDED,
    "ascent/compute": tied.GPU,
    "ascent/replication": tied.REPLICATION,
    "specific_heat/results": heat.EXTENDED,
    "specific_heat/delayed": heat.DELAYED,
    "published/results": published_numbers.REDUCED,
    "published/replication": published_numbers.REPLICATION,
}
OTHERS = {  # settings that the plans explain
    "filtering/results": {"seeds"},  # fewer of some arms
    "specific_heat/delayed": {"steps", "tf32"},  # chosen by the speed of the machine; written before TF32 was added
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_the_code_are_those_of_the_results(name):
    written = json.loads((ROOT / "experiments" / f"{name}.json").read_text())["settings"]
    settings = json.loads(json.dumps(rounded(asdict(SETTINGS[name]))))
    assert {key for key in written if shared(settings.get(key), written[key]) != written[key]} == OTHERS.get(
        name, set()
    )


def shared(value, written):
    """The value without the settings that results of earlier versions do not name, at any depth."""
    if isinstance(value, dict) and isinstance(written, dict):
        return {key: shared(each, written[key]) for key, each in value.items() if key in written}
    return value


def test_the_contrasts_of_arms_of_filtering_are_on_the_page():
    page = (ROOT / "docs" / "experiments" / "filtering.md").read_text()
    answer = results_of("filtering")["answer"]
    for name in ("H6 depth", "H7 moments"):
        interval = answer[name]["difference"]
        assert f"{interval['mean']:.3f} [{interval['low']:.3f}, {interval['high']:.3f}]" in page


def test_the_lag_without_the_run_that_ends_at_its_onset_is_on_the_page():
    runs = json.loads((ROOT / "experiments" / "specific_heat" / "delayed.json").read_text())["runs"]
    early = [run for run in runs if run["kind"] == "generalising" and run["onset"] not in (None, 8000)]
    lag = student([math.log2(run["onset"] / run["peak"]) for run in early])
    page = (ROOT / "docs" / "experiments" / "specific_heat.md").read_text()
    assert f"without it the lag is {lag.mean:.2f} [{lag.low:.2f}, {lag.high:.2f}] in four runs" in page
    assert len(early) == 4
