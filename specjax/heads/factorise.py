"""Starting points for a low-rank head: factors of a dense head that lose least.

Both factorisations need only d x d eigenproblems, never a decomposition of the d x V matrix itself: the left singular
vectors of A are the eigenvectors of A A^T. They run on the host in float64.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int

from specjax.heads.source import HeadSource

_COLUMNS_AT_ONCE = 8192
_RIDGE = 1e-6
_RELATIVE_FLOOR = 1e-16

Matrix = Float[np.ndarray, "d V"]
Factors = tuple[Float[np.ndarray, "d r"], Float[np.ndarray, "r V"]]


def svd_factors(
    weight: Matrix, rank: int, *, centre: bool = True, token_weights: Float[np.ndarray, "tokens"] | None = None
) -> Factors:
    """The best rank-r approximation of a head's weights, in the Frobenius norm.

    Args:
        weight: dense head, [d, V], any float dtype.
        rank: inner width r.
        centre: subtract each input's mean over the vocabulary first. That moves all logits of a row by the same
            amount, which no softmax sees, and spends no rank on it.
        token_weights: importance of each token's error, [V], not negative; `frequency_weights` makes the usual one.

    Returns:
        `down` [d, r] and `up` [r, V] in float32, balanced: both carry the square root of the singular values.

    Raises:
        ValueError: if the rank is not in [1, d] or the importances do not fit.
    """
    return _factors(weight, np.eye(weight.shape[0]), rank, centre=centre, token_weights=token_weights)


def frequency_weights(counts: Int[np.ndarray, "tokens"], *, smoothing: float = 10.0) -> Float[np.ndarray, "tokens"]:
    """Importance of each token for a frequency-weighted SVD: its frequency over the mean one, plus a constant.

    The constant keeps tokens that never occurred from being given up; with the default a token must be ten times
    as frequent as the mean to count twice as much as one that was never seen.

    Args:
        counts: occurrences, [V].
        smoothing: the constant, not negative.

    Returns:
        Importances, [V] float64.

    Raises:
        ValueError: if nothing was counted or the constant is negative.
    """
    if smoothing < 0 or counts.sum() < 1:
        raise ValueError(f"`smoothing` must not be negative and `counts` not empty; got {smoothing}, {counts.sum()}")
    return counts / counts.mean() + smoothing


def start_factors(source: HeadSource, weight: Matrix, rank: int) -> Factors:
    """Factors of a dense head by the source's method; see the functions above.

    Args:
        source: says which method, and has what it needs.
        weight: the dense head, [d, V].
        rank: inner width.

    Returns:
        `down` [d, r] and `up` [r, V].

    Raises:
        ValueError: if the source lacks the covariance or the counts, or its method is "random".
    """
    if source.method == "svd":
        return svd_factors(weight, rank)
    if source.method == "activation_aware":
        if source.covariance is None:
            raise ValueError("`covariance` must be given for head_init='activation_aware'; got None")
        return activation_aware_factors(weight, np.asarray(source.covariance), rank)
    if source.method == "frequency_svd":
        if source.answer_counts is None:
            raise ValueError("`answer_counts` must be given for head_init='frequency_svd'; got None")
        return svd_factors(weight, rank, token_weights=frequency_weights(source.answer_counts))
    raise ValueError(f"`head_init` must not be {source.method!r} for factors of a dense head")


def activation_aware_factors(
    weight: Matrix,
    covariance: Float[np.ndarray, "rows columns"],
    rank: int,
    *,
    centre: bool = True,
    token_weights: Float[np.ndarray, "tokens"] | None = None,
) -> Factors:
    """The rank-r head with the least expected squared error of its logits.

    With C = E[h h^T] the expected error of head A is the squared Frobenius norm of C^(1/2) (W - A). So C^(1/2) W is
    truncated to rank r and the root is taken off again. Hidden states of language models are far from white, which
    is why this keeps far more of the top-1 choices than truncating W itself.

    Args:
        weight: dense head, [d, V].
        covariance: second moment (not centred) of the head's input states, [d, d].
        rank: inner width r.
        centre: as in `svd_factors`.
        token_weights: optional importance of each token's logit error, [V], not negative; for example token
            frequencies plus a constant.

    Returns:
        `down` [d, r] and `up` [r, V] in float32, balanced.

    Raises:
        ValueError: if a shape or the rank does not fit, or the covariance is not finite.
    """
    size = weight.shape[0]
    if covariance.shape != (size, size):
        raise ValueError(f"`covariance` must have shape [{size}, {size}]; got {list(covariance.shape)}")
    if not np.all(np.isfinite(covariance)):
        raise ValueError("`covariance` must be finite; got NaN or infinity")
    moments = np.asarray(covariance, np.float64)
    moments = (moments + moments.T) / 2
    # Directions that never occurred still need an inverse; the ridge leaves them their plain weights' share.
    moments += _RIDGE * np.trace(moments) / size * np.eye(size)
    values, vectors = np.linalg.eigh(moments)
    root = vectors * np.sqrt(np.maximum(values, 0.0)) @ vectors.T
    return _factors(weight, root, rank, centre=centre, token_weights=token_weights)


def _factors(
    weight: Matrix,
    root: Float[np.ndarray, "d d"],
    rank: int,
    *,
    centre: bool,
    token_weights: Float[np.ndarray, "tokens"] | None,
) -> Factors:
    """Truncates root @ weight to rank r and takes the symmetric `root` off the left factor again."""
    size, vocab_size = weight.shape
    if not 1 <= rank <= size:
        raise ValueError(f"`rank` must be in [1, {size}]; got {rank}")
    if token_weights is not None and (token_weights.shape != (vocab_size,) or np.any(token_weights < 0)):
        raise ValueError(f"`token_weights` must be {vocab_size} values that are not negative")
    starts = range(0, vocab_size, _COLUMNS_AT_ONCE)
    importance = np.ones(vocab_size) if token_weights is None else np.asarray(token_weights, np.float64)
    mean = np.zeros((size, 1))
    if centre:
        for start in starts:
            block = slice(start, start + _COLUMNS_AT_ONCE)
            mean += (np.asarray(weight[:, block], np.float64) @ importance[block])[:, None]
        mean /= importance.sum()
    gram = np.zeros((size, size))
    for start in starts:
        block = slice(start, start + _COLUMNS_AT_ONCE)
        columns = np.asarray(weight[:, block], np.float64) - mean
        gram += (columns * importance[block]) @ columns.T
    values, vectors = np.linalg.eigh(root @ gram @ root)
    values, vectors = values[::-1][:rank], vectors[:, ::-1][:, :rank]
    # Equal scales of the two factors: singular value sigma = sqrt(eigenvalue), each factor carries sqrt(sigma).
    # The floor keeps the unused directions of a head of lower rank from being divided by zero.
    floor = _RELATIVE_FLOOR * values[0] if values[0] > 0 else 1.0
    scale = np.maximum(values, floor) ** 0.25
    down = np.linalg.solve(root, vectors) * scale
    left = (vectors / scale).T @ root
    up = np.empty((rank, vocab_size), np.float32)
    for start in starts:
        block = slice(start, start + _COLUMNS_AT_ONCE)
        up[:, block] = left @ (np.asarray(weight[:, block], np.float64) - mean)
    return down.astype(np.float32), up
