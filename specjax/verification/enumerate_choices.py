"""Exact law of one iteration of a `ChoiceRule`: all drafts, all prescribed choices, through the rule's own `decide`."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.testing.instances import Instance, Prefix
from specjax.types import DraftTree, Proposal
from specjax.verification.base import ChoiceRule, prescribed
from specjax.verification.emissions import Emission, EmissionTable
from specjax.verification.enumerate_drafts import LawTables, all_drafts, rule_laws

_BATCH_SIZES = (64, 512, 2048)
_DRAFTS_AT_ONCE = _BATCH_SIZES[-1]


@functools.cache
def _decide_all(rule: ChoiceRule, tree: DraftTree):
    """Jitted: outcomes [T, C] and next carries [T, C, V] for T drafts and C lists of choices."""
    choices = jnp.asarray(list(itertools.product(*map(range, rule.choice_sizes(tree)))), jnp.int32)

    def one(tokens: Any, draft: Any, target: Any, indices: Any, max_depth: Any, carry: Any) -> Any:
        proposal = Proposal(tokens=tokens, draft_log_laws=draft, max_depth=max_depth, tree=tree)
        outcome = rule.decide(prescribed(indices), proposal, target, carry)
        advance = lambda token: rule.advance_carry(carry, proposal, outcome, token)  # noqa: E731
        carries = jax.vmap(advance)(jnp.arange(target.shape[1], dtype=jnp.int32))
        return outcome.stop_node, outcome.next_log_law, outcome.log_prob, carries

    over_choices = jax.vmap(one, in_axes=(None, None, None, 0, None, None))
    over_drafts = jax.vmap(over_choices, in_axes=(0, 0, 0, None, None, None))
    return jax.jit(
        lambda tokens, draft, target, max_depth, carry: over_drafts(tokens, draft, target, choices, max_depth, carry)
    )


def choice_iteration(
    rule: ChoiceRule, tree: DraftTree, instance: Instance, context: Prefix, carry: Any, max_depth: int
) -> list[Emission]:
    """What one iteration emits after `context`, with exact probabilities. Call it under 64-bit JAX.

    Args:
        rule: the rule.
        tree: shape of the proposal.
        instance: the laws.
        context: committed tokens.
        carry: carry before the iteration.
        max_depth: nodes deeper than this do not exist.

    Returns:
        One entry for each pair of accepted tokens and next token of positive probability (and each carry, should it
        depend on more than those).
    """
    tables = LawTables.of(instance, context, tree.max_depth)
    drafts = all_drafts(tables, tree, max_depth)
    draft_laws, target_laws = rule_laws(tables, tree, drafts, max_depth)
    table = EmissionTable(instance.vocab_size)
    for start in range(0, len(drafts.probability), _DRAFTS_AT_ONCE):
        part = slice(start, start + _DRAFTS_AT_ONCE)
        count = len(drafts.probability[part])
        # A few sizes only, so that few programs are compiled.
        size = next(size for size in _BATCH_SIZES if size >= count)
        pad = [(0, size - count)]
        stop, next_log_law, log_prob, carries = _decide_all(rule, tree)(
            np.pad(drafts.tokens[part], [*pad, (0, 0)]),
            np.pad(draft_laws[part], [*pad, (0, 0), (0, 0)]),
            np.pad(target_laws[part], [*pad, (0, 0), (0, 0)]),
            np.int32(max_depth),
            carry,
        )
        weight = np.exp(np.asarray(log_prob)[:count]) * drafts.probability[part][:, None]
        mass = weight[..., None] * np.exp(np.asarray(next_log_law)[:count])
        codes = np.take_along_axis(drafts.codes[part], np.asarray(stop)[:count], axis=1)
        table.add(codes, mass, carries)
    return table.emissions()
