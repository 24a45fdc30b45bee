"""Linear attention: all pairs, chunks and single steps give the same; identity features ascend a quadratic energy.

The oracle is the matrix of all weights, written out.   [katharopoulos20]
"""

import math

import pytest
import torch
from torch.nn.functional import elu

from gradlogz import Gaussian, attend
from gradlogz.attention import LinearAttention, linear_attend
from gradlogz.attention.linear import CHUNK
from gradlogz.dynamics import hebbian
from support.scales import close

F64 = torch.float64
FEATURES = {"elu": lambda x: elu(x) + 1, "relu": torch.relu, "identity": lambda x: x}
LENGTHS = [(5, 5), (CHUNK, CHUNK), (2 * CHUNK + 9, 2 * CHUNK + 9), (7, CHUNK + 20), (CHUNK + 20, 7), (1, 9)]


def drawn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def operands(m, n):
    return drawn(1, 2, 3, m, 6), drawn(2, 2, 3, n, 6), drawn(3, 2, 3, n, 4)


def by_hand(q, k, v, features, mask=None, *, is_causal=False):
    """Output and log normaliser from the matrix of all weights."""
    phi, (m, n) = FEATURES[features], (q.shape[-2], k.shape[-2])
    weights = phi(q) @ phi(k).mT / math.sqrt(q.shape[-1])
    seen = torch.ones(m, n, dtype=torch.bool) if mask is None else mask
    if is_causal:
        seen = seen & torch.ones(m, n, dtype=torch.bool).tril(n - m)
    weights = torch.where(seen, weights, 0.0)
    if features == "identity":
        return weights @ v, weights.square().sum(-1) * math.sqrt(q.shape[-1]) / 2
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, weights @ v / total.where(total > 0, torch.ones(())), 0.0), total.squeeze(-1).log()


def size_of(q, k, v):
    """Largest sum of absolute terms: rounding errors are relative to it."""
    return float((q.abs().unsqueeze(-2) * k.abs().unsqueeze(-3)).sum((-1, -2)).square().max()) + float(v.abs().max())


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("m", "n"), LENGTHS)
def test_chunks_are_all_pairs(features, is_causal, m, n):
    q, k, v = operands(m, n)
    found = linear_attend(q, k, v, feature_map=features, is_causal=is_causal)
    output, G = by_hand(q, k, v, features, is_causal=is_causal)
    scale = size_of(q, k, v) if features == "identity" else 10.0
    close(found.output, output, scale)
    close(found.log_normalizer, G, scale)


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("shape", [(3, 9, 12), (1, 12), (2, 1, 1, 12), (2, 3, 9, 12)])
def test_masks_hide_pairs(features, shape):
    """A mask of keys, shared by all queries, and one that differs between queries; with and without order."""
    q, k, v = operands(9, 12)
    mask = drawn(5, *shape) > -0.3
    for is_causal in (False, True):
        found = linear_attend(q, k, v, feature_map=features, attn_mask=mask, is_causal=is_causal)
        output, G = by_hand(q, k, v, features, mask, is_causal=is_causal)
        close(found.output, output, size_of(q, k, v))
        close(found.log_normalizer, G, size_of(q, k, v))


