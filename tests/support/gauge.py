"""Changes of weights that leave the function of a model as it is: its gauge transformations.

    queries and keys     W_q -> W_q M,  W_k -> W_k M^-T         per head
    values and outputs   W_v -> W_v M,  W_o -> M^-1 W_o         per head
    norms                gain -> c gain,  W -> W / c            of a norm and the matrices that read it
    biases of norms      bias -> bias + t,  b -> b - t W        of a norm and what reads it
    biases of keys       b_k -> b_k + t                         without rotary embeddings; softmax does not see it
    heads                in another order
    hidden units         in another order; w1 -> c w1, w2 -> w2 / c for any c != 0 in gated feed-forward maps

Row vectors: q = z W_q + b_q. A `Layer` names the matrices of one attention layer, as [D, h d] views into the model.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Affine(NamedTuple):
    """A matrix [in, out] as a view into the model's weights, and its bias [out] or None."""

    weight: Tensor
    bias: Tensor | None


class Layer(NamedTuple):
    """The matrices of an attention layer; `norm` with the matrices that read it, in pre-norm models.

    planes: whether queries and keys rotate in the planes of coordinates i and i + d/2 (rotary embeddings).
    units: matrices of the feed-forward map: those that read, the factor without activation function first, and W_2.
    """

    query: Affine
    key: Affine
    value: Affine
    output: Affine
    heads: int
    key_heads: int
    norms: tuple[tuple[torch.nn.Module, tuple[Affine, ...]], ...] = ()
    planes: bool = False
    units: tuple[Affine, ...] = ()


def gpt2_layers(model):
    for block in model.transformer.h:
        weight, bias = block.attn.c_attn.weight, block.attn.c_attn.bias
        D = weight.shape[0]
        q, k, v = (Affine(weight[:, i : i + D], bias[i : i + D]) for i in range(0, 3 * D, D))
        norms = (
            (block.ln_1, (Affine(weight, bias),)),
            (block.ln_2, (Affine(block.mlp.c_fc.weight, block.mlp.c_fc.bias),)),
        )
        units = Affine(block.mlp.c_fc.weight, block.mlp.c_fc.bias), Affine(block.mlp.c_proj.weight, None)
        output, heads = Affine(block.attn.c_proj.weight, None), block.attn.num_heads
        yield Layer(q, k, v, output, heads, heads, norms, units=units)


def bert_layers(model):
    for layer in model.encoder.layer:
        part = layer.attention.self
        q, k, v = (Affine(m.weight.mT, m.bias) for m in (part.query, part.key, part.value))
        output = Affine(layer.attention.output.dense.weight.mT, None)
        units = (
            Affine(layer.intermediate.dense.weight.mT, layer.intermediate.dense.bias),
            Affine(layer.output.dense.weight.mT, None),
        )
        yield Layer(q, k, v, output, part.num_attention_heads, part.num_attention_heads, units=units)


def llama_layers(model):
    for layer in model.model.layers:
        part, mlp = layer.self_attn, layer.mlp
        q, k, v, o, *gated = (
            Affine(m.weight.mT, None)
            for m in (part.q_proj, part.k_proj, part.v_proj, part.o_proj, mlp.gate_proj, mlp.up_proj)
        )
        norms = ((layer.input_layernorm, (q, k, v)), (layer.post_attention_layernorm, tuple(gated)))
        if layer is model.model.layers[-1]:
            norms += ((model.model.norm, (Affine(model.lm_head.weight.mT, None),)),)
        heads, key_heads = q.weight.shape[1] // part.head_dim, k.weight.shape[1] // part.head_dim
        units = (gated[1], gated[0], Affine(mlp.down_proj.weight.mT, None))
        yield Layer(q, k, v, o, heads, key_heads, norms, planes=True, units=units)


def invertible(source, size, condition):
    """A random matrix with singular values from 1/sqrt(condition) to sqrt(condition)."""
    left, right = (np.linalg.qr(source.standard_normal((size, size)))[0] for _ in range(2))
    values = condition ** source.uniform(-0.5, 0.5, size)
    values[0], values[-1] = condition**0.5, condition**-0.5
    return torch.from_numpy(left * values @ right)


