"""A prediction is one file: written into a folder it is found, measured, judged, and explained on a page.

Nothing of the package is changed: neither a list of names, nor units, nor memory estimates, nor a page.
"""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

import gradlogz
from gradlogz.probing import predictions
from gradlogz.probing.predictions import known_predictions
from gradlogz.probing.runs.records import DESCRIPTIVE
from support.planted.matrices import VOCABULARY, gpt2, tied

SOURCE = '''
"""Do rows of small logits have large entropies?"""

from typing import NamedTuple

from gradlogz.probing.inside.events import Attended
from gradlogz.probing.prediction import Prediction
from gradlogz.probing.runs.records import Declaration, Detail, Label, Quantity, Remark
from gradlogz.probing.statistics import Sums, bootstrap, correlation, moment_columns, sums_of
from gradlogz.probing.hypothesis_tests import Bounds, conclude, judge, measured

QUANTITY, BOUND = "correlation with the maximum", 0.25

DECLARATION = Declaration(
    title="Calm heads",
    claim="Rows whose logits are small have large entropies.",
    formula="corr(max s, H)",
    supports=f"The correlation is below {BOUND}.",
    refutes=f"A correlation above {BOUND}.",
    method=(f"Over rows that are no padding, against {BOUND}.", "There is no null."),
    decision_rule="The majority of heads decides.",
    quantities={QUANTITY: Quantity("furlongs", "corr(max s, H) of a head")},
    references=("zhai23",),
    statistic="median calm",
    number="{:.1f} furlongs",
    details={"rows": Label("calm rows")},
    remarks={"weather": "The wind is {wind:.0f} knots."},
)


class LayerState(NamedTuple):
    rows: Sums


def statistics(event, batch_pass):
    if not isinstance(event, Attended):
        return None
    columns = moment_columns(event.attention.max_logit, event.attention.entropy, valid=batch_pass.real(event))
    return {event.layer: LayerState(sums_of(columns, batch_pass.documents))}


def evaluate(state, model):
    rows = []
    for layer, kept in state.items():
        rows += measured(layer, QUANTITY, bootstrap(correlation, kept.rows), kept.rows.totals[0, :, 0])
    return rows


def null(state, model, baseline):
    return []


def verdict(findings):
    judged = judge(findings, QUANTITY, lambda f: Bounds(BOUND, BOUND), small=True)
    return conclude(
        judged, QUANTITY, details=[Detail("rows", count=3, total=7)], remarks=[Remark("weather", {"wind": 12})]
    )


PREDICTION = Prediction(
    __name__, DECLARATION, statistics, evaluate, null, verdict, order=25, matrices=lambda a: {"sums": a.width}
)
'''
NAME = "calm_heads"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / f"{NAME}.py"
    path.write_text(SOURCE)
    return path


@pytest.fixture(scope="module")
def words():
    """A tokenizer of numbers."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"[PAD]": 0, "[BOS]": 1, "[UNK]": 2, **{str(i): i + 3 for i in range(VOCABULARY - 4)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", model_max_length=64)


def probed(words, **options):
    texts = [(f"document {i}", " ".join(str((7 * i + 3 * j * j) % 40) for j in range(20))) for i in range(12)]
    return gradlogz.probe(gpt2(0, tied), words, texts, name="tiny", tokens=None, **options)


def check(findings):
    """Rows, claim and declaration are there, and the page shows them."""
    rows = findings.select(NAME).rows
    assert len(rows) == 2 * 4  # layers and heads
    assert {row.quantity for row in rows} == {"correlation with the maximum"}
    (claim,) = (claim for claim in findings.claims if claim.prediction == NAME)
    assert claim.verdict in ("supported", "refuted", "inconclusive")
    assert claim.claim == findings.declarations[NAME].claim == "Rows whose logits are small have large entropies."
    page = gradlogz.report(findings)
    declared = ("Calm heads", claim.claim, "furlongs", "corr(max s, H) of a head", "against 0.25.", "There is no null.")
    declared += ("Median calm ", " furlongs", "Calm rows: 3 of 7; p value of the verdict", "The wind is 12 knots.")
    for text in (*declared, "The correlation is below 0.25.", "A correlation above 0.25.", "Entropy Collapse"):
        assert text in page, text


def test_a_file_in_the_folder_is_found_in_its_place(file, words, monkeypatch):
    before = [p.name for p in known_predictions()]
    monkeypatch.setattr(predictions, "__path__", [*predictions.__path__, str(file.parent)])
    try:
        names = [p.name for p in known_predictions()]
        assert names == [*before[:2], NAME, *before[2:]]  # as its order says
        check(probed(words, predictions=[NAME, "identity"]))
    finally:
        sys.modules.pop(f"{predictions.__name__}.{NAME}", None)
    monkeypatch.undo()
    assert [p.name for p in known_predictions()] == before


def test_a_file_of_a_user_is_passed_as_a_module(file, words):
    spec = importlib.util.spec_from_file_location(NAME, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for given in (module, module.PREDICTION):
        check(probed(words, predictions=[given], baseline=0.0))


def test_nothing_but_its_file_names_a_prediction():
    """Where findings are made and shown; names of files after "Read next" are for readers.

    Propagation has observables of the simulator, some of which share their names with predictions.
    """
    root = Path(gradlogz.__file__).parent
    shown = [
        path
        for path in (root / "reporting").glob("*.py")
        if not re.match("simulation|phase|track|propagation", path.name)
    ]
    quoted = re.compile(rf"""["'](?:{"|".join(p.name for p in known_predictions())})["']""")
    commands = [path for path in (root / "commands").glob("*.py") if path.name != "simulate.py"]  # has a contraction
    found = [
        f"{path.relative_to(root)}: {match.group()}"
        for path in (*(root / "probing").rglob("*.py"), *commands, *shown)
        if path.parent.name not in ("predictions", "propagation")
        for match in quoted.finditer(path.read_text(encoding="utf-8"))
    ]
    assert not found


def test_texts_are_data():
    """Without docstrings, which python -OO takes away, every declaration is the same."""
    code = (
        "from gradlogz.probing.predictions import known_predictions\n"
        "print([(p.name, *p.declaration) for p in known_predictions()])"
    )
    stripped = subprocess.run([sys.executable, "-OO", "-c", code], capture_output=True, text=True, check=True).stdout
    assert f"{[(p.name, *p.declaration) for p in known_predictions()]}\n" == stripped
    for prediction in known_predictions():
        declared = prediction.declaration
        texts = (declared.title, declared.claim, declared.formula, *declared.method)
        texts += () if declared.kind == DESCRIPTIVE else (declared.refutes,)
        if declared.kind != DESCRIPTIVE:
            assert bool(declared.supports) != (prediction.name in ("gaussian_measure", "link", "mixture")), (
                prediction.name
            )
        texts += (declared.decision_rule, declared.statistic, declared.number, *declared.remarks.values())
        assert len(declared.title) <= 26, prediction.name
        assert all(texts), prediction.name
        assert declared.quantities, prediction.name
        assert not re.search(r"[a-z]+\.py\b", " ".join(texts)), prediction.name
