"""Attention of one head in fp64 with the whole score matrix in memory: what NumPy exercises are compared with."""

import numpy as np


def allowed(seqlen_q: int, seqlen_k: int, causal: bool = False, window_size: tuple[int, int] = (-1, -1)) -> np.ndarray:
    """Which key each query sees: bool `(seqlen_q, seqlen_k)`, aligned bottom-right, window bounds inclusive."""
    left, right = window_size
    if causal:
        right = 0
    distance = np.arange(seqlen_k)[None, :] - (np.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q)
    mask = np.ones((seqlen_q, seqlen_k), dtype=bool)
    if left >= 0:
        mask &= distance >= -left
    if right >= 0:
        mask &= distance <= right
    return mask


def log_sum_exp(scores: np.ndarray) -> np.ndarray:
    """Natural log of the sum of exponentials along the last axis, -inf where no score is above -inf."""
    scores = np.asarray(scores, dtype=np.float64)
    top = scores.max(axis=-1, initial=-np.inf)
    shift = np.where(np.isneginf(top), 0.0, top)
    with np.errstate(divide="ignore"):
        return shift + np.log(np.exp(scores - shift[..., None]).sum(axis=-1))


def softmax(scores: np.ndarray) -> np.ndarray:
    """Probabilities along the last axis, 0 in a row without keys."""
    lse = log_sum_exp(scores)
    return np.exp(np.asarray(scores, dtype=np.float64) - np.where(np.isneginf(lse), 0.0, lse)[..., None])


def attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, softmax_scale: float, mask: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """q `(sq, d)`, k `(sk, d)`, v `(sk, dv)` -> out `(sq, dv)` and LSE `(sq,)`, natural log with the scale included."""
    scores = softmax_scale * (q.astype(np.float64) @ k.astype(np.float64).T)
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    return softmax(scores) @ v.astype(np.float64), log_sum_exp(scores)