def turning(source, size, condition):
    """A random matrix that commutes with rotations in the planes of coordinates i and i + size/2."""
    half = size // 2
    length = condition ** source.uniform(-0.5, 0.5, half)
    angle = source.uniform(0, 2 * np.pi, half)
    a, b = np.diag(length * np.cos(angle)), np.diag(length * np.sin(angle))
    return torch.from_numpy(np.block([[a, b], [-b, a]]))


def change_queries_and_keys(layer, source, condition):
    d = layer.key.weight.shape[1] // layer.key_heads
    each = layer.heads // layer.key_heads
    for g in range(layer.key_heads):
        M = (turning if layer.planes else invertible)(source, d, condition)
        for h in range(g * each, (g + 1) * each):
            multiply(layer.query, slice(h * d, (h + 1) * d), M)
        multiply(layer.key, slice(g * d, (g + 1) * d), torch.linalg.inv(M).mT)


def change_values_and_outputs(layer, source, condition):
    d = layer.value.weight.shape[1] // layer.key_heads
    each = layer.heads // layer.key_heads
    for g in range(layer.key_heads):
        M = invertible(source, d, condition)
        multiply(layer.value, slice(g * d, (g + 1) * d), M)
        for h in range(g * each, (g + 1) * each):
            rows = slice(h * d, (h + 1) * d)
            layer.output.weight[rows] = torch.linalg.solve(M, layer.output.weight[rows].clone())


def absorb_gains(layer, source, condition):
    for norm, readers in layer.norms:
        c = torch.from_numpy(condition ** source.uniform(-0.5, 0.5, len(norm.weight)))
        for name in ("weight", "bias"):
            parameter = getattr(norm, name, None)
            if parameter is not None:
                parameter.mul_(c)
        for reader in readers:
            reader.weight.div_(c.unsqueeze(-1))


def move_shifts(layer, source, condition):
    """Biases of norms moved into the layers that read them, where both have biases."""
    for norm, readers in layer.norms:
        if getattr(norm, "bias", None) is not None and all(reader.bias is not None for reader in readers):
            t = torch.from_numpy(source.standard_normal(len(norm.bias)))
            norm.bias.add_(t)
            for reader in readers:
                reader.bias.sub_(t @ reader.weight)


def shift_keys(layer, source, condition):
    """Another bias of the keys, of the size of the keys."""
    t = torch.from_numpy(source.standard_normal(len(layer.key.bias)))
    layer.key.bias.add_(3.0 * t * layer.key.weight.norm(dim=0))


def permute_heads(layer, source, condition):
    """The heads in the opposite order."""
    for part, heads in ((layer.query, layer.heads), (layer.key, layer.key_heads), (layer.value, layer.key_heads)):
        part.weight.copy_(part.weight.unflatten(1, (heads, -1)).flip(1).flatten(1).clone())
        if part.bias is not None:
            part.bias.copy_(part.bias.unflatten(0, (heads, -1)).flip(0).flatten().clone())
    layer.output.weight.copy_(layer.output.weight.unflatten(0, (layer.heads, -1)).flip(0).flatten(0, 1).clone())


def change_units(layer, source, condition):
    """Units in another order; scales of any sign where a factor of the map is linear."""
    *readers, output = layer.units
    order = torch.from_numpy(source.permutation(len(output.weight)))
    c = torch.ones(len(order), dtype=torch.float64)
    if len(readers) > 1:
        c = torch.from_numpy(condition ** source.uniform(-0.5, 0.5, len(order)) * source.choice([-1, 1], len(order)))
    for reader, scale in zip(readers, (c, torch.ones_like(c)), strict=False):
        reader.weight.copy_((reader.weight * scale)[:, order].clone())
        if reader.bias is not None:
            reader.bias.copy_((reader.bias * scale)[order].clone())
    output.weight.copy_((output.weight / c.unsqueeze(-1))[order].clone())


def multiply(part, columns, M):
    part.weight[:, columns] = part.weight[:, columns].clone() @ M
    if part.bias is not None:
        part.bias[columns] = part.bias[columns].clone() @ M
