"""The probe measures everything in one pass, leaves the model as it was, and keeps what it has when it is stopped."""

import copy
import math
import os
import signal
import weakref
from dataclasses import replace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from typer.testing import CliRunner

import gradlogz
from gradlogz import cli
from gradlogz.probing import run_probe as running
from gradlogz.probing.corpus import batching
from gradlogz.probing.corpus.text import Document
from gradlogz.probing.inside.events import ForwardOutput
from gradlogz.probing.passes import matched_draws, memory_limits
from gradlogz.probing.passes.batch_statistics import statistics_of
from gradlogz.probing.passes.extreme_tokens import greatest
from gradlogz.probing.passes.interruption import interruptible
from gradlogz.probing.passes.memory_limits import matrix_bytes
from gradlogz.probing.passes.placement import placed
from gradlogz.probing.predictions import ascent, entropy, known_predictions, tie
from gradlogz.probing.predictions.observables import moved_tokens
from gradlogz.probing.predictions.qk_geometry import WHITENED
from gradlogz.probing.statistics import GROUPS, merge, stream_seed
from support.architectures import ARCHITECTURES
from support.planted.matrices import VOCABULARY, gpt2, tied
from support.probe_models import tensors_of

TEXTS = [(f"document {i}", " ".join(str((7 * i + 3 * j * j) % (VOCABULARY - 4)) for j in range(30))) for i in range(12)]


