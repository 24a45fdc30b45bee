"""Interventions on a model without a loss, or by names that do not exist: mistakes are explained in one sentence."""

import functools

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from gradlogz.probing.interventions.records import interventions_from_json
from gradlogz.probing.interventions.run_interventions import intervene
from support.error_form import each_of, refused

TEXTS = [(f"document {i}", "1 2 3 4 5 6 7 8") for i in range(8)]


@functools.cache
def words():
    tokenizer = Tokenizer(models.WordLevel({str(i): i for i in range(10)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=16)


def t5():
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 10}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))


class Pooled(torch.nn.Module):
    """One vector for each text."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(10, 8)
        self.layer = torch.nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)

    def forward(self, input_ids, attention_mask=None):
        return self.layer(self.embed(input_ids)).mean(1)


ERRORS = [
    (TypeError, "intervene: tokenizer", "callable", lambda: intervene(Pooled(), None, TEXTS)),
    (
        ValueError,
        "intervene: interventions",
        "'ablate'",
        lambda: intervene(Pooled(), words(), TEXTS, interventions=["heads", "ablate"]),
    ),
    (ValueError, "intervene: interventions", "empty", lambda: intervene(Pooled(), words(), TEXTS, interventions=[])),
    (ValueError, "intervene: sublayers", "regular", lambda: intervene(Pooled(), words(), TEXTS, sublayers="h.(1")),
    (
        ValueError,
        "intervene: sublayers",
        "matches",
        lambda: intervene(Pooled(), words(), TEXTS, sublayers="nowhere", tokens=20, fit_tokens=20),
    ),
    (ValueError, "intervene: draws", "0", lambda: intervene(Pooled(), words(), TEXTS, draws=0)),
    (ValueError, "intervene: model", "encoder-decoder", lambda: intervene(t5(), words(), TEXTS, tokens=20)),
    (
        ValueError,
        "intervene: model",
        "last_hidden_state",
        lambda: intervene(Pooled(), words(), TEXTS, tokens=20, interventions=["gradient"]),
    ),
    (ValueError, "batches: length", "500", lambda: intervene(Pooled(), words(), TEXTS, length=500)),
    (ValueError, "intervene: texts", "two tokens", lambda: intervene(Pooled(), words(), [("one", "1")])),
    (ValueError, "interventions_from_json: text", "JSONDecodeError", lambda: interventions_from_json("{")),
    (ValueError, "interventions_from_json: text", "KeyError", lambda: interventions_from_json("{}")),
]


@each_of(ERRORS)
def test_mistakes_are_explained(refusal):
    refused(refusal)
