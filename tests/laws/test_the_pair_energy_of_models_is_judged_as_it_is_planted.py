"""Pair energies of streams by their definition, and the verdict on models whose energy rises, falls or stays."""

import itertools
import math

import numpy as np
import pytest
import torch

from gradlogz.dynamics.observables import OBSERVABLES
from gradlogz.probing.corpus.batching import Batch
from gradlogz.probing.inside.capturing import capture
from gradlogz.probing.prediction import Probed
from gradlogz.probing.predictions import pair_energy
from gradlogz.probing.predictions.pair_energy import CHANGE, ENERGY, NORMALIZER, OF_LOGITS, RANK, SHARE, SHARPER, TOTAL
from gradlogz.probing.runs.records import Finding
from gradlogz.probing.statistics import merge, sums_of
from support.architectures import ARCHITECTURES
from support.planted.energies import VOCABULARY, attending
from support.planted.rows import decoder, encoder
from support.pretrained import minilm
from support.probe_models import details_of, findings_of, judged, probed, remarks_of, state_of, token_batches
from support.scales import close


def log_energy(x, beta):
    """log sum_ij exp(beta <u_i, u_j>) - 2 log n, pair by pair."""
    u = x / x.norm(dim=-1, keepdim=True)
    return float((beta * u @ u.mT).flatten().logsumexp(0) - 2 * math.log(len(x)))


# The numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [encoder, decoder], ids=["post-norm", "pre-norm"])
def test_energies_and_changes_are_those_of_all_pairs(build):
    model, batch = build(layers=2).double(), token_batches(96, rows=4, batches=1)[0]
    known = probed(model, batch)
    captured = capture(model, batch.inputs, architecture=known.architecture)
    state = state_of(pair_energy, model, [batch], known.architecture)
    rows = {(m.layer, m.quantity): m for m in pair_energy.evaluate(state, known)}
    lengths = batch.inputs["attention_mask"].sum(1).tolist()

    def energies(x, beta=1.0):
        return np.array([log_energy(part[:n], beta) for part, n in zip(x, lengths, strict=True)])

    streams = {name: passed.stream for name, passed in captured.sublayers.items()}
    for name, x in streams.items():
        assert rows[name, ENERGY].value == pytest.approx(energies(x).mean(), rel=1e-9)
        assert rows[name, SHARPER].value == pytest.approx(energies(x, math.sqrt(32)).mean(), rel=1e-9)
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


def test_sums_of_log_normalizers_are_those_of_the_logits():
    model, batch = encoder(sharpness=2.0).double(), token_batches(96, rows=3, batches=1)[0]
    known = probed(model, batch)
    captured = capture(model, batch.inputs, architecture=known.architecture)
    rows = {(m.layer, m.quantity): m.value for m in pair_energy.evaluate(
        state_of(pair_energy, model, [batch], known.architecture), known)}  # fmt: skip
    lengths = batch.inputs["attention_mask"].sum(1).tolist()
    for layer in known.architecture.attention:
        event = captured.attention[layer]
        s = event.query @ event.key.mT / math.sqrt(8)
        parts = [part[:, :n, :n] for part, n in zip(s, lengths, strict=True)]
        sums = np.mean([float(p.logsumexp(-1).mean()) for p in parts])
        pairs = np.mean([float(p.flatten(1).logsumexp(-1).mean()) - 2 * math.log(p.shape[-1]) for p in parts])
        assert rows[layer, NORMALIZER] == pytest.approx(sums, rel=1e-9)
        assert rows[layer, OF_LOGITS] == pytest.approx(pairs, rel=1e-9)