@pytest.fixture(scope="module")
def words():
    """A tokenizer of numbers."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"[PAD]": 0, "[BOS]": 1, "[UNK]": 2, **{str(i): i + 3 for i in range(VOCABULARY - 4)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", model_max_length=64)


def model():
    return gpt2(0, lambda g, gain: tied(g, gain))


def documents():
    return (Document(*text) for text in TEXTS)


def test_findings_have_a_claim_for_every_prediction(words):
    found = gradlogz.probe(model(), words, TEXTS, name="planted", tokens=None)
    names = [p.name for p in known_predictions()]
    assert [s.prediction for s in found.summary()] == names
    assert all(c.verdict and (c.remarks or c.judged) for c in found.claims)
    assert found.facts["planted"]["tokens"] == 12 * 30
    assert {f.layer for f in found.select("ascent").rows} == {f"transformer.h.{i}.attn" for i in (0, 1)}
    assert {t.kind for t in found.tokens} == {"largest variance", "largest logit"}
    assert all("[" in t.text for t in found.tokens)
    assert "supported" in found._repr_html_()


def test_a_part_of_the_predictions_is_a_part_of_the_findings(words):
    found = gradlogz.probe(model(), words, TEXTS, predictions=["ascent"], tokens=None, baseline=0)
    assert {row.prediction for row in found.rows} == {"ascent", "identity"}  # the self-check is always among them
    assert [claim.prediction for claim in found.claims] == ["ascent", "identity"]


def test_a_model_in_training_is_left_as_it_was(words):
    one = model().train()
    before = copy.deepcopy(one.state_dict())
    state = torch.random.get_rng_state()
    gradlogz.probe(one, words, TEXTS[:3], tokens=None, predictions=["identity", "ascent", "entropy"])
    assert one.training
    assert all(torch.equal(t, before[name]) for name, t in one.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in one.modules())
    assert all(p.grad is None for p in one.parameters())


def test_the_same_seed_gives_the_same_findings(words):
    planted = model()
    wanted = ["ascent", "symmetry", "gaussian_measure"]
    one, other = (gradlogz.probe(planted, words, TEXTS, tokens=None, predictions=wanted) for _ in range(2))
    assert repr(one.rows) == repr(other.rows)


def test_documents_and_null_models_have_seeds_of_their_own(words):
    """Another seed of the nulls changes null values alone; without one, the seed of the documents is that of both."""
    wanted, planted = {"tokens": 120, "predictions": ["entropy"], "draws": 3}, model()

    def rows(**seeds):
        found = gradlogz.probe(planted, words, TEXTS, **seeds, **wanted).table("entropy", quantity="entropy")
        return [[row[name] for row in found] for name in ("value", "null")]

    values, nulls = rows(seed=1)
    for seeds, same_values, same_nulls in (
        ({"seed": 1, "baseline_seed": 1}, True, True),
        ({"seed": 1, "baseline_seed": 2}, True, False),
        ({"seed": 2, "baseline_seed": 1}, False, False),
    ):
        others = rows(**seeds)
        assert (others[0] == values, others[1] == nulls) == (same_values, same_nulls), seeds
    streams = [stream_seed(name, *numbers) for name in ("weights", "draw") for numbers in ((0,), (1,), (0, 1), (1, 0))]
    assert len(set(streams)) == len(streams)
    assert all(0 <= seed < 2**62 for seed in streams)


def test_a_batch_that_does_not_fit_is_passed_in_halves(words):
    one = model()
    several = batching.batches([Document(f"a{i}", TEXTS[0][1]) for i in range(40)], words, tokens=None, size=64)
    batch = max(several, key=lambda b: len(b.keys))
    assert len(batch.keys) >= 4
    layout = running.discover(one, batch.inputs)
    whole, _ = statistics_of(one, layout, batch, [tie.PREDICTION])
    forward = one.forward

    def small(input_ids, **others):
        if len(input_ids) > 2:
            raise torch.OutOfMemoryError("no")
        return forward(input_ids, **others)

    one.forward = small
    halves, _ = statistics_of(one, layout, batch, [tie.PREDICTION])
    for name, t in tensors_of(whole).items():
        torch.testing.assert_close(tensors_of(halves)[name], t, rtol=1e-5, atol=1e-5)


def test_halves_add_the_events_that_a_batch_had_not_reached(words):
    """The batch fails in its second layer, and its first half in the first layer."""
    one = model()
    several = batching.batches([Document(f"a{i}", TEXTS[0][1]) for i in range(40)], words, tokens=None, size=64)
    batches = sorted(several, key=lambda b: -len(b.keys))[:2]
    rows = len(batches[0].keys)
    assert rows >= 4
    layout = running.discover(one, batches[0].inputs)
    predictions = running.chosen(None)
    before = [statistics_of(one, layout, batches[1], predictions)[0] for _ in range(2)]
    whole, tokens = statistics_of(one, layout, batches[0], predictions, before[0])
    failing = {(1, rows), (0, rows // 2)}  # layer, rows
    for layer in (0, 1):
        projected = one.transformer.h[layer].mlp.c_fc.forward

        def fails(x, projected=projected, layer=layer):
            if (layer, len(x)) in failing:
                failing.remove((layer, len(x)))
                raise torch.OutOfMemoryError("no")
            return projected(x)

        one.transformer.h[layer].mlp.c_fc.forward = fails
    halves, others = statistics_of(one, layout, batches[0], predictions, before[1])
    assert not failing
    for name, t in tensors_of(whole).items():
        torch.testing.assert_close(tensors_of(halves)[name], t, rtol=1e-5, atol=1e-5)
    assert {(t.layer, t.kind) for t in greatest(tokens)} == {(t.layer, t.kind) for t in greatest(others)}


def test_nothing_of_a_batch_that_did_not_fit_is_left_when_its_halves_pass(words):
    """A GPU has no memory for what an error still holds."""
    one = model()
    batch = max(batching.batches([Document(f"a{i}", TEXTS[0][1]) for i in range(20)], words, tokens=None, size=64),
                key=lambda b: len(b.keys))  # fmt: skip
    layout = running.discover(one, batch.inputs)
    made, left = [], []
    projected = one.transformer.h[1].mlp.c_fc.forward

    def fails(x):
        left.append(sum(ref() is not None for ref in made))
        found = projected(x)
        made.append(weakref.ref(found))
        if len(x) == len(batch.keys):
            raise torch.OutOfMemoryError("no")
        return found

    one.transformer.h[1].mlp.c_fc.forward = fails
    statistics_of(one, layout, batch, [ascent.PREDICTION, tie.PREDICTION])
    assert left[:2] == [0, 0]


def test_matrices_that_cannot_fit_are_refused_before_the_work(words, monkeypatch):
    monkeypatch.setattr(memory_limits, "LARGE", 1)
    monkeypatch.setattr(memory_limits, "memory_of", lambda device: 2**10)
    with pytest.raises(ValueError, match=r"memory.*0\.0 GiB"):
        gradlogz.probe(model(), words, TEXTS, tokens=None)
    found = gradlogz.probe(model(), words, TEXTS, tokens=None, predictions=["entropy"], baseline=0)
    assert found.rows


def test_matrices_take_as_much_as_is_said(words):
    """Of every prediction that keeps products of the stream, and of all together, which share them."""
    one = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=160, n_layer=2, n_head=4, n_positions=64))
    batch = next(batching.batches(documents(), words, tokens=None))
    layout = running.discover(one, batch.inputs)
    several = (["qk_geometry"], ["linearity"], ["qk_geometry", "linearity"])
    for names in several:
        state, _ = statistics_of(one, layout, batch, running.chosen(names))
        met: dict[int, int] = {}

        def walk(part, met=met):
            if isinstance(part, torch.Tensor) and part.numel() > 160**2 / 2:
                met[part.data_ptr()] = part.numel() * part.element_size()
            for each in part.values() if isinstance(part, dict) else part if isinstance(part, tuple) else ():
                walk(each)

        walk(state)
        assert matrix_bytes(layout, running.chosen(names)) == GROUPS * sum(met.values()) > 0


def test_no_null_is_the_value_of_one_untrained_model(words):
    """Null values do not move with the seed of untrained weights: no prediction asks for such a model."""
    assert {p.baseline for p in known_predictions()} == {"none", "matched"}
    assert running.measure(model(), words, documents(), tokens=None, draws=2).baseline is None


def test_a_row_that_does_not_fit_is_said(words):
    one = model()
    one.forward = lambda **given: (_ for _ in ()).throw(torch.OutOfMemoryError("no"))
    layout = running.discover(model(), {"input_ids": torch.tensor([[3, 4, 5]])})
    batch = next(batching.batches(documents(), words, tokens=None))
    with pytest.raises(RuntimeError, match=r"30 tokens.*memory"):
        statistics_of(one, layout, batch, [tie.PREDICTION])


def test_nan_is_named_by_layer_and_head(words):
    one = model()
    with torch.no_grad():
        one.transformer.h[1].attn.c_attn.weight[:, 8] = torch.nan  # the queries of the second head
    batch = next(batching.batches(documents(), words, tokens=None))
    layout = running.discover(model(), batch.inputs)
    with pytest.raises(ValueError, match=r"head 1 of transformer.h.1.attn"):
        statistics_of(one, layout, batch, [])


@pytest.fixture
def not_ignored():
    """Ctrl-C interrupts, also where a script has started the tests in the background, with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("not_ignored")
