"""Tables, summaries and displays of findings are counts of their rows, and show no more than is there."""

import csv
import io
import math
import re
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from gradlogz.probing.predictions import tie
from gradlogz.probing.runs.findings import Findings
from gradlogz.probing.runs.findings_file import read_findings, write_findings
from gradlogz.probing.runs.records import (
    VERDICTS,
    Claim,
    Declaration,
    Detail,
    Finding,
    Label,
    Quantity,
    Remark,
    Token,
)
from gradlogz.probing.runs.row_table import COLUMNS
from gradlogz.reporting.findings_terminal import table_lines
from gradlogz.reporting.findings_wording import title_of, verdict_sentences
from gradlogz.reporting.formatting import STYLES

numbers = st.floats(allow_nan=True, allow_infinity=True)
names = st.sampled_from(["tie", "ascent", "[bold]x[/]", "<b>&"])
verdicts = st.sampled_from(["", *VERDICTS])


@st.composite
def findings(draw, model="tiny"):
    keys = draw(st.sets(st.tuples(names, st.sampled_from(["a.0", "a.1"]), st.none() | st.integers(0, 3)), max_size=12))
    rows = [
        Finding(model, prediction, layer, 1, head, "cosine", *draw(st.tuples(*[numbers] * 6)), 5, draw(verdicts))
        for prediction, layer, head in sorted(keys, key=str)
    ]
    claimed = draw(st.sets(names, max_size=3))
    claims = [
        Claim(model, name, draw(names), "cosine", 0.5, 0.4, 0.6, draw(numbers), draw(verdicts), draw(names))
        for name in sorted(claimed)
    ]
    tokens = [Token(model, "sink", "a.0", 1, None, draw(numbers), "doc", 3, draw(names))]
    declarations = {name: declaration(name) for name in sorted({prediction for prediction, *_ in keys} - {"ascent"})}
    return Findings({model: {"architecture": draw(names), "parameters": 12}}, rows, claims, tokens, declarations)


def declaration(name):
    return Declaration(
        name, "A claim.", "1 = 1", "", ("One.", "Two."), "", {"cosine": Quantity("1", "cos")}, ("shim22",)
    )


def same(one, other):
    return str(one) == str(other)  # NaN is written as NaN


@given(findings())
def test_a_summary_counts_its_rows(found):
    summary = found.summary()
    assert [s.prediction for s in summary] == list(dict.fromkeys(e.prediction for e in (*found.rows, *found.claims)))
    for s in summary:
        judged = [row.verdict for row in found.rows if row.prediction == s.prediction and row.verdict]
        assert s.supported == judged.count("supported")
        assert s.refuted == judged.count("refuted")
        assert s.judged == len(judged) - judged.count("not applicable")
        assert math.isnan(s.share) if not s.judged else s.share == s.supported / s.judged
        claim = next((c for c in found.claims if c.prediction == s.prediction), None)
        shared = judged[0] if len(set(judged)) == 1 else "inconclusive" if judged else ""
        assert s.verdict == (shared if claim is None else claim.verdict)


def test_without_a_claim_the_middle_row_speaks():
    values = [0.1, 0.9, 0.3, math.nan]
    rows = [Finding("tiny", "tie", "a", 1, h, "cosine", v, null=v / 2, verdict="refuted") for h, v in enumerate(values)]
    told = Finding("tiny", "tie", "a", 1, 0, "norm", 77.0)
    (s,) = Findings({"tiny": {}}, [*rows, told]).summary()
    assert (s.quantity, s.value, s.null, s.verdict, s.share) == ("cosine", 0.3, 0.15, "refuted", 0.0)


@given(findings())
def test_tables_divide_the_rows(found):
    assert same(found.table(), [row._asdict() for row in found.rows])
    for column in ("prediction", "layer"):
        parts = [found.table(**{column: value}) for value in {row[column] for row in found.table()}]
        assert sum(map(len, parts)) == len(found)
        assert all(len({row[column] for row in part}) == 1 for part in parts)
    for prediction in {row.prediction for row in found.rows}:
        chosen = found.select(prediction)
        assert same(chosen.table(), found.table(prediction))
        assert all(claim.prediction == prediction for claim in chosen.claims)
        assert chosen.declarations == {name: d for name, d in found.declarations.items() if name == prediction}


