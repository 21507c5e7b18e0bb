"""Embeddings and scores from pooled hidden states; apart from `pooling`, which imports no numpy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from loramux.types.pooling import Activation, ModelPooling

Vector = NDArray[np.float32]


def embedding_of(pooled: bytes, model: ModelPooling, dimensions: int | None = None) -> Vector:
    """Return the embedding of a pooled hidden state, shortened to `dimensions`."""
    vector = vector_of(pooled)[:dimensions]
    length = float(np.linalg.norm(vector))
    # Shortening changes the length, so that it is set again.
    return vector / np.float32(length) if length and (model.normalize or dimensions) else vector


def scores_of(pooled: bytes, model: ModelPooling) -> Vector:
    """Return the scores of a classification head's outputs."""
    outputs = vector_of(pooled).astype(np.float64)
    if model.activation is Activation.SOFTMAX:
        powers = np.exp(outputs - outputs.max())
        outputs = powers / powers.sum()
    elif model.activation is Activation.SIGMOID:
        outputs = 1 / (1 + np.exp(-outputs))
    return outputs.astype(np.float32)


def vector_of(pooled: bytes) -> Vector:
    """Return the vector of a TokenEvent or a Delta."""
    return np.frombuffer(pooled, dtype="<f4").astype(np.float32, copy=False)
