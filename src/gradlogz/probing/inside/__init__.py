"""Inside a model: loading, discovery of the architecture, hooks, capture, re-projection, weights."""
