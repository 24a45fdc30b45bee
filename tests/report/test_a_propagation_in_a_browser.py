"""The pages of tokens in the layers of a model: drawn, quiet, offline."""

import pytest
from playwright.sync_api import expect

from gradlogz import report
from gradlogz.probing import iterate_layer, layer_clouds, layer_dynamics, propagate
from support.saved_models import TEXTS, gpt2, tokenizer

OPTIONS = {"tokens": 40, "length": 12, "seeds": 2, "name": "tiny"}


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    place, model, words = tmp_path_factory.mktemp("pages"), gpt2(), tokenizer()
    report(propagate(model, words, TEXTS, **OPTIONS), place / "propagation.html")
    clouds = layer_clouds(model, words, TEXTS, layer=1, **OPTIONS)
    report(iterate_layer(layer_dynamics(model, clouds.inputs, 1), clouds, steps=4), place / "iteration.html")
    return place


@pytest.mark.parametrize(("name", "figures", "width"), [("propagation", 12, 1440), ("iteration", 10, 390)])
def test_every_figure_is_drawn(opened, pages, name, figures, width):
    one = opened(pages / f"{name}.html", width=width)
    boxes = one.page.locator("[data-figure]")
    assert boxes.count() >= figures
    for i in range(boxes.count()):
        boxes.nth(i).scroll_into_view_if_needed()
        expect(boxes.nth(i)).to_have_attribute("data-drawn", "light")
        labels = boxes.nth(i).locator(".xtitle, .ytitle").all_text_contents()
        assert all("[" in label for label in labels if label), "every axis has a unit"
    legend = one.page.locator("#figure-effective-rank .legendtext").all_text_contents()
    assert legend == (["text", "Gaussian", "untrained", "redrawn"] if name == "propagation" else ["text", "Gaussian"])
    assert "gradlogz simulate --model tiny" in one.page.locator(".reproduce").inner_text()
    assert one.complaints == []
    assert [url for url in one.requests if not url.startswith(("file:", "data:", "blob:"))] == []
