"""Bad input: the documented error on every implementation, and named implementations that cannot serve."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from verifier_examples import example, pairs

from pallas_kernels.block_verifier import Laws, draw_residuals, residual_sums, row_statistics
from pallas_kernels.block_verifier.chains import chain_residual_masses, chain_rows, chain_statistics
from pallas_kernels.block_verifier.shapes import NAMED_SHAPES, get_shape

IMPLEMENTATIONS = (None, "xla", "interpret", "mosaic_gpu", "pallas")
VALUES = example(640, "float32")
ROWS = np.zeros(1, np.int32)


def _statistics(**changes):
    arguments = {
        "target_logits": VALUES.target_logits,
        "draft_logits": VALUES.draft_logits,
        "tokens": jnp.zeros(1, jnp.int32),
        "target_row": ROWS,
        "draft_row": ROWS,
    }
    return row_statistics(**(arguments | changes))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_logits": jnp.zeros((0, 640))}, r"`target_logits` must have shape \[rows, V\].*got \(0, 640\)"),
        ({"draft_logits": jnp.zeros((2, 0))}, r"`draft_logits` must have shape"),
        ({"draft_logits": jnp.zeros((2, 512))}, r"`draft_logits` must have the vocabulary.*640 tokens; got 512"),
        ({"draft_logits": jnp.zeros((2, 640), jnp.bfloat16)}, r"`draft_logits` must have the dtype.*got bfloat16"),
        ({"target_logits": jnp.zeros((3, 640), jnp.int32)}, r"`target_logits` must be bfloat16.*got int32"),
        ({"target_row": np.asarray([3])}, r"`target_row` must be in \[0, 3\); got \[3\]"),
        ({"draft_row": np.zeros(2, np.int32)}, r"`draft_row` must have 1 entries; got shape \(2,\)"),
        ({"tokens": jnp.zeros(1)}, r"`tokens` must be integers; got float32"),
        ({"tokens": np.asarray([640])}, r"`tokens` must be in \[0, 640\); got \[640\]"),
        ({"target_row": [0]}, r"`target_row` must be an array; got list"),
        ({"draft_logits": None}, r"`draft_logits` must be an array; got NoneType"),
        ({"target_inverse_temperature": 0.5}, r"`target_inverse_temperature` must have shape \[3\]; got \[\]"),
        ({"target_inverse_temperature": jnp.ones(2)}, r"`target_inverse_temperature` must have shape \[3\]; got \[2\]"),
    ],
)
def test_pass_1_names_the_bad_argument(implementation: str | None, changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _statistics(implementation=implementation, **changes)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_row": np.zeros(0, np.int32)}, r"`pairs.target_row` must have at least one entry"),
        ({"draft_row": np.asarray([0, 1, 2, 0])}, r"`pairs.draft_row` must be in \[0, 2\)"),
        ({"log_weight": jnp.zeros(3)}, r"`pairs.log_weight` must have shape \[4\]; got \[3\]"),
        ({"uses_draft": np.zeros(4)}, r"`pairs.uses_draft` must be bool \[4\]; got float64"),
    ],
)
def test_pass_2_names_the_bad_argument(implementation: str | None, changes: dict, message: str) -> None:
    laws = Laws(VALUES.target_logits), Laws(VALUES.draft_logits)
    with pytest.raises(ValueError, match=message):
        residual_sums(*laws, pairs()._replace(**changes), implementation=implementation)


def test_other_arguments_are_checked() -> None:
    target, draft = Laws(VALUES.target_logits), Laws(VALUES.draft_logits)
    for width in (0, True, 2.0):
        with pytest.raises(ValueError, match="`width` must be a positive int"):
            residual_sums(target, draft, pairs(), width=width)
    with pytest.raises(ValueError, match=r"`target.log_normaliser` must have shape \[3\]"):
        residual_sums(target._replace(log_normaliser=jnp.zeros(4)), draft, pairs())
    with pytest.raises(ValueError, match="`target` must be Laws; got ArrayImpl"):
        residual_sums(VALUES.target_logits, draft, pairs())  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="`pairs` must be Pairs; got tuple"):
        residual_sums(target, draft, tuple(pairs()))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="`implementation` must be None or one of"):
        residual_sums(target, draft, pairs(), implementation="triton")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"`block_noise` must have shape \[1, 5\]"):
        draw_residuals(
            jnp.zeros((4, 5)),
            target,
            draft,
            pairs(),
            pair_of_draw=ROWS,
            block_noise=jnp.zeros((1, 4)),
            entry_noise=jnp.zeros((1, 128)),
        )


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((0, 2, 3), "`batch` must be at least 1; got 0"),
        ((2, 0, 3), "`num_drafts` must be at least 1; got 0"),
        ((2, 2, 0), "`draft_length` must be at least 1; got 0"),
    ],
)
def test_nothing_drafted_is_refused(shape: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chain_rows(*shape)
    batch, drafts, length = shape
    logits = jnp.zeros((batch, drafts, length + 1, 128)), jnp.zeros((batch, drafts, length, 128))
    with pytest.raises(ValueError, match=message):
        chain_statistics(*logits, jnp.zeros(shape, jnp.int32))


def test_chains_must_belong_together() -> None:
    draft, tokens = jnp.zeros((1, 2, 3, 128)), jnp.zeros((1, 2, 3), jnp.int32)
    with pytest.raises(ValueError, match=r"`target_logits` must have shape \[1, 2, 4, V\]"):
        chain_statistics(jnp.zeros((1, 2, 3, 128)), draft, tokens)
    with pytest.raises(ValueError, match=r"`tokens` must have shape \[1, 2, 3\]"):
        chain_statistics(jnp.zeros((1, 2, 4, 128)), draft, tokens[:, :1])
    with pytest.raises(ValueError, match=r"`inverse_temperature` must have shape \[1\]; got \[\]"):
        chain_statistics(jnp.zeros((1, 2, 4, 128)), draft, tokens, inverse_temperature=0.5)  # pyright: ignore[reportArgumentType]
    statistics = chain_statistics(jnp.zeros((1, 2, 4, 128)), draft, tokens)
    for shape in ((2, 3), (1, 2, 4)):
        with pytest.raises(ValueError, match=r"`log_weight` must be \[B, K, L\], one number for each of 6"):
            chain_residual_masses(statistics, jnp.zeros(shape))
    with pytest.raises(ValueError, match=r"must be \[B, K, L\+1, V\]"):
        chain_statistics(jnp.zeros((2, 4, 128)), draft, tokens)


@pytest.mark.parametrize(
    ("vocab_size", "dtype", "width", "implementation", "reason"),
    [
        (650, "float32", None, "mosaic_gpu", "rows of float32 must be a multiple of 64 long; got 650"),
        (704, "bfloat16", None, "mosaic_gpu", "rows of bfloat16 must be a multiple of 128 long; got 704"),
        (640, "float32", 32, "mosaic_gpu", "blocks of tokens must be a multiple of 64 long; got 32"),
        (640, "float32", 64, "pallas", "blocks of tokens must be a multiple of 128 long; got 64"),
    ],
)
def test_a_named_implementation_that_cannot_serve_says_why(
    vocab_size: int, dtype: str, width: int | None, implementation: str, reason: str
) -> None:
    values = example(vocab_size, dtype)
    with pytest.raises(NotImplementedError, match=f"'{implementation}' is not available: .*{reason}"):
        residual_sums(
            Laws(values.target_logits),
            Laws(values.draft_logits),
            pairs(),
            width=width,
            implementation=implementation,  # pyright: ignore[reportArgumentType]
        )


def test_float64_is_served_by_xla_alone() -> None:
    with jax.enable_x64(True):
        laws = Laws(jnp.zeros((3, 640), jnp.float64)), Laws(jnp.zeros((2, 640), jnp.float64))
        for implementation in ("mosaic_gpu", "pallas", "interpret"):
            with pytest.raises(NotImplementedError, match="it reads bfloat16 and float32; got float64"):
                residual_sums(*laws, pairs(), implementation=implementation)


def test_named_shapes_count_their_bytes() -> None:
    shape = get_shape("llama-3.1-8b batch 1, 8 x 8")
    assert (shape.num_target_rows, shape.num_draft_rows) == (72, 64)
    assert shape.statistics_bytes == 136 * 128256 * 2
    assert shape.residual_bytes == 128 * 128256 * 2
    assert all(name == value.name for name, value in NAMED_SHAPES.items())
    with pytest.raises(ValueError, match="`shape` must be one of"):
        get_shape("llama")