@given(findings("one"), findings("two"), findings("three"))
def test_merging_keeps_everything_in_order(one, two, three):
    every = one.merge(two, three)
    assert same(every.rows, one.rows + two.rows + three.rows)
    assert same(every.merge().summary(), one.summary() + two.summary() + three.summary())
    assert same(one.merge(two).merge(three).tokens, every.tokens)
    assert every.declarations == {**one.declarations, **two.declarations, **three.declarations}


@given(findings())
def test_a_file_of_findings_reads_back(tmp_path_factory, found):
    path = tmp_path_factory.mktemp("findings") / "findings.json"
    write_findings(path, found)
    assert same(read_findings(path).__dict__, found.__dict__)
    assert "NaN" not in path.read_text()  # no other language reads that


def from_cells(cells):
    """A row of a table as a finding, without the step."""
    named = dict(zip(COLUMNS, cells, strict=True))
    return Finding(
        *(
            math.nan if value is None and kind is float else value
            for value, kind in ((named[name], COLUMNS[name]) for name in Finding._fields)
        )
    )


@given(findings())
def test_a_frame_has_the_rows(found):
    polars = pytest.importorskip("polars")
    frame = found.frame()
    assert frame.columns == list(COLUMNS)
    types = {str: polars.String, int: polars.Int64, float: polars.Float64}
    assert dict(frame.schema) == {name: types[kind] for name, kind in COLUMNS.items()}
    assert same([from_cells(row) for row in frame.rows()], list(found.rows))
    assert frame["step"].to_list() == [found.facts[row.model].get("step") for row in found.rows]
    for unit, row in zip(frame["unit"].to_list(), found.rows, strict=True):
        declared = found.declarations.get(row.prediction)
        known = {} if declared is None else declared.quantities
        assert unit == (known[row.quantity].unit if row.quantity in known else "")


@given(findings())
def test_a_csv_has_the_rows(found):
    head, *lines = csv.reader(io.StringIO(found.csv()))
    assert head == list(COLUMNS)
    cells = [
        [
            text if kind is str else None if text == "" else kind(text)
            for text, kind in zip(line, COLUMNS.values(), strict=True)
        ]
        for line in lines
    ]
    assert same([from_cells(row) for row in cells], list(found.rows))


def test_rows_have_the_step_of_their_checkpoint():
    row = Finding("a@step5", "tie", "layer", 1, 0, "cosine", 0.5)
    facts = {"a@step5": {"step": 5}, "b": {"step": True}, "c": {}}
    found = Findings(facts, [row, row._replace(model="b"), row._replace(model="c")])
    assert [line.split(",")[1] for line in found.csv().splitlines()] == ["step", "5", "", ""]


