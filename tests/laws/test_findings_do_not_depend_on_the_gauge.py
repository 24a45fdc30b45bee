"""Changes of the weights that leave the function of a model unchanged leave its judged findings unchanged.

W_q -> W_q M, W_k -> W_k M^-T;  W_v -> W_v M, W_o -> M^-1 W_o;  gains and biases of norms moved into the layers that
read them; biases of keys, which change all logits of a row by the same number;  heads and hidden units in another
order, and factors of gated feed-forward maps scaled. So are the null values of the matched baseline, drawn with the
same seeds.
"""

import copy

import numpy as np
import pytest
import torch
import transformers as tf

from gradlogz.probing.inside.discovery import discover
from gradlogz.probing.inside.embeddings import word_vectors_of
from gradlogz.probing.inside.weights import weights_of
from gradlogz.probing.passes.batch_statistics import statistics_of
from gradlogz.probing.passes.rotated_heads import DrawStates, _differences, rotated_statistics
from gradlogz.probing.prediction import Baseline, Probed
from gradlogz.probing.predictions import known_predictions
from gradlogz.probing.runs.judgement import graded
from gradlogz.probing.statistics import merge
from support import gauge
from support.probe_models import findings_of, token_batches

VOCABULARY = 64
CHANGES = {
    "queries and keys": gauge.change_queries_and_keys,
    "values and outputs": gauge.change_values_and_outputs,
    "gains": gauge.absorb_gains,
    "biases of norms": gauge.move_shifts,
    "biases of keys": gauge.shift_keys,
    "order of heads": gauge.permute_heads,
    "hidden units": gauge.change_units,
}