@pytest.mark.parametrize("features", FEATURES)
def test_a_state_carries_all_earlier_tokens(features):
    """One token after the other, and in two parts of unequal length: the recurrent form."""
    q, k, v = operands(20, 20)
    options = {"feature_map": features, "is_causal": True}
    whole = linear_attend(q, k, v, **options)
    for cuts in ([1] * 20, [13, 7]):
        state, outputs, normalizers = None, [], []
        for part in zip(*(t.split(cuts, -2) for t in (q, k, v)), strict=True):
            step = linear_attend(*part, state=state, **options)
            state = step.state
            outputs.append(step.output)
            normalizers.append(step.log_normalizer)
        close(torch.cat(outputs, -2), whole.output, size_of(q, k, v))
        close(torch.cat(normalizers, -1), whole.log_normalizer, size_of(q, k, v))
        for a, e in zip(state, whole.state, strict=True):
            assert (a is None) == (e is None)
            if a is not None:
                close(a, e, 100.0)


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_state_holds_the_keys_that_a_query_sees(features, is_causal):
    """Keys that a mask hides from all queries are in no sum, NaN or not; the shape of the mask does not matter."""
    q, k, v = operands(5, 7)
    seen = torch.tensor([True, False, True, True, False, True, True])
    k[..., ~seen, :], v[..., ~seen, :] = math.nan, math.nan
    phi_k = FEATURES[features](k[..., seen, :])
    for mask in (seen, seen[None], seen.expand(5, 7), seen.expand(2, 3, 5, 7)):
        found = linear_attend(q, k, v, feature_map=features, attn_mask=mask, is_causal=is_causal)
        close(found.state.memory, phi_k.mT @ v[..., seen, :], 100.0)
        if features == "identity":
            close(found.state.moments, phi_k.mT @ phi_k, 100.0)
        else:
            close(found.state.mass, phi_k.sum(-2), 100.0)
        assert bool(found.output.isfinite().all())
    pairs = seen.repeat(5, 1)
    pairs[1:, 0] = False  # still seen by the first query
    state = linear_attend(q, k, v, feature_map=features, attn_mask=pairs, is_causal=is_causal).state
    close(state.memory, found.state.memory, 100.0)


def test_masked_steps_continue_a_state():
    q, k, v = operands(10, 10)
    mask = drawn(5, 10, 10) > -0.5
    first = linear_attend(q[..., :6, :], k[..., :6, :], v[..., :6, :])
    found = linear_attend(q[..., 6:, :], k[..., 6:, :], v[..., 6:, :], attn_mask=mask[6:, 6:], state=first.state)
    everything = torch.cat((torch.ones(4, 6, dtype=torch.bool), mask[6:, 6:]), -1)
    close(found.output, by_hand(q[..., 6:, :], k, v, "elu", everything)[0], 10.0)


def test_the_state_is_the_hebbian_matrix_of_a_hopfield_network():
    """Patterns as keys and values: the state is d times the weights of the Ising model and its diagonal."""
    patterns = drawn(0, 5, 12).sign()
    network, x = hebbian(patterns), drawn(1, 7, 12)
    found = linear_attend(x, patterns, patterns, feature_map="identity", scale=1 / 12)
    diagonal = torch.diag(patterns.square().sum(0) / 12)
    close(found.state.memory / 12, network.weights + diagonal, 10.0)
    close(found.state.moments, found.state.memory, 10.0)
    downhill = -torch.func.grad(lambda y: network.energy(y).sum())(x)
    close(found.output, downhill + x @ diagonal, 100.0)
    close(-found.log_normalizer, network.energy(x) - (x @ diagonal * x).sum(-1) / 2, 100.0)


def test_identity_features_attend_to_a_gaussian():
    """Values = keys: output and gradient of G, the log normaliser of N(0, scale sum k k^T).   [shim22, Cor. 1]"""
    k, q = drawn(0, 9, 4), drawn(1, 6, 4)
    found = linear_attend(q, k, k, feature_map="identity", scale=0.7)
    h = Gaussian(torch.zeros(4, dtype=F64), 0.7 * sum(torch.outer(y, y) for y in k))
    close(found.output, h.mean(q), 100.0)
    close(found.log_normalizer, h.log_normalizer(q), 100.0)
    gradient = torch.func.grad(lambda x: linear_attend(x, k, k, feature_map="identity", scale=0.7).log_normalizer.sum())
    close(found.output, gradient(q), 100.0)


def test_as_many_values_are_retrieved_as_features_allow():
    """Orthonormal keys: exact. More keys than features: no better than the best map of that rank [Eckart and Young]."""
    keys, values = torch.linalg.qr(drawn(1, 6, 6))[0], drawn(2, 6, 6)
    close(linear_attend(keys, keys, values, feature_map="identity", scale=1.0).output, values, 10.0)
    keys, values = drawn(3, 15, 6), drawn(4, 15, 20)
    unit = keys / keys.norm(dim=-1, keepdim=True)
    missed = (linear_attend(unit, unit, values, feature_map="identity", scale=1.0).output - values).square().sum()
    assert float(missed) >= float(torch.linalg.svdvals(values)[6:].square().sum())
    close(attend(1e3 * unit, unit, values, scale=1.0).output, values, 10.0)  # softmax retrieves them all


