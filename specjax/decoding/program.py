"""The engine's jitted functions: prefill of one row, and the step that drafts, verifies and commits."""

from __future__ import annotations

import collections
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from specjax import verification
from specjax.decoding import laws as laws_lib
from specjax.decoding import state as state_lib
from specjax.decoding.state import EngineState, RowSettings
from specjax.decoding.stopping import count_until_stop
from specjax.drafters import base as drafter_base
from specjax.models import KVCache, ModelConfig, Params, commit_path, compute_logits, forward
from specjax.types import DRAW_DETERMINISTIC, DRAW_IID, DraftTree, Proposal, Verdict

# Columns of a step's output behind the committed tokens.
NUM_EXTRA_COLUMNS = 4


@dataclasses.dataclass(frozen=True)
class ProgramSpec:
    """Everything static about the jitted functions; programs are shared between engines of equal spec.

    Attributes:
        config: the target's configuration.
        tree: shape of every proposal; a single root is plain decoding.
        drafter: its configuration object, or None with a single root.
        verifiers: registered names of the rules that the step can verify with; a call chooses one.
        cache_length: most tokens of a row, prompt included.
        max_stop_ids: most stop tokens of a row.
        steps_per_call: most steps in one call; the call ends early when a row ends.
    """

    config: ModelConfig
    tree: DraftTree
    drafter: drafter_base.Drafter | None
    verifiers: tuple[str, ...]
    cache_length: int
    max_stop_ids: int
    steps_per_call: int = 1

    @property
    def num_slots_in_cache(self) -> int:
        """Slots of a row: the proposal behind the last committed token must fit, nodes that do not exist too."""
        return self.cache_length + self.tree.num_nodes


@dataclasses.dataclass(frozen=True)
class PromptSpec:
    """Everything static about prefilling: nothing of the proposals' shape, so that all draft lengths share it.

    Attributes:
        config: the target's configuration.
        drafter: its configuration object, or None.
        cache_length: most tokens of a row.
        max_stop_ids: most stop tokens of a row.
    """

    config: ModelConfig
    drafter: drafter_base.Drafter | None
    cache_length: int
    max_stop_ids: int

    @property
    def row_spec(self) -> ProgramSpec:
        """The program whose state, of one slot and without drafts, is a prefilled row."""
        draw = DRAW_DETERMINISTIC if self.drafter is not None and self.drafter.deterministic else DRAW_IID
        tree = DraftTree.chains(1, 0, draw)
        return ProgramSpec(self.config, tree, self.drafter, (), self.cache_length, self.max_stop_ids)


class PromptProgram:
    """Jitted functions that feed prompts.

    Attributes:
        spec: what they were built for.
        trace_counts: how often each function was traced, by name: one trace is one compilation.
        start: `(params, drafter_params, settings, tokens [1, T + 1], count [1]) -> row` makes a row and
            feeds `count` prompt tokens; column t + 1 is the token after column t.
        prefill: `(params, drafter_params, row, tokens, count) -> row` feeds more, donates the row.
    """

    def __init__(self, spec: PromptSpec) -> None:
        self.spec = spec
        self.trace_counts: collections.Counter[str] = collections.Counter()
        self.start = jax.jit(_counted(self.trace_counts, "start", functools.partial(_start, spec.row_spec)))
        prefill = _counted(self.trace_counts, "prefill", functools.partial(_prefill, spec.row_spec))
        self.prefill = jax.jit(prefill, donate_argnums=2)


class Program:
    """Jitted functions of one `ProgramSpec`.

    Attributes:
        spec: what they were built for.
        trace_counts: how often each function was traced, by name: one trace is one compilation.
        prompts: the functions that make rows, shared with programs of other trees and rules.
        empty: `(batch, dtype) -> state` of empty slots.
        insert: `(state, row, slot) -> state` puts a prefilled row into a slot, donates the state.
        step: `(params, drafter_params, state, rule=0) -> (state, outputs [n, B, D + 4] int32)`, donates the state;
            `rule` is the place of a verifier in the spec. Columns: committed tokens padded with -1, then how many
            were committed, drafted and accepted, and the row's status.
    """

    def __init__(self, spec: ProgramSpec) -> None:
        self.spec = spec
        self.trace_counts: collections.Counter[str] = collections.Counter()
        self.prompts = get_prompt_program(PromptSpec(spec.config, spec.drafter, spec.cache_length, spec.max_stop_ids))
        counted = functools.partial(_counted, self.trace_counts)
        self.empty = jax.jit(counted("empty", functools.partial(init_state, spec)), static_argnums=(0, 1))
        self.insert = jax.jit(counted("insert", functools.partial(_insert, spec)), donate_argnums=0)
        self.step = jax.jit(counted("step", functools.partial(_steps, spec)), donate_argnums=2)


