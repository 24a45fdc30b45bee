"""Feed-forward maps that are Hopfield layers, their reverse or unrelated; word vectors; tokens that spread.

Maps of the models of matrices.py and of small Llamas: hidden unit i reads along w1_i and writes along w2_i.
"""

import numpy as np
import torch
import transformers as tf

from support.planted import matrices
from support.planted.energies import attending
from support.planted.matrices import HEADS, VOCABULARY, WIDTH, centring, put
from support.planted.updates import seeded

HIDDEN = 64


def aligned(generator, reading, strength):
    """Output vectors [H, D] of unit norm whose cosine with the reading vectors is `strength`."""
    reading = reading / np.linalg.norm(reading, axis=1, keepdims=True)
    noise = generator.normal(size=reading.shape) @ centring()
    noise -= (noise * reading).sum(1, keepdims=True) * reading
    noise /= np.linalg.norm(noise, axis=1, keepdims=True)
    return strength * reading + np.sqrt(1 - strength**2) * noise


def gpt2(strength, seed=1, activation="relu", layers=2):
    """A GPT-2 whose output vectors have this cosine with the reading vectors, behind a norm with random gains."""
    model = matrices.gpt2(seed, matrices.free, layers=layers, activation=activation)
    generator = np.random.default_rng(seed)
    with torch.no_grad():
        for block in model.transformer.h:
            gain = generator.uniform(0.5, 1.5, WIDTH)
            W = generator.normal(size=(WIDTH, 4 * WIDTH)) / np.sqrt(WIDTH)
            put(block.ln_2.weight, gain)
            put(block.mlp.c_fc.weight, W)
            put(block.mlp.c_fc.bias, 0.1 * generator.normal(size=4 * WIDTH))
            put(block.mlp.c_proj.weight, 0.3 * aligned(generator, (gain[:, None] * W).T @ centring(), strength))
            put(block.mlp.c_proj.bias, 0.1 * generator.normal(size=WIDTH))
    return model


def llama(strength, seed=1, layers=2):
    """A Llama whose output vectors have this cosine with the vectors of the factor without activation function."""
    config = tf.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=layers, num_attention_heads=HEADS,
        num_key_value_heads=2, intermediate_size=HIDDEN, max_position_embeddings=64, initializer_range=0.25,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = seeded(lambda: tf.LlamaForCausalLM(config).eval(), seed)
    generator = np.random.default_rng(seed)
    with torch.no_grad():
        for layer in model.model.layers:
            gain = layer.post_attention_layernorm.weight.numpy()
            reading = layer.mlp.up_proj.weight.numpy() * gain
            reading = reading / np.linalg.norm(reading, axis=1, keepdims=True)
            noise = generator.normal(size=reading.shape) / np.sqrt(WIDTH)
            put(layer.mlp.down_proj.weight, 0.3 * (strength * reading + np.sqrt(1 - strength**2) * noise).T)
    return model


def spreading_along_the_sphere(step=0.5, common=6.0):
    """An ALBERT of one layer whose tokens have a large common part and attend to themselves.

    The update is step times the rest. The norm brings tokens back to its sphere, where they are near the common part
    and stay apart.
    """
    model = attending(step, layers=1)
    (layer,) = model.encoder.albert_layer_groups[0].albert_layers
    shared = np.linspace(-1, 1, layer.attention.dense.weight.shape[0])
    shared *= common / np.linalg.norm(shared) * np.sqrt(len(shared))
    with torch.no_grad():
        layer.attention.query.weight.mul_(40.0)
        put(layer.attention.dense.bias, -step * shared)
        for norm in (model.embeddings.LayerNorm, layer.attention.LayerNorm, layer.full_layer_layer_norm):
            put(norm.bias, shared)
        put(layer.attention.query.bias, -layer.attention.query.weight.numpy() @ shared)  # queries and keys without it
        put(layer.attention.key.bias, -shared)
    return model


def with_words(model, vectors):
    """The model with these word vectors in its embedding, and in an unembedding that is tied to it."""
    with torch.no_grad():
        put(model.get_input_embeddings().weight, vectors)
    return model


def words(generator, anisotropy=0.0, common=0.0):
    """Gaussian word vectors: variances of coordinates from 1 to exp(-anisotropy), and a common vector of this norm."""
    scales = np.exp(-anisotropy * np.linspace(0, 0.5, WIDTH))
    vectors = generator.normal(size=(VOCABULARY, WIDTH)) * scales
    shared = generator.normal(size=WIDTH)
    return vectors + common * shared / np.linalg.norm(shared)