def test_small_logits_make_softmax_linear():
    """Softmax attention of centred keys is identity attention divided by n, to first order in the scale."""
    q, k = drawn(1, 5, 4), drawn(2, 30, 4)
    k = k - k.mean(0)
    errors = []
    for scale in (1e-2, 1e-3):
        linear = linear_attend(q, k, k, feature_map="identity", scale=scale).output / 30
        errors.append(float((attend(q, k, k, scale=scale).output - linear).norm() / linear.norm()))
    assert errors[0] < 0.2
    assert 8 < errors[0] / errors[1] < 12.5


def test_the_output_is_a_gradient_in_omega():
    """omega tilts the weights by exp<omega, v>: the output is the gradient of G at 0.   [theory 3.9]"""
    q, k, v = operands(4, 6)
    weights = by_hand(q, k, torch.eye(6, dtype=F64).expand(2, 3, 6, 6), "elu")[0]
    G = by_hand(q, k, v, "elu")[1]

    def tilted(omega):
        return (weights.log() + G.unsqueeze(-1) + (v @ omega).unsqueeze(-2)).logsumexp(-1).sum((0, 1, 2))

    found = linear_attend(q, k, v)
    close(found.output.sum((0, 1, 2)), torch.func.grad(tilted)(torch.zeros(4, dtype=F64)), 100.0)


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("mask", [None, torch.ones(4, 4, dtype=torch.bool).triu(-2)])
def test_gradients_are_right(features, mask):
    tensors = [drawn(seed, 1, 2, 4, 3).requires_grad_() for seed in range(3)]

    def function(*tensors):
        found = linear_attend(*tensors, feature_map=features, is_causal=True, attn_mask=mask)
        seen = found.log_normalizer.isfinite()
        return found.output, torch.where(seen, found.log_normalizer, 0.0), found.state.memory

    assert torch.autograd.gradcheck(function, tensors, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, tensors, fast_mode=True)


def test_a_row_without_weight_is_zero():
    q, k, v = (-drawn(1, 3, 4).abs()).requires_grad_(), drawn(2, 5, 4), drawn(3, 5, 4)
    found = linear_attend(q, k, v, feature_map="relu")
    assert torch.equal(found.output, torch.zeros_like(found.output))
    assert bool((found.log_normalizer == -torch.inf).all())
    found.output.sum().backward()
    assert bool(q.grad.isfinite().all())


def test_half_precision_sums_in_float32():
    q, k, v = (t.bfloat16() for t in operands(300, 300))
    found = linear_attend(q, k, v, is_causal=True)
    assert found.output.dtype == torch.bfloat16
    assert found.log_normalizer.dtype == found.state.memory.dtype == torch.float32
    exact = linear_attend(q.double(), k.double(), v.double(), is_causal=True)
    torch.testing.assert_close(found.output.double(), exact.output, rtol=1e-2, atol=1e-2)


def test_a_layer_decodes_token_by_token():
    layer, x = LinearAttention(8, 2, dtype=F64), drawn(0, 3, 10, 8)
    whole, state, outputs = layer(x, is_causal=True), None, []
    for token in x.split(1, 1):
        output, heads = layer.attend(token, is_causal=True, state=state)
        state = heads.state
        outputs.append(output)
    close(torch.cat(outputs, 1), whole, 10.0)


def test_features_may_be_a_function():
    """exp(x) of each coordinate: a positive map of another size."""
    q, k, v = operands(6, 6)

    def features(x):
        return torch.cat((x.exp(), (-x).exp()), -1)

    found = linear_attend(q, k, v, feature_map=features, scale=1.0)
    weights = features(q) @ features(k).mT
    close(found.output, weights @ v / weights.sum(-1, keepdim=True), 10.0)
    close(found.log_normalizer, weights.sum(-1).log(), 10.0)


def test_values_without_columns_have_a_log_normalizer():
    q, k = torch.randn(3, 5, 4, dtype=torch.float64), torch.randn(3, 6, 4, dtype=torch.float64)
    result = linear_attend(q, k, k[..., :0], feature_map="relu")
    close(result.log_normalizer.exp(), (q.relu() @ k.relu().mT / 2).sum(-1), 10.0)
    assert result.output.shape == (3, 5, 0)
    assert result.state.mass.shape == (3, 4)