def _counted(counts: collections.Counter[str], name: str, function: Any) -> Any:
    def traced(*args: Any) -> Any:
        counts[name] += 1
        return function(*args)

    traced.__name__ = name
    return traced


@functools.lru_cache(maxsize=32)
def get_program(spec: ProgramSpec) -> Program:
    """The functions for `spec`, made once."""
    return Program(spec)


@functools.lru_cache(maxsize=32)
def get_prompt_program(spec: PromptSpec) -> PromptProgram:
    """The functions for `spec`, made once."""
    return PromptProgram(spec)


def init_state(spec: ProgramSpec, batch: int, dtype: Any, settings: RowSettings | None = None) -> EngineState:
    """Empty slots, or with `settings` one running row without tokens.

    Args:
        spec: sizes.
        batch: slots B; 1 with `settings`.
        dtype: of the cache.
        settings: what the row's request asks for.

    Returns:
        The state.

    Raises:
        ValueError: if the drafter cannot serve this length or tree.
    """
    done = jnp.full(batch, settings is None)
    if settings is None:
        settings = state_lib.RowSettings(
            remaining=jnp.zeros(batch, jnp.int32),
            draft_length=jnp.zeros(batch, jnp.int32),
            stop_ids=jnp.full((batch, spec.max_stop_ids), state_lib.NO_TOKEN, jnp.int32),
            seed=jnp.zeros(batch, jnp.uint32),
            **vars(laws_lib.LawParams.greedy(batch)),
        )
    slots = spec.num_slots_in_cache
    return EngineState(
        cache=KVCache.zeros(spec.config, batch, slots, dtype),
        drafter_state=() if spec.drafter is None else spec.drafter.init_state(batch, slots, spec.tree),
        carry=_fresh_carry(spec, batch),
        last_token=jnp.zeros(batch, jnp.int32),
        length=jnp.zeros(batch, jnp.int32),
        remaining=settings.remaining,
        draft_length=settings.draft_length,
        stop_ids=settings.stop_ids,
        laws=laws_lib.LawParams(settings.temperature, settings.top_k, settings.top_p, settings.min_p),
        seed=settings.seed,
        done=done,
    )


def _fresh_carry(spec: ProgramSpec, batch: int) -> tuple[Any, ...]:
    rules = map(verification.get_verifier, spec.verifiers)
    carry = tuple(rule.init_carry(spec.tree, spec.config.vocab_size) for rule in rules)
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (batch, *jnp.shape(leaf))), carry)


def _insert(spec: ProgramSpec, state: EngineState, row: EngineState, slot: Int[Array, ""]) -> EngineState:
    row = row.replace(carry=_fresh_carry(spec, 1))  # pyright: ignore[reportAttributeAccessIssue]
    return state_lib.insert_row(state, row, slot)


def _start(
    spec: ProgramSpec,
    params: Params,
    drafter_params: Any,
    settings: RowSettings,
    tokens: Int[Array, "1 columns"],
    count: Int[Array, "1"],
) -> EngineState:
    row = init_state(spec, 1, params["embed_tokens"].dtype, settings)
    if spec.drafter is not None:
        drafter_state = drafter_base.begin(spec.drafter, drafter_params, row.drafter_state, tokens[:, 0])
        row = row.replace(drafter_state=drafter_state)  # pyright: ignore[reportAttributeAccessIssue]
    return _prefill(spec, params, drafter_params, row, tokens, count)


