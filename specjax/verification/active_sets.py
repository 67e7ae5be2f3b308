"""The walk of rules that go down a tree token by token and keep every draft that agrees with the tokens emitted so far.

`spectr` and `recursive_rejection` share it: at each depth the *active* nodes all spell the same prefix; their children
are the candidates; a one-step rule accepts one of them or rejects all; the children with the accepted token become
active. The suffixes of drafts that share a prefix are still independent, so every step is a fresh one-step problem.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from specjax.types import DRAW_WITHOUT_REPLACEMENT, NO_NODE, Proposal
from specjax.verification.base import Choose, Outcome
from specjax.verification.trees import depth_table, draft_row


@flax.struct.dataclass
class Candidates:
    """The drafted continuations of one prefix.

    Attributes:
        tokens: their tokens, [W].
        active: which of the W places hold a candidate, [W].
        new_group: place starts the children of another node than the place before, [W].
        distinct: the place was drawn without replacement among the children of its node, [W].
        target_log_law: the target's law after the prefix, [V].
        draft_log_law: the law the candidates were drawn from, [V].
    """

    tokens: Int[Array, " width"]
    active: Bool[Array, " width"]
    new_group: Bool[Array, " width"]
    distinct: Bool[Array, " width"]
    target_log_law: Float[Array, " vocab"]
    draft_log_law: Float[Array, " vocab"]


@flax.struct.dataclass
class StepLaw:
    """A one-step rule's answer.

    Attributes:
        log_choice_law: log-probability of accepting each place, then of rejecting all, [W+1].
        rejection: what the rule needs to give the residual law when all are rejected; a pytree.
    """

    log_choice_law: Float[Array, " choices"]
    rejection: Any


@flax.struct.dataclass
class _Walk:
    active: Bool[Array, " nodes"]
    node: Int[Array, ""]
    stopped: Bool[Array, ""]
    rejected: Bool[Array, ""]
    rejection: Any
    log_prob: Float[Array, ""]


def walk_active_sets(
    choose: Choose,
    proposal: Proposal,
    target_log_laws: Array,
    step_law: Callable[[Candidates], StepLaw],
    residual_log_law: Callable[[Any, Array, Array], Array],
    no_rejection: Any,
) -> Outcome:
    """Goes down the tree until all candidates are rejected or none is left.

    Args:
        choose: draws the accepted place at each depth; the site is the depth of the node that branches.
        proposal: any tree with i.i.d. siblings (or others that `step_law` knows).
        target_log_laws: [N+1, V].
        step_law: the one-step rule.
        residual_log_law: the normalised law of the next token when all are rejected, [V], from the step's `rejection`
            and the log laws of target and draft there; asked for once, since the row is long.
        no_rejection: any `rejection`, to start with.

    Returns:
        The outcome; the stop node is the first active node, in order, at the last emitted prefix.
    """
    tree = proposal.tree
    levels = depth_table(tree)
    parents = np.asarray(tree.parent)[levels]
    new_group = np.ones_like(levels, bool)
    new_group[:, 1:] = parents[:, 1:] != parents[:, :-1]
    distinct = np.asarray([draw == DRAW_WITHOUT_REPLACEMENT for draw in tree.draws])[parents]
    width = levels.shape[1]

    def step(walk: _Walk, level: tuple[Array, ...]) -> tuple[_Walk, None]:
        depth, nodes, parent, starts, is_distinct = level
        present = (nodes != NO_NODE) & walk.active[parent] & (depth < proposal.max_depth) & ~walk.stopped
        tokens = proposal.tokens[nodes]
        rows = target_log_laws[walk.node], draft_row(proposal, walk.node)
        law = step_law(Candidates(tokens, present, starts, is_distinct, *rows))
        nothing_left = ~jnp.any(present)
        reject = jnp.arange(width + 1, dtype=jnp.int32) == width
        log_choice_law = jnp.where(nothing_left, jnp.where(reject, 0, -jnp.inf), law.log_choice_law)
        choice, log_prob = choose(depth, log_choice_law.astype(target_log_laws.dtype))
        accepted = choice < width
        follows = present & (tokens == tokens[jnp.minimum(choice, width - 1)]) & accepted
        # Padding places scatter out of range and are dropped.
        places = jnp.where(follows, nodes, tree.num_nodes)
        active = jnp.zeros_like(walk.active).at[places].set(True, mode="drop")
        node = jnp.where(jnp.any(follows), jnp.min(places), walk.node)
        rejects_all = ~accepted & ~nothing_left
        rejection = jax.tree.map(partial(jnp.where, rejects_all), law.rejection, walk.rejection)
        walk = _Walk(
            active=active,
            node=node,
            stopped=walk.stopped | ~accepted,
            rejected=walk.rejected | rejects_all,
            rejection=rejection,
            log_prob=walk.log_prob + log_prob,
        )
        return walk, None

    if tree.num_nodes == 1:
        return Outcome(jnp.int32(0), target_log_laws[0], jnp.zeros((), target_log_laws.dtype))
    depths = jnp.arange(tree.max_depth, dtype=jnp.int32)
    tables = tuple(jnp.asarray(table) for table in (levels, parents, new_group, distinct))
    start = _Walk(
        active=jnp.arange(tree.num_nodes, dtype=jnp.int32) == 0,
        node=jnp.int32(0),
        stopped=jnp.bool_(False),
        rejected=jnp.bool_(False),
        rejection=no_rejection,
        log_prob=jnp.zeros((), target_log_laws.dtype),
    )
    end, _ = jax.lax.scan(step, start, (depths, *tables))
    target_row = target_log_laws[end.node]
    residual = residual_log_law(end.rejection, target_row, draft_row(proposal, end.node))
    return Outcome(end.node, jnp.where(end.rejected, residual, target_row), end.log_prob)
