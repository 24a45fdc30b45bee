"""Rows are packed into batches as memory allows; values, intervals and null values are the same however they are.

The largest number of padded tokens of a batch is 250, 1500 or 8192, in double precision: what differs is rounding.
"""

import functools
import math
import random

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

import gradlogz
from gradlogz.probing import run_probe
from gradlogz.probing.predictions import known_predictions
from support.planted.matrices import VOCABULARY, free, gpt2

NUMBERS = ("value", "low", "high", "null", "null_low", "null_high")
PADDED = (250, 1500, 8192)


@functools.cache
def words():
    vocabulary = {"[PAD]": 0, "[BOS]": 1, "[UNK]": 2, **{str(i): i + 3 for i in range(VOCABULARY - 4)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", model_max_length=64)


def bert():
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=64,
    )  # fmt: skip
    model = BertModel._from_config(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(8.0 if p.ndim == 2 else 1.0)
    return model


MODELS = {"gpt2": lambda: gpt2(0, free), "bert": bert}


@functools.cache
def findings(name):
    """Rows by place, in the three ways to pack batches, of a corpus of documents of 3 to 200 tokens."""
    draw = random.Random(2)
    topics = [[str(draw.randrange(VOCABULARY - 4)) for _ in range(30)] for _ in range(6)]
    texts = [
        (f"document {i}", " ".join(draw.choices(topics[i % 6], k=draw.choice((3, 20, 40, 60, 64, 200)))))
        for i in range(40)
    ]
    every, model = [], MODELS[name]().double()
    for padded in PADDED:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(run_probe, "tokens_of_a_batch", lambda model, padded=padded: padded)
            found = gradlogz.probe(model, words(), texts, tokens=2000, baseline=0.1, draws=3)
        every.append({row[1:6]: row for row in found.rows})
    return every


@pytest.mark.parametrize("prediction", [p.name for p in known_predictions() if p.name != "identity"])  # it is rounding
@pytest.mark.parametrize("name", MODELS)
def test_values_and_nulls_do_not_depend_on_batches(name, prediction):
    first, *others = ({p: row for p, row in each.items() if p[0] == prediction} for each in findings(name))
    assert first or prediction == "dropped_covariance"
    for other, padded in zip(others, PADDED[1:], strict=True):
        assert other.keys() == first.keys()
        for place, row in first.items():
            for number in NUMBERS:
                one, two = getattr(row, number), getattr(other[place], number)
                scale = 1 + abs(one) if math.isfinite(one) else 1.0
                assert one == pytest.approx(two, abs=1e-6 * scale, nan_ok=True), (place, number, padded)


def test_batches_are_packed_in_other_ways():
    """The law says nothing unless rows are packed differently; most batches of 250 tokens have fewer rows."""
    from gradlogz.probing.corpus.batching import batches
    from gradlogz.probing.corpus.text import Document

    documents = [Document(f"{i}", "7 " * 60) for i in range(100)]
    sizes = [[len(b.keys) for b in batches(documents, words(), tokens=None, padded=padded)] for padded in PADDED]
    assert max(sizes[0]) < max(sizes[1])
    assert len(sizes[0]) > len(sizes[1])