def _prefill(
    spec: ProgramSpec,
    params: Params,
    drafter_params: Any,
    row: EngineState,
    tokens: Int[Array, "1 columns"],
    count: Int[Array, "1"],
) -> EngineState:
    inputs, following = tokens[:, :-1], tokens[:, 1:]
    output = forward(params, spec.config, inputs, row.cache, row.length, feature_layers=_feature_layers(spec))
    drafter_state = row.drafter_state
    if spec.drafter is not None:
        drafter_state = spec.drafter.extend(
            drafter_params, drafter_state, tokens=following, features=output.features, count=count
        )
    return row.replace(  # pyright: ignore[reportAttributeAccessIssue]
        cache=output.cache,
        drafter_state=drafter_state,
        last_token=jnp.take_along_axis(tokens, count[:, None], axis=1)[:, 0],
        length=row.length + count,
    )


def _steps(
    spec: ProgramSpec, params: Params, drafter_params: Any, state: EngineState, rule: Int[Array, ""] | int = 0
) -> tuple[EngineState, Int[Array, "calls batch columns"]]:
    if spec.steps_per_call == 1:
        state, output = _step(spec, params, drafter_params, state, rule)
        return state, output[None]
    shape = (spec.steps_per_call, state.done.shape[0], spec.tree.max_depth + 1 + NUM_EXTRA_COLUMNS)
    done_before = state.done

    def body(carry: tuple[Array, EngineState, Array]) -> tuple[Array, EngineState, Array]:
        index, state, outputs = carry
        state, output = _step(spec, params, drafter_params, state, rule)
        return index + 1, state, outputs.at[index].set(output)

    def goes_on(carry: tuple[Array, EngineState, Array]) -> Array:
        index, state, _ = carry
        # A row that ends gives its slot back, so the host must see it.
        unchanged = jnp.all(state.done == done_before)
        return (index < spec.steps_per_call) & unchanged & ~jnp.all(state.done)

    # Calls that are not made stay zero: nothing committed.
    start = (jnp.int32(0), state, jnp.zeros(shape, jnp.int32))
    _, state, outputs = jax.lax.while_loop(goes_on, body, start)
    return state, outputs