class Texts(HTMLParser):
    """The tags and the texts of a page."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.texts = [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)

    def handle_data(self, data):
        self.texts.append(data)


@given(findings())
def test_notebooks_show_every_prediction_and_run_none_of_its_words(found):
    page = Texts(found._repr_html_())
    tables, maps = {"p", "b", "table", "thead", "tbody", "tr", "th", "td"}, {"svg", "rect", "title"}
    assert set(page.tags) <= tables | maps | {"div", "figure", "figcaption"}
    summary = found.summary()
    assert page.tags.count("b") == 1  # that of the model, not one that a name brings along
    assert page.tags.count("tr") == 1 + len(summary)
    assert all(s.prediction in page.texts for s in summary)


def printed(found, width, **options):
    out = io.StringIO()
    Console(file=out, width=width, **options).print(found)
    return out.getvalue().splitlines()


@given(findings(), st.integers(40, 200))
def test_terminals_have_a_line_for_every_claim_within_their_width(found, width):
    lines = printed(found, width, color_system=None)
    assert max(map(len, lines)) <= width
    titles = {s.prediction: title_of(found.declarations, s.prediction) for s in found.summary()}
    starts = [line for line in lines if re.match("[✓✗~–·] ", line)]
    assert sorted(line.split()[1] for line in starts) == sorted(title.split()[0] for title in titles.values())


TESTED_HEADINGS = ["supported predictions", "refuted predictions", "inconclusive predictions"]
HEADINGS = [*TESTED_HEADINGS, "described", "self-check", "failed", "not applicable"]


def rows_and_claims(count=3):
    """One claim for each verdict, with a long title and numbers of every width."""
    rows, claims, declarations = [], [], {}
    for i, verdict in enumerate(VERDICTS):
        name, numbers = f"claim_{i}", (-0.0534, -0.0612, -0.0444, 0.0012)
        rows += [Finding("m", name, "a", 1, h, "cosine", -0.05, tokens=9, verdict=verdict) for h in range(count)]
        counts = {"judged": 72, "supported": 6, "refuted": 63} if verdict != "not applicable" else {}
        claims.append(Claim("m", name, "It is.", "cosine", *numbers, verdict, **counts))
        declarations[name] = declaration(f"Twenty-six letters and more {i}")._replace(
            statistic="median cosine",
            null="random-rotation null",
            kind={"described": "descriptive", "passed": "self-check"}.get(verdict, "prediction"),
        )
    facts = {"architecture": "Model", "layers": 6, "heads": 12, "tokens": 20000, "documents": 41}
    return Findings({"m": facts}, rows, claims, (), declarations)


@pytest.mark.parametrize("width", [40, 50, 60, 80, 120])
def test_narrow_terminals_lose_columns_and_no_claim(width):
    lines = printed(rows_and_claims(), width, color_system=None)
    assert max(map(len, lines)) <= width
    claims = [line for line in lines if re.match("[✓✗~–·] ", line)]
    assert [line[0] for line in claims] == ["✓", "✗", "~", "·", "✓", "✗", "–"]
    assert all("-0.053" in line for line in claims)
    assert ("6/63 of 72" in claims[0]) == (width >= 60)
    assert claims[3].endswith(" 72") == (width >= 60), "a described claim has no counts of support"
    assert ("-0.061 to -0.044" in claims[0]) == (width >= 80)
    assert [line for line in lines if line.endswith(" (1)")] == [f"{heading} (1)" for heading in HEADINGS]


def test_very_small_numbers_stay_in_their_columns():
    large = rows_and_claims()
    small = [claim._replace(value=-3.4e-5, low=-3.7e-5, high=-3.1e-5, null=-3.6e-5) for claim in large.claims]
    lines = [line.text for line in table_lines(Findings(large.facts, large.rows, small, (), large.declarations), 80)]
    claims = [line for line in lines if re.match("[✓✗~] ", line)]
    assert len({line.index(" of 72") for line in claims}) == 1
    assert all("-3e-05  -4e-05 to -3e-05   -4e-05" in line for line in claims)


def test_details_are_sentences_within_the_width():
    for width in (40, 80):
        lines = [line.text for line in table_lines(rows_and_claims(), width, details=True)]
        assert max(map(len, lines)) <= width
        text = " ".join(" ".join(lines).split())
        assert "Median cosine −0.05 (random-rotation null 0.00)." in text
        assert "6 of 72 heads support the claim, 63 refute it (FDR 5 %, Benjamini–Hochberg)." in text


def test_a_console_without_symbols_has_ascii():
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Console(file=out, width=80, color_system=None).print(rows_and_claims())
    out.flush()
    text = out.buffer.getvalue().decode("ascii")
    assert "\n+ Twenty" in text
    assert "\nx Twenty" in text
    assert "?" not in text


def test_colours_follow_verdicts():
    found = rows_and_claims()
    out = io.StringIO()
    Console(file=out, width=120, force_terminal=True, color_system="standard").print(found)
    headings = [heading for heading in HEADINGS if heading != "self-check"]  # which has no colour
    codes = [re.search(rf"\x1b\[1;(\d+)m{heading}", out.getvalue())[1] for heading in headings]
    assert codes == ["32", "31", "33", "34", "31", "90"]
    page = found._repr_html_()
    colours = {verdict: STYLES[verdict].hexadecimal for verdict in VERDICTS}
    assert list(colours.values()) == [
        "#009e73", "#d55e00", "#c98a00", STYLES[""].hexadecimal, "#009e73", "#d55e00", "#767b84",
    ]  # fmt: skip
    assert all(f'color:{colour};font-weight:600">{verdict}<' in page for verdict, colour in colours.items())


def test_no_color_is_respected(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    out = io.StringIO()
    Console(file=out, width=80, force_terminal=True).print(rows_and_claims())
    assert not re.search(r"\x1b\[[\d;]*3\dm", out.getvalue())


def test_printing_and_repr():
    row = Finding("tiny", "tie", "a", 1, 0, "cosine", 0.5, verdict="supported")
    claim = Claim("tiny", "tie", "They tie.", "cosine", 0.5, 0.25, 0.75, 0.0, "supported", "It does.")
    found = Findings(
        {"tiny": {"architecture": "A", "parameters": 1_500_000, "layers": 2, "tokens": 1234}}, [row], [claim]
    )
    assert repr(found) == "Findings(tiny; 1 predictions, 1 rows)"
    lines = str(found).splitlines()
    assert lines[0] == "tiny: A, 2 layers, 1,234 tokens"
    assert lines[1].split() == ["claim", "value", "95", "%", "CI", "null", "support/refute"]
    assert lines[2] == "supported predictions (1)"
    assert lines[3].split() == ["✓", "tie", "0.500", "0.250", "to", "0.750", "0.000", "1/0", "of", "1"]
    assert max(map(len, lines)) <= 80


def test_a_result_is_worded_from_its_numbers():
    """Value, null value, counts, details and remarks; a stored text goes before."""
    label = Label("median gain", "{:.1f} nats", "flat null", "above it")
    declared = declaration("tie")._replace(
        statistic="median cosine", null="rotation null", details={"gain": label, "layers": Label("rising layers")},
        remarks={"shared": "{shared:.0f} of them in {layers}."},
    )  # fmt: skip
    details = (
        Detail("gain", 2.0, null=-1.0, count=3, total=8, layer="a.0"), Detail("layers", count=2, total=4), Detail("new")
    )  # fmt: skip
    remarks = (Remark("shared", {"shared": 2}, ("a", "b", "c", "d", "e")), Remark("not_declared"))
    claim = Claim(
        "m", "tie", "", "cosine", -0.051, 0.0, 0.0, 0.0, "refuted", judged=8, supported=1, refuted=6, details=details,
        remarks=remarks,
    )  # fmt: skip
    (summary,) = Findings({"m": {}}, [], [claim]).summary()
    assert verdict_sentences(summary, declared) == (
        "Median cosine −0.05 (rotation null 0.00).",
        "1 of 8 heads support the claim, 6 refute it (FDR 5 %, Benjamini–Hochberg).",
        "Median gain 2.0 nats (flat null −1.0 nats; 3 of 8 heads above it; a.0); rising layers: 2 of 4.",
        "2 of them in a, b, c and 2 more.",
        "Not declared.",
    )
    for number in ("{", "{:>99999999999.2f}", "{:.2q}", "{0.__class__}", ""):  # as of a damaged run
        assert (
            verdict_sentences(summary, declared._replace(number=number))[0] == "Median cosine −0.051 (rotation null 0)."
        )
    damaged = declared._replace(remarks={"shared": "{x} {layers.__class__} {shared!r} {"})
    assert verdict_sentences(summary, damaged)[3] == "{x} {layers.__class__} {shared!r} {"
    assert verdict_sentences(summary._replace(text="As it was."), declared) == ("As it was.",)
    assert verdict_sentences(summary, None) == ()


def test_no_number_is_a_negative_zero():
    rows = [Finding("m", "tie", "layer", 1, h, "weighted cosine", -1e-4, -2e-4, -0.0, -0.0, tokens=9) for h in range(4)]
    found = Findings({"m": {}}, rows, [Claim("m", "tie", "", "weighted cosine", -0.0, -0.0, -0.0, -0.0, "refuted", "")])
    assert "-0.0" not in str(found).replace("-0.0001", "")
    claim = Claim("m", "tie", "", "weighted cosine", -1e-4, -2e-4, -0.0, -0.0, "refuted", judged=4, refuted=4)
    (summary,) = Findings({"m": {}}, rows, [claim]).summary()
    text = " ".join(verdict_sentences(summary, tie.DECLARATION))
    assert "0.00 (" in text
    assert "-0" not in text
    assert "−0" not in text
