"""A decoding step cut into parts that are timed one by one, in the order and on the data of real decoding.

The engine runs a step as one program, in which parts cannot be told apart. Here the same parts are programs of their
own and take turns as in the engine: each finds the processor's caches as the part before it left them, which a loop
over one part alone would not. What one program saves over several shows in the difference to the engine's own step.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from eval.timing import Timing
from specjax.decoding import LawParams, to_log_laws
from specjax.drafters.base import begin, empty_proposal
from specjax.models import KVCache, ModelConfig, compute_logits, forward
from specjax.types import DRAW_DETERMINISTIC, DRAW_IID, DraftTree, Proposal
from specjax.verification import get_verifier

PROPOSE = "propose"
TARGET = "target"
DECIDE = "decide"
EXTEND = "extend"

# The first steps compile.
WARMUP_STEPS = 2


@flax.struct.dataclass
class StepState:
    """What passes from step to step; every row decodes the same prompt with its own key.

    Attributes:
        cache: the target's keys and values.
        drafter_state: the drafter's memory; () for plain decoding.
        last_token: last committed token, [B].
        length: committed tokens in the cache, [B].
        rng_keys: one key a row, [B].
    """

    cache: KVCache
    drafter_state: Any
    last_token: jax.Array
    length: jax.Array
    rng_keys: jax.Array


@dataclasses.dataclass(frozen=True)
class StepParts:
    """The four parts of a step as jitted functions; static sizes only, so that equal sizes share compiled code.

    Attributes:
        config: the target's.
        drafter: its configuration object, or None for plain decoding.
        draft_length: L.
        verifier: name of the rule.
    """

    config: ModelConfig
    drafter: Any
    draft_length: int
    verifier: str = "token"

    @property
    def tree(self) -> DraftTree:
        """One chain of L drafts."""
        deterministic = self.drafter is not None and self.drafter.deterministic
        return DraftTree.chains(1, self.draft_length, DRAW_DETERMINISTIC if deterministic else DRAW_IID)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Target layers that the drafter reads."""
        return () if self.drafter is None else tuple(self.drafter.feature_layers)

    def start(
        self, params: Any, drafter_params: Any, prompt_ids: Sequence[int], batch: int, cache_length: int
    ) -> StepState:
        """Prefills one prompt into all rows."""
        tokens = jnp.broadcast_to(jnp.asarray(prompt_ids, jnp.int32), (batch, len(prompt_ids)))
        slots = cache_length + self.tree.num_nodes
        cache = KVCache.zeros(self.config, batch, slots, params["embed_tokens"].dtype)
        state = () if self.drafter is None else self.drafter.init_state(batch, slots, self.tree)
        cache, state = _prefill(self, params, drafter_params, cache, state, tokens)
        return StepState(
            cache=cache,
            drafter_state=state,
            last_token=tokens[:, -1],
            length=jnp.full(batch, len(prompt_ids) - 1, jnp.int32),
            rng_keys=jax.random.split(jax.random.key(0), batch),
        )

    @property
    def propose(self) -> Callable[..., tuple[Proposal, Any]]:
        """(drafter params, drafter state, keys, last token, laws) to (proposal, state); donates the state."""
        return _propose(self.drafter, self.tree, self.config.vocab_size)

    @property
    def verify_forward(self) -> Callable[..., tuple[jax.Array, jax.Array, KVCache]]:
        """(params, cache, tokens, length) to (logits, features, cache); donates the cache."""
        return _target_forward(self.config, self.feature_layers)

    @property
    def decide(self) -> Callable[..., tuple[jax.Array, jax.Array, jax.Array, jax.Array]]:
        """(keys, proposal, logits, laws, length) to (committed, count, last token, length)."""
        return _decide(self.verifier, self.tree)

    @property
    def extend(self) -> Callable[..., Any]:
        """(drafter params, drafter state, committed, features, count) to the state; donates it."""
        return _extend(self.drafter)


