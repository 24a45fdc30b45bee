"""Tables, summaries and displays of findings are counts of their rows, and show no more than is there."""

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
from gradlogz.probing.runs.records import VERDICTS, Claim, Declaration, Finding, Quantity, Token
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
        shared = judged[0] if len(set(judged)) == 1 else "undecided" if judged else ""
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


@given(findings())
def test_a_frame_has_the_rows(found):
    pytest.importorskip("polars")
    frame = found.frame()
    assert frame.columns == list(Finding._fields)
    assert same([Finding(*row) for row in frame.rows()], list(found.rows))


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


@given(findings(), st.integers(60, 200))
def test_terminals_show_every_prediction_within_their_width(found, width):
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(found)
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    starts = [line for line in lines[1:] if not line.startswith((" ", "prediction "))]
    assert len(starts) == len(found.summary())
    for line, s in zip(starts, found.summary(), strict=True):
        assert line.startswith(s.prediction)
        assert line.rstrip().endswith(s.verdict)


def test_colours_follow_verdicts():
    rows = [Finding("tiny", verdict, "a", 1, 0, "cosine", 0.5, verdict=verdict) for verdict in VERDICTS]
    found = Findings({"tiny": {}}, rows)
    out = io.StringIO()
    Console(file=out, width=120, force_terminal=True, color_system="standard").print(found)
    codes = [re.search(rf"\x1b\[(\d+)m{verdict}\x1b", out.getvalue())[1] for verdict in VERDICTS]
    assert codes == ["32", "31", "33", "90"]
    page = found._repr_html_()
    colours = {verdict: STYLES[verdict].hexadecimal for verdict in VERDICTS}
    assert list(colours.values()) == ["#009e73", "#d55e00", "#c98a00", "#767b84"]
    assert all(f'color:{colour};font-weight:600">{verdict}<' in page for verdict, colour in colours.items())


def test_printing_and_repr():
    row = Finding("tiny", "tie", "a", 1, 0, "cosine", 0.5, verdict="supported")
    claim = Claim("tiny", "tie", "They tie.", "cosine", 0.5, 0.25, 0.75, 0.0, "supported", "It does.", "One stands.")
    found = Findings(
        {"tiny": {"architecture": "A", "parameters": 1_500_000, "layers": 2, "tokens": 1234}}, [row], [claim]
    )
    assert repr(found) == "Findings(tiny; 1 predictions, 1 rows)"
    assert str(found) == (
        "tiny  A, 1.5 M parameters, 2 layers, 1,234 tokens\n"
        "  tie  supported  0.500  0.250 to 0.750  It does.  One stands."
    )


def test_no_number_is_a_negative_zero():
    rows = [Finding("m", "tie", "layer", 1, h, "weighted cosine", -1e-4, -2e-4, -0.0, -0.0, tokens=9) for h in range(4)]
    found = Findings({"m": {}}, rows, [Claim("m", "tie", "", "weighted cosine", -0.0, -0.0, -0.0, -0.0, "refuted", "")])
    assert "-0.0" not in str(found).replace("-0.0001", "")
    assert "-0.00" not in tie.verdict(rows).words
