"""Exact law of one iteration of `spectr_gbv`: times integrated, laws and carries from the rule's own functions."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.testing.instances import Instance, Prefix
from specjax.types import DraftTree, Proposal
from specjax.verification.carry import apply_carry, log_path_ratio
from specjax.verification.emissions import Emission, EmissionTable
from specjax.verification.enumerate_drafts import LawTables
from specjax.verification.enumerate_times import NodeLaws, TimeLaw, integrate_below
from specjax.verification.multi_draft_block import MultiDraftBlockRule
from specjax.verification.spectr_gbv import SpectrGbvRule
from specjax.verification.trees import chain_table


@functools.cache
def _walk_paths(rule: SpectrGbvRule, tree: DraftTree):
    """Jitted: for every path of drafted tokens the laws, log Z, next laws and carries at each of its prefixes."""
    first = np.concatenate([[0], chain_table(tree, "spectr_gbv")[0]]).astype(np.int32)

    def one(tokens: Any, draft: Any, target: Any, max_depth: Any, carry: Any) -> Any:
        proposal = Proposal(tokens=tokens, draft_log_laws=draft, max_depth=max_depth, tree=tree)
        laws, levels = apply_carry(carry, proposal, target, len(tree.children[0]))
        log_z = log_path_ratio(proposal, laws, jnp.zeros((), target.dtype))

        def at(stop: Any) -> Any:
            step = functools.partial(rule.next_carry, carry, levels, proposal, target, log_z, stop)
            return rule.next_log_law(proposal, laws, log_z, stop), jax.vmap(step)(
                jnp.arange(target.shape[1], dtype=jnp.int32)
            )

        next_log_laws, carries = jax.vmap(at)(jnp.asarray(first))
        return laws[first], log_z[first], next_log_laws, carries

    return jax.jit(jax.vmap(one, in_axes=(0, 0, 0, None, None)))


def gbv_iteration(
    rule: SpectrGbvRule, tree: DraftTree, instance: Instance, context: Prefix, carry: Any, max_depth: int
) -> list[Emission]:
    """What one iteration emits after `context`, with exact probabilities. Call it under 64-bit JAX."""
    plain = LawTables.of(instance, context, tree.max_depth)
    if tree.num_nodes == 1:
        return [Emission((), y, float(mass), carry) for y, mass in enumerate(plain.target[0]) if mass > 0]
    num_drafts, length = chain_table(tree, "spectr_gbv").shape
    paths = np.asarray(list(itertools.product(range(instance.vocab_size), repeat=length)), np.int32)
    codes = np.zeros((len(paths), length + 1), np.int64)
    for depth in range(length):
        codes[:, depth + 1] = codes[:, depth] * instance.vocab_size + paths[:, depth] + 1

    # Every chain of a proposal carries the same path: what is computed on the first does not look at the others.
    depth_of = np.asarray(tree.depth)
    tokens = np.concatenate([np.zeros((len(paths), 1), np.int32), paths], axis=1)[:, depth_of]
    with np.errstate(divide="ignore"):
        target = np.log(plain.target)[codes[:, depth_of]]
        draft = np.log(plain.draft)[codes[:, depth_of[list(tree.internal)]]]
    laws, log_z, next_log_laws, carries = _walk_paths(rule, tree)(tokens, draft, target, np.int32(max_depth), carry)

    seen = np.zeros((len(plain.target), plain.target.shape[1]))
    seen[codes] = np.exp(np.asarray(laws))
    z_of = np.zeros(len(plain.target))
    z_of[codes] = np.exp(np.asarray(log_z))
    accepted = _accepted_mass(LawTables(seen, plain.draft), z_of, num_drafts, tree, max_depth)
    stop = accepted.copy()
    for code in range(1, len(stop)):
        stop[(code - 1) // instance.vocab_size] -= accepted[code]

    # A prefix's laws are taken from the first path through it that the draft can draw.
    drawable = np.exp(draft)[:, np.searchsorted(tree.internal, _first_internal(tree))]
    possible = np.take_along_axis(drawable, paths[:, :, None], axis=2)[:, :, 0] > 0
    weight = np.zeros(codes.shape)
    taken: set[int] = set()
    for row, position in np.ndindex(codes.shape):
        code = int(codes[row, position])
        if position <= max_depth and code not in taken and possible[row, :position].all() and accepted[code] > 0:
            taken.add(code)
            weight[row, position] = max(stop[code], 0.0)
    table = EmissionTable(instance.vocab_size)
    table.add(codes, weight[..., None] * np.exp(np.asarray(next_log_laws)), carries)
    return table.emissions()


def _first_internal(tree: DraftTree) -> list[int]:
    return [0, *chain_table(tree, "spectr_gbv")[0, :-1].tolist()]


def _accepted_mass(tables: LawTables, z_of: np.ndarray, num_drafts: int, tree: DraftTree, max_depth: int) -> np.ndarray:
    """P(prefix accepted) for every code: a chain's time there lies below the smallest root times of all others."""
    laws = NodeLaws(MultiDraftBlockRule("minimum"), tree, tables, max_depth)
    vocab_size = tables.target.shape[1]
    chain = chain_table(tree, "spectr_gbv")[0]
    root_time = laws.gap_filled_scores(0)[0] if max_depth > 0 else None
    accepted = np.zeros(len(tables.target))
    accepted[0] = 1.0
    drafted = np.zeros(len(tables.target))
    drafted[0] = 1.0
    level = [0]
    for depth in range(1, max_depth + 1):
        next_level = []
        for parent in level:
            for token in np.flatnonzero(tables.draft[parent]).tolist():
                code = parent * vocab_size + token + 1
                drafted[code] = drafted[parent] * tables.draft[parent, token]
                next_level.append(code)
                time = laws.node_law(int(chain[depth - 1]), code)
                if np.isfinite(z_of[code]) and root_time is not None:
                    scaled = TimeLaw(time.breaks * z_of[code], {(): time.total / z_of[code]})
                    mass = integrate_below(scaled, [root_time] * (num_drafts - 1))
                    accepted[code] = num_drafts * drafted[code] * mass
        level = next_level
    return accepted
