"""The form of a head with rotary embeddings, over the distances that it attends to: by loops over pairs of tokens."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers as tf

from gradlogz import attend
from gradlogz.probing import capture
from gradlogz.probing.corpus.batching import Batch
from gradlogz.probing.inside.discovery import discover
from gradlogz.probing.inside.head_weights import Turning
from gradlogz.probing.inside.weights import weights_of
from gradlogz.probing.predictions import qk_geometry, symmetry, tie
from gradlogz.probing.predictions.observables import attention_rows as chosen_rows
from gradlogz.probing.predictions.observables.attention_distance import FINE, OVER, STILL, averaged, by_group
from gradlogz.probing.statistics import GROUPS, Sums, merge
from support.architectures import ARCHITECTURES, LLAMA
from support.probe_models import details_of, findings_of, judged, probed, remarks_of, state_of, token_batches
from support.scales import close

BATCHES = token_batches(64, rows=2, length=20, batches=2)


def built(name, **options):
    return next(a for a in ARCHITECTURES if a.name == name).build("sdpa", **options)


def angles(size, base=10000.0):
    return base ** (-np.arange(0, size, 2) / size)


def rotation(distance, size, turned, base=10000.0, split=True):
    """R(distance) on rows, [size, size]: pairs half of the turned part apart, or side by side."""
    R = np.eye(size)
    half = turned // 2
    for number, angle in enumerate(angles(turned, base)):
        i, j = (number, number + half) if split else (2 * number, 2 * number + 1)
        c, s = math.cos(distance * angle), math.sin(distance * angle)
        R[i, i], R[j, j], R[i, j], R[j, i] = c, c, s, -s
    return R


CASES = {
    "llama": (8, 8, 10000.0, True),
    "gpt_neox": (8, 2, 10000.0, True),
    "qwen2": (8, 8, 10000.0, True),
    "qwen3": (8, 8, 10000.0, True),
    "gemma2": (8, 8, 10000.0, True),
    "cohere": (8, 8, 500000.0, False),
}


@pytest.mark.parametrize("name", CASES)
def test_the_angles_are_those_of_the_formula(name):
    size, turned, base, split = CASES[name]
    model = next(a for a in ARCHITECTURES if a.name == name).build()
    inputs = BATCHES[0].inputs
    for w in weights_of(model, discover(model, inputs), inputs).values():
        assert isinstance(w.turning, Turning)
        n = 20 - 1  # an angle is known to what rounding leaves of a turn over the whole window
        assert np.abs(np.sort(w.turning.angle.numpy()) - np.sort(angles(turned, base))).max() < 1e-5 / n
        phase = 7 * w.turning.angle
        expected = torch.from_numpy(rotation(7, size, turned, base, split))
        close(w.turning.matrix(phase.cos(), phase.sin()), expected, tolerance=1e-5)
        assert len(w.turning.still) == size - turned


def test_layers_of_one_model_may_turn_by_other_angles():
    model = built("modernbert")
    inputs = BATCHES[0].inputs
    found = list(weights_of(model, discover(model, inputs), inputs).values())
    for w, base in zip(found, (160000.0, 10000.0, 10000.0), strict=True):  # every third layer sees the whole text
        assert np.abs(np.sort(w.turning.angle.numpy()) - np.sort(angles(8, base))).max() < 1e-6


def test_a_part_that_stays_lies_where_the_layer_has_it():
    model = built("deepseek_v3")
    inputs = BATCHES[0].inputs
    for w in weights_of(model, discover(model, inputs), inputs).values():
        assert w.turning.still.tolist() == list(range(8))


def average_form(event, Wq, Wk, real, turned):
    """sum_ij a_ij W_q R(i - j) W_kᵀ / sum_ij a_ij of each head, by loops."""
    h, size = Wq.shape[0], Wq.shape[2]
    q, k = event.query.double(), event.key.double().repeat_interleave(h // event.key.shape[1], 1)
    n = q.shape[2]
    forms, unturned = np.zeros((h, Wq.shape[1], Wq.shape[1])), np.zeros(h)
    R = {d: rotation(d, size, turned) for d in range(n)}
    for b in range(len(q)):
        s = (q[b] @ k[b].mT * size**-0.5).masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
        p = s.softmax(-1).numpy()
        for i in range(n):
            if not real[b, i]:
                continue
            for j in range(i + 1):
                for head in range(h):
                    forms[head] += p[head, i, j] * (Wq[head] @ R[i - j] @ Wk[head].T)
                    unturned[head] += p[head, i, j]
    return forms / unturned[:, None, None]


def values(rows, quantity):
    return torch.tensor([f.value for f in rows if f.quantity == quantity], dtype=torch.float64)


@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
def test_every_quantity_is_that_of_the_form_summed_pair_by_pair(name, monkeypatch):
    monkeypatch.setattr(chosen_rows, "SHARE", 1.0)
    model = built(name)
    turned = CASES[name][1]
    layer = {"llama": "model.layers.1.self_attn", "gpt_neox": "gpt_neox.layers.1.attention"}[name]
    (batch,) = token_batches(64, rows=2, length=14, batches=1)
    one = probed(model, batch)
    alone = replace(one, architecture=one.architecture._replace(attention=(layer,)))
    w = one.weights[layer]
    module = model.get_submodule(layer)
    if name == "llama":
        Wq, Wk = (p.weight.detach().double().numpy().T.reshape(32, -1, 8).transpose(1, 0, 2) for p in
                  (module.q_proj, module.k_proj))  # fmt: skip
        Wk = Wk.repeat(2, 0)
    else:
        fused = module.query_key_value.weight.detach().double().numpy().T.reshape(32, 4, 3, 8)
        Wq, Wk = (fused[:, :, i].transpose(1, 0, 2) for i in (0, 1))
    event = capture(model, batch.inputs, architecture=one.architecture).attention[layer]
    M = average_form(event, Wq, Wk, batch.inputs["attention_mask"].bool(), turned)
    # Symmetry, of the matrices as they are ------------------------------------------------------------------------
    rows = findings_of(symmetry, state_of(symmetry, model, [batch], one.architecture), alone)
    each = torch.from_numpy(np.array([np.trace(B @ B) / (B**2).sum() for B in M]))
    close(values(rows, symmetry.OF_HEAD + OVER), each, tolerance=1e-5)
    whole = M.sum(0)
    assert abs(float(values(rows, symmetry.SYMMETRY + OVER)) - np.trace(whole @ whole) / (whole**2).sum()) < 1e-5
    excess = []
    for axis in (1, 0):
        norms = np.linalg.norm(whole, axis=axis)
        edge = norms.mean() + 2 * norms.std(ddof=1)
        excess.append((norms[norms > edge] - edge).sum())
    expected = (excess[0] - excess[1]) / sum(excess) if sum(excess) else 0.0
    assert abs(float(values(rows, symmetry.DIRECTIONALITY + OVER)) - expected) < 1e-4
    # Geometry, on tokens that are only normalised -----------------------------------------------------------------
    rows = findings_of(qk_geometry, state_of(qk_geometry, model, [batch], one.architecture), alone)
    P = np.eye(32) - w.norm.centres / 32
    g = w.norm.gain.numpy()
    B = P @ (g[:, None] * M * g) @ P
    S = (B + B.transpose(0, 2, 1)) / 2
    eigenvalues = np.linalg.eigvalsh(S)
    positive = np.sqrt((eigenvalues.clip(min=0) ** 2).sum(-1) / (B**2).sum((1, 2)))
    close(values(rows, qk_geometry.POSITIVE + OVER), torch.from_numpy(positive), tolerance=1e-5)
    symmetric = (S**2).sum((1, 2)) / (B**2).sum((1, 2))
    close(values(rows, qk_geometry.SYMMETRIC + OVER), torch.from_numpy(symmetric), tolerance=1e-5)
    inputs = capture(model, batch.inputs, architecture=one.architecture).sublayers[layer].input
    z = inputs[batch.inputs["attention_mask"].bool()]
    z = (z.double().numpy() - w.norm.bias.numpy()) / g
    C = P @ np.cov(z.T, bias=True) @ P
    variance, vectors = np.linalg.eigh(C)
    E = vectors[:, -max(int((variance[::-1].cumsum() / variance.sum() < 0.9).sum()) + 1, 8) :]
    M_s, T = E.T @ S @ E, E.T @ C @ E
    cosine = (M_s * T).sum((1, 2)) / (np.linalg.norm(M_s, axis=(1, 2)) * np.linalg.norm(T))
    close(values(rows, qk_geometry.WITH_C + OVER), torch.from_numpy(cosine), tolerance=1e-5)
    # The tie of its transpose with the value map ------------------------------------------------------------------
    rows = findings_of(tie, state_of(tie, model, [batch], one.architecture), alone)
    A = g[:, None] * (w.value @ w.output).numpy()
    A, gradient = P @ A @ P, B.transpose(0, 2, 1)
    cosine = (A * gradient).sum((1, 2)) / np.sqrt((A**2).sum((1, 2)) * (gradient**2).sum((1, 2)))
    close(values(rows, tie.COSINE + OVER), torch.from_numpy(cosine), tolerance=1e-5)
    real = batch.inputs["attention_mask"].bool()
    k = event.key.repeat_interleave(event.query.shape[1] // event.key.shape[1], 1)
    hidden = ~real[:, None, None] | torch.ones(14, 14).triu(1).bool()
    a = (event.query @ k.mT / 8**0.5).masked_fill(hidden, -torch.inf).softmax(-1).double()
    attended = (a @ inputs.double().unsqueeze(1)).transpose(0, 1)[:, real].numpy()  # means of inputs, [h, t, D]
    update, gradient = attended @ ((w.value @ w.output).numpy() @ P), attended @ (M.transpose(0, 2, 1) * g @ P)
    inner, own, steep = ((X * Y).sum((1, 2)) for X, Y in ((update, gradient), (update,) * 2, (gradient,) * 2))
    close(values(rows, tie.WEIGHTED + OVER), torch.from_numpy(inner / np.sqrt(own * steep)), tolerance=1e-4)
    # The part that does not turn ----------------------------------------------------------------------------------
    share = values(rows, STILL)
    if turned == 8:
        assert len(share) == 0
    else:
        stays, turns = (g[:, None] * Wq[..., c] @ Wk[..., c].transpose(0, 2, 1) * g for c in (slice(2, 8), slice(2)))
        stays, turns = ((P @ X @ P) ** 2 for X in (stays, turns))
        expected = stays.sum((1, 2)) / (stays + turns).sum((1, 2))
        close(share, torch.from_numpy(expected), tolerance=1e-5)


def test_far_distances_count_as_the_mean_of_their_bin():
    turning = Turning(torch.tensor([0]), torch.tensor([1]), torch.tensor([0.037], dtype=torch.float64), 3)
    bins = 2 * (FINE + 72)
    for place, distances in ((5, [5]), (FINE, range(64, 70)), (bins // 2 + FINE + 1, range(-75, -69))):
        w = torch.zeros(1, bins, dtype=torch.float64)
        w[0, place] = 0.3  # a sink may take the rest
        expected = np.eye(3)
        turns = [[[math.cos(0.037 * d), math.sin(0.037 * d)], [-math.sin(0.037 * d), math.cos(0.037 * d)]] for d in
                 distances]  # fmt: skip
        expected[:2, :2] = np.mean(turns, 0)
        close(averaged(turning, w)[0], torch.from_numpy(expected))


@pytest.mark.parametrize("name", ["llama", "modernbert"])
def test_weights_by_distance_are_those_of_all_pairs(name, monkeypatch):
    monkeypatch.setattr(chosen_rows, "SHARE", 1.0)
    model = built(name)
    layout = discover(model, BATCHES[0].inputs)
    layer = layout.attention[-1]
    found = by_group(state_of(symmetry, model, BATCHES, layout)[layer].distances).sum(0)
    assert bool((found[:, 0] == sum(int(batch.inputs["attention_mask"].sum()) for batch in BATCHES)).all())
    found = found[:, 1:]
    expected = torch.zeros_like(found)
    for batch in BATCHES:
        event = capture(model, batch.inputs, architecture=layout).attention[layer]
        real = batch.inputs["attention_mask"].bool()
        p = torch.zeros(2, 4, 20, 20, dtype=torch.float64)
        for j in range(20):  # values that are 1 at one key show its weight
            one = torch.zeros_like(event.value)
            one[:, :, j] = 1.0
            p[..., j] = attend(**event.arguments._replace(value=one)._asdict(), statistics="none").output[..., 0]
        for b, i, j in np.ndindex(2, 20, 20):
            if real[b, i]:
                expected[:, i - j if j <= i else found.shape[-1] // 2 + j - i] += p[b, :, i, j]
    close(found, expected, tolerance=1e-4)
    behind = float(found[:, found.shape[-1] // 2 :].sum())
    assert behind == 0 if name == "llama" else behind > 10


def test_shards_merge_to_one_pass():
    model, batches = built("llama"), token_batches(64, rows=3, length=40)
    one = probed(model, batches[0])
    states = [state_of(symmetry, model, part, one.architecture) for part in (batches, batches[3:], batches[:3])]
    joined = merge(states[1], states[2])
    found = [symmetry.evaluate(state, one) for state in (states[0], joined)]
    a, b = (torch.tensor([m[3:6] for m in rows], dtype=torch.float64).nan_to_num() for rows in found)
    close(a, b, tolerance=1e-10)


def at_distance(distance):
    """Every head gives all its weight to keys at one distance."""
    sums = torch.zeros(1, 4, 1 + 2 * (FINE + 72), dtype=torch.float64)
    sums[..., 0] = sums[..., 1 + distance] = 10.0
    return {g: Sums(sums) for g in range(GROUPS)}


STEEP = 2.0  # with this base all pairs turn by more than half a radian


def turning_fast():
    parameters = {"rope_type": "default", "rope_theta": STEEP}
    return built("llama", num_key_value_heads=4, rope_parameters=parameters)


def planted(model, distance):
    """A Llama with W_k = W_q R(distance): its form is symmetric and positive for keys at that distance alone."""
    R = torch.from_numpy(rotation(distance, 8, 8, STEEP))
    with torch.no_grad():
        for layer in model.model.layers:
            attention = layer.self_attn
            Wq = attention.q_proj.weight.double().unflatten(0, (4, 8))
            attention.k_proj.weight.copy_((R.T @ Wq).flatten(0, 1))
    return model


@pytest.mark.parametrize(("looks", "there"), [(3, True), (0, False), (5, False)])
def test_forms_planted_at_one_distance_are_found_at_that_distance(looks, there):
    model = planted(turning_fast(), 3)
    batches = token_batches(64, rows=3, length=16)
    one = probed(model, batches[0])
    far = at_distance(looks)
    scored = {layer: symmetry.LayerState(far) for layer in one.architecture.attention}
    scores = values(findings_of(symmetry, scored, one), symmetry.OF_HEAD + OVER)
    state = state_of(qk_geometry, model, batches, one.architecture)
    state = {layer: kept._replace(distances=far) for layer, kept in state.items()}
    cosines = values(findings_of(qk_geometry, state, one), qk_geometry.POSITIVE + OVER)
    if there:
        close(scores, torch.ones(8, dtype=torch.float64), tolerance=1e-5)
        close(cosines, torch.ones(8, dtype=torch.float64), tolerance=1e-5)
    else:
        assert float(scores.max()) < 0.5
        assert float(cosines.max()) < 0.9


def tied(model, distance):
    """W_v W_o = W_k R(-distance) W_qᵀ behind the norm: the gradient of the log normaliser of keys at that distance."""
    R = torch.from_numpy(rotation(-distance, 8, 8, STEEP))
    with torch.no_grad():
        for layer in model.model.layers:
            part, gain = layer.self_attn, layer.input_layernorm.weight.double()
            Wq = part.q_proj.weight.double().unflatten(0, (4, 8))
            part.v_proj.weight.copy_(part.k_proj.weight)
            part.o_proj.weight.copy_(((R @ Wq) * gain).flatten(0, 1).mT)
    return model


@pytest.mark.parametrize(("looks", "there"), [(2, True), (0, False)])
def test_a_tie_planted_at_one_distance_is_found_at_that_distance(looks, there):
    model = tied(turning_fast(), 2)
    batches = token_batches(64, rows=3, length=16)
    one = probed(model, batches[0])
    state = state_of(tie, model, batches, one.architecture)
    state = {layer: kept._replace(distances=at_distance(looks)) for layer, kept in state.items()}
    found = values(findings_of(tie, state, one), tie.WEIGHTED + OVER)
    if there:
        close(found, torch.ones(8, dtype=torch.float64), tolerance=1e-5)
    else:
        assert float(found.max()) < 0.9


class Squared(torch.nn.Module):
    """The rotations of a Llama, by the squares of positions."""

    def __init__(self, whole):
        super().__init__()
        self.whole = whole

    def forward(self, x, position_ids):
        return self.whole(x, position_ids**2)


def test_what_is_no_power_of_one_rotation_is_not_applicable_by_name():
    model, batches = built("llama"), token_batches(64, rows=2, length=16)
    model.model.rotary_emb = Squared(model.model.rotary_emb)
    one = probed(model, batches[0])
    assert {w.turning for w in one.weights.values()} == {"its rotation angles are not proportional to the distance"}
    for prediction, quantity in (
        (tie, tie.WEIGHTED), (qk_geometry, qk_geometry.POSITIVE), (symmetry, symmetry.SYMMETRY)
    ):  # fmt: skip
        found = judged(prediction, model, batches)
        assert remarks_of(found)["over_distances"].layers == ("model.layers.0.self_attn", "model.layers.1.self_attn")
        rows = [f for f in found.findings if f.quantity == quantity + OVER]
        assert len(rows) == 2
        assert all(math.isnan(f.value) for f in rows)


def test_angles_that_depend_on_the_length_are_not_applicable():
    dynamic = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    config = tf.LlamaConfig(**{**LLAMA, "max_position_embeddings": 8, "rope_parameters": dynamic})
    model = tf.LlamaForCausalLM(config).eval()
    (batch,) = token_batches(64, rows=2, length=30, batches=1)
    assert {w.turning for w in probed(model, batch).weights.values()} == {"its rotations depend on the sequence length"}


class Mixed(torch.nn.Module):
    """The rotations of a Llama with another sine for one of the two coordinates of every pair: no rotation."""

    def __init__(self, whole):
        super().__init__()
        self.whole = whole

    def forward(self, x, position_ids):
        cos, sin = self.whole(x, position_ids)
        return cos, torch.cat((sin[..., :4], 0.3 * sin[..., 4:]), -1)


def test_what_is_no_rotation_of_pairs_is_refused():
    model = built("llama")
    model.model.rotary_emb = Mixed(model.model.rotary_emb)
    (batch,) = token_batches(64, rows=2, length=16, batches=1)
    found = probed(model, Batch(*batch)).weights.values()
    assert all(isinstance(w, str) or isinstance(w.turning, str) for w in found)


def test_models_that_do_not_turn_have_no_rows_over_distances():
    found = judged(symmetry, built("gpt2"), BATCHES)
    assert not any(f.quantity.endswith(OVER) for f in found.findings)
    assert "over_distances" not in remarks_of(found) | details_of(found)
