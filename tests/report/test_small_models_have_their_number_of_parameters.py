"""The sentence on a model gives its number of parameters: in millions, or as it is for a small model."""

import pytest

from gradlogz.reporting.formatting import model_sentence


@pytest.mark.parametrize(
    ("parameters", "words"), [(29_280, "29,280 parameters"), (22_713_216, "22.7 M parameters"), (0, "")]
)
def test_the_number_of_parameters(parameters, words):
    sentence = model_sentence({"architecture": "GPT2LMHeadModel", "parameters": parameters})
    assert sentence == f"GPT2LMHeadModel{', ' if words else ''}{words}."
