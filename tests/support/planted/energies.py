"""Tied layers whose pair energy is known to rise or to fall: an ALBERT of one head with identity weights.

x -> LayerNorm(x + step sum_j a_ij x_j),   a = softmax of <x_i, x_j> / sqrt(D);  the feed-forward map adds nothing
"""

import numpy as np
import torch
import transformers as tf

VOCABULARY, WIDTH = 96, 16


def attending(step, layers=6, seed=0):
    """Return the model; the theorem assumes step > 0, and with step < 0 tokens move apart."""
    generator = np.random.default_rng(seed)
    config = tf.AlbertConfig(
        vocab_size=VOCABULARY, embedding_size=WIDTH, hidden_size=WIDTH, num_hidden_layers=layers, num_attention_heads=1,
        intermediate_size=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=256,
        pad_token_id=0,
    )  # fmt: skip
    model = tf.AlbertModel(config, add_pooling_layer=False).eval()
    with torch.no_grad():
        put(model.embeddings.word_embeddings.weight, generator.normal(size=(VOCABULARY, WIDTH)))
        put(model.encoder.embedding_hidden_mapping_in.weight, np.eye(WIDTH))
        (layer,) = model.encoder.albert_layer_groups[0].albert_layers
        part = layer.attention
        for linear, size in ((part.query, 1), (part.key, 1), (part.value, 1), (part.dense, step)):
            put(linear.weight, size * np.eye(WIDTH))
            put(linear.bias, 0)
        put(layer.ffn_output.weight, 0)
        put(layer.ffn_output.bias, 0)
    return model


def put(parameter, values):
    parameter.copy_(torch.as_tensor(values, dtype=parameter.dtype))
