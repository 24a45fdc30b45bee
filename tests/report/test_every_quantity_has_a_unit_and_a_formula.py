"""Every axis says what is on it: of all that a model is asked, nothing is a bare number."""

import pytest
from transformers import PreTrainedTokenizerFast

import gradlogz
from gradlogz.reporting.citations import bibliography
from gradlogz.reporting.findings_wording import keys_cited, unit_and_formula
from support.invented_findings import DECLARATIONS
from support.planted.matrices import VOCABULARY, gpt2, tied

TEXTS = [(f"document {i}", " ".join(str((7 * i + 3 * j * j) % (VOCABULARY - 4)) for j in range(30))) for i in range(48)]
# Of models with a logit of their own for no key, of those that satisfy the conditions of a theorem, of post-norm ones,
# and of gated feed-forward maps.
ELSEWHERE = {
    ("entropy", "learned sink"),
    ("pair_energy", "change by reversed attention"),
    ("contraction", "share taken back"),
    ("contraction", "share taken back, cleaned"),
    ("contraction", "share taken back, feed-forward"),
    ("feed_forward_hopfield", "cosine of gates"),
}
ROTARY = (", over distances", "share without rotation")


@pytest.fixture(scope="module")
def measured():
    """Findings about a small causal model."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"[PAD]": 0, "[BOS]": 1, "[UNK]": 2, **{str(i): i + 3 for i in range(VOCABULARY - 4)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", model_max_length=64)
    return gradlogz.probe(gpt2(0, tied), words, TEXTS, tokens=None)


def names_of(findings):
    return {(row.prediction, row.quantity) for row in findings.rows}


def test_what_is_measured_has_them(measured):
    names = names_of(measured)
    assert len(names) > 90
    assert {name for name in names if not all(unit_and_formula(measured.declarations, *name))} == set()


def test_what_has_them_is_measured(measured):
    """A quantity that was renamed leaves its formula behind; this finds it."""
    declared = {
        (name, quantity)
        for name, each in measured.declarations.items()
        for quantity in each.quantities
        if not quantity.endswith(ROTARY)
    }
    assert declared - ELSEWHERE == names_of(measured)


def test_every_work_that_a_prediction_cites_is_in_the_bibliography(measured):
    assert set(measured.declarations) >= {row.prediction for row in measured.rows}
    assert set(keys_cited(measured.declarations, measured.declarations)) <= set(bibliography())


def test_what_is_not_declared_is_a_number():
    assert unit_and_formula(DECLARATIONS, "novel", "size") == ("1", "")
    assert unit_and_formula(DECLARATIONS, "ascent", "height") == ("1", "")
    gain = DECLARATIONS["ascent"].quantities["gain"]
    assert unit_and_formula(DECLARATIONS, "ascent", "gain, sideways") == gain
    assert unit_and_formula(DECLARATIONS, "ascent", "gain without first tokens") == gain