def drawn(model):
    """Weights of a scale at which attention, biases and gains matter, in float64."""
    source = np.random.default_rng(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            values = torch.from_numpy(source.standard_normal(p.shape))
            if p.ndim >= 2:
                p.copy_(values * (1.0 if "emb" in name or "wte" in name or "wpe" in name else 1.3 / p.shape[0] ** 0.5))
            elif "weight" in name:
                p.copy_(1 + 0.3 * values)
            else:
                p.copy_(0.2 * values)
    return model.double().eval()


def gpt2():
    config = tf.GPT2Config(
        vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=3, n_head=4, attn_pdrop=0.0, resid_pdrop=0.0,
        embd_pdrop=0.0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return drawn(tf.GPT2LMHeadModel._from_config(config, attn_implementation="sdpa")), gauge.gpt2_layers


def bert():
    config = tf.BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    model = tf.BertModel._from_config(config, attn_implementation="sdpa", add_pooling_layer=False)
    return drawn(model), gauge.bert_layers


def llama():
    config = tf.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return drawn(tf.LlamaForCausalLM._from_config(config, attn_implementation="sdpa")), gauge.llama_layers


def changed(model, layers, change, condition):
    other, source = copy.deepcopy(model), np.random.default_rng(1)
    with torch.no_grad():
        for layer in layers(other):
            change(layer, source, condition)
    return other


def output(model, batch):
    with torch.no_grad():
        found = model(**batch.inputs)
    return getattr(found, "logits", None) if hasattr(found, "logits") else found.last_hidden_state


# Predictions of which all quantities are compared, also those that are only reported.
WHOLE = (
    "gaussian_measure", "qk_geometry", "dropped_covariance", "gaussianity", "entropy", "coherence", "hopfield", "link",
    "mixture", "contraction", "feed_forward_hopfield", "word_vectors",
)  # fmt: skip
# Predictions whose null values are those of the matched baseline.
MATCHED = [p.name for p in known_predictions() if p.baseline == "matched"]
# Rounding errors in units of eps; a self-check is compared by its verdict alone.
ROUNDING = ("identity",)
# Logits and log normalisers as the model has them, which are reported and not judged: a bias of the keys moves them.
RAW = {"log normalizer R²", "log normalizer correlation", "max logit", "log normalizer", "raw cost"}


DRAWS = range(3)


def matched(model, architecture, batches):
    """{prediction: its values in each draw of the matched baseline, and those of equal logit variance}."""
    predictions = [p for p in known_predictions() if p.baseline == "matched"]
    states = [DrawStates({}, {}, {}) for _ in DRAWS]
    for batch in batches:
        added = rotated_statistics(model, architecture, batch, predictions, DRAWS)
        states = [merge(state, each) for state, each in zip(states, added, strict=True)]
    nothing = Probed("draw", architecture, {}, 0)
    found = {}
    for p in predictions:
        rotated = tuple(p.evaluate(state.rotated[p.name], nothing) for state in states)
        pairs = [[p.evaluate(part[p.name], nothing) for part in state[1:]] for state in states] if p.rescaled else []
        found[p.name] = rotated, tuple(_differences(*pair) for pair in pairs)
    return found


def judgements(model, batches):
    """{prediction: rows} by layer, head and quantity: those that are judged, without the random-weights baseline."""
    architecture = discover(model, batches[0].inputs)
    weights, words = weights_of(model, architecture, batches[0].inputs), word_vectors_of(model, architecture)
    known = Probed("model", architecture, weights, 0, words=words)
    predictions = known_predictions()
    state = {}
    for batch in batches:
        state = merge(state, statistics_of(model, architecture, batch, predictions)[0])
    draws, found = matched(model, architecture, batches[:2]), {}
    for prediction in predictions:
        values = draws.get(prediction.name)
        baseline = None if values is None else Baseline(prediction.empty(), known, *values)
        judgement = prediction.verdict(findings_of(prediction, state[prediction.name], known, baseline))
        judgement = graded(judgement, prediction.declaration.kind)
        rows = [f for f in judgement.findings if f.verdict not in ("", "described") or prediction.name in WHOLE]
        found[prediction.name] = {(f.layer, f.call, f.head, f.quantity): f for f in rows}
    return found


BATCHES = token_batches(VOCABULARY, rows=4, length=48)
MODELS = {"gpt2": gpt2, "bert": bert, "llama": llama}
FOUND = {}


def found_before(which):
    if which not in FOUND:
        model, layers = MODELS[which]()
        FOUND[which] = model, layers, judgements(model, BATCHES)
    return FOUND[which]


# The gains and biases of post-norm layers are part of the function: the output of the norm is added to the stream.
# Llama has no biases, and rotary embeddings turn those of keys by position.
WITHOUT = {("bert", "gains"), ("bert", "biases of norms"), ("llama", "biases of norms"), ("llama", "biases of keys")}
CASES = [(which, change) for which in MODELS for change in CHANGES if (which, change) not in WITHOUT]


@pytest.mark.parametrize(("which", "change"), CASES)
def test_judged_findings_do_not_depend_on_the_gauge(which, change):
    model, layers, before = found_before(which)
    other = changed(model, layers, CHANGES[change], 100.0)
    size = float(output(model, BATCHES[0]).abs().max())
    assert float((output(model, BATCHES[0]) - output(other, BATCHES[0])).abs().max()) < 1e-9 * size
    after = judgements(other, BATCHES)
    failures = []
    for name, rows in before.items():
        heads = 1 + max((f.head for f in rows.values() if f.head is not None), default=0)
        assert len(rows) == len(after[name])
        assert name not in MATCHED or any(not np.isnan(f.null_high) for f in rows.values())
        for (layer, call, head, quantity), one in rows.items():
            if change == "biases of keys" and quantity in RAW:
                assert one.verdict == "" or name == "coherence"  # a description
                continue
            place = heads - 1 - head if change == "order of heads" and head is not None else head
            two = after[name][layer, call, place, quantity]
            fields = ("value", "low", "high", *(("null", "null_low", "null_high") if name in MATCHED else ()))
            for field in () if name in ROUNDING else fields:
                a, b = getattr(one, field), getattr(two, field)
                if not abs(a - b) <= 1e-6 * max(abs(a), abs(b), 1e-3) and not (np.isnan(a) and np.isnan(b)):
                    failures.append((name, quantity, layer, head, field, a, b))
            if one.verdict != two.verdict:
                failures.append((name, quantity, layer, head, one.verdict, two.verdict))
    assert not failures, failures[:20]
