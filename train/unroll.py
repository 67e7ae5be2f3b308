"""The training-time test of EAGLE-3 (Li et al., arXiv 2503.01840): a teacher-forced unroll of S draft steps.

Entry t of step 0 pairs the target's state at t with the embedding of token t + 1. Step i feeds entry t with its own
output of step i - 1 and the embedding of token t + 1 + i, at position t + i, and predicts token t + 2 + i. It attends
to the step-0 entries up to t and, for each step j from 1 to i, to the one entry t of step j: exactly what decoding sees
when it drafts a chain after committing the entries up to t.

Entries are computed in windows of consecutive positions. With all windows, every position is trained on; with a random
choice of windows, keys and values of step 0 still cover all positions, and only the chosen entries cost the rest.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from specjax.drafters.eagle3_layer import (
    Eagle3Config,
    combine_features,
    embed,
    fed_back,
    finish_layer,
    keys_values_of,
    layer_input,
    queries_of,
)
from specjax.models.rope import rope_frequencies, rope_tables, rotate

Params = dict[str, Any]

# Queries of one attention block; more of them are handled block by block, so that scores stay small.
_QUERIES_AT_ONCE = 512
_HIDDEN_SCORE = float(jnp.finfo(jnp.float32).min)


@flax.struct.dataclass
class Batch:
    """Teacher-forced texts with the target's states.

    Attributes:
        tokens: token ids, [B, T].
        loss_mask: whether a token is supervised, that is, whether its draft counts in the loss, [B, T].
        features: outputs of the target's three feature layers, side by side, [B, T, 3 * target width].
        final_hidden: the target's states after its final norm, [B, T, target width].
        segment_ids: text that each token belongs to, [B, T]; texts of one row see nothing of one another. None
            means that each row is one text.
    """

    tokens: Int[Array, "*parts batch time"]
    loss_mask: Bool[Array, "*parts batch time"]
    features: Float[Array, "*parts batch time features"]
    final_hidden: Float[Array, "*parts batch time width"]
    segment_ids: Int[Array, "*parts batch time"] | None = None


def supervised_pairs(batch: Batch, num_steps: int) -> Bool[Array, "steps batch time"]:
    """Which (draft step, entry) pairs have a supervised token to predict, in the entry's own text.

    Args:
        batch: the batch.
        num_steps: draft steps S.

    Returns:
        True at [i, b, t] iff token t + 2 + i exists, is supervised and belongs to the text of token t; [S, B, T].
    """
    length = batch.tokens.shape[1]
    pairs = []
    for step in range(num_steps):
        shift = min(step + 2, length)
        supervised = _shift_left(batch.loss_mask, shift)
        if batch.segment_ids is not None:
            same = _shift_left(batch.segment_ids, shift) == batch.segment_ids
            supervised = supervised & same
        pairs.append(supervised)
    return jnp.stack(pairs)


def all_windows(batch_size: int, length: int, window: int) -> Int[Array, "batch windows"]:
    """First entries of the windows that cover all entries, [B, ceil((T - 1) / window)]."""
    starts = jnp.arange(0, max(length - 1, 1), window, dtype=jnp.int32)
    return jnp.broadcast_to(starts, (batch_size, starts.shape[0]))


def random_windows(
    rng_key: PRNGKeyArray, pairs: Bool[Array, "steps batch time"], window: int, num_windows: int
) -> Int[Array, "batch windows"]:
    """A random choice of windows of each row, those without any supervised pair last.

    Args:
        rng_key: consumed; rows draw from it independently of the batch they are in.
        pairs: supervised pairs, [S, B, T].
        window: entries of a window.
        num_windows: windows of a row, at most as many as there are.

    Returns:
        Their first entries, in ascending order, [B, num_windows].

    Raises:
        ValueError: if a row has fewer windows.
    """
    _, batch_size, length = pairs.shape
    starts = all_windows(batch_size, length, window)
    available = starts.shape[1]
    if not 1 <= num_windows <= available:
        raise ValueError(f"`num_windows` must be in [1, {available}] for rows of {length} tokens; got {num_windows}")
    padded = jnp.pad(jnp.any(pairs, axis=0), ((0, 0), (0, max(0, available * window - length))))
    useful = jnp.any(padded[:, : available * window].reshape(batch_size, available, window), axis=-1)
    priority = jax.random.uniform(rng_key, (batch_size, available)) + useful.astype(jnp.float32)
    chosen = jnp.sort(lax.top_k(priority, num_windows)[1], axis=-1)
    return jnp.take_along_axis(starts, chosen, axis=1)


def unroll(
    params: Params,
    config: Eagle3Config,
    batch: Batch,
    windows: Int[Array, "batch windows"],
    *,
    num_steps: int,
    window: int,
    rematerialise: bool = False,
) -> Float[Array, "steps batch windows window width"]:
    """Runs the draft layer S times over the chosen entries.

    Args:
        params: the drafter's parameters, with `embed_tokens`.
        config: the drafter's configuration, static.
        batch: teacher-forced texts.
        windows: first entry of each window, [B, W]; entries past the row's end give unsupervised garbage.
        num_steps: draft steps S, static.
        window: entries of a window, static.
        rematerialise: keep only the outputs of each step for the backward pass and compute the rest again.

    Returns:
        Raw output states of all steps, [S, B, W, window, d].
    """
    batch_size, length = batch.tokens.shape
    entries = jnp.minimum(windows[:, :, None] + jnp.arange(window, dtype=windows.dtype), length - 1)
    entries = entries.reshape(batch_size, -1)

    def run_step(step_params: Params, step: int, state: Array, context: dict[str, Any]) -> tuple[Array, dict[str, Any]]:
        if step == 0:
            return _first_step(step_params, config, batch, entries, state)
        return _later_step(step_params, config, batch, entries, step, state, context)

    state, context, outputs = batch.features, {}, []
    for step in range(num_steps):
        run = jax.checkpoint(run_step, static_argnums=(1,)) if rematerialise else run_step
        output, context = run(params, step, state, context)
        outputs.append(output)
        state = output
    return jnp.stack(outputs).reshape(num_steps, batch_size, windows.shape[1], window, -1)


def _first_step(
    params: Params, config: Eagle3Config, batch: Batch, entries: Array, features: Array
) -> tuple[Array, dict[str, Any]]:
    """Entries with the target's own states; keys and values of all positions."""
    batch_size, length = batch.tokens.shape
    combined = combine_features(params, config, features)
    inputs, residual = layer_input(params, config, embed(params, _shift_left(batch.tokens, 1)), combined)
    keys, values = keys_values_of(params, config, inputs)
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch_size, length))
    keys = rotate(keys, *_tables(config, positions))
    queries = queries_of(params, config, _at(inputs, entries))
    visible = jnp.arange(length, dtype=entries.dtype)[None, None, :] <= entries[:, :, None]
    if batch.segment_ids is not None:
        visible &= batch.segment_ids[:, None, :] == _at(batch.segment_ids, entries)[:, :, None]
    context = {"keys": keys, "values": values, "visible": visible, "own_keys": (), "own_values": ()}
    mixed = _attend(rotate(queries, *_tables(config, entries)), context)
    return finish_layer(params, config, _at(residual, entries), mixed), context


