"""Draws from a rule as it decodes: jitted float32 `verify` on an instance, over as many iterations as needed."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PRNGKeyArray

from specjax.testing.instances import Instance, Prefix, all_prefixes
from specjax.types import DRAW_DETERMINISTIC, DRAW_WITHOUT_REPLACEMENT, DraftTree, Proposal
from specjax.verification.base import Verifier


@dataclasses.dataclass(frozen=True)
class Draws:
    """Independent runs of a rule.

    Attributes:
        tokens: emitted tokens, int32 [runs, num_tokens].
        first_accepted: accepted draft tokens of the first iteration, [runs].
        first_emitted: tokens of the first iteration, padded with -1, [runs, L+1].
        calls: iterations until `num_tokens` tokens were there, [runs].
    """

    tokens: np.ndarray
    first_accepted: np.ndarray
    first_emitted: np.ndarray
    calls: np.ndarray


def sample_runs(
    verifier: Verifier,
    tree: DraftTree,
    instance: Instance,
    rng_key: PRNGKeyArray,
    *,
    num_runs: int,
    num_tokens: int,
    max_depth: int | None = None,
) -> Draws:
    """Emits `num_tokens` tokens in each of `num_runs` independent requests.

    Args:
        verifier: the rule.
        tree: shape of every proposal.
        instance: the laws; its number of prefixes of length `num_tokens + L` must be small.
        rng_key: key, consumed.
        num_runs: number of requests.
        num_tokens: tokens to emit in each.
        max_depth: nodes deeper than this do not exist; None means the whole tree.

    Returns:
        What was emitted.
    """
    depth = tree.max_depth if max_depth is None else max_depth
    prefixes = all_prefixes(instance.vocab_size, num_tokens - 1 + tree.max_depth)
    with np.errstate(divide="ignore"):
        target = np.log(np.stack([instance.target(prefix) for prefix in prefixes])).astype(np.float32)
        draft = np.log(np.stack([instance.draft(prefix) for prefix in prefixes])).astype(np.float32)
    run = _runner(verifier, tree, num_tokens)
    rng_keys = jax.random.split(rng_key, num_runs)
    history, accepted, calls = run(rng_keys, jnp.asarray(target), jnp.asarray(draft), jnp.int32(depth))
    history = np.asarray(history)
    accepted = np.asarray(accepted)
    first = history[:, : tree.max_depth + 1].copy()
    first[np.arange(first.shape[1]) > accepted[:, None]] = -1
    return Draws(history[:, :num_tokens], accepted, first, np.asarray(calls))


@functools.cache
def _runner(verifier: Verifier, tree: DraftTree, num_tokens: int) -> Any:
    block = tree.max_depth + 1

    def run(rng_key: PRNGKeyArray, target: Array, draft: Array, max_depth: Array) -> tuple[Array, Array, Array]:
        vocab_size = target.shape[1]

        def iteration(state: Any, rng_key: PRNGKeyArray) -> tuple[Any, Array]:
            history, length, code, carry, calls = state
            draft_key, verify_key = jax.random.split(rng_key)
            tokens, codes = draw_drafts(draft_key, tree, draft, code)
            proposal = Proposal(
                tokens=tokens, draft_log_laws=draft[codes[jnp.asarray(tree.internal, jnp.int32)]],
                max_depth=max_depth, tree=tree,
            )  # fmt: skip
            verdict = verifier.verify(verify_key, proposal, target[codes], carry)
            position = jnp.arange(block)
            emitted = jnp.where(position < verdict.num_accepted, tokens[jnp.roll(verdict.path, -1)], verdict.next_token)
            active = length < num_tokens
            places = jnp.where(active & (position <= verdict.num_accepted), length + position, history.shape[0])
            history = history.at[places].set(emitted, mode="drop")
            stop = verdict.path[verdict.num_accepted]
            new_code = codes[stop] * vocab_size + verdict.next_token + 1
            # Rows that are done go on from the root, where the tables reach.
            done = length + verdict.num_accepted + 1 >= num_tokens
            state = (
                history,
                jnp.where(active, length + verdict.num_accepted + 1, length),
                jnp.where(done | ~active, 0, new_code),
                verdict.carry,
                calls + active.astype(jnp.int32),
            )
            return state, verdict.num_accepted

        start = (
            jnp.zeros((num_tokens + block,), jnp.int32),
            jnp.int32(0),
            jnp.int32(0),
            verifier.init_carry(tree, vocab_size),
            jnp.int32(0),
        )
        (history, _, _, _, calls), accepted = jax.lax.scan(iteration, start, jax.random.split(rng_key, num_tokens))
        return history, accepted[0], calls

    return jax.jit(jax.vmap(run, in_axes=(0, None, None, None)))


def draw_drafts(
    rng_key: PRNGKeyArray, tree: DraftTree, draft_log_laws: Array, root_code: Array
) -> tuple[Int[Array, " nodes"], Int[Array, " nodes"]]:
    """Draws a tree's tokens as the tree says, from a table of laws by prefix code.

    Returns:
        The nodes' tokens and the codes of the prefixes that end at them; the root's token is 0.
    """
    vocab_size = draft_log_laws.shape[1]
    tokens = [jnp.int32(0)]
    codes = [root_code]
    for node in range(1, tree.num_nodes):
        parent = tree.parent[node]
        elder = [sibling for sibling in tree.children[parent] if sibling < node]
        law = draft_log_laws[codes[parent]]
        if tree.draws[parent] == DRAW_DETERMINISTIC:
            token = jnp.argsort(-law, stable=True)[len(elder)].astype(jnp.int32)
        else:
            if tree.draws[parent] == DRAW_WITHOUT_REPLACEMENT:
                for sibling in elder:
                    law = law.at[tokens[sibling]].set(-jnp.inf)
            token = jax.random.categorical(jax.random.fold_in(rng_key, node), law).astype(jnp.int32)
        tokens.append(token)
        codes.append(codes[parent] * vocab_size + token + 1)
    return jnp.stack(tokens), jnp.stack(codes)


def count_sequences(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """How often each sequence was drawn, flat, in lexicographic order, [V^n]."""
    num_tokens = tokens.shape[1]
    index = tokens @ (vocab_size ** np.arange(num_tokens - 1, -1, -1))
    return np.bincount(index, minlength=vocab_size**num_tokens)


def sequence_law(instance: Instance, num_tokens: int) -> np.ndarray:
    """The target's probability of each sequence, in the same order, [V^n]."""
    joint = instance.target_joint(num_tokens)
    return np.asarray([joint[prefix] for prefix in sorted(joint)])


def count_outcomes(draws: Draws, law: dict[tuple[Prefix, int], float]) -> tuple[np.ndarray, np.ndarray]:
    """Counts of (accepted tokens, next token) of the first iteration beside their exact probabilities."""
    rows, counts = np.unique(draws.first_emitted, axis=0, return_counts=True)
    seen: dict[tuple[Prefix, int], int] = {}
    for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
        emitted = tuple(token for token in row if token >= 0)
        seen[emitted[:-1], emitted[-1]] = count
    keys = sorted({*law, *seen})
    return np.asarray([seen.get(key, 0) for key in keys]), np.asarray([law.get(key, 0.0) for key in keys])
