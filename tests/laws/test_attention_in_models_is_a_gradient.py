"""The check of the capture is exact wherever the capture is, and notices what it is not.   [theory 3.9]"""

import pytest
import torch

from gradlogz.probing.corpus.batching import Batch
from gradlogz.probing.inside.events import Attended
from gradlogz.probing.predictions import identity
from gradlogz.probing.statistics import hash_of, merge
from support.architectures import ARCHITECTURES
from support.planted.rows import VOCABULARY, decoder, encoder
from support.pretrained import minilm
from support.probe_models import judged, probed, remarks_of, state_of, token_batches

EVERY = [a for a in ARCHITECTURES if a.kind in ("encoder", "decoder", "pair")]


def batch_for(inputs):
    names = [f"row {i}" for i in range(len(next(iter(inputs.values()))))]
    keys = torch.tensor([hash_of(name) for name in names])
    return Batch(dict(inputs), keys, 0, names, torch.zeros_like(keys))


@pytest.fixture(autouse=True)
def _every_row(monkeypatch):
    monkeypatch.setattr(identity, "PART", 16.0)


@pytest.mark.parametrize("architecture", EVERY, ids=str)
def test_every_architecture_is_exact_or_has_no_queries(architecture):
    given = architecture.inputs("right") if architecture.kind != "pair" else architecture.inputs()
    model, batch = architecture.build(), batch_for({k: v.repeat(8, *(1,) * (v.ndim - 1)) for k, v in given.items()})
    found = judged(identity, model, [batch])
    assert found.verdict == ("not applicable" if architecture.fallback and not _whole(found) else "supported"), found
    assert all(f.tokens > 0 or f.verdict == "not applicable" for f in found.findings)


def _whole(found):
    return any(f.tokens for f in found.findings)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_it_is_exact_in_every_precision(dtype):
    batches = token_batches(VOCABULARY, length=64)
    found = judged(identity, decoder(sharpness=4.0, key_heads=2).to(dtype), batches)
    assert found.verdict == "supported", found
    assert 0 < found.value <= identity.LIMIT


@pytest.mark.parametrize("share", [3e-4, 1e-2, 1.0])
def test_an_output_that_is_no_gradient_is_noticed(share):
    def change(event):
        if not isinstance(event, Attended):
            return event
        v = event.attention.value_variance.sqrt()
        return event._replace(attention=event.attention._replace(output=event.attention.output + share * v))

    found = judged(identity, encoder(), token_batches(VOCABULARY), change=change)
    assert found.verdict == "refuted"
    assert (found.judged, found.refuted) == (8, 8)
    assert remarks_of(found)["not_exact"].layers[0] == "encoder.layer.0.attention.self"


def test_one_head_that_is_wrong_is_named_and_a_number_that_is_none_is_an_error():
    def change(event):
        if not isinstance(event, Attended) or event.layer != "encoder.layer.1.attention.self":
            return event
        output = event.attention.output.clone()
        output[:, 2] = torch.nan
        return event._replace(attention=event.attention._replace(output=output))

    found = judged(identity, encoder(), token_batches(VOCABULARY), change=change)
    wrong = [f for f in found.findings if f.verdict == "refuted"]
    assert [(f.layer, f.head, f.value) for f in wrong] == [("encoder.layer.1.attention.self", 2, torch.inf)]


def test_random_errors_are_never_taken_for_exact():
    generator = torch.Generator().manual_seed(0)

    def change(event):
        if not isinstance(event, Attended):
            return event
        # Each head of each call has its own error, of a thousandth of the spread of its values.
        v = event.attention.value_variance.sqrt()
        noise = torch.randn(v.shape, generator=generator)
        return event._replace(attention=event.attention._replace(output=event.attention.output + 1e-3 * v * noise))

    batches = token_batches(VOCABULARY, rows=2)
    found = [f for seed in range(25) for f in judged(identity, encoder(seed=seed), batches, change=change).findings]
    assert len(found) == 200
    assert all(f.verdict == "refuted" for f in found)


def test_shards_count_the_same_errors_as_one_pass():
    batches, model = token_batches(VOCABULARY), encoder()
    layout = probed(model, batches[0]).architecture
    whole, even, odd = (state_of(identity, model, b, layout) for b in (batches, batches[::2], batches[1::2]))
    parts = merge(even, odd)
    for layer, kept in whole.items():
        assert torch.equal(kept.errors.counts, parts[layer].errors.counts)


def test_the_rows_are_those_of_a_real_model():
    model, inputs = minilm("sdpa")
    batch = batch_for({k: v.repeat(4, 1) for k, v in inputs.items()})
    found = judged(identity, model, [batch])
    assert found.verdict == "supported"
    assert len(found.findings) == 72
