"""The Hopper kernels, interpreted with race detection, against the reference."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from head_cases import (
    check_extreme_temperatures,
    check_greedy,
    check_logits,
    check_no_token,
    check_sample,
    make_head,
    make_hidden,
    row_keys,
    states_of_no_token,
    temperatures,
)

from pallas_kernels import _compat
from pallas_kernels.low_rank_head import noise

pytestmark = pytest.mark.skipif(
    not _compat.HAS_MOSAIC_INTERPRETER, reason="this release of jax cannot interpret Mosaic GPU kernels"
)

# Fewer CTAs than tiles: every CTA has several.
NUM_CTAS = 2


def run(op, head, hidden, *, num_ctas=NUM_CTAS, temperature=None):
    from pallas_kernels.low_rank_head import mosaic_gpu

    options = {"interpret": _compat.mosaic_interpreter(detect_races=True), "num_ctas": num_ctas}
    batch = hidden.shape[0]
    temperature = temperatures(batch) if temperature is None else temperature
    extra = (noise.raw_keys(row_keys(batch)), temperature) if op == "sample" else ()
    return jax.jit(lambda *args: getattr(mosaic_gpu, op)(*args, **options))(hidden, head, *extra)


CHECKS = {"greedy": check_greedy, "sample": check_sample, "logits": check_logits}


@pytest.mark.parametrize("batch", [3, 8])
def test_logits_of_few_rows(batch, capfd):
    head = make_head(rank=48)
    hidden = make_hidden(head, batch)
    check_logits(run("logits", head, hidden), hidden, head)
    assert "RACE DETECTED" not in capfd.readouterr().out


@pytest.mark.parametrize("op", CHECKS)
def test_one_row_of_a_low_rank_head(op, capfd):
    head = make_head(rank=40)
    hidden = make_hidden(head, 1)
    CHECKS[op](run(op, head, hidden), hidden, head)
    assert "RACE DETECTED" not in capfd.readouterr().out


def test_sampled_batches_of_several_groups(capfd):
    head = make_head(rank=32)
    hidden = make_hidden(head, 40)
    check_sample(run("sample", head, hidden), hidden, head)
    assert "RACE DETECTED" not in capfd.readouterr().out


@pytest.mark.parametrize("op", ["greedy", "logits"])
def test_states_too_wide_for_shared_memory_travel_with_the_rows(op, monkeypatch, capfd):
    from pallas_kernels.low_rank_head import mosaic_stream

    monkeypatch.setattr(mosaic_stream, "_MAX_RESIDENT_BYTES", 0)
    # Several chunks a tile, and more of them than slots.
    monkeypatch.setattr(mosaic_stream, "_MAX_CHUNK_COLUMNS", 64)
    head = make_head(rank=None, hidden_size=384, vocab_size=520, num_valid=500)
    hidden = make_hidden(head, 9)
    CHECKS[op](run(op, head, hidden), hidden, head)
    assert "RACE DETECTED" not in capfd.readouterr().out


def test_states_that_are_not_finite_give_token_0_and_nan():
    head = make_head(vocab_size=128, num_valid=100)
    hidden = make_hidden(head, 3).at[1].set(jnp.nan)
    for op, num_ctas in (("greedy", 1), ("sample", NUM_CTAS)):
        draw = run(op, head, hidden, num_ctas=num_ctas)
        assert int(draw.token[1]) == 0
        assert np.isnan(draw.log_prob[1])
        assert np.isnan(draw.logsumexp[1])
        assert np.all(np.isfinite(draw.log_prob[np.asarray([0, 2])]))


# The interpreter multiplies with numpy, which warns.
@pytest.mark.filterwarnings("ignore:overflow encountered in matmul:RuntimeWarning")
def test_rows_without_a_token_have_the_documented_values():
    hidden, head = states_of_no_token()
    check_no_token(run("greedy", head, hidden))


@pytest.mark.slow
def test_temperatures_at_the_ends_of_their_range():
    head = make_head()
    hidden = make_hidden(head, 5)
    temperature = jnp.asarray([np.nan, -1.0, np.inf, 1e-30, 0.0], jnp.float32)
    check_extreme_temperatures(run("sample", head, hidden, temperature=temperature), hidden, head)


@pytest.mark.slow
@pytest.mark.parametrize("op", CHECKS)
def test_a_real_rank_gives_the_reference_values(op, capfd):
    head = make_head(vocab_size=4096, hidden_size=512, rank=512, num_valid=4000)
    hidden = make_hidden(head, 33)
    CHECKS[op](run(op, head, hidden, num_ctas=5), hidden, head)
    assert "RACE DETECTED" not in capfd.readouterr().out
