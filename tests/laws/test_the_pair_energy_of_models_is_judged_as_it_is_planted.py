"""Pair energies of streams by their definition, and the verdict on models for which they rise by a theorem."""

import math

import numpy as np
import pytest
import torch

from gradlogz.probing.corpus.batching import Batch
from gradlogz.probing.inside.capturing import capture
from gradlogz.probing.prediction import Probed
from gradlogz.probing.predictions import pair_energy
from gradlogz.probing.predictions.pair_energy import CHANGE, ENERGY, JUDGED, TOTAL
from gradlogz.probing.runs.records import Finding
from gradlogz.probing.statistics import merge
from support.architectures import ARCHITECTURES
from support.planted.energies import VOCABULARY, attending
from support.planted.rows import decoder, encoder
from support.pretrained import minilm
from support.probe_models import details_of, judged, probed, remarks_of, state_of, token_batches


def log_energy(x):
    """log sum_ij exp(<u_i, u_j>) - 2 log n, pair by pair."""
    u = x / x.norm(dim=-1, keepdim=True)
    return float((u @ u.mT).flatten().logsumexp(0) - 2 * math.log(len(x)))


# The numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [encoder, decoder], ids=["post-norm", "pre-norm"])
def test_energies_and_changes_are_those_of_all_pairs(build):
    model, batch = build(layers=2).double(), token_batches(96, rows=4, batches=1)[0]
    known = probed(model, batch)
    captured = capture(model, batch.inputs, architecture=known.architecture)
    state = state_of(pair_energy, model, [batch], known.architecture)
    rows = {(m.layer, m.quantity): m for m in pair_energy.evaluate(state, known)}
    lengths = batch.inputs["attention_mask"].sum(1).tolist()

    def energies(x):
        return np.array([log_energy(part[:n]) for part, n in zip(x, lengths, strict=True)])

    streams = {name: passed.stream for name, passed in captured.sublayers.items()}
    for name, x in streams.items():
        assert rows[name, ENERGY].value == pytest.approx(energies(x).mean(), rel=1e-9)
        assert rows[name, ENERGY].tokens == sum(lengths)
    first, second = known.architecture.attention
    change = energies(streams[second]) - energies(streams[first])
    assert rows[first, CHANGE].value == pytest.approx(change.mean(), rel=1e-7)
    assert rows[first, "sequences that rise"].value == (change > 0).mean()
    between = list(streams)[list(streams).index(first) + 1]
    by_attention = energies(streams[between]) - energies(streams[first])
    assert rows[first, "change by attention"].value == pytest.approx(by_attention.mean(), rel=1e-7)
    end = list(captured.sublayers.values())[-1].after if build is decoder else captured.output.last_hidden_state
    assert rows["end", ENERGY].value == pytest.approx(energies(end).mean(), rel=1e-9)
    assert rows["", TOTAL].value == pytest.approx((energies(end) - energies(streams[first])).mean(), rel=1e-7)