def _step(
    spec: ProgramSpec, params: Params, drafter_params: Any, state: EngineState, rule: Int[Array, ""] | int
) -> tuple[EngineState, Int[Array, "batch columns"]]:
    """One target call for every slot; finished slots compute along and commit nothing."""
    tree = spec.tree
    batch = state.done.shape[0]
    draft_keys, verify_keys = _row_keys(state)
    room = jnp.minimum(state.remaining, spec.cache_length - 1 - state.length)
    # Drafts that could not be committed do not exist: a full acceptance brings one token more.
    max_depth = jnp.clip(jnp.minimum(state.draft_length, room - 1), 0, tree.max_depth)
    max_depth = jnp.where(state.done, 0, max_depth)

    proposal, drafter_state = _propose(spec, draft_keys, drafter_params, state, max_depth)
    is_chain = tree.parent == tuple(range(-1, tree.num_nodes - 1))
    output = forward(
        params,
        spec.config,
        proposal.tokens,
        state.cache,
        state.length,
        tree_mask=None if is_chain else tree.ancestor_mask,
        depth=None if is_chain else np.asarray(tree.depth, np.int32),
        feature_layers=_feature_layers(spec),
    )
    logits = compute_logits(params, spec.config, output.hidden)
    verdict = _verify(spec, rule, verify_keys, proposal, laws_lib.to_log_laws(logits, state.laws), state.carry)

    path = jnp.where(verdict.path < 0, 0, verdict.path)
    accepted = jnp.take_along_axis(proposal.tokens, path, axis=1)
    steps = jnp.arange(tree.max_depth + 1, dtype=jnp.int32)
    # Token i of the commit is the one after node `path[i]`.
    shifted = jnp.pad(accepted[:, 1:], ((0, 0), (0, 1)))
    committed = jnp.where(steps == verdict.num_accepted[:, None], verdict.next_token[:, None], shifted)
    committed = committed.astype(jnp.int32)

    on_path = steps <= verdict.num_accepted[:, None]
    usable = jnp.take_along_axis(laws_lib.finite_logits(logits), path, axis=1)
    broken = jnp.any(on_path & ~usable, axis=1)
    count = jnp.minimum(verdict.num_accepted.astype(jnp.int32) + 1, room)
    count, stopped = count_until_stop(committed, count, state.stop_ids)
    count = jnp.where(state.done | broken, 0, count)
    remaining, length = state.remaining - count, state.length + count

    status = jnp.full(batch, state_lib.RUNNING, jnp.int32)
    status = jnp.where(length + 1 >= spec.cache_length, state_lib.OUT_OF_CONTEXT, status)
    status = jnp.where(remaining <= 0, state_lib.OUT_OF_LENGTH, status)
    status = jnp.where(stopped, state_lib.STOPPED, status)
    status = jnp.where(broken, state_lib.NOT_FINITE, status)

    if spec.drafter is not None:
        features = output.features
        if not is_chain:
            features = jnp.take_along_axis(features, path[..., None], axis=1)
        drafter_state = spec.drafter.extend(
            drafter_params, drafter_state, tokens=committed, features=features, count=count
        )
    last = jnp.take_along_axis(committed, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
    new_state = state.replace(  # pyright: ignore[reportAttributeAccessIssue]
        cache=commit_path(output.cache, state.length, verdict.path, tree=tree),
        drafter_state=drafter_state,
        carry=verdict.carry,
        last_token=jnp.where(count > 0, last, state.last_token),
        length=length,
        remaining=remaining,
        done=state.done | (status != state_lib.RUNNING),
    )
    columns = (count, jnp.minimum(proposal.max_depth, tree.max_depth), verdict.num_accepted, status)
    outputs = jnp.concatenate(
        (
            jnp.where(steps < count[:, None], committed, state_lib.NO_TOKEN),
            jnp.stack([column.astype(jnp.int32) for column in columns], axis=1),
        ),
        axis=1,
    )
    return new_state, outputs


def _row_keys(state: EngineState) -> tuple[Array, Array]:
    """Keys of this step, for drafting and for verifying, from (seed, position) alone."""

    def row_keys(seed: Array, position: Array) -> Array:
        return jax.random.split(jax.random.fold_in(jax.random.key(seed), position))

    keys = jax.vmap(row_keys)(state.seed, state.length)
    return keys[:, 0], keys[:, 1]


def _propose(
    spec: ProgramSpec, rng_keys: Array, drafter_params: Any, state: EngineState, max_depth: Array
) -> tuple[Proposal, Any]:
    if spec.drafter is None or spec.tree.num_nodes == 1:
        return drafter_base.empty_proposal(state.last_token, spec.tree, spec.config.vocab_size), state.drafter_state
    proposal, drafter_state = spec.drafter.propose(
        rng_keys,
        drafter_params,
        state.drafter_state,
        last_token=state.last_token,
        tree=spec.tree,
        max_depth=max_depth,
        to_laws=lambda logits: laws_lib.to_log_laws(logits, state.laws),
    )
    depth = jnp.minimum(proposal.max_depth, max_depth)
    return proposal.replace(max_depth=depth), drafter_state  # pyright: ignore[reportAttributeAccessIssue]


def _verify(
    spec: ProgramSpec,
    rule: Int[Array, ""] | int,
    rng_keys: Array,
    proposal: Proposal,
    laws: Array,
    carries: tuple[Any, ...],
) -> Verdict:
    """Verifies with one rule; its own carry moves on, those of the others stay."""

    def verify(place: int, carries: tuple[Any, ...]) -> Verdict:
        verifier = verification.get_verifier(spec.verifiers[place])
        verdict = jax.vmap(verifier.verify)(rng_keys, proposal, laws, carries[place])
        moved = (*carries[:place], verdict.carry, *carries[place + 1 :])
        return verdict.replace(carry=moved)  # pyright: ignore[reportAttributeAccessIssue]

    branches = [functools.partial(verify, place) for place in range(len(spec.verifiers))]
    return branches[0](carries) if len(branches) == 1 else jax.lax.switch(rule, branches, carries)


def _feature_layers(spec: ProgramSpec) -> tuple[int, ...]:
    return () if spec.drafter is None else tuple(spec.drafter.feature_layers)