def test_an_interrupt_that_is_ignored_stays_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with interruptible() as interrupted:
        os.kill(os.getpid(), signal.SIGINT)
        assert not interrupted()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


@pytest.mark.usefixtures("not_ignored")
def test_an_interrupt_ends_after_the_batch(words):
    """The first Ctrl-C finishes the batch that is under way; what was measured is kept."""

    def statistics(event, batch_pass):
        if not seen:
            os.kill(os.getpid(), signal.SIGINT)
        seen.append(batch_pass.batch.group)
        return ascent.statistics(event, batch_pass)

    seen = []
    before = signal.getsignal(signal.SIGINT)
    stopping = [replace(ascent.PREDICTION, statistics=statistics)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moved_tokens, "PART", 1)
        found = running.measure(model(), words, documents(), tokens=None, baseline=0, predictions=stopping)
        rows = running.evaluate(found, predictions=stopping).rows
    assert not found.complete
    assert len(set(seen)) == 1  # one batch, of one group
    assert rows
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.usefixtures("not_ignored")
def test_an_interrupt_while_the_twin_reads_loses_nothing(words):
    def statistics(event, batch_pass):
        if isinstance(event, ForwardOutput):
            seen.append(batch_pass.batch.group)
            if len(seen) == 1 + len(batches):
                os.kill(os.getpid(), signal.SIGINT)
        return ascent.statistics(event, batch_pass)

    batches = list(batching.batches(documents(), words, tokens=None))
    seen = []
    stopping = [replace(ascent.PREDICTION, statistics=statistics, baseline="statistics")]
    found = running.measure(model(), words, documents(), tokens=None, baseline=1.0, predictions=stopping)
    assert len(batches) > 1
    assert len(seen) == len(batches) + 1
    assert found.baseline is not None
    assert not found.complete
    assert found.report.tokens == 12 * 30


