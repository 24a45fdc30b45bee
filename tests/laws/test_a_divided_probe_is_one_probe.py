"""A probe in parts is one probe: the parts, their number and the disk change nothing but the last digits."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gradlogz.engine.state_file import Encoded
from gradlogz.probing import run_probe
from gradlogz.probing.corpus import batching, text
from gradlogz.probing.corpus.readers import corpus_of
from gradlogz.probing.divided import corpus_parts, divided_pass, joined_parts
from gradlogz.probing.inside.discovery import discover
from gradlogz.probing.inside.loading import load
from gradlogz.probing.passes import memory_limits
from gradlogz.probing.passes.batch_statistics import statistics_of
from gradlogz.probing.passes.placement import placed
from gradlogz.probing.prediction_files import selected
from gradlogz.probing.statistics import SAMPLE, affine_fits, comoments_of, regression
from support.divided_probes import NAMES, UNTRAINED, content, divided, saved
from support.nested_states import alike, numbers_in
from support.saved_models import SIZES, tokenizer


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("divided"))


@pytest.fixture(autouse=True)
def one_thread():
    """Sums depend on the number of threads in their last digits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_the_parts_of_a_corpus_are_that_of_one_pass(place, tmp_path, monkeypatch):
    """Several parts of each group, with batches of few rows, against one pass of `measure`."""
    monkeypatch.setattr(corpus_parts, "CHUNK", 1)
    monkeypatch.setattr(divided_pass, "PADDED", 40)
    loaded = load(place / "model", device="cpu", dtype="float64")
    corpus = corpus_of(loaded.tokenizer, str(place / "text.jsonl"))
    one = run_probe.measure(
        loaded.model, loaded.tokenizer, corpus, name="m", facts=loaded.facts, tokens=None,
        predictions=selected([*NAMES, "untrained"], [UNTRAINED]), baseline=0.3, draws=2,
    )  # fmt: skip
    outcome = divided(place, tmp_path / "work", dtype="float64", parts=16, files=(UNTRAINED,))
    assert not outcome.failures
    other = outcome.measured
    assert other.complete
    names = [path.name for path in (tmp_path / "work/items").iterdir()]
    assert sum(name.startswith("text-") for name in names) > 8
    alike(one.state, other.state)
    alike(one.baseline.state, other.baseline.state)
    alike(one.matched, other.matched)
    alike(one.probed.weights, other.probed.weights)
    assert one.report._replace(padded=0) == other.report._replace(padded=0)
    assert one.facts == other.facts
    assert len(one.tokens) == len(other.tokens)
    for a, b in zip(one.tokens, other.tokens, strict=True):
        assert (a._replace(value=0.0), a.value) == (b._replace(value=0.0), pytest.approx(b.value, rel=1e-9))


def test_matrices_on_the_disk_are_those_in_memory(place, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_parts, "CHUNK", 1)
    monkeypatch.setattr(divided_pass, "PADDED", 40)
    in_memory = content(divided(place, tmp_path / "a"), tmp_path / "x")
    monkeypatch.setattr(joined_parts, "LARGE", 1)
    assert content(divided(place, tmp_path / "b"), tmp_path / "y") == in_memory
    joined = [path.stem.rpartition("-")[0] for path in (tmp_path / "b/joined").iterdir()]
    assert joined
    assert len(joined) == len(set(joined))  # one file for each group: those of the steps before are removed
    assert not list((tmp_path / "a/joined").iterdir())


def test_a_finished_probe_computes_nothing(place, tmp_path, monkeypatch):
    once = content(divided(place, tmp_path / "work"), tmp_path / "x")
    monkeypatch.setattr("gradlogz.probing.divided.divided_pass.statistics_of", None)
    assert content(divided(place, tmp_path / "work"), tmp_path / "x") == once


def test_without_a_baseline_there_are_fewer_parts(place, tmp_path):
    outcome = divided(place, tmp_path / "work", baseline=0.0, files=(UNTRAINED,))
    assert outcome.measured.baseline is None
    assert outcome.measured.matched == {}
    assert not list((tmp_path / "work/items").glob("baseline-*"))


