"""The example of a training run that breaks runs, and its committed numbers are what the page says of them."""

import importlib.util
import json
from pathlib import Path

ROOT = Path(__file__).parents[2]


def example():
    spec = importlib.util.spec_from_file_location("entropy_collapse", ROOT / "examples" / "entropy_collapse.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_committed_run_is_what_the_page_says():
    found = json.loads((ROOT / "docs" / "pictures" / "entropy_collapse.json").read_text())
    late = example().noticed(found["losses"])
    assert late == found["loss"]
    assert found["logit explosion"] < late
    assert found["entropy collapse"] < late
    lead = late - max(found["logit explosion"], found["entropy collapse"])
    page = " ".join((ROOT / "docs" / "models.md").read_text().split())
    assert f"{lead} steps" in page
    at = found["entropy collapse"]
    means = [sum(found["losses"][i - 20 : i]) / 20 for i in range(20, len(found["losses"]) + 1)]
    assert means[at - 19] < 1.05 * min(means), "the loss is near its best"
    layer = found["layers"]["blocks.2.attention"]
    index = found["steps"].index(at)
    assert layer["entropy"][index] < 0.1 * max(layer["entropy"][: index + 1])
    assert layer["max_logit"][index] > 100


def test_the_example_runs():
    module = example()
    losses, rows, alerts = module.trained(11)
    assert len(losses) == 11
    assert [row.step for row in rows] == [0, 5, 10]
    assert not alerts
    assert losses[-1] < losses[0]


def test_a_loss_is_noticed_when_its_mean_is_above_the_best():
    noticed = example().noticed
    assert noticed([1.0] * 30) is None
    assert noticed([1.0] * 30 + [3.0]) == 30
    assert noticed([1.0] * 30 + [1.2] * 6) == 35
