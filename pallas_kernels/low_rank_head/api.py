"""The draft head on one hidden state a row: tokens, laws and candidates, on the implementation that fits.

Implementations (`implementation=`): None chooses by the platform that the program is lowered for, "xla" runs
everywhere, "mosaic_gpu" on Hopper (compute capability 9.0), "pallas" on TPU, "interpret" runs the TPU kernel's body
anywhere, slowly. Other NVIDIA chips (Ampere, Ada, Blackwell) take the XLA path under None. `greedy` and `sample` of
the kernels never write logits to memory.

What is the caller's mistake raises ValueError. A named implementation that cannot serve (wrong chip, float32 weights
on "mosaic_gpu", more than 64 rows there) raises NotImplementedError with the reason; None then takes XLA.

Values that are no numbers are not looked for, but have a documented result, the same on every implementation:

    a row with NaN or plus infinity among its logits    token 0, log-probability and logsumexp NaN
    a row whose logits are all -inf                     token 0, log-probability NaN, logsumexp -inf
    a temperature above 0, but below 1e-5               counts as 1e-5: float32 logits tell no colder law
    an infinite temperature (in an array)               the uniform law of the valid tokens
    a negative temperature or NaN (in an array)         counts as 0: the greedy token

`logits` and `log_law` pass NaN and infinities on. Temperatures that Python or numpy hold are checked; values of jax's
arrays are not, since that would wait for the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from pallas_kernels import _platform
from pallas_kernels._platform import Implementation
from pallas_kernels.low_rank_head import xla
from pallas_kernels.low_rank_head.noise import raw_keys
from pallas_kernels.low_rank_head.statistics import HeadDraw, bounded
from pallas_kernels.low_rank_head.weights import DTYPES, PreparedHead, check_head, is_count

# Compute capabilities that the Mosaic GPU kernels compile for: they use Hopper's wgmma.
SERVED = ((9, 0),)
MAX_MOSAIC_ROWS = 64


def greedy(
    hidden: Float[Array, "batch d"], head: PreparedHead, *, implementation: Implementation | None = None
) -> HeadDraw:
    """The most likely token of each row, the lowest id among equals.

    Args:
        hidden: hidden states, [B, d], bfloat16 or float32; rounded to the weights' dtype.
        head: result of `prepare_weights`.
        implementation: see the module.

    Returns:
        Token [B] int32, its log-probability [B] float32 and the logsumexp of the logits [B] float32.

    Raises:
        ValueError: if an argument does not fit.
        NotImplementedError: if the named implementation cannot serve.
    """
    _check(hidden, head)
    return _run("greedy", implementation, hidden, head)


def sample(
    hidden: Float[Array, "batch d"],
    head: PreparedHead,
    rng_keys: Key[Array, "batch"],
    *,
    temperature: Float[Array, "batch"] | float = 1.0,
    implementation: Implementation | None = None,
) -> HeadDraw:
    """A draw from softmax(logits / temperature) of each row, by the Gumbel maximum.

    Row b takes argmax(logits / temperature + g) with g = `jax.random.gumbel(rng_keys[b], (V,))`: the draw depends on
    the row's own key and state only, and is the same on every implementation up to float32 rounding.

    Args:
        hidden: hidden states, [B, d], bfloat16 or float32.
        head: result of `prepare_weights`.
        rng_keys: one threefry key a row, [B]; consumed.
        temperature: one number or [B] float32, finite and not negative. A row of temperature 0 takes the greedy
            token, its log-probability and logsumexp at temperature 1. See the module for the ends of the range.
        implementation: see the module.

    Returns:
        Token [B] int32, its log-probability under the tempered law and the logsumexp of the tempered logits.

    Raises:
        ValueError: if an argument does not fit.
        NotImplementedError: if the named implementation cannot serve.
    """
    _check(hidden, head)
    batch, words = hidden.shape[0], raw_keys(rng_keys)
    if rng_keys.shape != (batch,):
        raise ValueError(f"`rng_keys` must hold one key a row, [{batch}]; got shape {list(rng_keys.shape)}")
    return _run("sample", implementation, hidden, head, words, _temperatures(temperature, batch))


def logits(
    hidden: Float[Array, "batch d"], head: PreparedHead, *, implementation: Implementation | None = None
) -> Float[Array, "batch vocab"]:
    """Float32 logits [B, V] of each row, -inf for ids that are not valid. Arguments and errors as in `greedy`."""
    _check(hidden, head)
    return _run("logits", implementation, hidden, head)


def log_law(
    hidden: Float[Array, "batch d"],
    head: PreparedHead,
    *,
    temperature: Float[Array, "batch"] | float = 1.0,
    implementation: Implementation | None = None,
) -> Float[Array, "batch vocab"]:
    """Float32 log-probabilities [B, V] at a temperature above 0: the law that a verification rule asks for.

    In an array of jax, whose values are not looked at, 0 and negative numbers count as 1e-5 here.

    Raises:
        ValueError: as in `greedy`, or for a temperature that is known to be 0.
        NotImplementedError: if the named implementation cannot serve.
    """
    _check(hidden, head)
    scale = bounded(_temperatures(temperature, hidden.shape[0]))
    if not isinstance(temperature, jax.Array) and np.any(np.asarray(temperature) == 0):
        raise ValueError("`temperature` of a law must be above 0; got 0: its law is one-hot at the greedy token")
    return jax.nn.log_softmax(_run("logits", implementation, hidden, head) / scale[:, None], axis=-1)


def top_candidates(
    hidden: Float[Array, "batch d"],
    head: PreparedHead,
    count: int,
    *,
    implementation: Implementation | None = None,
) -> tuple[Int[Array, "batch count"], Float[Array, "batch count"]]:
    """The `count` most likely tokens of each row and their logits, in falling order, the lower id first among equals.

    Args:
        hidden: hidden states, [B, d], bfloat16 or float32.
        head: result of `prepare_weights`.
        count: number of candidates, C, between 1 and the number of valid tokens.
        implementation: see the module.

    Returns:
        Tokens [B, C] int32 and logits [B, C] float32. NaN counts as the greatest logit.

    Raises:
        ValueError: if an argument does not fit.
        NotImplementedError: if the named implementation cannot serve.
    """
    _check(hidden, head)
    if not is_count(count) or not 1 <= count <= head.num_valid_tokens:
        raise ValueError(
            f"`count` must be an integer in [1, {head.num_valid_tokens}], the number of valid tokens; got {count!r}"
        )
    return _run("top_candidates", implementation, hidden, head, count=int(count))


def _check(hidden: Array, head: PreparedHead) -> None:
    if not isinstance(head, PreparedHead):
        raise ValueError(f"`head` must be the result of prepare_weights; got {type(head).__name__}")
    check_head(head)
    if not isinstance(hidden, jax.Array | np.ndarray):
        raise ValueError(f"`hidden` must be an array; got {type(hidden).__name__}")
    if hidden.ndim != 2 or hidden.shape[0] < 1 or hidden.shape[1] != head.hidden_size:
        raise ValueError(
            f"`hidden` must be [batch, d={head.hidden_size}] with at least one row; got shape {list(hidden.shape)}"
        )
    if hidden.dtype not in [jnp.dtype(dtype) for dtype in DTYPES]:
        raise ValueError(f"`hidden` must be bfloat16 or float32; got {hidden.dtype}")


def _temperatures(temperature: Any, batch: int) -> Float[Array, "batch"]:
    if not isinstance(temperature, jax.Array | np.ndarray | np.generic | int | float):
        raise ValueError(f"`temperature` must be a number or [{batch}]; got {temperature!r}")
    if not isinstance(temperature, jax.Array):
        known = np.asarray(temperature)
        if known.dtype.kind not in "iuf" or not np.all((known >= 0) & (known < np.inf)):
            raise ValueError(f"`temperature` must be finite and not negative; got {temperature}")
    values = jnp.asarray(temperature, jnp.float32)
    if values.shape not in ((), (batch,)):
        raise ValueError(f"`temperature` must be a number or [{batch}]; got shape {list(values.shape)}")
    return jnp.broadcast_to(values, (batch,))


def _run(op: str, implementation: Implementation | None, *args: Any, **static: Any) -> Any:
    """Checks what is known before tracing, then calls the implementation, compiled."""
    _platform.check_name(implementation)
    hidden, head = args[:2]
    obstacle = _mosaic_obstacle(hidden, head)
    if implementation == "mosaic_gpu" and obstacle is not None:
        raise _platform.unavailable(f"low_rank_head.{op}", implementation, obstacle)
    if implementation == "mosaic_gpu":
        # The jitted function below may be remembered from another chip: ask again at every call.
        _platform.choose(implementation, _candidates(op, True, ()), op=f"low_rank_head.{op}", served=SERVED)
    return _compiled(
        *args, op=op, implementation=implementation, mosaic=obstacle is None, options=tuple(static.items())
    )


@functools.partial(jax.jit, static_argnames=("op", "implementation", "mosaic", "options"))
def _compiled(
    *args: Any, op: str, implementation: Implementation | None, mosaic: bool, options: tuple[tuple[str, Any], ...]
) -> Any:
    candidates = _candidates(op, mosaic, options)
    return _platform.choose(implementation, candidates, op=f"low_rank_head.{op}", served=SERVED)(*args)


def _candidates(op: str, mosaic: bool, options: tuple[tuple[str, Any], ...]) -> dict[str, Callable[..., Any]]:
    static = dict(options)

    def portable(*args: Any, **interpret: Any) -> Any:
        # Imported when it is traced: programs that stay on XLA do not load Pallas.
        from pallas_kernels.low_rank_head import portable as module

        return getattr(module, op)(*args, **static, **interpret)

    def mosaic_gpu(*args: Any) -> Any:
        from pallas_kernels.low_rank_head import mosaic_gpu as module

        return getattr(module, op)(*args, **static)

    candidates = {
        "xla": functools.partial(getattr(xla, op), **static),
        "pallas": portable,
        "interpret": functools.partial(portable, interpret=True),
    }
    return candidates | ({"mosaic_gpu": mosaic_gpu} if mosaic else {})


def _mosaic_obstacle(hidden: Array, head: PreparedHead) -> str | None:
    if head.rows.dtype != jnp.bfloat16:
        return f"it multiplies bfloat16 weights only (tensor cores round float32 to 10 bits); got {head.rows.dtype}"
    if hidden.shape[0] > MAX_MOSAIC_ROWS:
        return f"it serves up to {MAX_MOSAIC_ROWS} rows; got {hidden.shape[0]}"
    return None
