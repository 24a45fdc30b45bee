"""Networks that were never trained are not supported by claims on training, whatever the scale of their weights."""

import pytest
import torch
import transformers as tf

from gradlogz.probing import run_probe
from gradlogz.probing.corpus.text import documents
from gradlogz.probing.inside.loading import load
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


def with_a_sink(model, size=8):
    """Keys of rank one along the vector of the first position, to which the bias of every query points."""
    first, along = torch.randn(32), torch.ones(size) / size**0.5
    first = (first - first.mean()) / (first - first.mean()).norm()
    with torch.no_grad():
        model.embeddings.position_embeddings.weight[0] = 10 * first
        for layer in model.encoder.layer:
            attention = layer.attention.self
            attention.key.weight.copy_(1.5 * torch.outer(along, first).repeat(4, 1))
            attention.query.bias.copy_(3 * along.repeat(4))
    return model


def test_heads_that_their_spectra_do_not_explain_are_supported():
    """Every draw of the matched baseline has the same spectra and biases, and its keys point elsewhere."""
    claims = judged(with_a_sink(bert(0.02, 0)))
    assert {claims[name].verdict for name in CLAIMS} == {"supported"}
    assert claims["entropy"].value < 0.3 < claims["entropy"].null


def permuted(model):
    """Permute the entries of every matrix of attention and feed-forward sublayers, in place."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in model.encoder.parameters():
            if p.ndim == 2:
                p.copy_(p.flatten()[torch.randperm(p.numel(), generator=generator)].view_as(p))
    return model


def test_permuted_entries_of_a_trained_model_are_not_supported():
    """All-MiniLM-L6-v2 is supported; with the entries of its matrices permuted it is not."""
    loaded = load("minilm", device="cpu")
    options = {"tokens": 1500, "length": 64, "predictions": CLAIMS}
    verdicts = []
    for change in (lambda model: model, permuted):
        measured = run_probe.measure(change(loaded.model), loaded.tokenizer, documents(None), draws=6, **options)
        claims = run_probe.evaluate(measured, predictions=CLAIMS).claims
        verdicts.append({claim.prediction: claim.verdict for claim in claims})
    trained, random = verdicts
    assert {trained[name] for name in CLAIMS} == {"supported"}
    assert "supported" not in {random[name] for name in CLAIMS}
    assert trained["identity"] == random["identity"] == "passed"
