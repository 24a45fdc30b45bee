"""Networks that were never trained are not supported by claims on training, whatever the scale of their weights."""

import pytest
import torch
import transformers as tf

from gradlogz.probing import run_probe
from gradlogz.probing.corpus.text import documents
from gradlogz.probing.hypothesis_tests import against_null
from gradlogz.probing.inside.loading import load
from gradlogz.probing.predictions import entropy
from gradlogz.probing.runs.records import Finding
from support.planted.matrices import VOCABULARY, matching, on_principal_axes
from support.planted.matrices import gpt2 as gpt2_with
from support.probe_models import token_batches

CLAIMS = ["entropy"]
SIZES = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def gpt2(scale, seed):
    config = tf.GPT2Config(n_embd=32, n_layer=3, n_head=4, n_positions=64, initializer_range=scale, **SIZES)
    torch.manual_seed(seed)
    return tf.GPT2LMHeadModel(config).eval()


def bert(scale, seed):
    config = tf.BertConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64, max_position_embeddings=64,
        initializer_range=scale, **SIZES,
    )  # fmt: skip
    torch.manual_seed(seed)
    return tf.BertModel(config, add_pooling_layer=False).eval()


def judged(model, *, draws=10, predictions=CLAIMS):
    (batch,) = token_batches(VOCABULARY, rows=48, length=48, batches=1)
    measured = run_probe.measure(model, None, [batch.inputs], predictions=predictions, draws=draws)
    return {claim.prediction: claim for claim in run_probe.evaluate(measured, predictions=predictions).claims}


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
    """The reason for matched models: a larger scale shows in the values, and weights of the usual scale lack it."""
    large, usual = (judged(gpt2(scale, 0), draws=0)["entropy"] for scale in (0.25, 0.02))
    assert large.verdict == usual.verdict == "inconclusive"
    assert large.value < usual.value - 0.1


@pytest.mark.parametrize("scale", [0.5, 2.0])
def test_independent_matrices_on_the_principal_axes_are_not_supported(scale):
    """W_q and W_k read the directions in which tokens vary, and are otherwise unrelated: logits vary, no more."""
    for seed in range(2):
        claims = judged(on_principal_axes(seed, scale))
        for name in CLAIMS:
            assert claims[name].value < claims[name].null - 0.2  # the matched baseline does not have their variance
            assert claims[name].verdict == "inconclusive", claims[name]
            assert claims[name].supported == 0
        kept = next(d for d in claims["entropy"].details if d.key == entropy.KEPT)
        assert abs(kept.value - kept.null) < 0.05


def test_heads_that_match_tokens_are_supported():
    """Few keys stand out from the others, which no variance of logits explains."""
    claims = judged(gpt2_with(0, matching, width=256), predictions=["entropy"])
    assert claims["entropy"].verdict == "supported", claims["entropy"]
    even = judged(gpt2_with(0, lambda generator, gain: matching(generator, gain, 0.0), width=256))
    assert {even[name].verdict for name in CLAIMS} == {"inconclusive"}


def test_a_head_must_be_beyond_both_nulls():
    """The larger p-value counts, whichever null it is of; a head without the second null is not judged."""

    def rows(null, kept):
        about = ("model", "entropy", "layer", 1, 0)
        one = Finding(*about, "entropy", 0.5, 0.48, 0.52, null, null - 0.1, null + 0.1, 100, freedom=20.0)
        other = one._replace(quantity=entropy.KEPT, null=kept, null_low=kept - 0.1, null_high=kept + 0.1)
        return [one, other]

    def verdict(*findings):
        return entropy.verdict(list(findings)).findings[0].verdict

    assert verdict(*rows(0.9, 0.9)) == "supported"
    assert verdict(*rows(0.1, 0.1)) == "refuted"
    for nulls in ((0.9, 0.52), (0.52, 0.9), (0.9, 0.1), (0.1, 0.9)):
        assert verdict(*rows(*nulls)) == "inconclusive"
    assert verdict(rows(0.9, 0.9)[0]) == "inconclusive"


def permuted(model):
    """Permute the entries of every matrix of attention and feed-forward sublayers, in place."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in model.encoder.parameters():
            if p.ndim == 2:
                p.copy_(p.flatten()[torch.randperm(p.numel(), generator=generator)].view_as(p))
    return model


def test_permuted_entries_of_a_trained_model_are_above_the_spectra_of_its_heads():
    """Heads of all-MiniLM-L6-v2 are below their matched baseline; after a permutation of all entries they are not."""
    loaded = load("minilm", device="cpu")
    options = {"tokens": 1500, "length": 64, "predictions": ["entropy"]}
    below = []
    for change in (lambda model: model, permuted):
        measured = run_probe.measure(change(loaded.model), loaded.tokenizer, documents(None), draws=6, **options)
        findings = run_probe.evaluate(measured, predictions=["entropy"])
        claims = {claim.prediction: claim for claim in findings.claims}
        rows = [f for f in findings.rows if f.quantity == "entropy"]
        below.append(sum((against_null(rows)[1] < 0.01).tolist()))
        assert claims["identity"].verdict == "passed"
    assert claims["entropy"].supported <= 2
    trained, random = below
    assert trained > 36
    assert random <= 7


@pytest.mark.long
@pytest.mark.parametrize("change", ["permuted", "redrawn"])
def test_a_trained_model_without_its_relations_has_no_verdict(change):
    """all-MiniLM-L6-v2 with permuted entries, or with random singular vectors: no verdict, and hardly on a head."""
    loaded, generator = load("minilm", device="cpu"), torch.Generator().manual_seed(0)

    def redrawn(p):
        sides = (torch.linalg.qr(torch.randn(n, min(p.shape), generator=generator)).Q for n in p.shape)
        U, V = sides
        return U * torch.linalg.svdvals(p) @ V.mT

    if change == "permuted":
        permuted(loaded.model)
    else:
        with torch.no_grad():
            for p in loaded.model.encoder.parameters():
                if p.ndim == 2:
                    p.copy_(redrawn(p))
    claims = [
        "ascent", "tie", "qk_geometry", "link", "gaussian_measure", "expansion", "feed_forward_hopfield", "entropy",
    ]  # fmt: skip
    measured = run_probe.measure(loaded.model, loaded.tokenizer, documents(None), tokens=5000, predictions=claims)
    tested = [c for c in run_probe.evaluate(measured, predictions=claims).claims if c.prediction in claims]
    assert {c.verdict for c in tested} == {"inconclusive"}
    assert {c.prediction: c.judged for c in tested if max(c.supported, c.refuted) > 0.05 * c.judged} == {}