def test_a_folder_of_other_facts_is_refused_and_the_difference_named(place, tmp_path):
    divided(place, tmp_path / "work", facts={"seed": 1, "text_sha256": "a"}, draws=0, baseline=0.0)
    with pytest.raises(ValueError, match=r"seed was 1 and is 2; text_sha256 was \"a\" and is \"b\""):
        divided(place, tmp_path / "work", facts={"seed": 2, "text_sha256": "b"}, draws=0, baseline=0.0)
    divided(place, tmp_path / "work", facts={"seed": 2}, restart=True, draws=0, baseline=0.0)


def test_predictions_with_large_matrices_have_passes_of_their_own(place, tmp_path, monkeypatch):
    """Four predictions in bundles of one each are those of one pass."""
    together = divided(place, tmp_path / "a", files=(UNTRAINED,)).measured
    monkeypatch.setattr(memory_limits, "BUNDLE", 1)
    apart = divided(place, tmp_path / "b", files=(UNTRAINED,)).measured
    assert list((tmp_path / "b/items").glob("text-*.1-*"))
    assert not list((tmp_path / "a/items").glob("text-*.1-*"))
    for one, other in ((together.state, apart.state), (together.baseline.state, apart.baseline.state)):
        expected, found = dict(numbers_in(one)), dict(numbers_in(other))
        assert expected.keys() == found.keys()
        assert all(torch.equal(value.nan_to_num(), found[path].nan_to_num()) for path, value in expected.items())
    assert together.tokens == apart.tokens
    assert together.matched == apart.matched or repr(together.matched) == repr(apart.matched)  # NaN among them


def test_the_statistics_of_a_part_are_bounded(monkeypatch):
    """Measured at a small width with full samples of tokens; computed at the width of a model of 8 billion weights."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(**sizes, intermediate_size=256, max_position_embeddings=64, **SIZES)
    model, predictions = LlamaForCausalLM(config).eval(), run_probe.chosen(None)
    texts = [" ".join(str((7 * i + 3 * j * j + i * j) % 60) for j in range(28)) for i in range(1300)]
    state = {}
    every = batching.batches(text.documents(texts), tokenizer(), tokens=None, length=32)
    one_group = [placed(batch, model) for batch in every if batch.group == 0]
    assert sum(int(batch.inputs["attention_mask"].sum()) for batch in one_group) > SAMPLE
    architecture = discover(model, one_group[0].inputs)
    for batch in one_group:
        state, _ = statistics_of(model, architecture, batch, predictions, state)
    assert Encoded(state).nbytes <= memory_limits.part_bytes(architecture, predictions)

    def layer(i):
        return tuple(s._replace(name=f"{s.name} {i}") for s in architecture.sublayers[:2])

    large = architecture._replace(width=4096, sublayers=tuple(s for i in range(32) for s in layer(i)))
    assert memory_limits.matrix_bytes(large, predictions) > 100 * 2**30
    assert memory_limits.part_bytes(large, predictions) <= 20 * 2**30
    assert [len(bundle) for bundle in memory_limits.bundles_of(large, predictions)] == [len(predictions) - 1, 1]
    assert len(memory_limits.bundles_of(architecture, predictions)) == 1


def test_fits_of_single_groups_are_those_of_all_groups_at_once(monkeypatch):
    moments = None
    for group in range(5):
        x = torch.randn(40, 6, generator=torch.Generator().manual_seed(group), dtype=torch.float64)
        added = comoments_of(x, x.roll(1, -1) + 0.3 * x.square(), group=group, yy="trace")
        moments = added if moments is None else moments.merge(added)
    together = affine_fits(moments)
    monkeypatch.setattr(regression, "WIDE", 1)
    for one, other in zip(together, affine_fits(moments), strict=True):
        for (path, value), (_, found) in zip(numbers_in(one), numbers_in(other), strict=True):
            torch.testing.assert_close(found, value, rtol=0.0, atol=1e-12, msg=str(path), equal_nan=True)
