"""Models whose attention updates are planted: gradients of the log normaliser, their reverse, or unrelated to it.

GPT-2s and BERTs of matrices.py, untrained ones of any scale, and ALBERTs of one head (energies.py), in which tokens
are keys and values: x -> LayerNorm(x + step sum_j a_ij x_j).
"""

import numpy as np
import torch
import transformers as tf

from support.planted import matrices
from support.planted.energies import attending
from support.planted.matrices import HEADS, LAYERS, SIZE, VOCABULARY, WIDTH, centring, random_heads, tied


def opposed(generator, gain):
    """Tied heads with the sign of the OV matrix reversed: descent."""
    Wq, Wk, Wv, Wo = tied(generator, gain)
    return [Wq, Wk, Wv, -Wo]


def half_tied(generator, gain):
    """Heads whose OV and transposed QK matrices have a cosine of about .3."""
    return tied(generator, gain, 0.3)


def transposed(generator, gain):
    """W_v W_o = W_q W_kᵀ: right but for the transposition."""
    Wq, Wk, _, _ = random_heads(generator)
    return [Wq, Wk, Wq, Wk.transpose(0, 2, 1) * gain]


def negative(generator, gain):
    """W_k = -W_q: tokens avoid keys like their own."""
    Wq, _, Wv, Wo = random_heads(generator)
    return [Wq, -Wq, Wv, Wo]


def positive(generator, gain):
    """Symmetric positive QK matrices, and OV matrices that have nothing to do with them."""
    Wq, _, Wv, Wo = random_heads(generator)
    return [1.5 * Wq, 1.5 * Wq, Wv, Wo]


def positive_and_tied(generator, gain):
    """Symmetric positive QK matrices, and OV matrices along them."""
    Wq = 1.5 * random_heads(generator)[0]
    gradient = Wq.transpose(0, 2, 1) * gain @ centring()
    return [Wq, Wq, Wq, 1.2 * gradient / np.linalg.norm(gradient, axis=(1, 2), keepdims=True)]


def identical(generator, gain):
    """Heads whose tokens are keys and values: each has its own coordinates."""
    identity = np.eye(WIDTH).reshape(WIDTH, HEADS, SIZE).transpose(1, 0, 2)
    return [identity, identity, identity, 0.3 * identity.transpose(0, 2, 1)]


def to_itself(step=0.3, sharpness=40.0):
    """An ALBERT whose tokens attend to themselves alone: the update step * x is undone by the norm that follows."""
    model = attending(step)
    (layer,) = model.encoder.albert_layer_groups[0].albert_layers
    with torch.no_grad():
        layer.attention.query.weight.mul_(sharpness)
    return model


def untrained(kind, scale, seed=0, layers=LAYERS):
    """A GPT-2 or BERT as transformers initialise it, with weights of this standard deviation."""
    sizes = {"vocab_size": VOCABULARY, "initializer_range": scale}
    if kind == "gpt2":
        config = tf.GPT2Config(n_embd=WIDTH, n_layer=layers, n_head=HEADS, n_positions=64, **sizes)
        build = tf.GPT2LMHeadModel
    else:
        config = tf.BertConfig(
            hidden_size=WIDTH, num_hidden_layers=layers, num_attention_heads=HEADS, intermediate_size=4 * WIDTH,
            max_position_embeddings=64, **sizes,
        )  # fmt: skip
        build = tf.BertModel
    return seeded(lambda: build(config).eval(), seed)


def seeded(build, seed=0):
    """Build a model whose other weights are drawn from a seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build()


def gpt2(heads, seed=1, **sizes):
    return matrices.gpt2(seed, heads, **sizes)


def bert(heads, seed=1):
    return seeded(lambda: matrices.bert(seed, heads), seed)
