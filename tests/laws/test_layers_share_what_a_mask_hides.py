"""A monitor examines a mask once in a pass: the same numbers in the same memory are the same mask, others are not."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import gradlogz
from gradlogz.attention import Thresholds
from gradlogz.attention.in_models.head_summaries import KEPT_SIGHTS
from gradlogz.attention.in_models.intercepted_calls import Call, _Memory

LAYERS, TOKENS = 6, 9
QUIET = Thresholds(entropy=None, logit=None, sink=None, nan=None)


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.projection = nn.Linear(16, 48)

    def forward(self, x, mask):
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.projection(x).chunk(3, -1))
        return x + scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


class Model(nn.Module):
    """`masks` is a generator of the masks of the layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(SelfAttention() for _ in range(LAYERS))

    def forward(self, x, masks):
        for layer, mask in zip(self.layers, masks, strict=True):
            x = layer(x, mask)
        return x


@pytest.fixture
def examined(monkeypatch):
    """Calls whose masks were examined."""
    calls, visible_keys = [], Call.visible_keys
    monkeypatch.setattr(Call, "visible_keys", lambda call: calls.append(None) or visible_keys(call))
    return calls


def row(masks):
    torch.manual_seed(0)
    model, x = Model(), torch.randn(2, TOKENS, 16)
    with gradlogz.monitor(model, every=1, thresholds=QUIET) as m:
        model(x, masks)
        m.step()
    return m.row()


def padding(keys, additive):
    """All but the last keys of the second sequence are visible."""
    mask = torch.ones(2, 1, 1, TOKENS, dtype=torch.bool)
    mask[1, ..., keys:] = False
    return torch.where(mask, 0.0, torch.finfo(torch.float32).min) if additive else mask


@pytest.mark.parametrize("additive", [False, True], ids=["bool", "additive"])
def test_a_mask_of_all_layers_is_examined_once(examined, additive):
    shared = padding(6, additive)
    found = row([shared] * LAYERS)
    assert len(examined) == 1
    assert found.scalars() == row(padding(6, additive) for _ in range(LAYERS)).scalars()
    assert len(examined) == 1 + LAYERS


@pytest.mark.parametrize("additive", [False, True], ids=["bool", "additive"])
def test_a_mask_that_is_changed_between_layers_is_another_one(examined, additive):
    def changing():
        mask = padding(6, additive)
        for i in range(LAYERS):
            mask.copy_(padding(3 + i % 2, additive))
            yield mask

    found = row(changing())
    assert len(examined) == LAYERS
    assert found.scalars() == row(padding(3 + i % 2, additive) for i in range(LAYERS)).scalars()


def test_masks_in_turn_are_examined_once_each(examined):
    full, short = padding(6, False), padding(3, False)
    row([full, short] * (LAYERS // 2))
    assert len(examined) == 2


def test_masks_of_single_layers_are_not_kept_until_the_pass_ends():
    masks, alive = [], []

    def own():
        for _ in range(LAYERS):
            mask = padding(6, False)
            masks.append(weakref.ref(mask))
            gc.collect()
            alive.append(sum(each() is not None for each in masks))
            yield mask

    row(own())
    assert max(alive) <= KEPT_SIGHTS + 1 < LAYERS


def test_tensors_without_memory_of_their_own_are_the_same_only_if_they_are_one():
    class Wrapper(torch.Tensor):
        """As a DTensor: a tensor made of another one."""

        @staticmethod
        def __new__(cls, inner):
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

        __torch_dispatch__ = None

    one, other = Wrapper(torch.zeros(3)), Wrapper(torch.ones(3))
    assert _Memory(one) == _Memory(one)
    assert _Memory(one) != _Memory(other)
