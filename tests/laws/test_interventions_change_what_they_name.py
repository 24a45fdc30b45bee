"""An intervention changes the tensor that it names and nothing else, and its effect is that of the loss."""

import copy
import json
import math

import numpy as np
import pytest
import torch
import transformers as tf
from scipy import stats
from transformers import PreTrainedTokenizerFast

import gradlogz
from gradlogz.probing.corpus.batching import Batch
from gradlogz.probing.corpus.text import Document
from gradlogz.probing.inside.capturing import capture
from gradlogz.probing.inside.discovery import discover
from gradlogz.probing.interventions import run_interventions
from gradlogz.probing.interventions.edited_passes import Replacement, edited, recording, resumable_blocks, resuming
from gradlogz.probing.interventions.gradient_steps import REMOVED, directions_of, edited_updates, gradient_of
from gradlogz.probing.interventions.losses import kind_of, loss_of, task_of
from gradlogz.probing.interventions.records import Effect, interventions_from_json
from gradlogz.probing.interventions.replaced_heads import gaussian_and_uniform, with_head
from gradlogz.probing.interventions.run_interventions import single_windows
from gradlogz.probing.statistics import Estimate, hash_of, p_values
from support.planted import copying

WORDS = 60
SIZES = {"vocab_size": WORDS + 4, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
TEXTS = [
    (f"document {i}", " ".join(str((i * i + 7 * i + 3 * j * j + j) % WORDS) for j in range(12 + i % 9)))
    for i in range(24)
]


def gpt2(seed=0, **options):
    torch.manual_seed(seed)
    config = tf.GPT2Config(
        vocab_size=WORDS + 4, n_embd=32, n_layer=3, n_head=4, n_positions=32, initializer_range=0.2, resid_pdrop=0.1,
        bos_token_id=1, eos_token_id=2, **options,
    )  # fmt: skip
    return tf.GPT2LMHeadModel(config).eval()


def llama(seed=0):
    torch.manual_seed(seed)
    config = tf.LlamaConfig(
        **SIZES, intermediate_size=48, num_key_value_heads=2, initializer_range=0.2, max_position_embeddings=32,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return tf.LlamaForCausalLM(config).eval()


def bert(seed=0, kind=tf.BertForMaskedLM):
    torch.manual_seed(seed)
    config = tf.BertConfig(**SIZES, intermediate_size=48, initializer_range=0.2, max_position_embeddings=32)
    return kind(config).eval()


def bare_bert(seed=0):
    return bert(seed, tf.BertModel)


def albert(seed=0):
    torch.manual_seed(seed)
    config = tf.AlbertConfig(
        **SIZES, embedding_size=16, intermediate_size=48, initializer_range=0.2, max_position_embeddings=32
    )
    return tf.AlbertForMaskedLM(config).eval()


MODELS = pytest.mark.parametrize("make", [gpt2, llama, bert, bare_bert, albert])


def words(count=WORDS):
    """Return a tokenizer of numbers with a mask token."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    names = ["[PAD]", "[BOS]", "[EOS]", "[MASK]", *map(str, range(count))]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="[PAD]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", mask_token="[MASK]", model_max_length=32
    )


def batch_of(rows=3, length=14, seed=0):
    """Return random tokens; the last row is padded."""
    ids = torch.randint(4, WORDS + 4, (rows, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[-1, length // 2 :] = 0
    names = [f"row {i}" for i in range(rows)]
    keys = torch.tensor([hash_of(name) for name in names])
    return Batch({"input_ids": ids, "attention_mask": mask}, keys, 0, names, torch.zeros(rows, dtype=torch.int64))


def output(model, batch):
    result = model(**batch.inputs)
    return getattr(result, "logits", None) if hasattr(result, "logits") else result.last_hidden_state


# The replaced tensor --------------------------------------------------------------------------------------------------


@MODELS
def test_a_tensor_replaced_by_itself_changes_no_bit(make):
    model, batch = make(), batch_of()
    architecture = discover(model, batch.inputs)
    with edited(model, architecture) as replaceable:
        expected = output(model, batch)
    captured = capture(model, batch.inputs, architecture=architecture, statistics="none")
    assert replaceable == {*captured.attention}
    replacements = [Replacement(name, "output", a.attention.output) for name, a in captured.attention.items()]
    replacements += [Replacement(name, "update", s.update) for name, s in captured.sublayers.items()]
    assert len(replacements) == 9
    for replacement in replacements:
        with edited(model, architecture, replacement):
            assert torch.equal(output(model, batch), expected)
        with edited(model, architecture, replacement._replace(tensor=replacement.tensor * 1.01)):
            assert not torch.equal(output(model, batch), expected)


# Modules whose output is the update of a sublayer, by the ends of the names of both.
UPDATES = {
    gpt2: {"attn": "attn", "mlp": "mlp"},
    llama: {"self_attn": "self_attn", "mlp": "mlp"},
    bert: {"attention.self": "attention.output.dense", "": "output.dense"},
}


@pytest.mark.parametrize("make", UPDATES)
def test_a_replaced_update_is_added_to_the_stream(make):
    """As if the module that computes the update returned the replacement."""
    model, batch = make(), batch_of()
    architecture = discover(model, batch.inputs)
    for i, (name, sublayer) in enumerate(capture(model, batch.inputs, architecture=architecture).sublayers.items()):
        other = torch.randn(sublayer.update.shape, generator=torch.Generator().manual_seed(i))
        with edited(model, architecture, Replacement(name, "update", other)):
            result = output(model, batch)
        block = f"{name.split(f'.{i // 2}')[0]}.{i // 2}"
        module = model.get_submodule(f"{block}.{list(UPDATES[make].values())[i % 2]}")
        hook = module.register_forward_hook(
            lambda m, a, o, other=other: (other, *o[1:]) if isinstance(o, tuple) else other
        )
        with edited(model, architecture):
            assert torch.equal(result, output(model, batch)), name
        hook.remove()


@MODELS
def test_a_pass_may_begin_at_any_block(make):
    model, batch = make(), batch_of()
    architecture = discover(model, batch.inputs)
    blocks = resumable_blocks(model, architecture, batch.inputs)
    assert len(blocks) == (1 if make is albert else 3)  # the layers of ALBERT are one module
    with edited(model, architecture), recording(blocks) as outputs:
        expected = output(model, batch)
    for name in blocks:
        with edited(model, architecture), resuming(blocks, outputs, name):
            assert torch.equal(output(model, batch), expected)


def test_a_block_that_reads_an_earlier_one_is_not_skipped():
    class Long(torch.nn.Module):
        """A model whose last block also reads the first one."""

        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embed = torch.nn.Embedding(WORDS + 4, 16)
            self.h = torch.nn.ModuleList(torch.nn.TransformerEncoderLayer(16, 2, 32, 0.0) for _ in range(4))

        def forward(self, input_ids, attention_mask=None):
            x = first = self.h[0](self.embed(input_ids))
            for block in self.h[1:3]:
                x = block(x)
            return self.h[3](x + first)

    model, batch = Long().eval(), batch_of()
    assert resumable_blocks(model, discover(model, batch.inputs), batch.inputs) == {}


def test_a_model_is_left_as_it_was_even_after_an_error():
    model = gpt2().train()
    before, state = copy.deepcopy(model.state_dict()), torch.random.get_rng_state()

    class StopError(Exception):
        pass

    def stop(done, total):
        if done > 3:
            raise StopError

    with pytest.raises(StopError):
        gradlogz.intervene(model, words(), TEXTS, tokens=100, fit_tokens=100, progress=stop)
    for run in (True, False):
        assert model.training
        assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
        assert not any(m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in model.modules())
        assert all(p.grad is None for p in model.parameters())
        assert torch.equal(torch.random.get_rng_state(), state)
        if run:
            gradlogz.intervene(model, words(), TEXTS, tokens=100, fit_tokens=100)


# Heads ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [gpt2, llama, bert])
def test_gaussian_heads_are_mu_plus_sigma_q(make):
    model, batch = make().double(), batch_of()
    for event in capture(model, batch.inputs, statistics="none").attention.values():
        call = event.arguments
        gaussian, uniform = gaussian_and_uniform(call)
        groups = call.query.shape[1] // call.key.shape[1]
        for b, h, m in np.ndindex(*call.query.shape[:3]):
            n = int(batch.inputs["attention_mask"][b].sum())
            if m >= n:
                continue
            last = n if make is bert else m + 1
            k, v = (t[b, h // groups, :last].detach().numpy() for t in (call.key, call.value))
            q = call.scale * call.query[b, h, m].detach().numpy()
            covariance = (v - v.mean(0)).T @ (k - k.mean(0)) / last
            np.testing.assert_allclose(gaussian[b, h, m].detach(), v.mean(0) + covariance @ q, rtol=1e-9, atol=1e-11)
            np.testing.assert_allclose(uniform[b, h, m].detach(), v.mean(0), rtol=1e-9, atol=1e-11)
            if last == 1:  # one visible key: all weights are the same
                np.testing.assert_allclose(gaussian[b, h, m].detach(), event.attention.output[b, h, m].detach())


def test_gaussian_heads_are_attention_to_first_order_in_the_logits():
    model, batch = llama().double(), batch_of()
    event = capture(model, batch.inputs, statistics="none").attention["model.layers.1.self_attn"]
    errors = []
    for size in (1e-2, 1e-3):
        call = event.arguments._replace(query=size * event.query)
        exact = gradlogz.attend(
            call.query, call.key, call.value, scale=call.scale, attn_mask=call.attn_mask, is_causal=call.is_causal,
            enable_gqa=True,
        ).output  # fmt: skip
        errors.append(float((gaussian_and_uniform(call)[0] - exact).abs().max()))
    assert errors[1] < 0.02 * errors[0]  # quadratic
    assert errors[1] < 1e-4


def test_blocks_of_rows_do_not_matter(monkeypatch):
    model, batch = bert(), batch_of()
    (event, *_) = capture(model, batch.inputs, statistics="none").attention.values()
    expected = gaussian_and_uniform(event.arguments)
    monkeypatch.setattr("gradlogz.probing.interventions.replaced_heads.ROWS", 5)
    for t, e in zip(gaussian_and_uniform(event.arguments), expected, strict=True):
        torch.testing.assert_close(t, e)


def test_one_head_or_all_heads_are_replaced():
    heads, other = torch.randn(2, 4, 5, 3), torch.randn(4, 3)[None, :, None]
    one = with_head(heads, 2, other)
    assert torch.equal(one[:, 2], other.expand_as(heads)[:, 2])
    assert torch.equal(one[:, [0, 1, 3]], heads[:, [0, 1, 3]])
    assert torch.equal(with_head(heads, None, other), other.expand_as(heads))


def test_the_head_on_which_the_loss_depends_is_identified():
    model, texts = copying.copying(), copying.alternating(40)
    tokenizer = words(copying.TOKENS - 4)
    tokenizer.model_max_length = copying.POSITIONS
    effects = gradlogz.intervene(model, tokenizer, texts, interventions=["heads"], tokens=300, fit_tokens=300)
    assert effects.facts["loss"] == "next token"
    assert effects.facts["loss_value"] < 0.6  # the first token has none before it
    site = (f"transformer.h.{copying.LAYER}.attn", copying.HEAD)
    for row in effects.rows:
        if (row.layer, row.head) == site:
            assert row.control_value > 1  # uniform, mean and zero ablation
            if row.control == "zero":
                assert (row.outcome, row.difference < -1) == ("below", True)
        else:
            assert row.value == row.control_value == row.difference == 0
            assert (row.p, row.outcome) == (1.0, "")


# Directions -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [gpt2, llama, bert])
def test_the_gradient_is_that_of_the_log_normaliser(make):
    """The derivative of the formula, with queries written out for each architecture and the keys of a pass."""
    model, batch = make().double(), batch_of(rows=1)
    batch.inputs["attention_mask"].fill_(1)
    architecture = discover(model, batch.inputs)
    captured = capture(model, batch.inputs, architecture=architecture, statistics="none")
    name = architecture.attention[1]
    event, x = captured.attention[name], captured.sublayers[name].stream.detach().requires_grad_()
    query = _query(model, name, architecture, x)
    torch.testing.assert_close(query, event.query)
    key = event.key.repeat_interleave(query.shape[1] // event.key.shape[1], 1)
    s = 8**-0.5 * query @ key.mT
    if make is not bert:
        s = s.masked_fill(torch.ones(s.shape[-2:]).triu(1).bool(), -torch.inf)
    (expected,) = torch.autograd.grad(8**0.5 * s.logsumexp(-1).sum(), x)
    torch.testing.assert_close(gradient_of(event.layer_call, x), expected)


def _query(model, name, architecture, stream):
    """Return the queries of a moved stream, written out for each architecture."""
    modules = dict(model.named_modules())
    layer, reads = modules[name], architecture.branch_of(name).reads
    z = stream if reads is None else modules[reads.name](stream)
    if hasattr(layer, "c_attn"):
        q = layer.c_attn(z).split(32, -1)[0]
    else:
        q = (layer.q_proj if hasattr(layer, "q_proj") else layer.query)(z)
    q = q.unflatten(-1, (4, 8)).transpose(1, 2)
    if hasattr(layer, "q_proj"):
        cos, sin = model.model.rotary_emb(z, torch.arange(z.shape[1]).unsqueeze(0))
        half = torch.cat((-q[..., 4:], q[..., :4]), -1)
        q = q * cos + half * sin
    return q


@pytest.mark.parametrize("make", [gpt2, llama, bert])
def test_a_removed_component_is_orthogonal_to_the_tangential_gradient(make):
    model, batch = make().double(), batch_of()
    architecture = discover(model, batch.inputs)
    captured = capture(model, batch.inputs, architecture=architecture, statistics="none")
    real = batch.inputs["attention_mask"].bool()
    for name in architecture.attention:
        event, passed = captured.attention[name], captured.sublayers[name]
        x, D = passed.stream, passed.update
        g = gradient_of(event.layer_call, x)
        directions = directions_of(g, x, passed.sublayer, batch, draws=2, seed=0)
        centre = x - x.mean(-1, keepdim=True) if make is not llama else x
        for unit in (directions.gradient, directions.earlier, *directions.random):
            unit = unit[real]
            torch.testing.assert_close(unit.norm(dim=-1), torch.ones(len(unit), dtype=unit.dtype))
            assert float((unit * centre[real]).sum(-1).abs().max()) < 1e-12
            if make is not llama:
                assert float(unit.sum(-1).abs().max()) < 1e-12
        edits = list(edited_updates(D, directions, (0.3,)))
        assert [edit.control for edit in edits].count("random direction") == 4
        for edit in edits:
            along = ((edit.update - D) * directions.gradient).sum(-1)
            amount = (D * directions.gradient).sum(-1) if edit.variant == REMOVED else 0.3 * D.norm(dim=-1)
            torch.testing.assert_close((edit.update - D).norm(dim=-1)[real], amount.abs()[real])  # equal norms
            if not edit.control and edit.variant == REMOVED:
                assert float((edit.update * directions.gradient).sum(-1)[real].abs().max()) < 1e-12
            elif not edit.control:
                torch.testing.assert_close(along[real], amount[real])


def test_directions_do_not_depend_on_batches_and_no_later_token_is_used():
    batch = batch_of(rows=3)
    g, x = (torch.randn(3, 14, 32, generator=torch.Generator().manual_seed(i)) for i in (1, 2))
    model = gpt2()
    sublayer = discover(model, batch.inputs).sublayers[0]
    together = directions_of(g, x, sublayer, batch, draws=1, seed=0)
    alone = directions_of(g[1:2, :9], x[1:2, :9], sublayer, batch.rows([1]), draws=1, seed=0)
    torch.testing.assert_close(together.random[0][1:2, :9], alone.random[0])
    changed = g.clone()
    changed[:, 7:] = 0
    moved = directions_of(changed, x, sublayer, batch, draws=1, seed=0)
    assert torch.equal(moved.earlier[:, :7], together.earlier[:, :7])
    other = directions_of(g, x, sublayer, batch, draws=1, seed=1)
    assert not torch.equal(other.random[0], together.random[0])


# Losses ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "kind"),
    [(gpt2, "next token"), (llama, "next token"), (bert, "masked token"), (bare_bert, "representation")],
)
@torch.no_grad()
def test_the_loss_is_that_of_the_model(make, kind):
    model, batch, tokenizer = make(), batch_of(), words()
    assert kind_of(model, tokenizer, batch) == kind
    ids = batch.inputs["input_ids"].clone()
    ids[:, :16][:, -1] = ids[:, 0]  # causality is tested by another last token, also if it equals the first
    assert kind_of(model, tokenizer, batch._replace(inputs={**batch.inputs, "input_ids": ids})) == kind
    task = task_of(kind, batch, tokenizer)
    result = model(**task.inputs)
    if kind == "next token":
        labels = batch.inputs["input_ids"].masked_fill(batch.inputs["attention_mask"] == 0, -100)
        expected = float(model(**batch.inputs, labels=labels).loss)
    elif kind == "masked token":
        hidden = task.inputs["input_ids"] == tokenizer.mask_token_id
        assert torch.equal(hidden, task.scored)
        assert 0 < int(hidden.sum()) < 0.4 * hidden.numel()
        expected = float(model(**task.inputs, labels=batch.inputs["input_ids"].masked_fill(~hidden, -100)).loss)
    else:
        reference = torch.randn(3, 14, 32)
        cosine = torch.nn.functional.cosine_similarity(result.last_hidden_state, reference, dim=-1)
        expected = float((1 - cosine)[task.scored].mean())
        loss = loss_of(task, result, reference.double()).sum() / task.scored.sum()
        assert float(loss) == pytest.approx(expected, rel=1e-5)
        assert float(loss_of(task, result, None).abs().max()) < 1e-12
        return
    loss = loss_of(task, result, None).sum() / task.scored.sum()
    assert float(loss) == pytest.approx(expected, rel=1e-5)


def test_masks_do_not_depend_on_batches():
    batch, tokenizer = batch_of(rows=4, length=20), words()
    task = task_of("masked token", batch, tokenizer)
    alone = task_of("masked token", batch.rows([2]), tokenizer)
    assert torch.equal(alone.scored, task.scored[2:3])


# The measurement ------------------------------------------------------------------------------------------------------


def test_affine_maps_in_place_of_linear_ones_change_nothing():
    linear, bent = (gpt2(activation_function=name) for name in ("linear", "relu"))
    for model, is_linear in ((linear, True), (bent, False)):
        effects = gradlogz.intervene(model, words(), TEXTS, interventions=["feed_forward"], tokens=200, fit_tokens=200)
        assert len(effects.rows) == 3
        for row in effects.rows:
            assert (abs(row.value) < 1e-6) == is_linear
            assert abs(row.control_value) > 1e-3  # mean ablation


@MODELS
def test_all_interventions_are_measured_and_reproducible(make):
    model, options = make(), {"tokens": 150, "fit_tokens": 150, "draws": 1, "steps": (-0.2, 0.2)}
    effects = gradlogz.intervene(model, words(), TEXTS, name="tiny", **options)
    counts = {}
    for row in effects.rows:
        counts[row.intervention] = counts.get(row.intervention, 0) + 1
    assert counts == {"gradient": 3 * 2, "steps": 3 * 2 * 2, "layers": 3 * 3, "heads": 3 * 4 * 3, "feed_forward": 3}
    assert all(math.isfinite(row.value) and row.low <= row.value <= row.high for row in effects.rows)
    assert all(row.difference == pytest.approx(row.value - row.control_value, abs=1e-9) for row in effects.rows)
    assert gradlogz.intervene(model, words(), TEXTS, name="tiny", **options).rows == effects.rows


def test_some_sublayers_have_the_effects_that_they_have_among_all():
    model, options = gpt2(), {"tokens": 100, "fit_tokens": 100, "draws": 1, "steps": (0.2,)}
    effects = gradlogz.intervene(model, words(), TEXTS, **options)
    some = gradlogz.intervene(model, words(), TEXTS, sublayers=r"\.1\.", **options)
    expected = [row for row in effects.rows if ".1." in row.layer]
    assert [row[:14] for row in some.rows] == [row[:14] for row in expected]


def test_batches_and_skipped_blocks_do_not_matter(monkeypatch):
    model, options = llama(), {"tokens": 150, "fit_tokens": 150, "draws": 1, "steps": (0.2,)}
    effects = gradlogz.intervene(model, words(), TEXTS, **options)
    monkeypatch.setattr(run_interventions, "resumable_blocks", lambda *arguments: {})
    complete = gradlogz.intervene(model, words(), TEXTS, **options)
    assert complete.rows == effects.rows
    monkeypatch.setattr(run_interventions, "joined", lambda reading, padded: list(reading))
    apart = gradlogz.intervene(model, words(), TEXTS, **options)
    for one, other in zip(apart.rows, effects.rows, strict=True):
        assert one[:6] == other[:6]
        assert one[6:13] == pytest.approx(other[6:13], abs=2e-5)


def test_fits_and_losses_are_of_different_documents():
    corpus = [Document(*text) for text in TEXTS]
    fitted, scored = ({d.name for d in run_interventions._half(lambda: corpus, side)} for side in (True, False))
    assert not fitted & scored
    assert len(fitted) + len(scored) == 24
    assert 6 < len(fitted) < 18
    effects = gradlogz.intervene(gpt2(), words(), TEXTS, interventions=["feed_forward"], tokens=10**4, fit_tokens=10**4)
    lengths = {name: len(text.split()) for name, text in TEXTS}
    assert effects.facts["documents"] == len(scored)
    assert effects.facts["fit_tokens"] == sum(lengths[name] for name in fitted)
    assert effects.facts["tokens"] == sum(lengths[name] - 1 for name in scored)


def test_each_document_has_one_window_at_any_position():
    corpus = [
        Document(f"document {i}", " ".join(str((i + j) % WORDS) for j in range(8 * (1 + i % 5)))) for i in range(60)
    ]
    sample = list(single_windows(corpus, words(), tokens=200, length=8, seed=0))
    names = [name for batch in sample for name in batch.names]
    assert len(names) == len(set(names)) == 25
    assert 2 < sum(int(batch.starts[0]) > 0 for batch in sample) < 25
    assert names == [n for b in single_windows(corpus[::-1], words(), tokens=200, length=8, seed=0) for n in b.names]
    assert names != [n for b in single_windows(corpus, words(), tokens=200, length=8, seed=1) for n in b.names]
    short = [Document("short", "1"), *corpus]
    assert {n for b in single_windows(short, words(), tokens=10**4, length=8, seed=0) for n in b.names} == {
        d.name for d in corpus
    }


def test_p_values_are_those_of_a_t_test():
    generator = np.random.default_rng(0)
    sample = generator.normal(0.3, 1.0, size=12)
    mean, error = sample.mean(), sample.std(ddof=1) / np.sqrt(12)
    arm = stats.t.ppf(0.975, 11) * error
    estimate = Estimate(*(torch.tensor([v, 0.0]) for v in (mean, mean - arm, mean + arm)), torch.tensor([11.0, 11.0]))
    estimate = estimate._replace(low=torch.tensor([mean - arm, -1.0]), high=torch.tensor([mean + arm, 1.0]))
    estimate = estimate._replace(value=torch.tensor([mean, 0.0]))
    assert p_values(*(t.double() for t in estimate[:4])).tolist() == pytest.approx(
        [stats.ttest_1samp(sample, 0.0).pvalue, 1.0], rel=1e-4
    )


def test_random_networks_show_no_effect_of_the_gradient():
    """Over random networks the gradient is a direction like any other: differences have no sign.

    In one network its effect may differ from that of a random direction, which is a property of its weights. Over
    networks the signs of the mean difference are those of a coin.
    """
    means = []
    for seed in range(16):
        effects = gradlogz.intervene(
            gpt2(seed), words(), TEXTS, interventions=["gradient"], tokens=250, length=16, draws=2, seed=seed
        )
        rows = effects.select(REMOVED, "random direction").rows
        means.append(sum(row.difference for row in rows) / len(rows))
    assert stats.ttest_1samp(means, 0.0).pvalue > 0.01


def test_differences_of_two_random_directions_are_false_positives_at_the_nominal_rate(monkeypatch):
    """Two random directions are exchangeable: p <= 0.05 in about 5 % of the tests."""

    def random_alone(*arguments, draws, **options):
        directions = directions_of(*arguments, draws=2, **options)
        return directions._replace(gradient=directions.random[0], random=directions.random[1:])

    monkeypatch.setattr(run_interventions, "directions_of", random_alone)
    p = []
    for seed in range(16):
        effects = gradlogz.intervene(
            gpt2(seed), words(), TEXTS, interventions=["steps"], steps=(0.5,), tokens=250, length=16, seed=seed
        )
        p += [row.p for row in effects.select(control="random direction").rows]
    rejected = sum(value <= 0.05 for value in p)
    assert len(p) == 48
    assert stats.binomtest(rejected, len(p), 0.05, alternative="greater").pvalue > 0.01, rejected


def test_results_are_written_and_read():
    effects = gradlogz.intervene(
        gpt2(), words(), TEXTS, name="tiny", interventions=["layers"], tokens=60, fit_tokens=60
    )
    assert interventions_from_json(effects.to_json()).rows == effects.rows
    json.loads(effects.to_json())
    lines = effects.to_csv().splitlines()
    assert lines[0].split(",") == list(Effect._fields)
    assert len(lines) == 1 + len(effects) == 1 + 9
    assert {row["control"] for row in effects.table(variant="gaussian")} == {"uniform", "mean", "zero"}
    comparisons = effects.comparisons()
    assert [(c.intervention, c.control, len(c.rows)) for c in comparisons] == [
        ("layers", control, 3) for control in ("uniform", "mean", "zero")
    ]
    assert comparisons[0].median("value") == sorted(row.value for row in comparisons[0].rows)[1]
