"""Times of the jitted rules beside one log-softmax of the same arrays and the target's forward, for `--time`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eval.timing import time_interleaved
from specjax.models import KVCache, compute_logits, forward
from specjax.types import DraftTree, Proposal
from specjax.verification import Verifier

# Committed tokens that the target's forward finds in its cache.
_CONTEXT_LENGTH = 128


@dataclasses.dataclass(frozen=True)
class TimingRow:
    """Time of one rule.

    Attributes:
        verifier: name of the rule.
        num_drafts: K; 1 for rules that use one draft.
        milliseconds: median time of a call.
        spread: half the distance of the quartiles, milliseconds.
        log_softmax: median time of `log_softmax` over the same draft and target arrays, milliseconds.
        forward: median time of the target's packed forward of the step's nodes, milliseconds; None without a target.
    """

    verifier: str
    num_drafts: int
    milliseconds: float
    spread: float
    log_softmax: float
    forward: float | None = None


def timing_rows(
    verifiers: list[Verifier],
    *,
    vocab_size: int,
    draft_length: int,
    num_drafts: int,
    repeats: int,
    target: Any = None,
) -> Iterator[TimingRow]:
    """Times each rule and what it is compared with in turn, call by call, so that other load hits all alike.

    Args:
        verifiers: the rules.
        vocab_size: V.
        draft_length: L.
        num_drafts: K, for rules that use several drafts.
        repeats: timed calls of each.
        target: a loaded target with V tokens, or None.

    Yields:
        A row for each rule.

    Raises:
        ValueError: if the target has another vocabulary.
    """
    if target is not None and target.config.vocab_size != vocab_size:
        raise ValueError(f"`vocab_size` must be the target's {target.config.vocab_size}; got {vocab_size}")
    for verifier in verifiers:
        drafts = num_drafts if verifier.multi_draft else 1
        tree = DraftTree.chains(drafts, draft_length)
        proposal, laws = random_proposal(jax.random.key(0), tree, vocab_size)
        carry = verifier.init_carry(tree, vocab_size)
        verify = jax.jit(verifier.verify)
        keys = iter(jax.random.split(jax.random.key(1), repeats + 2))
        functions: dict[str, Callable[[], object]] = {
            "verify": functools.partial(_with_next_key, verify, keys, proposal, laws, carry),
            "log_softmax": functools.partial(_log_softmax, proposal.draft_log_laws, laws),
        }
        if target is not None:
            functions["forward"] = PackedForward(target, tree, proposal.tokens)
        timings = time_interleaved(functions, rounds=repeats)
        own = timings["verify"]
        yield TimingRow(
            verifier.name,
            drafts,
            1e3 * own.median,
            500 * (own.quartiles[1] - own.quartiles[0]),
            1e3 * timings["log_softmax"].median,
            1e3 * timings["forward"].median if target is not None else None,
        )


def _with_next_key(verify: Callable[..., Any], keys: Iterator[jax.Array], *arguments: Any) -> Any:
    return verify(next(keys), *arguments)


@jax.jit
def _log_softmax(draft: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jax.nn.log_softmax(draft), jax.nn.log_softmax(target)


class PackedForward:
    """The target's forward and head over one packed tree, as in a decoding step; called without arguments.

    Args:
        target: with `config` and `params`.
        tree: its nodes are the queries.
        tokens: token of each node, [N+1].
    """

    def __init__(self, target: Any, tree: DraftTree, tokens: jax.Array) -> None:
        self._params = target.params
        self._tokens = tokens[None]
        self._start = jnp.full(1, _CONTEXT_LENGTH, jnp.int32)
        self._cache = KVCache.zeros(
            target.config, 1, _CONTEXT_LENGTH + tree.num_nodes, target.params["embed_tokens"].dtype
        )

        def run(params: Any, cache: KVCache, tokens: jax.Array, start: jax.Array) -> tuple[jax.Array, KVCache]:
            mask, depth = np.asarray(tree.ancestor_mask), np.asarray(tree.depth, np.int32)
            output = forward(params, target.config, tokens, cache, start, tree_mask=mask, depth=depth)
            return compute_logits(params, target.config, output.hidden), output.cache

        self._run = jax.jit(run, donate_argnums=1)

    def __call__(self) -> jax.Array:
        """Logits of every node, [1, N+1, V]."""
        logits, self._cache = self._run(self._params, self._cache, self._tokens, self._start)
        return logits


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
FORWARD_HEADER = f"{'forward ms':>12}{'share':>8}"


def format_row(row: TimingRow) -> str:
    """One line of the table; the last two columns only where the target's forward was timed."""
    line = (
        f"{row.verifier:<27}{row.num_drafts:>2}{row.milliseconds:>12.2f}{row.spread:>8.2f}{row.log_softmax:>16.2f}"
        f"{row.milliseconds / row.log_softmax:>8.2f}"
    )
    if row.forward is None:
        return line
    return f"{line}{row.forward:>12.2f}{row.milliseconds / row.forward:>8.1%}"
