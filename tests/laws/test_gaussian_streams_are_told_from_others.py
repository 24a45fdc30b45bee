"""Shapes of clouds by their definitions, and the verdict on streams that are Gaussian and on streams that are not."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from gradlogz.probing.corpus.batching import Batch
from gradlogz.probing.inside.capturing import capture
from gradlogz.probing.prediction import Probed
from gradlogz.probing.predictions import gaussianity
from gradlogz.probing.predictions.gaussianity import ALL, CLEANED, EXCESS, MEAN, SELF, TREND
from gradlogz.probing.predictions.observables import gaussianity_tests as shapes
from gradlogz.probing.predictions.observables.attention_rows import SHARE
from gradlogz.probing.predictions.observables.gaussianity_tests import LARGEST, SLICED
from gradlogz.probing.statistics import Sample, jackknifed, merge, token_hashes
from support.planted.clouds import VOCABULARY, WIDTH, distance_of_scaled, gaussian, mixture, scaled, still
from support.planted.rows import encoder
from support.pretrained import minilm
from support.probe_models import findings_of, judged, probed, state_of, token_batches
from support.scales import close

NOTHING = Probed("", None, {}, 0)


def cloud(x, documents=None, positions=None):
    n = len(x)
    documents = torch.arange(n) if documents is None else documents
    classes = () if positions is None else (shapes.places_of(positions),)
    return shapes.project(torch.as_tensor(x), documents, documents % 8, classes)


# The numbers ---------------------------------------------------------------------------------------------------------


def test_anderson_and_darling_is_that_of_scipy():
    y = np.sort(np.random.default_rng(0).exponential(size=(3, 200)))
    y = (y - y.mean(1, keepdims=True)) / y.std(1, ddof=1, keepdims=True)  # scipy divides by n - 1
    found = shapes.anderson_darling(torch.from_numpy(y))
    with pytest.warns(FutureWarning):
        expected = [stats.anderson(row, "norm").statistic / 200 for row in y]
    close(found, torch.tensor(expected, dtype=torch.float64))


def test_the_best_logistic_law_is_that_of_scipy():
    generator = np.random.default_rng(0)
    for y in (generator.normal(size=300), generator.exponential(size=300), 3 + 5 * generator.standard_t(4, 300)):
        logistic = stats.logistic.logpdf(y, *stats.logistic.fit(y)).mean()
        normal = stats.norm.logpdf(y, y.mean(), y.std()).mean()
        assert float(shapes.logistic_against_normal(torch.from_numpy(y))) == pytest.approx(logistic - normal, abs=1e-6)


def test_the_distances_are_those_of_sorted_projections():
    x = mixture(np.random.default_rng(0), 400)
    found = cloud(x)
    assert found.axes == 8
    c = x - x.mean(0)
    values, vectors = np.linalg.eigh(np.cov(x.T, bias=True))
    z = (c @ vectors / np.sqrt(values))[:, ::-1][:, :8]
    quantiles = stats.norm.ppf((np.arange(400) + 0.5) / 400)[:, None]

    def square(y):
        return ((np.sort(y, 0) - quantiles) ** 2).mean()

    numbers = shapes.shape(found.features, found.axes)
    # axes have no sign, and the iteration finds them to a few digits where their variances are close
    expected = np.mean([min(square(z[:, [i]]), square(-z[:, [i]])) for i in range(8)])
    assert float(numbers[shapes.AXES]) == pytest.approx(expected, rel=0.05)
    direction = np.random.default_rng(1).normal(size=(8, 2000))
    each = ((np.sort(z @ (direction / np.linalg.norm(direction, axis=0)), 0) - quantiles) ** 2).mean(0)
    error = each.std() / math.sqrt(shapes.DIRECTIONS)  # of a mean over 16 directions in place of 2000
    assert abs(float(numbers[SLICED]) - each.mean()) < 3 * error
    expected = max(min(square(z[:, [i]]), square(-z[:, [i]])) for i in range(2))
    assert float(numbers[LARGEST]) == pytest.approx(expected, rel=0.1)  # the axes of the clusters
    close(shapes.largest_square(found.features, found.axes), numbers[LARGEST])
    third = np.einsum("ni,nj,nk->ijk", *3 * (z,)) / 400
    assert float(numbers["skewness"]) == pytest.approx((third**2).sum(), rel=0.05)
    assert float(numbers["kurtosis"]) == pytest.approx(((z**2).sum(1) ** 2).mean() - 80, rel=0.05)


def test_leading_axes_are_those_of_the_covariance():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(300, 40)) * np.geomspace(8, 0.01, 40)
    x = torch.from_numpy(x - x.mean(0))
    axes, spread = shapes.leading_axes(x, 4, torch.Generator().manual_seed(0))
    values, vectors = torch.linalg.eigh(x.mT @ x / 300)
    close(spread, values.flip(0)[:4], scale=1e3 * float(values.max()))
    close((axes * vectors.flip(1)[:, :4]).sum(0).abs(), torch.ones(4, dtype=torch.float64), tolerance=1e-8)


def test_covariances_between_and_within_documents_are_found():
    generator = np.random.default_rng(0)
    index = torch.from_numpy(generator.integers(0, 400, 8000))
    between, within = np.diag([2.0, 0.5, 0.0]), np.array([[1.0, 0.5, 0], [0.5, 1.0, 0], [0, 0, 3.0]])
    u = generator.multivariate_normal(np.zeros(3), between, 400)
    x = u[index] + generator.multivariate_normal(np.zeros(3), within, 8000)
    B, W = shapes.variances(torch.from_numpy(x), index)
    assert np.abs(B.numpy() - between).max() < 0.3
    assert np.abs(W.numpy() - within).max() < 0.15
    one, all_of_it = shapes.variances(torch.from_numpy(x), torch.zeros(8000, dtype=torch.int64))
    assert float(one.abs().max()) == 0
    close(all_of_it, torch.from_numpy(np.cov(x.T, bias=True)), scale=10.0)


def test_places_have_tokens_enough_and_their_means_are_removed():
    positions = torch.tensor([0] * 9 + [1] * 3 + [2] * 6 + [3] * 8 + [7] * 2)
    places = shapes.places_of(positions)
    assert places.tolist() == [0] * 9 + [1] * 9 + [2] * 10
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(28, 3)))
    found = shapes.without_means(x, places)
    for place, k in ((0, 9), (1, 9), (2, 10)):
        part = x[places == place]
        close(found[places == place], (part - part.mean(0)) / math.sqrt(1 - 1 / k))


# The verdict ---------------------------------------------------------------------------------------------------------


def batches():
    return token_batches(VOCABULARY, rows=6, padded=True)


def excesses(judgement):
    return {f.layer: f for f in judgement.findings if f.quantity == f"{EXCESS}, {CLEANED}"}


@pytest.mark.parametrize(("law", "gaussian_like"), [(gaussian, True), (mixture, False)])
def test_planted_streams_have_the_excess_of_their_distribution(law, gaussian_like):
    found = judged(gaussianity, still(law(np.random.default_rng(0), VOCABULARY), layers=1), batches())
    rows = excesses(found)
    assert set(rows) == {"h.0.attn", "end"}
    for f in rows.values():
        assert (f.high < 0.01) if gaussian_like else (f.low > 0.01)
    assert found.verdict == "not applicable"  # two depths have no trend


def test_artefacts_are_removed():
    generator = np.random.default_rng(0)
    x = gaussian(generator, VOCABULARY)
    large = x.copy()
    large[::20, 3] = 3000.0
    for model in (
        still(x, layers=1, first=20 * np.ones(WIDTH)),
        still(x, layers=1, positions=4 * np.sign(generator.normal(size=(64, 1))) * np.ones(WIDTH)),
        still(large, layers=1),
    ):
        rows = {f.quantity: f.value for f in judged(gaussianity, model, batches()).findings if f.layer == "h.0.attn"}
        assert rows[f"{EXCESS}, {ALL}"] > 0.02
        assert rows[f"{EXCESS}, {CLEANED}"] < 0.01


def state_with(depths, types, documents):
    """The state of a stack with these tokens at its depths, all at one position."""
    n = len(types)
    about = {"document": documents, "position": np.ones(n, int), "group": documents % 8, "type": types}
    vectors = {name: torch.from_numpy(t) for name, t in about.items()}
    vectors |= {f"layer {i}": torch.from_numpy(x) for i, x in enumerate(depths)}
    return gaussianity.State({"stack": Sample(torch.arange(n), vectors)})


def test_the_means_of_token_types_are_removed():
    """Repeated words are no Gaussian, whatever they are; what their contexts add may be."""
    generator = np.random.default_rng(0)
    often = 1 / np.arange(1, 21)
    types, documents = generator.choice(20, 1500, p=often / often.sum()), np.arange(1500) % 40
    words = 3 * gaussian(generator, 20)[types]
    states = [state_with([words + part(generator, 1500)], types, documents) for part in (gaussian, mixture)]
    rows = [{m.quantity: m.value for m in gaussianity.evaluate(state, NOTHING)} for state in states]
    assert all(row[f"{EXCESS}, {ALL}"] > 0.05 for row in rows)
    assert rows[0][f"{EXCESS}, {CLEANED}"] < 0.01
    assert rows[1][f"{EXCESS}, {CLEANED}"] > 0.05


def test_words_alone_leave_nothing_to_be_compared():
    generator = np.random.default_rng(0)
    types = generator.integers(0, 20, 600)
    state = state_with([gaussian(generator, 20)[types]], types, np.arange(600) % 40)
    rows = {m.quantity: m.value for m in gaussianity.evaluate(state, NOTHING)}
    assert math.isnan(rows[f"{EXCESS}, {CLEANED}"])
    assert rows[f"{EXCESS}, {ALL}"] > 0.01


@pytest.mark.parametrize(
    ("distances", "sign"), [((3.0, 2.6, 2.2, 1.8, 1.4, 0.0), -1), ((0.0, 1.4, 1.8, 2.2, 2.6, 3.0), 1)]
)
def test_the_trend_over_depth_is_described(distances, sign):
    generator = np.random.default_rng(0)
    tokens = [mixture(generator, 1500, distance=distance) for distance in distances]
    state = state_with(tokens, np.arange(1500), np.arange(1500) % 80)
    found = gaussianity.verdict(findings_of(gaussianity, state, NOTHING))
    assert found.verdict == "described", found
    excess = [f.value for f in excesses(found).values()]
    assert found.value == pytest.approx(stats.spearmanr(np.arange(6), excess).statistic)
    (trend,) = [f for f in found.findings if f.quantity == TREND]
    assert sign * trend.value > 0.9
    np.testing.assert_equal((found.low, found.high), (trend.low, trend.high))


def test_intervals_of_the_trend_do_not_exceed_one():
    """Of trends at and near ±1; on the scale of the trend itself the same intervals would."""
    source, counts, beyond = np.random.default_rng(2), torch.full((8,), 100), 0
    for n in (3, 7, 13, 31):
        for value in (1.0, -1.0, 0.9, -0.8, 0.0):
            values = torch.from_numpy(np.clip([value, *value + 0.1 * source.standard_normal(8)], -1, 1))
            plain, trend = jackknifed(values[0], values[1:], counts), gaussianity._correlation(values, counts, n)
            assert -1 <= trend.low <= value <= trend.high <= 1
            assert trend.low < trend.high
            beyond += bool(plain.low < -1 or plain.high > 1)
    assert beyond >= 12


@pytest.mark.parametrize("value", [-0.8, 0.0, 1.0])
def test_a_trend_that_no_group_changes_has_no_interval(value):
    """Ranks that stay as they are show that the jackknife is too coarse, not that the trend has no sampling error."""
    trend = gaussianity._correlation(torch.full((9,), value, dtype=torch.float64), torch.full((8,), 100), 6)
    assert float(trend.value) == value
    assert math.isnan(trend.low)
    assert math.isnan(trend.high)


def test_intervals_of_small_trends_are_those_of_the_trend_itself():
    values = torch.tensor([0.0, *(1e-4 * math.cos(i) for i in range(8))], dtype=torch.float64)
    counts = torch.full((8,), 100)
    plain, trend = jackknifed(values[0], values[1:], counts), gaussianity._correlation(values, counts, 9)
    np.testing.assert_allclose(trend.low, plain.low, rtol=1e-5)
    np.testing.assert_allclose(trend.high, plain.high, rtol=1e-5)
    assert torch.equal(trend.replicates, plain.replicates)


def test_intervals_of_the_trend_hold_its_value():
    """Depths that differ by chance alone have no trend; for so few of them, 92 of 100 intervals hold 0."""
    generator = np.random.default_rng(1)
    outside = 0
    for _ in range(40):
        tokens = [gaussian(generator, 256, 4) for _ in range(6)]
        state = state_with(tokens, np.arange(256), np.arange(256) % 32)
        (trend,) = [m for m in gaussianity.evaluate(state, NOTHING) if m.quantity == TREND]
        outside += not trend.low <= 0 <= trend.high
    assert outside <= 40 * 0.08 + 2 * math.sqrt(40 * 0.08 * 0.92)


def test_few_directions_are_enough():
    """Statistics over 4 of the 16 directions are those of all to a fifth, for tokens that are no Gaussian."""
    found = cloud(mixture(np.random.default_rng(0), 2000))
    z = shapes._whitened(found.features[:, :8])
    y = (z @ shapes._directions(z)).mT.sort(-1).values
    numbers = shapes.shape(found.features, found.axes)
    for name, function in (
        (shapes.DARLING, shapes.anderson_darling),
        (shapes.LOGISTIC, shapes.logistic_against_normal),
    ):
        each = function(y)
        assert abs(float(numbers[name] - each.mean())) < 2 * float(each.std()) / math.sqrt(shapes.FEW)


def interval(x, documents):
    """The excess of a model with one depth, whose tokens are these."""
    found = cloud(x, torch.from_numpy(documents), torch.from_numpy(documents * 0 + np.arange(len(x)) % 9))
    ((m,),) = [gaussianity._excess("", CLEANED, gaussianity._mean_excess(found, seed=0))]
    return m


def test_gaussian_clouds_of_few_documents_have_no_excess():
    """Tokens of a document are alike: half of their variance is that of documents."""
    generator = np.random.default_rng(0)
    above = 0
    for _ in range(100):
        documents = np.sort(generator.integers(0, 64, 256))
        x = generator.normal(size=(256, 4)) + generator.normal(size=(64, 4))[documents]
        above += interval(x, documents).low > 0.01
    assert above <= 5 + 2 * math.sqrt(100 * 0.05 * 0.95)


def test_intervals_of_the_excess_hold_the_planted_distance():
    generator = np.random.default_rng(1)
    spreads = np.linspace(0.2, 0.9, 36)
    distances = [distance_of_scaled(s) for s in spreads]
    for level, least in ((0.01, 0.85), (0.04, 0.85)):
        spread = np.interp(level, distances, spreads)
        found = [interval(scaled(generator, 384, 3, spread), np.arange(384)) for _ in range(60)]
        # The largest of several directions exceeds the distance of one of them.
        assert np.mean([m.high > level for m in found]) >= 0.95 - 2 * math.sqrt(0.05 * 0.95 / 60)
        assert np.mean([m.low < 1.5 * level + 0.005 for m in found]) >= least


# The statistics ------------------------------------------------------------------------------------------------------


def test_self_weights_and_mean_fractions_are_those_of_dense_attention():
    model, batch = encoder(sharpness=2.0).double(), token_batches(96, rows=4, length=60, batches=1)[0]
    known = probed(model, batch)
    state = state_of(gaussianity, model, [batch], known.architecture)
    rows = {(m.layer, m.quantity): m for m in gaussianity.evaluate(state, known)}
    captured = capture(model, batch.inputs, architecture=known.architecture)
    mask = batch.inputs["attention_mask"].bool()
    every, few = round(1 / SHARE), torch.zeros(4, 64, dtype=torch.bool)
    for first in range(0, 60, every):  # one of so many tokens in a row, by the hash of the first of them
        place = first + token_hashes(batch.keys, torch.tensor([[first]]).expand(4, -1)) % every
        few.scatter_(1, place, True)
    few = few[:, :60]
    for layer in known.architecture.attention:
        event = captured.attention[layer]
        s = (event.query @ event.key.mT / math.sqrt(8)).masked_fill(~mask[:, None, None], -torch.inf)
        own = s.softmax(-1).diagonal(dim1=-2, dim2=-1).mean(1)[few & mask]
        assert rows[layer, SELF].tokens == len(own) > 2
        assert rows[layer, SELF].value == pytest.approx(float(own.mean()), rel=1e-9)
        x = captured.sublayers[layer].stream[mask]
        assert rows[layer, MEAN].tokens == len(x)
        assert rows[layer, MEAN].value == pytest.approx(float(x.mean(0).square().sum() / x.square().sum(1).mean()))
    end = captured.output.last_hidden_state[mask]
    taken = state.samples["encoder.layer 32"].vectors["end"]
    close(taken.sort(0).values, end.sort(0).values)


def test_a_pretrained_model_is_measured():
    model, _ = minilm("sdpa")
    ids = torch.from_numpy(np.random.default_rng(0).integers(1000, 20000, (8, 40)))
    batch = Batch(
        {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
        torch.arange(1, 9),
        0,
        [""] * 8,
        torch.zeros(8, dtype=torch.int64),
    )
    known = Probed("minilm", probed(model, batch).architecture, {}, 0)
    found = gaussianity.evaluate(state_of(gaussianity, model, [batch], known.architecture), known)
    assert len({m.layer for m in found} - {""}) == 7
    assert all(math.isfinite(m.value) for m in found)
    assert all(math.isnan(m.low) for m in found if m.quantity.startswith((EXCESS, TREND)))  # one group has no interval


def test_shards_add_to_one_pass():
    batches, model = token_batches(96, rows=1), encoder(layers=1)
    known = probed(model, batches[0])
    whole, even, odd = (
        state_of(gaussianity, model, b, known.architecture) for b in (batches, batches[::2], batches[1::2])
    )
    one, two = (gaussianity.evaluate(state, known) for state in (whole, merge(odd, even)))
    assert one
    for a, b in zip(one, two, strict=True):
        assert a[:3] == b[:3]
        assert a.tokens == b.tokens
        np.testing.assert_allclose(a[3:6], b[3:6], rtol=1e-9, atol=1e-9)


def test_too_few_tokens_have_no_shape():
    found = judged(gaussianity, encoder(), token_batches(96, rows=1, batches=2, padded=False))
    assert found.verdict == "not applicable"
    assert all(math.isnan(f.value) for f in found.findings if f.quantity.startswith(EXCESS))
