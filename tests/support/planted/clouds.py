"""Models with a known residual stream: GPT-2s whose sublayers add nothing to the embeddings, and the embeddings.

gaussian    N(0, C), C with a decreasing spectrum
mixture     three Gaussian clusters at `distance` times the corners of a triangle
"""

import numpy as np
import torch
import transformers as tf

VOCABULARY, WIDTH = 4096, 16


def spectrum(width=WIDTH):
    return np.linspace(2.0, 0.5, width)


def gaussian(generator, n, width=WIDTH):
    return generator.normal(size=(n, width)) * spectrum(width)


def mixture(generator, n, width=WIDTH, distance=3.0):
    """Draw three clusters in the plane of the first two axes."""
    x = generator.normal(size=(n, width))
    angle = 2 * np.pi * generator.integers(0, 3, n) / 3
    x[:, 0] += distance * np.cos(angle)
    x[:, 1] += distance * np.sin(angle)
    return x * spectrum(width)


def scaled(generator, n, width, spread):
    """Draw tokens g r, g normal and r one of two scales: every projection is the same mixture of two normals."""
    r = np.where(generator.random((n, 1)) < 0.5, 1 + spread, 1 - spread)
    return generator.normal(size=(n, width)) * r / np.sqrt(1 + spread**2)


def distance_of_scaled(spread):
    """Return W² of the projections of `scaled` to N(0, 1): 2 - 2 E[Q(u) Phi^-1(u)], by the trapezoidal rule in y."""
    from scipy.stats import norm

    size = np.sqrt(1 + spread**2)
    a, b = (1 + spread) / size, (1 - spread) / size
    y = np.linspace(-12, 12, 200001)
    F = (norm.cdf(y / a) + norm.cdf(y / b)) / 2
    density = (norm.pdf(y / a) / a + norm.pdf(y / b) / b) / 2
    inside = (F > 0) & (F < 1)
    return 2 - 2 * np.trapezoid(np.where(inside, y * norm.ppf(np.where(inside, F, 0.5)) * density, 0.0), y)


def still(embedding, layers=2, positions=None, first=None):
    """Return a GPT-2 whose sublayers add nothing: the stream at every depth is the embedding of token and position."""
    config = tf.GPT2Config(
        vocab_size=len(embedding), n_positions=64, n_embd=embedding.shape[1], n_layer=layers, n_head=2, attn_pdrop=0.0,
        resid_pdrop=0.0, embd_pdrop=0.0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = tf.GPT2Model(config).eval()
    with torch.no_grad():
        put(model.wte.weight, embedding)
        put(model.wpe.weight, 0 if positions is None else positions)
        if first is not None:
            model.wpe.weight[0] += torch.as_tensor(first, dtype=torch.float32)
        for block in model.h:
            for linear in (block.attn.c_proj, block.mlp.c_proj):
                put(linear.weight, 0)
                put(linear.bias, 0)
    return model


def put(parameter, values):
    parameter.copy_(torch.as_tensor(values, dtype=parameter.dtype))
