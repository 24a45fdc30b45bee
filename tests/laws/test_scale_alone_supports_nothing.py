"""Networks that were never trained are not supported by claims on training, whatever the scale of their weights."""

import pytest
import torch
import transformers as tf

from gradlogz.probing import run_probe
from gradlogz.probing.corpus.text import documents
from gradlogz.probing.inside.discovery import discover
from gradlogz.probing.inside.loading import load
from gradlogz.probing.inside.random_models import MatchedModels
from gradlogz.probing.inside.weights import weights_of
from support.planted.matrices import VOCABULARY
from support.probe_models import token_batches

CLAIMS = ["entropy", "hopfield"]
SIZES = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def declared_small(model):
    """Let the model declare the usual initial scale, so that its random-weights baseline has smaller weights."""
    model.config.initializer_range = 0.02
    return model.eval()


def gpt2(scale, seed):
    config = tf.GPT2Config(n_embd=32, n_layer=3, n_head=4, n_positions=64, initializer_range=scale, **SIZES)
    torch.manual_seed(seed)
    return declared_small(tf.GPT2LMHeadModel(config))


def bert(scale, seed):
    config = tf.BertConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64, max_position_embeddings=64,
        initializer_range=scale, **SIZES,
    )  # fmt: skip
    torch.manual_seed(seed)
    return declared_small(tf.BertModel(config, add_pooling_layer=False))


def judged(model, *, draws=10):
    (batch,) = token_batches(VOCABULARY, rows=48, length=48, batches=1)
    measured = run_probe.measure(model, None, [batch.inputs], predictions=CLAIMS, draws=draws)
    return {claim.prediction: claim for claim in run_probe.evaluate(measured, predictions=CLAIMS).claims}


@pytest.mark.parametrize("scale", [0.02, 0.25])
@pytest.mark.parametrize("build", [gpt2, bert])
def test_random_networks_are_not_supported(build, scale):
    heads = dict.fromkeys(CLAIMS, 0)
    for seed in range(2):
        claims = judged(build(scale, seed))
        for name in CLAIMS:
            assert claims[name].verdict == "inconclusive", (build, scale, seed, claims[name])
            heads[name] += claims[name].supported
    assert all(count <= 2 for count in heads.values()), heads  # of 24 heads


def test_the_untrained_baseline_alone_would_support_them():
    """The reason for matched models: the larger scale shows in the values, and the initial weights do not have it."""
    claims = judged(gpt2(0.25, 0), draws=0)
    assert {claims[name].verdict for name in CLAIMS} == {"inconclusive"}
    untrained = claims["entropy"].details[0]
    assert untrained.value < untrained.null - 0.1


def test_sharper_heads_than_their_spectra_are_supported():
    """Each key is its query: the matrices have the same spectra in every draw, but not the same product."""
    model = bert(0.25, 0)
    with torch.no_grad():
        for layer in model.encoder.layer:
            layer.attention.self.key.weight.copy_(layer.attention.self.query.weight)
    claims = judged(model)
    assert {claims[name].verdict for name in CLAIMS} == {"supported"}
    assert claims["entropy"].value < claims["entropy"].null


def test_permuted_entries_of_a_trained_model_are_not_supported():
    """All-MiniLM-L6-v2 is supported; with the entries of its matrices permuted it is not."""
    loaded = load("minilm", device="cpu")
    ids = torch.randint(1000, 20000, (2, 32), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    architecture = discover(loaded.model, inputs)
    models = MatchedModels(loaded.model, architecture, weights_of(loaded.model, architecture, inputs), keep="entries")
    options = {"tokens": 1500, "length": 64, "predictions": CLAIMS}
    verdicts = []
    for model in (loaded.model, models.draw(7)):
        measured = run_probe.measure(model, loaded.tokenizer, documents(None), draws=6, **options)
        claims = run_probe.evaluate(measured, predictions=CLAIMS).claims
        verdicts.append({claim.prediction: claim.verdict for claim in claims})
    trained, permuted = verdicts
    assert {trained[name] for name in CLAIMS} == {"supported"}
    assert "supported" not in {permuted[name] for name in CLAIMS}
    assert trained["identity"] == permuted["identity"] == "passed"
