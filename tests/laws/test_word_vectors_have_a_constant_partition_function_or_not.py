"""The partition function of a context concentrates for isotropic word vectors and not for others.   [arora16]"""

import math

import numpy as np
import pytest
import torch
from scipy.special import logsumexp

from gradlogz.probing.inside.embeddings import WordVectors
from gradlogz.probing.predictions import word_vectors
from gradlogz.probing.predictions.word_vectors import (
    COMMON,
    DIMENSION,
    EXPLAINED,
    LEVEL,
    LOOSE,
    RAW,
    SCALE,
    SD,
    SPECTRUM,
    TEXT,
    concentration,
    spectrum_of,
)  # fmt: skip
from gradlogz.probing.statistics import merge
from support.architectures import ARCHITECTURES
from support.planted import matrices
from support.planted.matrices import VOCABULARY, WIDTH
from support.planted.sublayers import llama, with_words, words
from support.planted.updates import bert, untrained
from support.probe_models import details_of, findings_of, judged, probed, state_of, token_batches
from support.scales import close

BATCHES = token_batches(VOCABULARY, rows=4, length=24)


def planted(seed=0, **options):
    return with_words(bert(matrices.free), words(np.random.default_rng(seed), **options))


def anisotropic(model):
    """The model with an unembedding whose rows lie near a line."""
    generator = np.random.default_rng(0)
    with torch.no_grad():
        matrices.put(model.lm_head.weight, words(generator, anisotropy=12.0))
    return model