class StepClock:
    """Decodes one prompt step by step with a clock around each part.

    Several clocks that take turns see the same moments of the machine, so that their parts can be compared.
    """

    def __init__(
        self,
        parts: StepParts,
        params: Any,
        drafter_params: Any,
        prompt_ids: Sequence[int],
        *,
        num_steps: int,
        batch: int = 1,
        cache_length: int,
        temperature: float = 0.0,
        rivals: Mapping[str, tuple[Any, Any]] | None = None,
    ) -> None:
        """Prefills the prompt.

        Args:
            parts: the step.
            params: the target's.
            drafter_params: the drafter's; anything for plain decoding.
            prompt_ids: at least two tokens.
            num_steps: steps that count; `WARMUP_STEPS` more come before them.
            batch: rows.
            cache_length: slots; at least the prompt and all steps.
            temperature: of sampling.
            rivals: other drafters of the same state (another head, say) by name, as (drafter, parameters): each
                proposes in every step as well, right after a target forward of its own, and its drafts are thrown away.

        Raises:
            ValueError: if the prompt or the steps do not fit.
        """
        needed = len(prompt_ids) + (num_steps + WARMUP_STEPS) * (parts.draft_length + 1)
        if len(prompt_ids) < 2:
            raise ValueError(f"`prompt_ids` must hold at least two tokens; got {len(prompt_ids)}")
        if needed > cache_length:
            raise ValueError(f"`cache_length` must be at least {needed} for these steps; got {cache_length}")
        self._parts, self._params, self._drafter_params = parts, params, drafter_params
        temperatures = jnp.full(batch, temperature, jnp.float32)
        self._laws = dataclasses.replace(LawParams.greedy(batch), temperature=temperatures)
        self._rivals = {
            name: (_propose(drafter, parts.tree, parts.config.vocab_size), other_params)
            for name, (drafter, other_params) in (rivals or {}).items()
        }
        self._state = parts.start(params, drafter_params, prompt_ids, batch, cache_length)
        self._proposal = empty_proposal(self._state.last_token, parts.tree, parts.config.vocab_size)
        self._samples: dict[str, list[float]] = {}

    @property
    def timings(self) -> dict[str, Timing]:
        """Timings of "propose", "target", "decide", "extend" and of each rival's proposal, without the first steps."""
        return {name: Timing(tuple(values[WARMUP_STEPS:])) for name, values in self._samples.items()}

    def step(self) -> None:
        """Decodes one step."""
        parts, params, laws, state, proposal = self._parts, self._params, self._laws, self._state, self._proposal
        drafter_state, cache = state.drafter_state, state.cache
        draft_keys, verify_keys = _split(state.rng_keys, state.length)
        if parts.draft_length:
            for name, (function, other_params) in self._rivals.items():
                # Weights that a proposal reads must not still lie in the cache from the proposal before.
                _, _, cache = jax.block_until_ready(parts.verify_forward(params, cache, proposal.tokens, state.length))
                _, drafter_state = self._timed(
                    name, function, other_params, drafter_state, draft_keys, state.last_token, laws
                )
            if self._rivals:
                _, _, cache = jax.block_until_ready(parts.verify_forward(params, cache, proposal.tokens, state.length))
            proposal, drafter_state = self._timed(
                PROPOSE, parts.propose, self._drafter_params, drafter_state, draft_keys, state.last_token, laws
            )
        else:
            proposal = empty_proposal(state.last_token, parts.tree, parts.config.vocab_size)
        logits, features, cache = self._timed(
            TARGET, parts.verify_forward, params, cache, proposal.tokens, state.length
        )
        committed, count, last, length = self._timed(
            DECIDE, parts.decide, verify_keys, proposal, logits, laws, state.length
        )
        if parts.draft_length:
            drafter_state = self._timed(
                EXTEND, parts.extend, self._drafter_params, drafter_state, committed, features, count
            )
        self._state, self._proposal = StepState(cache, drafter_state, last, length, state.rng_keys), proposal

    def _timed(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        start = time.perf_counter()
        result = jax.block_until_ready(function(*arguments))
        self._samples.setdefault(name, []).append(time.perf_counter() - start)
        return result


def time_steps(
    parts: StepParts, params: Any, drafter_params: Any, prompt_ids: Sequence[int], *, num_steps: int, **options: Any
) -> dict[str, Timing]:
    """Timings of the parts of `num_steps` steps; all arguments are those of `StepClock`."""
    clock = StepClock(parts, params, drafter_params, prompt_ids, num_steps=num_steps, **options)
    for _ in range(num_steps + WARMUP_STEPS):
        clock.step()
    return clock.timings


@functools.partial(jax.jit, static_argnums=0)
def _prefill(
    parts: StepParts, params: Any, drafter_params: Any, cache: KVCache, state: Any, tokens: jax.Array
) -> tuple[KVCache, Any]:
    batch, count = tokens.shape[0], tokens.shape[1] - 1
    start = jnp.zeros(batch, jnp.int32)
    output = forward(params, parts.config, tokens[:, :-1], cache, start, feature_layers=parts.feature_layers)
    if parts.drafter is not None:
        state = begin(parts.drafter, drafter_params, state, tokens[:, 0])
        counts = jnp.full(batch, count, jnp.int32)
        state = parts.drafter.extend(
            drafter_params, state, tokens=tokens[:, 1:], features=output.features, count=counts
        )
    return output.cache, state


@jax.jit
def _split(rng_keys: jax.Array, length: jax.Array) -> tuple[jax.Array, jax.Array]:
    keys = jax.vmap(lambda key, position: jax.random.split(jax.random.fold_in(key, position)))(rng_keys, length)
    return keys[:, 0], keys[:, 1]


@functools.lru_cache(maxsize=64)
def _propose(drafter: Any, tree: DraftTree, vocab_size: int) -> Callable[..., tuple[Proposal, Any]]:
    del vocab_size

    def propose(params: Any, state: Any, rng_keys: Any, last_token: Any, laws: LawParams) -> tuple[Proposal, Any]:
        return drafter.propose(
            rng_keys,
            params,
            state,
            last_token=last_token,
            tree=tree,
            max_depth=jnp.full(last_token.shape, tree.max_depth, jnp.int32),
            to_laws=lambda logits: to_log_laws(logits, laws),
        )

    return jax.jit(propose, donate_argnums=1)


@functools.lru_cache(maxsize=64)
def _target_forward(config: ModelConfig, feature_layers: tuple[int, ...]) -> Callable[..., Any]:
    def target_forward(params: Any, cache: KVCache, tokens: Any, length: Any) -> tuple[Any, Any, KVCache]:
        output = forward(params, config, tokens, cache, length, feature_layers=feature_layers)
        return compute_logits(params, config, output.hidden), output.features, output.cache

    return jax.jit(target_forward, donate_argnums=1)


@functools.lru_cache(maxsize=64)
def _decide(verifier: str, tree: DraftTree) -> Callable[..., Any]:
    rule = get_verifier(verifier)

    def decide(rng_keys: Any, proposal: Proposal, logits: Any, laws: LawParams, length: Any) -> tuple[Any, ...]:
        carry = rule.init_carry(tree, logits.shape[-1])
        batched = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (logits.shape[0], *jnp.shape(leaf))), carry)
        verdict = jax.vmap(rule.verify)(rng_keys, proposal, to_log_laws(logits, laws), batched)
        path = jnp.where(verdict.path < 0, 0, verdict.path)
        drafts = jnp.pad(jnp.take_along_axis(proposal.tokens, path, axis=1)[:, 1:], ((0, 0), (0, 1)))
        places = np.arange(tree.max_depth + 1)
        committed = jnp.where(places == verdict.num_accepted[:, None], verdict.next_token[:, None], drafts)
        count = verdict.num_accepted.astype(jnp.int32) + 1
        return committed.astype(jnp.int32), count, verdict.next_token.astype(jnp.int32), length + count

    return jax.jit(decide)


@functools.lru_cache(maxsize=64)
def _extend(drafter: Any) -> Callable[..., Any]:
    def extend(params: Any, state: Any, committed: Any, features: Any, count: Any) -> Any:
        return drafter.extend(params, state, tokens=committed, features=features, count=count)

    return jax.jit(extend, donate_argnums=1)
