"""Every attention, contraction and feed-forward layer trains in every placement; no causal model sees the future."""

from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from experiments.costs import ATTENTION_COSTS, cost, matched
from experiments.parts import AttentionKind, ContractionKind, FeedForwardKind, TiedAttention, Whitening
from experiments.transformer import ModelSettings, Objective, Placement, Transformer
from gradlogz._errors import InputValueError

SMALL = ModelSettings(vocabulary=13, context=6, width=8, heads=2, layers=2, hidden=12)
VARIANTS = [
    *(replace(SMALL, attention=kind) for kind in get_args(AttentionKind) if kind != "none"),  # nothing to train or see
    *(
        replace(SMALL, contraction=kind, placement=place)
        for kind in get_args(ContractionKind)
        for place in get_args(Placement)
    ),
    *(replace(SMALL, feed_forward=kind, shared=each) for kind in get_args(FeedForwardKind) for each in (False, True)),
    replace(SMALL, separate=True),
]


def tokens(seed=0):
    return torch.randint(SMALL.vocabulary, (3, SMALL.context), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_all_parts_train(settings):
    model = Transformer(settings, seed=0)
    torch.nn.functional.cross_entropy(model(tokens()).flatten(0, 1), tokens(1).flatten()).backward()
    without = {name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0}
    # Softmax does not change with a bias of the keys; nothing reads the variance after the last layer.
    invariant = ("k_proj.bias", "in_proj_bias", "noise")
    assert not [name for name in without if not name.endswith(invariant)]
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
@pytest.mark.parametrize("objective", get_args(Objective))
def test_a_causal_model_does_not_see_later_tokens_and_a_masked_one_does(settings, objective):
    model = Transformer(replace(settings, objective=objective), seed=0).double().eval()
    changed = tokens()
    changed[:, -1] = (changed[:, -1] + 1) % SMALL.vocabulary
    with torch.no_grad():
        difference = (model(tokens()) - model(changed))[:, :-1].abs().max()
    assert difference < 1e-12 if objective == "causal" else difference > 1e-9  # keys are centred: rounding


def test_a_seed_determines_the_weights_and_leaves_the_global_generator_alone():
    before = torch.random.get_rng_state()
    first, second, other = (Transformer(SMALL, seed=seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["embedding.weight"], other["embedding.weight"])


def test_shared_layers_are_one_block_applied_repeatedly():
    model = Transformer(replace(SMALL, shared=True, layers=3), seed=0)
    assert len(model.blocks) == 1
    x = model.embed(tokens())
    for _ in range(3):
        x, _ = model.blocks[0](x, None, True)
    assert torch.equal(model.unembed(model.last(x)), model(tokens()))


def test_tied_attention_is_the_gradient_of_its_log_normalisers():
    layer, x = TiedAttention(8, 2).double(), torch.randn(3, 6, 8, dtype=torch.float64)
    with torch.no_grad():
        layer.log_step.copy_(torch.tensor([0.3, -0.5]))

    def weighted(y):
        q, k = (p(t).reshape(3, 6, 2, 4).transpose(1, 2) for p, t in ((layer.q_proj, y), (layer.k_proj, x)))
        return (layer.log_step.exp() * (q @ k.mT / 2).logsumexp(-1).sum((0, 2))).sum()

    assert torch.allclose(layer.attend(x, x)[0], 2 * torch.func.grad(weighted)(x), atol=1e-12)


def test_whitening_whitens_with_the_moments_of_earlier_batches():
    layer = Whitening(4, momentum=1.0, ridge=0.0)
    mixed = torch.randn(1, 4000, 4, generator=torch.Generator().manual_seed(0)) @ torch.randn(4, 4) + 3
    assert torch.allclose(layer(mixed), mixed)  # the first batch is mapped by the initial moments
    white = layer.eval()(mixed)[0]
    assert torch.allclose(white.mT @ white / 4000, torch.eye(4), atol=1e-3)


@pytest.mark.parametrize("kind", get_args(AttentionKind))
def test_multiplications_of_matrices_are_those_that_torch_counts(kind):
    settings = replace(SMALL, attention=kind, context=1)  # a single token: no pairs but its own
    model, token = Transformer(settings, seed=0), torch.zeros(1, 1, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(token)
    counts = counter.get_flop_counts()["Global"]
    matrices = sum(n for op, n in counts.items() if str(op) in ("aten.addmm", "aten.mm", "aten.linear")) / 2
    pairs = ATTENTION_COSTS[kind].pairs * SMALL.width / 2
    if kind == "linear":
        pairs = 2 * SMALL.width**2 / SMALL.heads
    assert matrices == cost(settings).multiplications - SMALL.layers * pairs


@pytest.mark.parametrize("by", ["parameters", "multiplications"])
@pytest.mark.parametrize("kind", get_args(AttentionKind))
def test_matched_models_have_nearly_equal_cost(kind, by):
    reference = replace(SMALL, hidden=40)
    variant = matched(replace(reference, attention=kind), reference, by)
    one_unit = 2 * 2 * SMALL.width + 2
    assert abs(getattr(cost(variant), by) - getattr(cost(reference), by)) <= one_unit


def test_models_without_feed_forward_are_matched_by_layers():
    reference = replace(SMALL, layers=6)
    variant = matched(replace(SMALL, feed_forward="none"), reference, "multiplications")
    assert variant.layers > 6


@pytest.mark.parametrize("name", ["attention", "contraction", "placement", "feed_forward", "objective"])
def test_unknown_parts_are_named(name):
    with pytest.raises(InputValueError, match="nonsense"):
        Transformer(replace(SMALL, **{name: "nonsense"}), seed=0)


def test_a_reference_that_is_too_small_is_refused():
    with pytest.raises(InputValueError, match="reference"):
        matched(replace(SMALL, width=64), SMALL, "parameters")
