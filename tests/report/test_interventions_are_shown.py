"""Effects of interventions on terminals and pages, and in the folder of a run."""

import csv
import json

import pytest
import transformers
from playwright.sync_api import expect
from tokenizers import Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner

import gradlogz
from gradlogz import cli
from gradlogz.probing.interventions.records import Effect, interventions_from_json
from gradlogz.reporting.interventions_terminal import interventions_table

WORDS = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a small GPT-2, its tokenizer and texts."""
    place = tmp_path_factory.mktemp("model")
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_embd=16, n_layer=2, n_head=2, n_positions=32, initializer_range=0.3, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    transformers.set_seed(0)
    transformers.GPT2LMHeadModel(config).save_pretrained(place)
    tokenizer = Tokenizer(models.WordLevel({str(i): i for i in range(WORDS)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="0", model_max_length=32
    ).save_pretrained(place)
    texts = place / "texts"
    texts.mkdir()
    for i in range(12):
        (texts / f"{i}.txt").write_text(" ".join(str((i * j + j * j) % WORDS) for j in range(24)))
    return place


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory):
    place = tmp_path_factory.mktemp("runs") / "tiny"
    arguments = [
        "probe", str(folder), "--text", str(folder / "texts"), "--only", "entropy", "--tokens", "600", "--intervene",
        "gradient,heads,feed_forward", "--out", str(place), "--device", "cpu",
    ]  # fmt: skip
    return place, CliRunner().invoke(cli.application(), arguments)


def test_the_command_writes_effects_and_prints_them(run):
    place, result = run
    assert result.exit_code == 0, result.output
    assert "gradient removed" in result.output
    assert "above/below" in result.output
    effects = interventions_from_json((place / "interventions.json").read_text())
    assert {row.intervention for row in effects.rows} == {"gradient", "heads", "feed_forward"}
    with (place / "interventions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(effects) == 2 * 2 + 4 * 3 + 2
    assert [float(row["value"]) for row in rows] == [row.value for row in effects.rows]


def test_an_unknown_intervention_is_one_line(folder):
    result = CliRunner().invoke(cli.application(), ["probe", str(folder), "--intervene", "heads,surgery"])
    assert result.exit_code == 2
    assert "surgery" in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_the_page_of_the_run_has_a_section(run, opened):
    place, _ = run
    one = opened(place / "report.html")
    section = one.page.locator("#section-interventions")
    assert section.count() == 1
    assert "cross-entropy of the next token" in section.inner_text()
    figure = section.locator("[data-figure]").first
    figure.scroll_into_view_if_needed()
    expect(figure).to_have_attribute("data-drawn", "light")
    assert "Few documents, fewer than 16" in section.inner_text()
    assert "Interventions changed the model: their effects are in the last section" in one.page.inner_text("body")
    section.locator("select").select_option(label="gradient removed / random direction")
    difference = section.locator("[data-figure]:visible").nth(1)
    difference.scroll_into_view_if_needed()
    expect(difference).to_have_attribute("data-drawn", "light")
    drawn = difference.evaluate("box => box.data.flatMap(t => [...t.y])")
    effects = interventions_from_json((place / "interventions.json").read_text())
    rows = effects.table(variant="gradient removed", control="random direction")
    assert sorted(drawn) == pytest.approx(sorted(row["difference"] for row in rows), rel=1e-3, abs=1e-9)
    section.locator("select").select_option(label="one head: gaussian / mean")
    heat = section.locator("[data-figure]:visible").first
    expect(heat).to_have_attribute("data-drawn", "light")
    assert one.complaints == []


def test_the_page_of_a_run_with_damaged_effects_names_the_file(run, tmp_path):
    place, _ = run
    whole = (place / "interventions.json").read_text()
    (place / "interventions.json").write_text(whole[:100])
    try:
        assert "interventions.json cannot be read" in gradlogz.report(place)
    finally:
        (place / "interventions.json").write_text(whole)


def test_effects_have_a_page_and_a_display(run):
    place, _ = run
    effects = interventions_from_json((place / "interventions.json").read_text())
    html = gradlogz.report(effects)
    assert "Interventions on" in html
    assert "[benjamini95]" in html
    assert effects._repr_html_().startswith("<iframe")
    assert json.loads(effects.to_json())["model"] == effects.model


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_table_fits_the_terminal(width, run):
    place, _ = run
    effects = interventions_from_json((place / "interventions.json").read_text())
    lines = [line.plain for line in interventions_table(effects, width)]
    assert all(len(line) <= width for line in lines)
    assert any("Largest differences" in line for line in lines) == any(row.outcome for row in effects.rows)
    assert Effect._fields[0] == "intervention"