PLANTED = {  # median sd of log Z, relative to that of the logits
    "isotropic": (planted, 0.0, 0.1),
    "isotropic with a common vector": (lambda: planted(common=20.0), 0.0, 0.1),
    "slightly uneven": (lambda: planted(anisotropy=1.0), 0.0, 0.1),
    "near a plane": (lambda: planted(anisotropy=12.0), 0.2, 1.0),
    "untrained BERT": (lambda: untrained("bert", 0.02), 0.0, 0.1),
    "untrained BERT, larger scale": (lambda: untrained("bert", 0.25), 0.0, 0.1),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_models_have_their_variation(name):
    build, least, most = PLANTED[name]
    found = judged(word_vectors, build(), BATCHES)
    assert {f.verdict for f in found.findings if f.quantity == SD} == {"described"}
    assert least < found.value < most


def test_an_uneven_unembedding_is_told_from_an_isotropic_embedding():
    found = judged(word_vectors, anisotropic(llama(0.0)), BATCHES)
    smaller, larger = sorted(f.value for f in found.findings if f.quantity == SD)
    assert smaller < 0.1 < 0.2 < larger


def test_images_have_no_words():
    vit = next(a for a in ARCHITECTURES if a.name == "vit")
    model, inputs = vit.build(), vit.inputs()
    batch = BATCHES[0]._replace(inputs=inputs, keys=torch.arange(2), names=["a", "b"], starts=torch.zeros(2).long())
    assert judged(word_vectors, model, [batch]).verdict == "not applicable"


def test_the_variation_grows_with_anisotropy_and_is_that_of_the_spectrum():
    """For Gaussian vectors log Z is <c, Sigma c>/2 up to a constant, whose variance over directions is known."""
    values = []
    for anisotropy in (0.0, 3.0, 6.0):
        vectors = torch.from_numpy(words(np.random.default_rng(1), anisotropy=anisotropy))
        (found,) = concentration(own := WordVectors("input", vectors, None, False), spectrum_of(own), (0.3,))
        Sigma = np.cov(vectors.numpy().T, bias=True) / np.trace(np.cov(vectors.numpy().T, bias=True)) * WIDTH * 0.3**2
        squared = 2 * (WIDTH * np.trace(Sigma @ Sigma) - np.trace(Sigma) ** 2) / (WIDTH**2 * (WIDTH + 2))
        assert found.gaussian == pytest.approx(math.hypot(math.sqrt(squared) / 2 / 0.3, found.isotropic), rel=0.25)
        assert found.actual == pytest.approx(found.gaussian, rel=0.35)
        values.append(found.actual)
    assert values == sorted(values)


def test_every_quantity_is_its_definition():
    vectors = words(np.random.default_rng(2), anisotropy=2.0, common=3.0)
    own = WordVectors("input", torch.from_numpy(vectors), None, False)
    spectrum = spectrum_of(own)
    (found,) = concentration(own, spectrum, (1.5,))
    about = vectors - vectors.mean(0)
    Sigma = about.T @ about / len(about)
    contexts = word_vectors._directions(word_vectors._contexts(VOCABULARY), WIDTH, False).numpy()
    assert np.allclose(np.linalg.norm(contexts, axis=1), 1.0)
    assert np.allclose(contexts.mean(0), 0.0)
    c = 1.5 * contexts * np.sqrt(WIDTH / np.trace(Sigma))
    log_Z = logsumexp(about @ c.T, axis=0)
    assert found.actual == pytest.approx(log_Z.std(ddof=1) / 1.5, rel=1e-9)
    assert found.raw == pytest.approx(logsumexp(vectors @ c.T, axis=0).std(ddof=1) / 1.5, rel=1e-9)
    Z = np.exp(log_Z)
    assert found.within == pytest.approx(np.mean(np.abs(Z / Z.mean() - 1) < 0.1))
    known = probed(planted(2, anisotropy=2.0, common=3.0), BATCHES[0])
    rows = {m.quantity: m.value for m in word_vectors.evaluate(word_vectors.State(), known)}
    P = matrices.centring()  # BERT's norms subtract the mean over features
    seen = vectors.astype(np.float32) @ P
    centred = seen - seen.mean(0)
    S = centred.T @ centred / len(centred)
    assert rows[COMMON] == pytest.approx((seen.mean(0) ** 2).sum() / (seen**2).sum(1).mean(), rel=1e-4)
    assert rows[DIMENSION] == pytest.approx(np.trace(S) ** 2 / np.trace(S @ S) / (WIDTH - 1), rel=1e-4)
    assert rows[RAW] > rows[SD]
    assert rows[SPECTRUM] > 0


def test_isotropic_vectors_of_the_same_norms_are_the_null():
    """The null of vectors with a few long ones, against vectors that are drawn so."""
    generator = np.random.default_rng(3)
    norms = np.exp(generator.normal(size=(VOCABULARY, 1)) * 0.8)
    values = []
    for _ in range(8):
        directions = generator.normal(size=(VOCABULARY, WIDTH))
        vectors = norms * directions / np.linalg.norm(directions, axis=1, keepdims=True)
        own = WordVectors("input", torch.from_numpy(vectors), None, False)
        (found,) = concentration(own, spectrum_of(own), (1.0,))
        values.append((found.actual, found.isotropic))
    own, isotropic = np.mean(values, 0)
    assert own == pytest.approx(isotropic, rel=0.2)
    assert own > 0.1
    found = judged(word_vectors, with_words(bert(matrices.free), vectors), BATCHES)
    assert found.null == pytest.approx(found.value, rel=0.3)  # isotropy does not make their partition function constant


def test_scale_and_common_vectors_do_not_matter():
    vectors = words(np.random.default_rng(4), anisotropy=4.0)
    found = []
    for other in (vectors, 7.0 * vectors, vectors + 5.0, vectors + np.linspace(0, 9, WIDTH)):
        own = WordVectors("input", torch.from_numpy(other), None, False)
        found.append(concentration(own, spectrum_of(own), (1.0,))[0].actual)
    assert np.allclose(found, found[0], rtol=1e-9)


def test_text_is_read_from_the_logits():
    model = llama(0.0, layers=1).double()
    word_vectors_part = word_vectors.PART
    batches = token_batches(VOCABULARY, rows=3, length=2 * word_vectors_part, padded=False)
    known = probed(model, batches[0])
    state = state_of(word_vectors, model, batches, known.architecture)
    rows = {m.quantity: m.value for m in word_vectors.evaluate(state, known) if m.layer == "lm_head"}
    logits = []
    for batch in batches:
        with torch.no_grad():
            every = model(**batch.inputs).logits.numpy()
        places = known_places(model, batch, known)
        logits.append(np.take_along_axis(every, places[..., None], 1).reshape(-1, VOCABULARY))
    logits = np.concatenate(logits)
    centred = logsumexp(logits, axis=-1) - logits.mean(-1)
    assert rows[SCALE] == pytest.approx(np.sqrt(logits.var(-1).mean()), rel=1e-9)
    assert rows[TEXT] == pytest.approx(centred.std(), rel=1e-7)
    assert rows[EXPLAINED] == pytest.approx(np.corrcoef(centred, logits.var(-1))[0, 1] ** 2, rel=1e-6)
    assert rows[LEVEL] == pytest.approx(logsumexp(logits, axis=-1).mean(), rel=1e-9)
    assert rows[LOOSE] == pytest.approx(logsumexp(logits, axis=-1).std(), rel=1e-6)
    details = details_of(word_vectors.verdict(findings_of(word_vectors, state, known)))
    assert details[TEXT].value == rows[TEXT]


def known_places(model, batch, known):
    """Positions that a pass samples, the same in every layer."""
    places = []

    def note(event):
        return event

    original = word_vectors.chosen
    try:
        word_vectors.chosen = lambda *args: places.append(original(*args)) or places[-1]
        state_of(word_vectors, model, [batch], known.architecture, note)
    finally:
        word_vectors.chosen = original
    return places[0][0].numpy()


def test_shards_merge_to_one_pass():
    model = llama(0.0, layers=1)
    one = probed(model, BATCHES[0])
    parts = [state_of(word_vectors, model, part, one.architecture) for part in (BATCHES, BATCHES[5:], BATCHES[:5])]
    rows = [word_vectors.evaluate(state, one) for state in (parts[0], merge(parts[1], parts[2]))]
    a, b = (torch.tensor([m[3:6] for m in each], dtype=torch.float64).nan_to_num() for each in rows)
    close(a, b, tolerance=1e-6)
