"""The verifier protocol, its registry, and the two sources of randomness that a rule can run on.

A rule gets drafted tokens, the laws they were drawn from and the target's laws at every node, and decides on a *stop
node* and a next token. Rules are written against `Choose`: "draw an index from this log law". Decoding passes a
`Choose` that samples; exact enumeration passes one that follows a prescribed list of indices and reports their
probability. So the function whose law is enumerated is the function that decodes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from specjax.types import DraftTree, Proposal, Verdict
from specjax.verification.rows import sample_log_law
from specjax.verification.trees import path_table

Choose = Callable[[Any, Array], tuple[Array, Array]]
"""`choose(site, log_law) -> (index, log_prob)`: draws an index; `site` (an int, maybe traced) names the draw."""


def sampled(rng_key: PRNGKeyArray) -> Choose:
    """A `Choose` that draws independently at each site; the same key and site give the same draw."""

    def choose(site: Any, log_law: Array) -> tuple[Array, Array]:
        index = sample_log_law(jax.random.fold_in(rng_key, site), log_law)
        return index, log_law[index]

    return choose


def prescribed(indices: Int[Array, " sites"]) -> Choose:
    """A `Choose` that takes `indices[site]` whatever its probability, and reports that probability."""

    def choose(site: Any, log_law: Array) -> tuple[Array, Array]:
        index = indices[site]
        return index, log_law[index]

    return choose


@flax.struct.dataclass
class Outcome:
    """Where a rule stops, given the drafts and its draws.

    Attributes:
        stop_node: the last accepted node; 0 when no draft is accepted, [].
        next_log_law: normalised law of the token after the stop node, [V].
        log_prob: log-probability of the draws that led here, given the drafts, [].
        working: whatever `advance_carry` needs from the decision; empty for rules without a carry.
    """

    stop_node: Int[Array, ""]
    next_log_law: Float[Array, " vocab"]
    log_prob: Float[Array, ""]
    working: Any = ()


@runtime_checkable
class Rule(Protocol):
    """What a file in this package provides for one rule; frozen and hashable."""

    def check_tree(self, tree: DraftTree) -> None:
        """Raises ValueError if the rule cannot use this tree."""
        ...

    def init_carry(self, tree: DraftTree, vocab_size: int) -> Any:
        """The carry before a request's first iteration."""
        ...

    def verify(self, rng_key: PRNGKeyArray, proposal: Proposal, target_log_laws: Array, carry: Any) -> Verdict:
        """See `Verifier.verify`."""
        ...


@dataclasses.dataclass(frozen=True)
class Verifier:
    """A registered rule, with what it needs and what it promises.

    Attributes:
        name: registered name, as given on command lines.
        rule: the implementation.
        summary: one line for tables and help texts.
        multi_draft: uses more than one draft.
        supports_trees: accepts trees other than disjoint chains.
        carries_state: its carry must live from one iteration of a request to the next, or the output law changes.
        needs_context_law: exact only if the draft's law at a position is a function of the committed and drafted tokens
            before it, whatever the iteration it is computed in (an independent model; not a drafter that reads the
            target's features).
        lossless: the emitted tokens follow the target's law exactly.
        needs_draft_law: reads `draft_log_laws` (one-hot for deterministic drafts).
        experimental: exact, but its interface or defaults may change.
    """

    name: str
    rule: Rule
    summary: str
    multi_draft: bool = False
    supports_trees: bool = False
    carries_state: bool = False
    needs_context_law: bool = False
    lossless: bool = True
    needs_draft_law: bool = True
    experimental: bool = False

    def check_tree(self, tree: DraftTree) -> None:
        """Refuses trees that the rule cannot use.

        Raises:
            ValueError: naming the rule, what it needs and an alternative.
        """
        self.rule.check_tree(tree)

    def init_carry(self, tree: DraftTree, vocab_size: int) -> Any:
        """The carry before a request's first iteration: a pytree of fixed shapes, `()` for most rules."""
        return self.rule.init_carry(tree, vocab_size)

    def verify(
        self,
        rng_key: PRNGKeyArray,
        proposal: Proposal,
        target_log_laws: Float[Array, "nodes vocab"],
        carry: Any,
    ) -> Verdict:
        """Accepts a path of the proposal and draws the token after it, for one request (batch it with `vmap`).

        Args:
            rng_key: key, consumed; it must be independent of the key that drew the drafts.
            proposal: the drafts and the laws they were drawn from.
            target_log_laws: the target's law after each node, [N+1, V].
            carry: from `init_carry` or from the previous verdict of the same request.

        Returns:
            The verdict. Token ids are in [0, V) whatever the rows hold; rows that are not laws (NaN or all -inf) give
            an unspecified id, never an error.

        Raises:
            ValueError: for a tree that the rule cannot use, arrays whose shapes or dtypes do not fit it, or a carry of
                another rule or tree.
        """
        self.check_tree(proposal.tree)
        _check_shapes(proposal, target_log_laws)
        self._check_carry(proposal.tree, target_log_laws.shape[1], carry)
        return self.rule.verify(rng_key, proposal, target_log_laws, carry)

    def _check_carry(self, tree: DraftTree, vocab_size: int, carry: Any) -> None:
        fresh = self.init_carry(tree, vocab_size)
        shapes, expected = ([jnp.shape(leaf) for leaf in jax.tree.leaves(value)] for value in (carry, fresh))
        if jax.tree.structure(carry) != jax.tree.structure(fresh) or shapes != expected:
            raise ValueError(
                f"`carry` must be what `init_carry` of {self.name!r} gives for this tree, leaves of shapes {expected}; "
                f"got {type(carry).__name__} with {shapes}"
            )


