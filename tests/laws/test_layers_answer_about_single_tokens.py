"""A layer that is asked about some tokens alone makes of them the queries that it made among all the others."""

import pytest
import torch

import gradlogz
from gradlogz.probing.batch_pass import BatchPass
from gradlogz.probing.inside.reprojection import at_tokens, queries_of
from gradlogz.probing.predictions import ascent
from gradlogz.probing.predictions.observables.attention_rows import at, chosen
from support.architectures import ARCHITECTURES
from support.planted.matrices import VOCABULARY, gpt2, tied
from support.planted.rows import decoder, encoder
from support.probe_models import state_of, token_batches
from support.scales import close

OWN_LOGITS = {"bloom", "falcon", "gptj", "deberta-v2"}
INTERFACE = [a for a in ARCHITECTURES if a.name not in OWN_LOGITS]


@pytest.mark.parametrize("architecture", INTERFACE, ids=str)
def test_queries_of_single_tokens_are_those_of_the_model(architecture):
    """Two versions of five tokens, in no order, the same version twice."""
    captured = gradlogz.capture(architecture.build(), architecture.inputs())
    assert captured.architecture.parted == set(captured.attention)
    for name, layer in captured.attention.items():
        sublayer = captured.sublayers.get(name)
        b, _, m, _ = layer.query.shape
        generator = torch.Generator().manual_seed(0)
        places = torch.rand(b, m, generator=generator).argsort(1)[:, :5]
        expected = at(layer.query, places)
        call = layer.layer_call
        given = call.tokens if sublayer is None else sublayer.stream
        tokens = at(given.reshape(call.tokens.shape).unsqueeze(1), places).squeeze(1)
        call = call if sublayer is not None else call._replace(norm=None)
        for parted in (True, False):
            found = queries_of(at_tokens(call._replace(parted=parted), places), torch.stack((tokens, tokens)))
            close(found, torch.cat((expected, expected), 2), scale=float(expected.abs().max()), tolerance=1e-5)


@pytest.mark.parametrize("name", sorted(OWN_LOGITS))
def test_layers_that_write_out_their_logits_are_not_asked(name):
    architecture = next(a for a in ARCHITECTURES if a.name == name)
    assert not gradlogz.capture(architecture.build(), architecture.inputs()).architecture.parted


@pytest.mark.parametrize("build", [encoder, decoder, lambda: gpt2(0, lambda g, gain: tied(g, gain))])
def test_a_layer_that_cannot_be_asked_about_tokens_alone_says_the_same(build):
    model = build().double()
    batch = token_batches(min(VOCABULARY, 96), rows=3, length=40, batches=1)[0]
    layout = gradlogz.capture(model, batch.inputs).architecture
    assert layout.parted
    alone, among = (
        state_of(ascent, model, [batch], layout._replace(parted=parted)) for parted in (layout.parted, frozenset())
    )
    assert alone.keys() == among.keys()
    for layer, statistics in alone.items():
        assert float(statistics.changes.totals[0, 0, 0]) > 0
        for sums, other in zip(statistics, among[layer], strict=True):
            close(other.totals, sums.totals, scale=1e3 * float(sums.totals.abs().max()))


def test_tokens_are_chosen_wherever_they_come():
    """One of each four that follow each other, with equal probability; alone, among others, and with padding."""
    model = encoder()
    batches = token_batches(96, rows=8, length=30, batches=3)
    met = torch.zeros(4)
    for batch in batches:
        event = next(iter(gradlogz.capture(model, batch.inputs).attention.values()))
        places, valid = chosen(event, BatchPass(batch), 1 / 4)
        assert places.shape == (8, 8)
        known = batch.inputs["attention_mask"].bool()
        assert torch.equal(valid, torch.where(valid, known.gather(1, places), False))
        for block in range(7):
            mine = places[valid[:, block], block]
            assert bool(((mine >= 4 * block) & (mine < 4 * block + 4)).all())
            met += torch.bincount(mine - 4 * block, minlength=4)
        for row in range(8):
            n = int(known[row].sum())
            inputs = {name: t[row : row + 1, :n] for name, t in batch.inputs.items()}
            one = batch._replace(inputs=inputs, keys=batch.keys[row : row + 1], starts=batch.starts[row : row + 1])
            event = next(iter(gradlogz.capture(model, inputs).attention.values()))
            again, valid_again = chosen(event, BatchPass(one), 1 / 4)
            assert torch.equal(again[valid_again], places[row][valid[row]])
    share = met / met.sum()
    assert float((share - 0.25).abs().max()) < 4 * float((0.25 * 0.75 / met.sum()).sqrt())