def _later_step(
    params: Params,
    config: Eagle3Config,
    batch: Batch,
    entries: Array,
    step: int,
    state: Array,
    context: dict[str, Any],
) -> tuple[Array, dict[str, Any]]:
    """Entries with the drafter's own states of the step before; one more key and value for each entry alone."""
    tokens = _at(_shift_left(batch.tokens, min(step + 1, batch.tokens.shape[1])), entries)
    inputs, residual = layer_input(params, config, embed(params, tokens), fed_back(params, config, state))
    tables = _tables(config, entries + step)
    keys, values = keys_values_of(params, config, inputs)
    context = {
        **context,
        "own_keys": (*context["own_keys"], rotate(keys, *tables)),
        "own_values": (*context["own_values"], values),
    }
    mixed = _attend(rotate(queries_of(params, config, inputs), *tables), context)
    return finish_layer(params, config, residual, mixed), context


def _attend(queries: Array, context: dict[str, Any]) -> Array:
    """Attention of [B, H, E, head_dim] queries to visible step-0 entries and to their own later entries."""
    batch_size, num_heads, num_entries, head_dim = queries.shape
    num_kv_heads = context["keys"].shape[1]
    grouped = queries.reshape(batch_size, num_kv_heads, num_heads // num_kv_heads, num_entries, head_dim)
    own_keys, own_values = (
        jnp.stack(context[name], axis=3) if context[name] else None for name in ("own_keys", "own_values")
    )

    def block(queries: Array, visible: Array, own_keys: Array | None, own_values: Array | None) -> Array:
        return _attend_block(queries, context["keys"], context["values"], visible, own_keys, own_values)

    if num_entries <= _QUERIES_AT_ONCE or num_entries % _QUERIES_AT_ONCE:
        mixed = block(grouped, context["visible"], own_keys, own_values)
    else:
        # Scores of all queries at once would be [B, H, E, T]; the backward pass makes each block's again.
        def split(x: Array, axis: int) -> Array:
            shape = (*x.shape[:axis], -1, _QUERIES_AT_ONCE, *x.shape[axis + 1 :])
            return jnp.moveaxis(x.reshape(shape), axis, 0)

        blocks = (split(grouped, 3), split(context["visible"], 1))
        if own_keys is not None and own_values is not None:
            blocks = (*blocks, split(own_keys, 2), split(own_values, 2))
        else:
            blocks = (*blocks, None, None)
        mixed = lax.map(lambda arguments: jax.checkpoint(block)(*arguments), blocks)
        mixed = jnp.moveaxis(mixed, 0, 3).reshape(grouped.shape)
    mixed = mixed.reshape(batch_size, num_heads, num_entries, head_dim)
    return jnp.swapaxes(mixed, 1, 2).reshape(batch_size, num_entries, num_heads * head_dim).astype(queries.dtype)


def _attend_block(
    queries: Float[Array, "batch kv group entries head_dim"],
    keys: Float[Array, "batch kv time head_dim"],
    values: Float[Array, "batch kv time head_dim"],
    visible: Bool[Array, "batch entries time"],
    own_keys: Float[Array, "batch kv entries later head_dim"] | None,
    own_values: Float[Array, "batch kv entries later head_dim"] | None,
) -> Float[Array, "batch kv group entries head_dim"]:
    precision = lax.Precision.HIGHEST if keys.dtype == jnp.float32 else lax.Precision.DEFAULT
    product = {"precision": precision, "preferred_element_type": jnp.float32}
    length = keys.shape[2]
    scores = jnp.einsum("bkgqd,bksd->bkgqs", queries, keys, **product)
    scores = jnp.where(visible[:, None, None], scores, jnp.float32(_HIDDEN_SCORE))
    if own_keys is not None:
        own_scores = jnp.einsum("bkgqd,bkqjd->bkgqj", queries, own_keys, **product)
        scores = jnp.concatenate((scores, own_scores), axis=-1)
    weights = jax.nn.softmax(scores * jnp.float32(queries.shape[-1] ** -0.5), axis=-1).astype(values.dtype)
    mixed = jnp.einsum("bkgqs,bksd->bkgqd", weights[..., :length], values, **product)
    if own_values is not None:
        mixed = mixed + jnp.einsum("bkgqj,bkqjd->bkgqd", weights[..., length:], own_values, **product)
    return mixed


def _tables(config: Eagle3Config, positions: Int[Array, "rows entries"]) -> tuple[Array, Array]:
    return rope_tables(positions, rope_frequencies(config))


def _shift_left(x: Array, amount: int) -> Array:
    """Element t becomes element t + amount; zeros past the end."""
    return jnp.pad(x[:, amount:], ((0, 0), (0, amount)))


def _at(x: Array, entries: Array) -> Array:
    """x[b, entries[b, e]] of [B, T, ...] arrays."""
    indices = entries.reshape(*entries.shape, *([1] * (x.ndim - 2)))
    return jnp.take_along_axis(x, indices, axis=1)