def _check_shapes(proposal: Proposal, target_log_laws: Array) -> None:
    tree = proposal.tree
    if target_log_laws.ndim != 2 or target_log_laws.shape[0] != tree.num_nodes or target_log_laws.shape[1] < 1:
        raise ValueError(f"`target_log_laws` must have shape [{tree.num_nodes}, V]; got {target_log_laws.shape}")
    if not jnp.issubdtype(target_log_laws.dtype, jnp.floating):
        raise ValueError(f"`target_log_laws` must be log-probabilities; got dtype {target_log_laws.dtype}")
    expected = (len(tree.internal), target_log_laws.shape[1])
    if proposal.draft_log_laws.shape != expected:
        raise ValueError(f"`draft_log_laws` must have shape {expected}; got {proposal.draft_log_laws.shape}")
    if proposal.draft_log_laws.dtype != target_log_laws.dtype:
        raise ValueError(
            f"`draft_log_laws` must have the dtype of the target's laws, {target_log_laws.dtype}; "
            f"got {proposal.draft_log_laws.dtype}"
        )
    for name, value, shape in (("tokens", proposal.tokens, (tree.num_nodes,)), ("max_depth", proposal.max_depth, ())):
        if jnp.shape(value) != shape:
            raise ValueError(f"`{name}` must have shape {shape}, batched by `vmap`; got {jnp.shape(value)}")
        if not jnp.issubdtype(jnp.result_type(value), jnp.integer):
            raise ValueError(f"`{name}` must be integers; got dtype {jnp.result_type(value)}")


def make_verdict(tree: DraftTree, stop_node: Int[Array, ""], next_token: Int[Array, ""], carry: Any) -> Verdict:
    """The verdict that accepts the path from the root to `stop_node`."""
    return Verdict(
        path=jnp.asarray(path_table(tree))[stop_node],
        num_accepted=jnp.asarray(tree.depth, jnp.int32)[stop_node],
        next_token=next_token.astype(jnp.int32),
        carry=carry,
    )


class ChoiceRule:
    """A rule whose randomness is a few draws from explicit laws. Subclasses give `choice_sizes` and `decide`.

    Deriving from this class makes a rule enumerable: `specjax.verification.enumerate` runs `decide` on every list of
    prescribed choices.
    """

    def check_tree(self, tree: DraftTree) -> None:
        """Accepts every tree; subclasses refuse."""

    def init_carry(self, tree: DraftTree, vocab_size: int) -> Any:
        """No carry."""
        return ()

    def choice_sizes(self, tree: DraftTree) -> tuple[int, ...]:
        """Number of alternatives at each choice site, in order of `site`."""
        raise NotImplementedError

    def decide(self, choose: Choose, proposal: Proposal, target_log_laws: Array, carry: Any) -> Outcome:
        """Chooses the stop node and gives the law of the next token."""
        raise NotImplementedError

    def advance_carry(self, carry: Any, proposal: Proposal, outcome: Outcome, next_token: Array) -> Any:
        """The carry for the next iteration, after this one had `outcome` and emitted `next_token`."""
        return carry

    def verify(self, rng_key: PRNGKeyArray, proposal: Proposal, target_log_laws: Array, carry: Any) -> Verdict:
        """See `Verifier.verify`."""
        choice_key, next_key = jax.random.split(rng_key)
        del rng_key
        outcome = self.decide(sampled(choice_key), proposal, target_log_laws, carry)
        next_token = sample_log_law(next_key, outcome.next_log_law)
        carry = self.advance_carry(carry, proposal, outcome, next_token)
        return make_verdict(proposal.tree, outcome.stop_node, next_token, carry)


_VERIFIERS: dict[str, Verifier] = {}


def register(verifier: Verifier) -> Verifier:
    """Makes a verifier available by its name; returns it.

    Raises:
        ValueError: if the rule is not lossless, or the name is taken by another verifier.
    """
    if not verifier.lossless:
        raise ValueError(f"`verifier` must be lossless to be registered for decoding; got {verifier.name!r}")
    known = _VERIFIERS.setdefault(verifier.name, verifier)
    if known != verifier:
        raise ValueError(f"`name` must be unique among verifiers; got {verifier.name!r} twice")
    return verifier


def get_verifier(name: str) -> Verifier:
    """The verifier registered under `name`.

    Raises:
        ValueError: if there is none; the message lists the names.
    """
    if name not in _VERIFIERS:
        raise ValueError(f"`verifier` must be one of {verifier_names()}; got {name!r}")
    return _VERIFIERS[name]


def verifier_names() -> tuple[str, ...]:
    """Names of all registered verifiers, in order of registration."""
    return tuple(_VERIFIERS)