def test_long_sequences_are_estimated_without_bias():
    """200 tokens, of which 64 are compared: over many choices the mean of E is that of all pairs."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 6, generator=generator, dtype=torch.float64) + 0.7
    picks = torch.stack([torch.randperm(200, generator=generator)[:64] for _ in range(2000)])
    taken = pair_energy.Taken(
        x[picks], torch.ones(2000, 64, dtype=torch.bool), torch.full((2000,), 200.0, dtype=torch.float64)
    )
    E = pair_energy.energies(taken).exp()
    for column, beta in ((0, 1.0), (1, math.sqrt(6))):
        exact = math.exp(log_energy(x, beta))
        error = float(E[:, column].std()) / math.sqrt(2000)
        assert abs(float(E[:, column].mean()) - exact) < 4 * error < 0.01 * exact


def test_the_number_of_tokens_is_that_of_the_compared_ones():
    model, batch = encoder().double(), token_batches(96, rows=2, length=90, batches=1)[0]
    known = probed(model, batch)
    rows = pair_energy.evaluate(state_of(pair_energy, model, [batch], known.architecture), known)
    lengths = batch.inputs["attention_mask"].sum(1)
    assert lengths.tolist() == [90, 60]
    tokens = {quantity: {m.tokens for m in rows if m.quantity == quantity} for quantity in (ENERGY, CHANGE, NORMALIZER)}
    assert tokens == {ENERGY: {64 + 60}, CHANGE: {64 + 60}, NORMALIZER: {90 + 60}}


def test_what_sequences_show_is_what_clouds_show():
    model, batch = encoder().double(), token_batches(96, rows=5, batches=1)[0]
    known = probed(model, batch)
    rows = {(m.layer, m.quantity): m.value for m in pair_energy.evaluate(
        state_of(pair_energy, model, [batch], known.architecture), known)}  # fmt: skip
    lengths = batch.inputs["attention_mask"].sum(1).tolist()
    passed = capture(model, batch.inputs, architecture=known.architecture).sublayers
    for layer in known.architecture.attention:
        clouds = [x[:n] for x, n in zip(passed[layer].stream, lengths, strict=True)]
        names = {**pair_energy.OBSERVED, "effective_rank": RANK}
        for name, quantity in names.items():
            expected = np.mean([float(OBSERVABLES[name](x, None, None)) for x in clouds])
            assert rows[layer, quantity] == pytest.approx(expected, rel=1e-8), quantity


def test_rises_in_random_order_are_counted():
    for steps in (1, 2, 3, 5):
        counts = np.zeros(steps + 1)
        for order in itertools.permutations(range(steps + 1)):
            counts[sum(b > a for a, b in itertools.pairwise(order))] += 1
        close(torch.tensor(pair_energy.ascents(steps)), torch.tensor(counts / counts.sum(), dtype=torch.float32))


def test_every_stack_has_an_order_of_its_own():
    """An encoder of one step and a decoder of two: the rises of 2 and of 3 numbers in random order, added."""
    state = drawn(np.random.default_rng(0), [0.0, 1.0]).steps
    layers = {"encoder.0.a": state["layer 0"], "decoder.0.a": state["layer 0"], "decoder.0.b": state["layer 0"]}
    found = ruling(pair_energy.State(steps=layers))
    rises = [a + b for a in (0, 1) for b in (0, 1, 1, 1, 1, 2)]
    assert details_of(found)["p_value"].value == pytest.approx(rises.count(3) / 12)


# The verdict ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("step", "expected"), [(0.3, "supported"), (-0.3, "refuted"), (0.0, "inconclusive")])
def test_planted_models_are_judged_as_they_are(step, expected):
    found = judged(pair_energy, attending(step), token_batches(VOCABULARY, rows=4), attending(0.0, seed=1))
    assert found.verdict == expected, found
    changes = [f for f in found.findings if f.quantity == CHANGE]
    assert [f.call for f in changes] == [1, 2, 3, 4, 5, 6]
    assert {f.verdict for f in changes} == {expected}
    assert set(remarks_of(found)) == {"tied"}
    assert (found.judged, found.supported, found.refuted) == (6, 6 * (step > 0), 6 * (step < 0))
    alone = details_of(found)["attention_alone"]
    assert (alone.count, alone.total) == (6 if step > 0 else 0, 6) or step == 0
    assert found.quantity == SHARE
    assert {1.0: 0.3, 0.0: -0.3}.get(found.value, 0.0) == step


def test_what_random_weights_show_as_well_is_no_finding():
    found = judged(pair_energy, attending(0.3), token_batches(VOCABULARY, rows=4), attending(0.3, seed=1))
    assert found.verdict == "inconclusive", found


def test_layers_that_are_not_tied_are_said_to_be_so():
    found = judged(pair_energy, encoder(layers=1), token_batches(96, rows=2, batches=2))
    assert set(remarks_of(found)) == {"untied"}


def drawn(generator, levels, documents=40, spread=0.05):
    """Models with these energies at each depth, up to what differs from text to text."""
    keys = torch.from_numpy(generator.integers(0, 2**62, documents))
    steps = {}
    for i, (a, b) in enumerate(itertools.pairwise(levels)):
        change = b - a + spread * generator.normal(size=documents)
        columns = np.stack((np.ones(documents), change, change > 0, 20 * np.ones(documents)), 1)
        steps[f"layer {i}"] = sums_of(torch.from_numpy(columns), keys)
    return pair_energy.State(steps=steps)


def ruling(state):
    known = Probed("drawn", None, {}, 0)
    return pair_energy.verdict(findings_of(pair_energy, state, known))


def test_depths_in_random_order_are_seldom_supported():
    generator = np.random.default_rng(0)
    found = [ruling(drawn(generator, generator.normal(size=4))).verdict for _ in range(200)]
    assert found.count("supported") <= 0.05 * 200 + 2 * math.sqrt(200 * 0.05 * 0.95)
    assert found.count("refuted") > 150


def test_models_that_do_nothing_are_seldom_supported_or_refuted():
    generator = np.random.default_rng(1)
    found = [ruling(drawn(generator, np.zeros(7))).verdict for _ in range(100)]
    for verdict in ("supported", "refuted"):
        assert found.count(verdict) <= 5 + 2 * math.sqrt(100 * 0.05 * 0.95)


def test_the_stronger_the_rise_the_more_models_are_found():
    generator = np.random.default_rng(2)
    power = []
    for effect in (0.0, 0.01, 0.02, 0.06):
        found = [ruling(drawn(generator, effect * np.arange(7))).verdict for _ in range(15)]
        power.append(found.count("supported") / 15)
    assert power == sorted(power), power
    assert power[-1] > 0.9


# The statistics ------------------------------------------------------------------------------------------------------


def test_a_decrease_that_the_correction_leaves_inconclusive_is_counted():
    """p = 0.018 of one block is below 0.05, but not below 0.05 / 6."""

    def row(layer, quantity, *numbers):
        return Finding("model", "pair_energy", layer, 1, None, quantity, *numbers, tokens=100)

    rising = [row(f"h.{i}.attn", CHANGE, 0.03, 0.028, 0.032, 0.001, 0.0, 0.002) for i in range(5)]
    falling = row("h.5.attn", CHANGE, -0.0127, -0.0212, -0.0037, 0.003, 0.002, 0.004)
    whole = [row("", SHARE, 5 / 6), row("", pair_energy.BASELINE, 5 / 6)]
    found = pair_energy.verdict([*rising, falling, *whole])
    assert (found.verdict, found.supported, found.refuted) == ("supported", 5, 0)
    assert details_of(found)["uncorrected"].count == 1
    found = pair_energy.verdict([*rising, falling._replace(low=-0.0137, high=-0.0117), *whole])
    assert (found.verdict, found.refuted) == ("refuted", 1)
    assert "uncorrected" not in details_of(found)


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
        exact = np.mean([log_energy(part[:n].double(), 1.0) for part, n in zip(x, lengths, strict=True)])
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
    exact = np.mean([log_energy(part[:n], 1.0) for part, n in zip(after, lengths, strict=True)])
    assert next(m.value for m in found if (m.layer, m.quantity) == ("end", ENERGY)) == pytest.approx(exact, rel=1e-9)


def test_models_without_a_stream_are_left_out():
    found = pair_energy.verdict([])
    assert (found.verdict, found.findings) == ("not applicable", [])
