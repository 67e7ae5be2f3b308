"""The head on Hopper: rows are streamed by the copy engine, multiplied by wgmma, and only statistics leave the chip.

The tokens' rows are the first operand (64 at a time), the batch the second, padded to a multiple of 8 only: the cost
of noise and statistics follows the real batch. Every accumulator element keeps its own running statistics, so that
the loop over tiles has no reduction across threads; one at the end of each CTA, one small kernel over CTAs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, UInt32

from pallas_kernels import _compat
from pallas_kernels.low_rank_head import noise as noise_lib
from pallas_kernels.low_rank_head.candidates import top_of_blocks
from pallas_kernels.low_rank_head.mosaic_logits import FEW_ROWS, logits_kernel
from pallas_kernels.low_rank_head.mosaic_stream import MMA_ROWS, plan, stream_tiles, transposed
from pallas_kernels.low_rank_head.projection import project
from pallas_kernels.low_rank_head.statistics import (
    LOWEST,
    NO_TOKEN,
    HeadDraw,
    Part,
    Running,
    closed_sum,
    known_token,
    log_prob_of,
    merge_all,
    tempering,
    update,
)
from pallas_kernels.low_rank_head.weights import PreparedHead

# One CTA a multiprocessor; H100 and H200 have 132.
NUM_CTAS = 132
# Rows of the batch whose statistics are computed together: with more, sampling needs more registers than there are.
_GROUP = 32
# Where two groups are sampled, the sums of both wait in shared memory, in the order that their threads have them.
_SUMS_TRANSFORMS = (plgpu.TilingTransform((8, _GROUP)), plgpu.SwizzleTransform(128))
_LOG2_E = 1.4426950408889634


def greedy(
    hidden: Float[Array, "batch d"], head: PreparedHead, *, interpret: Any = None, num_ctas: int = NUM_CTAS
) -> HeadDraw:
    """See `api.greedy`."""
    states = project(hidden, head, _row_multiple(hidden))
    parts = statistics_kernel(states, head.rows, head.num_valid_tokens, interpret=interpret, num_ctas=num_ctas)
    return merge_all(_of_batch(parts, hidden.shape[0]))


def sample(
    hidden: Float[Array, "batch d"],
    head: PreparedHead,
    key_words: UInt32[Array, "batch 2"],
    temperature: Float[Array, "batch"],
    *,
    interpret: Any = None,
    num_ctas: int = NUM_CTAS,
) -> HeadDraw:
    """See `api.sample`."""
    states = project(hidden, head, _row_multiple(hidden))
    inverse, noise_scale = tempering(temperature)
    factors = jnp.stack([inverse, noise_scale])
    padding = ((0, 0), (0, states.shape[0] - hidden.shape[0]))
    parts = statistics_kernel(
        states,
        head.rows,
        head.num_valid_tokens,
        row_words=jnp.pad(jnp.concatenate([key_words.T, lax.bitcast_convert_type(factors, jnp.uint32)]), padding),
        interpret=interpret,
        num_ctas=num_ctas,
    )
    return merge_all(_of_batch(parts, hidden.shape[0]))


def logits(
    hidden: Float[Array, "batch d"], head: PreparedHead, *, interpret: Any = None, num_ctas: int = NUM_CTAS
) -> Array:
    """Float32 logits [B, V], -inf where a token is not valid."""
    batch = hidden.shape[0]
    few = batch <= FEW_ROWS
    values = logits_kernel(
        # All rows of a wgmma operand, before the product: a padded product costs less than padding its result.
        project(hidden, head, FEW_ROWS if few else MMA_ROWS),
        head.rows,
        head.num_valid_tokens,
        num_rows=batch if few else batch + -batch % 8,
        interpret=interpret,
        num_ctas=num_ctas,
    )
    return values[:batch, : head.vocab_size]


def top_candidates(
    hidden: Float[Array, "batch d"], head: PreparedHead, count: int, *, interpret: Any = None
) -> tuple[Array, Array]:
    """See `api.top_candidates`."""
    return top_of_blocks(logits(hidden, head, interpret=interpret), count)


def statistics_kernel(
    states: Float[Array, "batch k"],
    rows: Float[Array, "V_padded k"],
    num_valid: int,
    *,
    row_words: UInt32[Array, "4 batch"] | None = None,
    interpret: Any = None,
    num_ctas: int = NUM_CTAS,
) -> Part:
    """Statistics of each CTA's tokens, [num_ctas, batch] each; the batch is 8, 16, 24, 32 or 64.

    Args:
        states: input of the last product, bfloat16.
        rows: a row a token, bfloat16.
        num_valid: ids from here on do not take part.
        row_words: for sampling, of each row: the two words of its key, and the bits of the two float32 factors of
            its logits and its noise.
        interpret: see `_compat.mosaic_kernel`.
        num_ctas: at most so many CTAs.
    """
    batch, num_columns = states.shape
    num_groups = -(-batch // _GROUP)
    sums_type = plgpu.SMEM((2 * num_groups, MMA_ROWS, _GROUP), jnp.float32, transforms=_SUMS_TRANSFORMS)
    stored = row_words is not None and num_groups > 1
    cut = plan(num_columns, batch, reserved_bytes=2 * num_groups * MMA_ROWS * _GROUP * 4 if stored else 0)
    num_ctas = min(num_ctas, rows.shape[0] // cut.tile_rows)
    sampled = row_words is not None
    groups = [(start, min(_GROUP, batch - start)) for start in range(0, batch, _GROUP)]
    layout = plgpu.Layout.WGMMA

    def body(*refs: Any) -> None:
        *inputs, logsumexp_out, best_out, token_out, log_prob_out, scratch = refs
        states_ref, rows_ref, *extra = inputs
        cta = lax.axis_index("cta")
        if sampled:
            plgpu.copy_gmem_to_smem(extra[0], scratch["row_words"], scratch["row_words_filled"])
            plgpu.barrier_wait(scratch["row_words_filled"])

        def word(index: int, start: int, size: int, dtype: Any) -> Array:
            reference = scratch["row_words"].at[index, pl.ds(start, size)]
            words = _compat.load(reference, layout.reduce(0), optimized=False)
            return lax.bitcast_convert_type(words, dtype)

        def noise(start: int, size: int, token: Array, spread: Callable[[Array], Array]) -> Array:
            # The words are read again for every block: kept, they would take a quarter of the registers.
            key0, key1 = (spread(word(index, start, size, jnp.uint32)) for index in (0, 1))
            return spread(word(3, start, size, jnp.float32)) * noise_lib.gumbel(key0, key1, token)

        def multiply(accumulators: list[Any], block_rows: Any, chunk_states: Any) -> None:
            for accumulator, (start, size) in zip(accumulators, groups, strict=True):
                plgpu.wgmma(accumulator, block_rows, transposed(chunk_states.at[pl.ds(start, size)]))

        def finish_block(carry: list[Running], values: list[Array], first_row: Any) -> list[Running]:
            return [
                put(index, add_group(take(index, carry), values[index], first_row, start, size))
                for index, (start, size) in enumerate(groups)
            ]

        def put(index: int, running: Running) -> Running:
            if not stored:
                return running
            scratch["sums"][2 * index] = running.maximum
            scratch["sums"][2 * index + 1] = running.total
            return Running(None, None, running.best, running.token)

        def take(index: int, carry: list[Running]) -> Running:
            if not stored:
                return carry[index]
            maximum, total = (_compat.load(scratch["sums"].at[2 * index + part], layout) for part in (0, 1))
            return Running(maximum, total, carry[index].best, carry[index].token)

        def add_group(running: Running, logits: Array, first_row: Any, start: int, size: int) -> Running:
            token = first_row + plgpu.broadcasted_iota(jnp.int32, (MMA_ROWS, size), 0, layout=layout)
            scores = None
            if sampled:
                # Keeps the compiler from computing several groups at once.
                plgpu.commit_smem()
                logits = logits * _over_rows(word(2, start, size, jnp.float32))
                scores = logits + noise(start, size, token, _over_rows)
            return update(running, logits, scores, token, token < num_valid)

        def start_of(size: int) -> Running:
            values = Running(LOWEST, np.float32(0.0), LOWEST, NO_TOKEN)
            return Running(*(plgpu.layout_cast(jnp.full((MMA_ROWS, size), value), layout) for value in values))

        carry = stream_tiles(
            cut,
            rows_ref,
            states_ref,
            scratch,
            cta=cta,
            num_ctas=num_ctas,
            multiply=multiply,
            accumulators=[(MMA_ROWS, size) for _, size in groups],
            finish_block=finish_block,
            carry=[put(index, start_of(size)) for index, (_, size) in enumerate(groups)],
        )
        for group, (start, size) in enumerate(groups):
            columns = pl.ds(start, size)
            logsumexp, best, token = _over_lanes(take(group, carry))
            chosen = best - noise(start, size, token, lambda vector: vector) if sampled else best
            for index, values in enumerate((logsumexp, best, log_prob_of(chosen, logsumexp))):
                scratch["floats"][index, columns] = values
            scratch["tokens"][columns] = token
        plgpu.commit_smem()
        for index, out in enumerate((logsumexp_out, best_out, log_prob_out)):
            plgpu.copy_smem_to_gmem(scratch["floats"].at[index], out.at[cta])
        plgpu.copy_smem_to_gmem(scratch["tokens"], token_out.at[cta])
        plgpu.wait_smem_to_gmem(0)

    scratch_types = cut.scratch_types() | {
        "floats": plgpu.SMEM((3, batch), jnp.float32),
        "tokens": plgpu.SMEM((batch,), jnp.int32),
    }
    if sampled:
        scratch_types |= {"row_words": plgpu.SMEM((4, batch), jnp.uint32), "row_words_filled": plgpu.Barrier()}
    if stored:
        scratch_types |= {"sums": sums_type}
    parts = _compat.mosaic_kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((num_ctas, batch), dtype)
            for dtype in (jnp.float32, jnp.float32, jnp.int32, jnp.float32)
        ],
        scratch_types=[scratch_types],
        grid=(num_ctas,),
        grid_names=("cta",),
        interpret=interpret,
    )(states, rows, *((row_words,) if sampled else ()))
    return Part(*parts)


def _row_multiple(hidden: Array) -> int:
    """What the batch is padded to a multiple of: eights, but only whole groups."""
    return 8 if hidden.shape[0] <= _GROUP else _GROUP


def _over_lanes(running: Running) -> tuple[Array, Array, Array]:
    """Joins the accumulators of a CTA, [64, batch] to [batch]: logsumexp, best score, token."""
    maximum, best = jnp.max(running.maximum, axis=0), jnp.max(running.best, axis=0)
    scale = jnp.exp2((running.maximum - _over_rows(maximum)) * _LOG2_E)
    tied = jnp.where(running.best == _over_rows(best), -running.token, -NO_TOKEN)
    logsumexp = closed_sum(maximum, jnp.sum(running.total * scale, axis=0))
    return logsumexp, best, known_token(-jnp.max(tied, axis=0), logsumexp)


def _over_rows(vector: Array) -> Array:
    return lax.broadcast_in_dim(vector, (MMA_ROWS, *vector.shape), (1,))


def _of_batch(parts: Part, batch: int) -> Part:
    return Part(*(part[:, :batch] for part in parts))
