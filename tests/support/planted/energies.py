"""Tied layers whose pair energy is known to rise, or to fall: an ALBERT of one head that attends to its own stream.

x -> LayerNorm(x + step sum_j a_ij x_j),   a = softmax of <x_i, x_j> / sqrt(D);  the feed-forward map adds nothing
"""

import numpy as np
import torch
import transformers as tf

VOCABULARY, WIDTH = 96, 16


def attending(step, layers=6, seed=0):
    """The theorem asks for step > 0; with step < 0 tokens leave one another."""
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
        own = layer.attention
        for linear, size in ((own.query, 1), (own.key, 1), (own.value, 1), (own.dense, step)):
            put(linear.weight, size * np.eye(WIDTH))
            put(linear.bias, 0)
        put(layer.ffn_output.weight, 0)
        put(layer.ffn_output.bias, 0)
    return model


def put(parameter, values):
    parameter.copy_(torch.as_tensor(values, dtype=parameter.dtype))
