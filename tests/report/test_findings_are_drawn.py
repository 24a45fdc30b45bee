"""Findings in a notebook: figures of plotly, and maps of verdicts below the table."""

import xml.etree.ElementTree as ElementTree

import pytest

from gradlogz.reporting.findings_figures import by_layer, head_map, labels_of, layer_name, sample_size
from gradlogz.reporting.findings_wording import verdict_sentence
from support.invented_findings import DECLARATIONS, HEADS, LAYERS, findings


def test_values_stand_beside_their_nulls_layer_by_layer():
    figure = findings().plot("ascent")
    traces = {trace.name: trace for trace in figure.data}
    assert list(traces) == ["null", "supported"]
    assert list(traces["supported"].x) == [0, 1, 2]
    assert list(traces["supported"].y) == pytest.approx([0.0, 0.1, 0.2])
    assert list(traces["supported"].error_y.array) == pytest.approx([0.02] * 3)
    assert list(traces["null"].y) == [0.05] * 3
    assert figure.layout.yaxis.title.text.endswith("[1]")
    assert traces["supported"].marker.color == "rgba(0,158,115,1)"


def test_heads_are_spread_over_their_layer_and_mapped():
    found = findings()
    figure = found.plot("entropy")
    assert {trace.name for trace in figure.data} == {"null", "supported", "refuted", "inconclusive"}
    places = sorted(x for trace in figure.data if trace.name != "null" for x in trace.x)
    assert len(places) == LAYERS * HEADS
    assert [round(x) for x in places] == [i for i in range(LAYERS) for _ in range(HEADS)]
    (heat,) = found.plot("entropy", "max logit", by="head").data
    by = {(r.layer, r.head): r.value for r in found.rows if r.quantity == "max logit"}
    layers = list(dict.fromkeys(layer for layer, _ in by))
    assert [list(line) for line in heat.z] == [pytest.approx([by[la, h] for h in range(HEADS)]) for la in layers]


def test_text_of_models_is_text_in_figures_too():
    figure = findings(words="<b>x").plot("novel")
    assert "&lt;b&gt;x" in figure.layout.yaxis.title.text
    assert all("<b>" not in word for trace in figure.data for word in trace.text)


def test_values_far_out_do_not_flatten_the_rest():
    found = findings()
    rows = [
        r._replace(value=-500.0) if r.quantity == "entropy" and r.head == 0 and "0" in r.layer else r
        for r in found.rows
    ]
    figure = type(found)(found.facts, rows, found.claims).plot("entropy")
    assert figure.layout.yaxis.range[0] > -10


def test_a_notebook_shows_a_map_of_every_prediction_that_judges_heads():
    shown = findings(words="<i>")._repr_html_()
    maps = [ElementTree.fromstring(f"<svg{part.partition('</svg>')[0]}</svg>") for part in shown.split("<svg")[1:]]
    assert [m.get("aria-label") for m in maps] == ["entropy: entropy", "novel: size<i>"]
    assert all(len(m.findall("rect")) == LAYERS * HEADS for m in maps)
    first = maps[0].findall("rect")[0]
    assert first.find("title").text.startswith("layer 0, head 0, entropy 0.92")
    assert int(first.get("y")) > int(maps[0].findall("rect")[-1].get("y")), "the first layer is at the bottom"
    assert first.get("fill") == "#009e73"


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        (["model.layers.0.self_attn", "model.layers.11.self_attn"], ["0", "11"]),
        (["h.0.attn#1", "h.0.attn#2"], ["1", "2"]),
        (["start", "h.0.attn#1", "h.0.attn#2", "end"], ["start", "1", "2", "end"]),
        (["only.attn"], ["only.attn"]),
        (["encoder.0.attn", "decoder.0.cross"], ["encoder.0.attn", "decoder.0.cross"]),
        (["a.0.x", "a.0.y"], ["x", "y"]),
        (["block.1", "block"], ["block.1", "block"]),
        (["embedding", "block.0.a", "block.1.a", "end"], ["embedding", "0", "1", "end"]),
        (["", "b.1.x", "b.2.x"], ["", "1", "2"]),
        (["l.0.a", "l.0.a#2", "l.1.a"], ["0", "0#2", "1"]),
    ],
)  # fmt: skip
def test_layers_have_short_names_that_differ(names, labels):
    row = findings().rows[0]
    parts = [name.partition("#") for name in names]
    rows = [row._replace(layer=layer, call=int(call or 1)) for layer, _, call in parts]
    assert list(labels_of(rows).values()) == labels


@pytest.mark.parametrize(
    ("label", "name"),
    [("3", "layer 3"), ("decoder.3", "layer decoder.3"), ("embeddings.LayerNorm", "module embeddings.LayerNorm"),
     ("end", "end of the model"), ("", "model")],
)  # fmt: skip
def test_a_layer_is_called_a_layer_only_if_it_has_a_number(label, name):
    assert layer_name(label) == name


def test_captions_count_what_rows_describe():
    rows = [row for row in findings().rows if row.quantity == "gain"]
    declared = {"ascent": DECLARATIONS["ascent"]._replace(unit="block")}
    assert sample_size(rows, declared) == f"n = {LAYERS} blocks, 50 tokens each"
    declared = {"ascent": DECLARATIONS["ascent"]._replace(places={"gain": "sublayers"})}
    assert sample_size(rows, declared) == f"n = {LAYERS} sublayers, 50 tokens each"
    assert sample_size(rows, {}) == f"n = {LAYERS} layers, 50 tokens each"
    exact = [row._replace(low=row.value, high=row.value, tokens=0) for row in rows]
    assert sample_size(exact, {}) == f"n = {LAYERS} layers; weights only"


def test_a_long_formula_is_in_the_caption_and_not_beside_the_axis():
    rows = [row for row in findings().rows if row.quantity == "gain"]
    quantity = DECLARATIONS["ascent"].quantities["gain"]
    for formula in (quantity.formula, 3 * quantity.formula):
        declared = {"ascent": DECLARATIONS["ascent"]._replace(quantities={"gain": quantity._replace(formula=formula)})}
        figure = by_layer(rows, labels_of(rows), declared)
        assert (formula in figure.caption) == (formula not in figure.y.label)
        assert len(figure.y.label.split("\n")) <= 2


def test_titles_name_the_quantity_alone():
    rows = [row for row in findings().rows if row.quantity == "max logit"]
    assert by_layer(rows, labels_of(rows), {}).title == "max logit"
    assert "by" not in head_map(rows, labels_of(rows), {}).title.split()


def test_a_self_check_is_named_in_the_first_sentence():
    claims = findings().summary()
    assert "Self-check" not in verdict_sentence("planted", claims, DECLARATIONS)
    declared = {**DECLARATIONS, "entropy": DECLARATIONS["entropy"]._replace(kind="self-check")}
    assert "Self-check “entropy”: " in verdict_sentence("planted", claims, declared)
