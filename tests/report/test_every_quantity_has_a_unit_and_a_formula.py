"""Every axis says what is on it: of all that a model is asked, nothing is a bare number."""

import pytest
from transformers import PreTrainedTokenizerFast

import gradlogz
from gradlogz.probing.quantities import QUANTITIES, unit_and_formula
from support.planted.matrices import VOCABULARY, gpt2, tied

TEXTS = [(f"document {i}", " ".join(str((7 * i + 3 * j * j) % (VOCABULARY - 4)) for j in range(30))) for i in range(12)]
# Of models with a logit of their own for no key, of those that fill in masked words, and of rotary ones.
ELSEWHERE = {
    ("entropy", "learned sink"),
    ("dropped_covariance", "correlation with pseudo-loss"),
    *((name, "share that does not turn") for name in ("tie", "qk_geometry", "symmetry")),
}


@pytest.fixture(scope="module")
def measured():
    """The names of everything that is measured of a small causal model."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"[PAD]": 0, "[BOS]": 1, "[UNK]": 2, **{str(i): i + 3 for i in range(VOCABULARY - 4)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", model_max_length=64)
    found = gradlogz.probe(gpt2(0, tied), words, TEXTS, tokens=None)
    return {(row.prediction, row.quantity) for row in found.rows}


def test_what_is_measured_has_them(measured):
    assert len(measured) > 90
    assert {name for name in measured if not all(unit_and_formula(*name))} == set()


def test_what_has_them_is_measured(measured):
    """A quantity that was renamed leaves its formula behind; this finds it."""
    known = {(prediction, quantity) for prediction, of in QUANTITIES.items() for quantity in of} - ELSEWHERE
    parts = {(p, part) for p, q in measured for part in (q, q.partition(",")[0], q.partition(" without ")[0])}
    assert known <= parts


def test_what_nobody_knows_is_a_number():
    assert unit_and_formula("novel", "size") == ("1", "")
    assert unit_and_formula("ascent", "gain, sideways") == unit_and_formula("ascent", "gain")