def test_long_sequences_are_estimated_without_bias():
    """200 tokens, of which 64 are compared: over many choices the mean of E is that of all pairs."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 6, generator=generator, dtype=torch.float64) + 0.7
    picks = torch.stack([torch.randperm(200, generator=generator)[:64] for _ in range(2000)])
    taken = pair_energy.Taken(
        x[picks], torch.ones(2000, 64, dtype=torch.bool), torch.full((2000,), 200.0, dtype=torch.float64)
    )
    E = pair_energy.log_energy(taken).exp()
    exact, error = math.exp(log_energy(x)), float(E.std()) / math.sqrt(2000)
    assert abs(float(E.mean()) - exact) < 4 * error < 0.01 * exact


def test_the_number_of_tokens_is_that_of_the_compared_ones():
    model, batch = encoder().double(), token_batches(96, rows=2, length=90, batches=1)[0]
    known = probed(model, batch)
    rows = pair_energy.evaluate(state_of(pair_energy, model, [batch], known.architecture), known)
    lengths = batch.inputs["attention_mask"].sum(1)
    assert lengths.tolist() == [90, 60]
    tokens = {quantity: {m.tokens for m in rows if m.quantity == quantity} for quantity in (ENERGY, CHANGE)}
    assert tokens == {ENERGY: {64 + 60}, CHANGE: {64 + 60}}


# The verdict ---------------------------------------------------------------------------------------------------------


def values(found, quantity):
    return [f.value for f in found.findings if f.quantity == quantity]


@pytest.mark.parametrize(("step", "expected"), [(0.3, "supported"), (-0.3, "not applicable"), (0.0, "not applicable")])
def test_the_theorem_is_judged_where_it_holds(step, expected):
    """One unmasked head with identity matrices, and the same with a reversed update, which the theorem leaves out."""
    found = judged(pair_energy, attending(step), token_batches(VOCABULARY, rows=4), attending(0.0, seed=1))
    assert found.verdict == expected, found
    rows = [f for f in found.findings if f.quantity == JUDGED]
    assert [f.call for f in rows] == [1, 2, 3, 4, 5, 6]
    assert {f.verdict for f in rows} == {expected}
    assert (found.judged, found.supported, found.refuted) == (6 * (step > 0), 6 * (step > 0), 0)
    assert set(remarks_of(found)) == (set() if step > 0 else {"conditions"})
    assert details_of(found)["rising_blocks"].count == (6 if step > 0 else 0) or step == 0
    assert details_of(found)[pair_energy.POSITIVE].value == pytest.approx(1.0)
    if step:
        assert details_of(found)[pair_energy.TIE].value == pytest.approx(math.copysign(1.0, step))
    assert details_of(found)[pair_energy.VISIBLE].value == 1.0


def test_the_judged_change_is_that_of_all_pairs():
    """log sum_ij exp(<x_i, x_j> / sqrt(D)) of whole sequences, before and after the tangential step and the sphere."""
    model, batch = attending(0.3, layers=1).double(), token_batches(VOCABULARY, rows=3, length=20, batches=1)[0]
    known = probed(model, batch)
    state = state_of(pair_energy, model, [batch], known.architecture)
    rows = {m.quantity: m.value for m in pair_energy.evaluate(state, known) if not m.quantity.startswith("log")}
    (passed,) = (
        p for p in capture(model, batch.inputs, architecture=known.architecture).sublayers.values()
        if p.sublayer.kind == "attention"
    )  # fmt: skip
    lengths = batch.inputs["attention_mask"].sum(1).tolist()
    for quantity, sign in ((JUDGED, 1), (pair_energy.REVERSED, -1)):
        changes = []
        for x, u, n in zip(passed.stream, passed.update, lengths, strict=True):
            x, u = (t[:n] - t[:n].mean(-1, keepdim=True) for t in (x, u))
            step = u - (u * x).sum(-1, keepdim=True) * x / x.square().sum(-1, keepdim=True)
            moved = x + sign * step
            moved = moved * x.norm(dim=-1, keepdim=True) / moved.norm(dim=-1, keepdim=True)
            before, after = ((t @ t.mT / 4).flatten().logsumexp(0) for t in (x, moved))
            changes.append(float(after - before))
        assert rows[quantity] == pytest.approx(np.mean(changes), rel=1e-6)


@pytest.mark.parametrize("build", [encoder, decoder], ids=["several free heads", "masked"])
def test_other_models_are_described_and_not_judged(build):
    found = judged(pair_energy, build(layers=2), token_batches(96, rows=2, batches=2))
    assert found.verdict == "not applicable"
    assert set(remarks_of(found)) == {"conditions"}
    assert len(values(found, CHANGE)) == 2
    assert details_of(found)[pair_energy.HEADS].value == 4
    visible = details_of(found)[pair_energy.VISIBLE].value
    assert visible == 1.0 if build is encoder else 0.5 < visible < 0.6


def test_one_fall_does_not_refute():
    def row(layer, quantity, *numbers):
        return Finding("model", "pair_energy", layer, 1, None, quantity, *numbers, tokens=100)

    rising = [row(f"h.{i}.attn", JUDGED, 0.03, 0.028, 0.032, 0.0, -0.002, 0.002) for i in range(3)]
    falling = row("h.3.attn", JUDGED, -0.03, -0.032, -0.028, 0.0, -0.002, 0.002)
    conditions = [row("h.0.attn", pair_energy.TIE, 1.0, 1.0, 1.0)]
    found = pair_energy.verdict([*rising, falling, *conditions])
    assert (found.verdict, found.supported, found.refuted) == ("supported", 3, 1)
    found = pair_energy.verdict([rising[0], falling, falling._replace(layer="h.4.attn"), *conditions])
    assert (found.verdict, found.supported, found.refuted) == ("refuted", 1, 2)
    above_reversed = row("h.0.attn", pair_energy.REVERSED, 0.04, 0.035, 0.045)
    assert pair_energy.verdict([rising[0], above_reversed, *conditions]).verdict == "inconclusive"


# The statistics ------------------------------------------------------------------------------------------------------


def test_shards_add_to_one_pass():
    batches, model = token_batches(VOCABULARY, rows=3), attending(0.2, layers=3)
    known = probed(model, batches[0])
    whole, even, odd = (
        state_of(pair_energy, model, b, known.architecture) for b in (batches, batches[::2], batches[1::2])
    )
    one, two = (pair_energy.evaluate(state, known) for state in (whole, merge(odd, even)))
    assert len(one) > 20
    other = {(m.layer, m.quantity): m for m in two}
    for a in one:
        b = other[a.layer, a.quantity]
        assert a.tokens == b.tokens
        np.testing.assert_allclose(a[3:6], b[3:6], rtol=1e-9, atol=1e-10)


def test_a_pretrained_model_is_measured():
    model, inputs = minilm("sdpa")
    batch = Batch(dict(inputs), torch.arange(1, 4), 0, ["", "", ""], torch.zeros(3, dtype=torch.int64))
    known = Probed("minilm", probed(model, batch).architecture, {}, 0)
    found = pair_energy.evaluate(state_of(pair_energy, model, [batch], known.architecture), known)
    assert sum(m.quantity == CHANGE for m in found) == 6
    assert all(math.isfinite(m.value) for m in found)
    lengths = inputs["attention_mask"].sum(1).tolist()
    with torch.no_grad():
        states = model(**inputs, output_hidden_states=True).hidden_states
    for layer, x in zip([*known.architecture.attention, "end"], states, strict=True):
        exact = np.mean([log_energy(part[:n].double()) for part, n in zip(x, lengths, strict=True)])
        value = next(m.value for m in found if (m.layer, m.quantity) == (layer, ENERGY))
        assert value == pytest.approx(exact, abs=2e-5)


def test_streams_that_are_flattened_are_those_of_their_tokens():
    """OPT joins sequences and tokens for its feed-forward maps."""
    model = next(a for a in ARCHITECTURES if a.name == "opt").build().double()
    batch = token_batches(64, rows=3, batches=1, length=20)[0]
    known = Probed("opt", probed(model, batch).architecture, {}, 0)
    found = pair_energy.evaluate(state_of(pair_energy, model, [batch], known.architecture), known)
    assert sum(m.quantity == CHANGE for m in found) == 2
    lengths = batch.inputs["attention_mask"].sum(1).tolist()
    after = list(capture(model, batch.inputs, architecture=known.architecture).sublayers.values())[-1].after.reshape(
        3, 20, -1
    )
    exact = np.mean([log_energy(part[:n]) for part, n in zip(after, lengths, strict=True)])
    assert next(m.value for m in found if (m.layer, m.quantity) == ("end", ENERGY)) == pytest.approx(exact, rel=1e-9)


def test_models_without_a_stream_are_left_out():
    found = pair_energy.verdict([])
    assert (found.verdict, found.findings) == ("not applicable", [])
