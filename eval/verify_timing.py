"""Times of the jitted rules beside one log-softmax of the same arrays, for `eval.verify --time`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from specjax.types import DraftTree, Proposal
from specjax.verification import Verifier


@dataclasses.dataclass(frozen=True)
class TimingRow:
    """Time of one rule.

    Attributes:
        verifier: name of the rule.
        num_drafts: K; 1 for rules that use one draft.
        milliseconds: median time of a call.
        spread: median absolute deviation, milliseconds.
        log_softmax: median time of `log_softmax` over the same draft and target arrays, milliseconds.
    """

    verifier: str
    num_drafts: int
    milliseconds: float
    spread: float
    log_softmax: float


def timing_rows(
    verifiers: list[Verifier], *, vocab_size: int, draft_length: int, num_drafts: int, repeats: int
) -> Iterator[TimingRow]:
    """Times each rule and the log-softmax in turn, call by call, so that other load hits both alike."""
    for verifier in verifiers:
        drafts = num_drafts if verifier.multi_draft else 1
        tree = DraftTree.chains(drafts, draft_length)
        proposal, target = random_proposal(jax.random.key(0), tree, vocab_size)
        carry = verifier.init_carry(tree, vocab_size)
        verify = jax.jit(verifier.verify)
        softmax = jax.jit(lambda draft, target: (jax.nn.log_softmax(draft), jax.nn.log_softmax(target)))
        calls: tuple[Callable[[int], Any], ...] = (
            lambda i: verify(jax.random.key(i), proposal, target, carry),  # noqa: B023
            lambda i: softmax(proposal.draft_log_laws, target),  # noqa: B023
        )
        samples: tuple[list[float], list[float]] = ([], [])
        for repeat in range(-2, repeats):
            for call, record in zip(calls, samples, strict=True):
                start = time.perf_counter()
                jax.block_until_ready(call(repeat + 2))
                if repeat >= 0:
                    record.append(1000 * (time.perf_counter() - start))
        own, reference = (jnp.asarray(record) for record in samples)
        median = jnp.median(own)
        spread = jnp.median(jnp.abs(own - median))
        yield TimingRow(verifier.name, drafts, float(median), float(spread), float(jnp.median(reference)))


def random_proposal(rng_key: jax.Array, tree: DraftTree, vocab_size: int) -> tuple[Proposal, jax.Array]:
    """Laws like a fair drafter's: peaked, the draft a disturbed version of the target, tokens drawn from the draft."""
    base_key, noise_key, token_key = jax.random.split(rng_key, 3)
    logits = 3 * jax.random.normal(base_key, (tree.num_nodes, vocab_size))
    disturbed = logits[jnp.asarray(tree.internal)]
    disturbed += jax.random.normal(noise_key, disturbed.shape)
    draft = jax.nn.log_softmax(disturbed)
    rows = [tree.internal.index(parent) for parent in tree.parent[1:]]
    tokens = jax.random.categorical(token_key, draft[jnp.asarray(rows)]).astype(jnp.int32)
    proposal = Proposal(
        tokens=jnp.concatenate([jnp.zeros((1,), jnp.int32), tokens]),
        draft_log_laws=draft,
        max_depth=jnp.int32(tree.max_depth),
        tree=tree,
    )
    return proposal, jax.nn.log_softmax(logits)


HEADER = f"{'rule':<27}{'K':>2}{'verify ms':>12}{'+-':>8}{'log_softmax ms':>16}{'ratio':>8}"


def format_row(row: TimingRow) -> str:
    """One line of the table."""
    return (
        f"{row.verifier:<27}{row.num_drafts:>2}{row.milliseconds:>12.2f}{row.spread:>8.2f}{row.log_softmax:>16.2f}"
        f"{row.milliseconds / row.log_softmax:>8.2f}"
    )