def test_a_single_document_is_measured_without_intervals(words):
    """Without its only group nothing is left: what has its interval from groups has a value alone."""
    found = gradlogz.probe(model(), words, TEXTS[:1], tokens=None)
    assert len(found.claims) == len(known_predictions())
    rows = [f for f in found.rows if f.quantity == WHITENED]
    assert rows
    assert all(math.isfinite(f.value) and math.isnan(f.low) for f in rows)


def test_the_interval_of_a_claim_is_about_its_value(words):
    """The interval of a median over heads or layers contains the median."""
    claims = [c for c in gradlogz.probe(model(), words, TEXTS, tokens=None).claims if not math.isnan(c.low)]
    assert {"symmetry", "tie"} <= {c.prediction for c in claims}
    assert all(c.low - 1e-12 <= c.value <= c.high + 1e-12 for c in claims)


def test_a_decoder_reads_what_its_encoder_does(words):
    """T5 wants the tokens of its decoder; they are the text behind the token that it starts with."""
    one = next(a for a in ARCHITECTURES if a.name == "t5").build(vocab_size=VOCABULARY)
    batch = next(batching.batches(documents(), words, tokens=None))
    inputs = placed(batch, one).inputs
    assert torch.equal(inputs["decoder_input_ids"], one._shift_right(batch.inputs["input_ids"]))
    found = gradlogz.probe(one, words, TEXTS, tokens=None, predictions=["identity", "entropy"])
    assert found.claims[0].verdict == "passed"
    assert {f.layer.split(".")[0] for f in found.rows} == {"encoder", "decoder"}


def test_states_of_shards_merge_to_that_of_the_whole(words):
    one = model()
    several = list(batching.batches(documents(), words, tokens=None, size=2))
    layout = running.discover(one, several[0].inputs)
    parts = [statistics_of(one, layout, batch, known_predictions())[0] for batch in several]
    forward, backward = {}, {}
    for part in parts:
        forward = merge(forward, part)
    for part in reversed(parts):
        backward = merge(part, backward)
    one, other = (tensors_of(state) for state in (forward, backward))
    assert one.keys() == other.keys()
    for name, t in one.items():
        if t.is_floating_point():
            scale = 1 + float(t.nan_to_num(posinf=0.0, neginf=0.0).abs().max()) if t.numel() else 1.0
            torch.testing.assert_close(t, other[name], rtol=0, atol=1e-10 * scale, equal_nan=True)


def test_a_real_model_is_probed():
    """MiniLM on a few paragraphs: every head is exact, and whatever is judged is a number with tokens behind it."""
    from gradlogz.probing.inside.loading import load

    loaded = load("minilm")
    texts = [
        (f"{i}", f"Paragraph {i}. " + "The river ran uphill and nobody found that strange. " * 3) for i in range(12)
    ]
    found = gradlogz.probe(loaded.model, loaded.tokenizer, texts, name="minilm", tokens=None)
    verdicts = {c.prediction: c.verdict for c in found.claims}
    assert list(verdicts) == [p.name for p in known_predictions()]
    assert verdicts["identity"] == "passed"
    assert verdicts["dropped_covariance"] == "not applicable"  # the checkpoint has no head that predicts words
    judged = [row for row in found.rows if row.verdict not in ("", "not applicable")]
    assert all(math.isfinite(row.value) for row in judged)
    of_weights = {"qk_geometry", "symmetry", "word_vectors"}
    assert {row.prediction for row in judged if not row.tokens} == of_weights
    assert len(found.table("identity", quantity="error")) == len(found.table("entropy", quantity="entropy")) == 6 * 12


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--json", "no/such/findings.json"], "probe: --json "),
        (["--only", "luck"], "probe: "),
        (["no such model"], "load: "),
        (["--text", "no such file", "--only", "symmetry"], "documents: "),
    ],
    ids=["file", "prediction", "model", "text"],
)
def test_the_command_refuses_in_one_sentence(words, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli.application(), ["probe", *words])
    assert result.exit_code == 2
    assert result.stderr.startswith(says)
    assert result.stdout == ""
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


