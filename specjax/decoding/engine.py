"""One engine for plain and speculative decoding: a jitted step on the device, bookkeeping on the host."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from specjax import verification
from specjax.decoding import program as program_lib
from specjax.decoding import state as state_lib
from specjax.decoding.request import Completion, Request, StreamEvent
from specjax.decoding.scheduler import Limits, RunningRequest
from specjax.drafters import base as drafter_base
from specjax.drafters.base import Drafter
from specjax.models import ModelConfig
from specjax.types import DRAW_DETERMINISTIC, DRAW_IID, DraftTree

OnTokens = Callable[[str, list[int], str], None]
"""Called with a request's id, its newly committed tokens and the text that became certain."""


@runtime_checkable
class DecodingTarget(Protocol):
    """What the engine needs of a target: configuration, parameters and, for text, a tokenizer (or None)."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def params(self) -> Any: ...
    @property
    def tokenizer(self) -> Any: ...


@dataclasses.dataclass
class RunStatistics:
    """Where the time of one run went, in seconds.

    Attributes:
        num_calls: calls of the step function.
        prefill_seconds: feeding prompts.
        step_seconds: from starting a step to having its outputs; with `overlap`, waiting for outputs.
        host_seconds: bookkeeping between steps, text and stop strings included, the caller's own excluded.
    """

    num_calls: int = 0
    prefill_seconds: float = 0.0
    step_seconds: float = 0.0
    host_seconds: float = 0.0


class Engine:
    """Decodes requests in batches; every row has its own length, limits, seed, law, stop set and draft length.

    A request's output is a function of its prompt, parameters and seed: neighbours, batch size and the order
    of requests do not enter. At temperature 0 in float32 speculative output equals plain decoding.

    The engine compiles one step for its sizes, and one prefill for each prompt length rounded up to a power
    of two. Engines of equal sizes share the compiled functions; those that differ in draft length, number of drafts
    or rule still share the prefill.

    Attributes:
        last_run: where the time of the latest `generate` or `stream` went.
    """

    def __init__(
        self,
        target: DecodingTarget,
        drafter: Drafter | None = None,
        drafter_params: Any = None,
        *,
        num_slots: int = 1,
        cache_length: int,
        draft_length: int = 4,
        num_drafts: int = 1,
        verifier: str = "token",
        shared_verifiers: Sequence[str] = (),
        max_stop_ids: int = 8,
        prefill_chunk: int = 512,
        prefill_padding: int = 16,
        keep_prefills: bool = False,
        steps_per_call: int = 1,
        overlap: bool = False,
    ) -> None:
        """Checks that the parts fit; nothing is compiled before the first request.

        Args:
            target: the model whose law the output follows.
            drafter: proposes tokens; None is plain decoding.
            drafter_params: its parameters.
            num_slots: requests decoded at the same time.
            cache_length: most tokens of a request, prompt included; at most the target's context.
            draft_length: most drafted tokens in a row (L), below `cache_length`; 0 is plain decoding. Without a
                drafter it is 0.
            num_drafts: independent drafts a step (K).
            verifier: registered name of the acceptance rule.
            shared_verifiers: rules to compile into one step, `verifier` among them: comparing rules then compiles
                once. Engines of equal sizes that name the same rules share it, and the property `verifier` may be set
                to any of them between runs.
            max_stop_ids: most stop tokens of a request.
            prefill_chunk: longest piece of a prompt that is fed at once, in tokens.
            prefill_padding: shorter pieces are padded to this length, longer ones to the next power of two times it:
                each length is compiled once.
            keep_prefills: keeps what prefilling a prompt gave, in as much memory as a slot takes, for measurements that
                ask the same prompts again and again.
            steps_per_call: steps made on the device before the host looks, for throughput: tokens then
                arrive in larger portions. A row that ends returns to the host at once, except for stop
                strings, which the host finds.
            overlap: starts the next step before reading the one before, so that host work is hidden; a slot
                is then refilled one step later.

        Raises:
            ValueError: naming the field, the rule and the value.
        """
        for name, value, lowest in (
            ("num_slots", num_slots, 1),
            ("cache_length", cache_length, 1),
            ("draft_length", draft_length, 0),
            ("num_drafts", num_drafts, 1),
            ("max_stop_ids", max_stop_ids, 1),
            ("prefill_chunk", prefill_chunk, 1),
            ("prefill_padding", prefill_padding, 1),
            ("steps_per_call", steps_per_call, 1),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
                raise ValueError(f"`{name}` must be an integer of at least {lowest}; got {value!r}")
        config = target.config
        if cache_length > config.max_position_embeddings:
            raise ValueError(
                f"`cache_length` must be at most the target's context of {config.max_position_embeddings} tokens; "
                f"got {cache_length}"
            )
        if drafter is None or draft_length == 0:
            drafter, drafter_params, draft_length, num_drafts = None, None, 0, 1
        # Longer drafts never fit behind a prompt, and the tree of very long ones takes minutes to compile.
        if draft_length >= cache_length:
            raise ValueError(f"`draft_length` must be below `cache_length` ({cache_length}); got {draft_length}")
        tree = _make_tree(drafter, num_drafts, draft_length)
        verifiers = tuple(shared_verifiers) or (verifier,)
        if verifier not in verifiers:
            raise ValueError(f"`shared_verifiers` must hold the engine's own rule {verifier!r}; got {list(verifiers)}")
        for name in verifiers:
            _check_verifier(name, tree, drafter)
        self._target = target
        self._drafter_params = None if drafter is None else drafter_base.prepare(drafter, drafter_params)
        self._num_slots = num_slots
        self._prefill_chunk = prefill_chunk
        self._prefill_padding = prefill_padding
        self._overlap = overlap
        self._limits = Limits(config, cache_length, draft_length, max_stop_ids, target.tokenizer is not None)
        spec = program_lib.ProgramSpec(
            config=config,
            tree=tree,
            drafter=drafter,
            verifiers=verifiers,
            cache_length=cache_length,
            max_stop_ids=max_stop_ids,
            steps_per_call=steps_per_call,
        )
        self._program = program_lib.get_program(spec)
        self._verifier = verifier
        self._prefills: dict[tuple[int, ...], state_lib.EngineState] | None = {} if keep_prefills else None
        # A drafter that cannot hold the context says so now and not in the middle of a run.
        jax.eval_shape(lambda: jax.tree.leaves(program_lib.init_state(spec, num_slots, self._dtype)))
        self._state: state_lib.EngineState | None = None
        self.last_run = RunStatistics()

    @property
    def tree(self) -> DraftTree:
        """Shape of every proposal."""
        return self._program.spec.tree

    @property
    def verifier(self) -> str:
        """Rule of the next run; may be set to any of the rules that share the step.

        Raises:
            ValueError: if the rule is none of them.
        """
        return self._verifier

    @verifier.setter
    def verifier(self, name: str) -> None:
        rules = self._program.spec.verifiers
        if name not in rules:
            raise ValueError(f"`verifier` must be among the rules of this engine's step, {list(rules)}; got {name!r}")
        self._verifier = name

    @property
    def compile_count(self) -> int:
        """How often functions of these sizes were compiled, in all engines that share them."""
        return sum((self._program.trace_counts + self._program.prompts.trace_counts).values())

    def generate(self, requests: Sequence[Request], *, on_tokens: OnTokens | None = None) -> list[Completion]:
        """Decodes all requests.

        Args:
            requests: with distinct ids. One that cannot be served (empty or too long a prompt, ids outside
                the vocabulary, ...) ends with an error completion; the others are not affected.
            on_tokens: called as tokens are committed.

        Returns:
            One completion a request, in the order of `requests`.

        Raises:
            ValueError: if two requests have the same id.
        """
        requests = list(requests)
        completions: dict[str, Completion] = {}
        for event in self.stream(requests):
            if on_tokens is not None and (event.token_ids or event.text):
                on_tokens(event.request_id, list(event.token_ids), event.text)
            if event.completion is not None:
                completions[event.request_id] = event.completion
        return [completions[request.id] for request in requests]

    def stream(self, requests: Iterable[Request]) -> Iterator[StreamEvent]:
        """Decodes all requests and yields tokens as they are committed; see `generate`.

        Yields:
            An event a target call and request; the last event of a request carries its completion.
        """
        requests = list(requests)
        seen: set[str] = set()
        for request in requests:
            if request.id in seen:
                raise ValueError(f"`id` of requests must be unique; got {request.id!r} twice")
            seen.add(request.id)
        return self._run(collections.deque(requests))

    def _run(self, queue: collections.deque[Request]) -> Iterator[StreamEvent]:
        statistics = self.last_run = RunStatistics()
        slots: list[RunningRequest | None] = [None] * self._num_slots
        in_flight: collections.deque[tuple[jax.Array, list[RunningRequest | None]]] = collections.deque()
        # Taken away while running: a broken run leaves no half-donated buffers behind.
        state, self._state = self._state, None
        if state is None:
            state = self._program.empty(self._num_slots, self._dtype)
        else:
            state = state.replace(  # pyright: ignore[reportAttributeAccessIssue]
                done=jnp.ones_like(state.done)
            )
        while True:
            for slot in range(self._num_slots):
                while queue and slots[slot] is None:
                    request = queue.popleft()
                    completion = self._limits.immediate(request)
                    if completion is not None:
                        yield StreamEvent(request.id, (), "", (), completion)
                        continue
                    began = time.perf_counter()
                    running = slots[slot] = RunningRequest(request, self._target.tokenizer)
                    state = self._fill(state, slot, running)
                    statistics.prefill_seconds += time.perf_counter() - began
            began = time.perf_counter()
            if any(running is not None for running in slots):
                state, outputs = self._program.step(self._target.params, self._drafter_params, state, *self._rule)
                in_flight.append((outputs, list(slots)))
                statistics.num_calls += 1
                if self._overlap and len(in_flight) == 1:
                    statistics.step_seconds += time.perf_counter() - began
                    continue
            if not in_flight:
                break
            outputs, owners = in_flight.popleft()
            if all(running is None or running.finished for running in owners):
                continue
            host_outputs = np.asarray(outputs)
            fetched = time.perf_counter()
            statistics.step_seconds += fetched - began
            events = self._read(host_outputs, owners)
            slots = [None if running is None or running.finished else running for running in slots]
            statistics.host_seconds += time.perf_counter() - fetched
            yield from events
        self._state = state

    def _read(self, outputs: np.ndarray, owners: Sequence[RunningRequest | None]) -> list[StreamEvent]:
        """Hands each owner what the calls in `outputs` [n, B, columns] committed for it."""
        num_tokens = self.tree.max_depth + 1
        events = []
        for rows in outputs.tolist():
            for row, running in zip(rows, owners, strict=True):
                if running is None or running.finished:
                    continue
                count, num_drafted, num_accepted, status = row[num_tokens:]
                if count or status != state_lib.RUNNING:
                    events.append(running.take(row[:count], num_drafted, num_accepted, status))
        return events

    def _fill(self, state: state_lib.EngineState, slot: int, running: RunningRequest) -> state_lib.EngineState:
        """Prefills a request and puts it into a slot."""
        prompt, settings = running.request.prompt_ids, self._settings(running.request)
        kept = None if self._prefills is None else self._prefills.get(prompt)
        row = self._prefill(prompt, settings) if kept is None else kept.with_settings(settings)
        if self._prefills is not None:
            self._prefills[prompt] = row
        state = self._program.insert(state, row, np.int32(slot))
        jax.block_until_ready(state.length)
        running.prefilled()
        return state

    def _prefill(self, prompt: tuple[int, ...], settings: state_lib.RowSettings) -> state_lib.EngineState:
        """A row with all of a prompt but its last token in the cache."""
        params, drafter_params, program = self._target.params, self._drafter_params, self._program.prompts
        row: state_lib.EngineState | None = None
        begin = 0
        while row is None or begin < len(prompt) - 1:
            count = min(len(prompt) - 1 - begin, self._prefill_chunk)
            width = self._bucket(count, begin)
            tokens = np.zeros((1, width + 1), np.int32)
            tokens[0, : count + 1] = prompt[begin : begin + count + 1]
            arguments = (tokens, np.array([count], np.int32))
            if row is None:
                row = program.start(params, drafter_params, settings, *arguments)
            else:
                row = program.prefill(params, drafter_params, row, *arguments)
            begin += count
        return row

    def _bucket(self, count: int, begin: int) -> int:
        """Width of a prefill: few different ones, so that few are compiled, that end inside the cache."""
        width = self._prefill_padding
        while width < count:
            width *= 2
        return min(width, self._program.prompts.spec.row_spec.num_slots_in_cache - begin)

    def _settings(self, request: Request) -> state_lib.RowSettings:
        params = request.params
        stop_ids = self._limits.stop_ids(params)
        padding = (state_lib.NO_TOKEN,) * (self._limits.max_stop_ids - len(stop_ids))
        draft_length = params.num_speculative_tokens
        # Numbers past the integer range mean the same as the largest one.
        largest = np.iinfo(np.int32).max
        # NumPy arrays: the jitted call takes them over faster than separate device arrays.
        return state_lib.RowSettings(
            remaining=np.array([min(params.max_new_tokens, largest)], np.int32),
            draft_length=np.array([self._limits.draft_length if draft_length is None else draft_length], np.int32),
            stop_ids=np.array([(*stop_ids, *padding)], np.int32),
            temperature=np.array([params.temperature], np.float32),
            top_k=np.array([min(params.top_k, largest)], np.int32),
            top_p=np.array([params.top_p], np.float32),
            min_p=np.array([params.min_p], np.float32),
            seed=np.array([params.seed], np.uint32),
        )

    @property
    def _rule(self) -> tuple[np.int32, ...]:
        """What a step that knows several rules is told beside the state."""
        rules = self._program.spec.verifiers
        return () if len(rules) == 1 else (np.int32(rules.index(self._verifier)),)

    @property
    def _dtype(self) -> Any:
        return self._target.params["embed_tokens"].dtype


def _make_tree(drafter: Drafter | None, num_drafts: int, draft_length: int) -> DraftTree:
    if drafter is None or not drafter.deterministic:
        return DraftTree.chains(num_drafts, draft_length, DRAW_IID)
    if num_drafts > 1:
        raise ValueError(
            f"`num_drafts` must be 1 for the deterministic drafter {drafter.name!r}, "
            f"whose drafts would all be equal; got {num_drafts}"
        )
    return DraftTree.chains(num_drafts, draft_length, DRAW_DETERMINISTIC)


def _check_verifier(name: str, tree: DraftTree, drafter: Drafter | None) -> None:
    verifier = verification.get_verifier(name)
    verifier.check_tree(tree)
    if verifier.needs_context_law and drafter is not None and drafter.feature_layers:
        raise ValueError(
            f"`verifier` {name!r} is exact only for a drafter whose law depends on the text alone, and "
            f"{drafter.name!r} reads the target's features; use {_without_carry(tree)!r}"
        )


def _without_carry(tree: DraftTree) -> str:
    """The rule that accepts most among those which carry nothing from one step to the next."""
    return "block" if tree.num_nodes == tree.max_depth + 1 else "multi_draft_block"