class Fixed(torch.nn.Module):
    """A parameter that nothing sets anew."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x * self.weight


class Plain(torch.nn.Module):
    """A model of torch's own modules."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, 32)
        self.block = torch.nn.TransformerEncoderLayer(32, 4, 48, batch_first=True)

    def forward(self, input_ids, attention_mask):
        return self.block(self.embedding(input_ids), src_key_padding_mask=attention_mask == 0)


def test_a_model_without_configuration_has_a_twin_if_its_modules_can_be_reset(words):
    plain = Plain()

    def null(state, model, baseline):
        return [] if baseline is None else entropy.evaluate(baseline.state, baseline.model)

    asks = [replace(entropy.PREDICTION, null=null, baseline="statistics")]
    found = running.measure(plain, words, documents(), tokens=None, baseline=1.0, predictions=asks)
    assert found.baseline is not None
    rows = running.evaluate(found, predictions=asks).table("entropy")
    assert all(math.isfinite(row["null"]) for row in rows if row["quantity"] == "entropy")
    plain.fixed = Fixed()
    found = running.measure(plain, words, documents(), tokens=None, baseline=1.0, predictions=asks)
    assert found.baseline is None
    assert "reset_parameters" in found.facts["without_baseline"]
    assert "without a random" in str(running.evaluate(found, predictions=asks))


MATCHED = entropy.PREDICTION


def test_matched_draws_are_measured_where_a_prediction_asks_for_them(words):
    planted, wanted = model(), [MATCHED, ascent.PREDICTION]
    measured, again = (
        running.measure(planted, words, documents(), tokens=None, predictions=wanted, draws=5) for _ in range(2)
    )
    assert set(measured.matched) == {"entropy"}
    draws = measured.matched["entropy"]
    assert len(draws) == 5
    assert repr(draws) == repr(again.matched["entropy"])
    places = [[row[:3] for row in rows] for rows in draws]
    assert all(each == places[0] for each in places)
    values = {tuple(row.value for row in rows if row.quantity == "entropy") for rows in draws}
    assert len(values) == 5
    for off in ({"draws": 0}, {"baseline": 0.0}):
        assert running.measure(planted, words, documents(), tokens=None, predictions=wanted, **off).matched == {}


def test_windows_are_dealt_to_draws(words):
    """An equal share to each draw if there are enough; if there are not, each window to several draws."""
    windows = []
    for batch in batching.batches(documents(), words, tokens=None, length=15):
        windows = matched_draws.with_windows(windows, batch, 3)
    assert len(windows) == 24
    for draws, share in ((3, 8), (20, 1), (24, 1), (50, 1)):
        dealt = list(matched_draws.dealt(windows, draws))
        assert sorted(number for _, numbers in dealt for number in numbers) == list(range(draws))
        names = [[(n, int(s)) for b in each for n, s in zip(b.names, b.starts, strict=True)] for each, _ in dealt]
        assert all(len(each) == share for each in names)
        assert len({window for each in names for window in each}) == min(draws * share, 24)
        assert all(b.inputs["input_ids"].shape[0] == len(b.keys) for each, _ in dealt for b in each)


def test_the_windows_of_the_matched_baseline_are_bounded(words, monkeypatch):
    monkeypatch.setattr(matched_draws, "MOST", 2)
    one, other = [], []
    several = list(batching.batches(documents(), words, tokens=None, length=15))
    for batch in several:
        one = matched_draws.with_windows(one, batch, 3)
    for batch in reversed(several):
        other = matched_draws.with_windows(other, batch, 3)
    assert len(one) == 6
    assert {window.hash for window in one} == {window.hash for window in other}


def test_a_model_of_unknown_modules_has_a_matched_baseline(words):
    plain = Plain()
    plain.fixed = Fixed()
    measured = running.measure(plain, words, documents(), tokens=None, predictions=[MATCHED], draws=3)
    assert measured.baseline is None
    assert len(measured.matched["entropy"]) == 3
