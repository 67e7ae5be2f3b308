"""The real engine's output law at temperature 1, against the exact law of three-token continuations and plain draws.

Each request has its own seed, so requests are independent draws of a continuation. The chi-squared test has a
false-alarm rate of 1e-6 a test. Seeds are literal: a statistical test must not change its verdict from run to run.
With 216 cells and 24,000 draws a typical cell expects about a hundred; a law at total variation 0.02 from the right
one adds about 4 * 0.02^2 * 24,000 = 38 to a statistic of 216 +- 21, one at 0.06 adds 350 and fails for sure.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import verification
from specjax.decoding import Engine, LawParams, Request, SamplingParams
from specjax.decoding import program as program_lib
from specjax.drafters.language_model import LanguageModelDrafter, keep_layers
from specjax.drafters.ngram import NgramDrafter
from specjax.testing.chi_squared import assert_follows_law, assert_same_law, chi_squared_test, two_sample_test
from specjax.testing.tiny_models import TabularDrafter, TinyTarget, exact_joint_law, tiny_target

VOCAB = 6
PROMPT = (1, 4, 2, 1, 4)  # the n-gram drafter finds a match
NUM_TOKENS = 3
FEW, MANY = 6_000, 24_000
LAWS = {
    "plain": {"temperature": 1.0},
    "truncated": {"temperature": 0.8, "top_k": 5, "top_p": 0.9},
    "min_p": {"temperature": 1.4, "min_p": 0.1},
}


@functools.cache
def target() -> TinyTarget:
    return tiny_target(jax.random.key(2), vocab_size=VOCAB, sharpness=1.5)


def exact_law(**settings) -> np.ndarray:
    settings = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | settings
    laws = LawParams(
        temperature=jnp.full(1, settings["temperature"], jnp.float32),
        top_k=jnp.full(1, settings["top_k"], jnp.int32),
        top_p=jnp.full(1, settings["top_p"], jnp.float32),
        min_p=jnp.full(1, settings["min_p"], jnp.float32),
    )
    return exact_joint_law(target(), PROMPT, NUM_TOKENS, laws)


def engine_of(drafter: str, *, verifier: str = "token", num_drafts: int = 1, draft_length: int = 2) -> Engine:
    if drafter == "ngram":
        parts = (NgramDrafter(VOCAB), None)
    else:
        tabular = TabularDrafter(VOCAB, greedy=drafter == "greedy")
        parts = (tabular, tabular.init_params(jax.random.key(5)))
    return Engine(
        target(),
        *parts,
        num_slots=64,
        cache_length=16,
        draft_length=draft_length,
        num_drafts=num_drafts,
        verifier=verifier,
    )


def draw(engine: Engine, num_draws: int, *, vary_length: bool = False, **settings) -> np.ndarray:
    """Counts of all continuations [V, V, V]."""
    longest = engine.tree.max_depth
    requests = []
    for seed in range(num_draws):
        length = seed % (longest + 1) if vary_length else None
        params = SamplingParams(seed=seed, max_new_tokens=NUM_TOKENS, num_speculative_tokens=length, **settings)
        requests.append(Request(str(seed), PROMPT, params))
    counts = np.zeros((VOCAB,) * NUM_TOKENS, np.int64)
    for completion in engine.generate(requests):
        counts[completion.token_ids] += 1
    return counts


def test_three_tokens_follow_the_target():
    counts = draw(engine_of("tabular"), FEW, **LAWS["plain"])
    assert_follows_law(counts, exact_law(**LAWS["plain"]))
    # The same draws refute laws that are wrong by a temperature of 10 %.
    for temperature in (0.85, 1.15):
        assert chi_squared_test(counts, exact_law(temperature=temperature)).p_value < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("vary_length", [False, True], ids=["one length", "lengths 0 to 2"])
@pytest.mark.parametrize("drafter", ["tabular", "greedy", "ngram"])
@pytest.mark.parametrize("name", list(LAWS))
def test_three_tokens_follow_the_target_for_all_laws_and_drafters(name, drafter, vary_length):
    counts = draw(engine_of(drafter), MANY, vary_length=vary_length, **LAWS[name])
    assert_follows_law(counts, exact_law(**LAWS[name]))


def rules_for(num_drafts: int) -> tuple[str, ...]:
    verifiers = [verification.get_verifier(name) for name in verification.verifier_names()]
    return tuple(v.name for v in verifiers if v.lossless and (v.multi_draft or num_drafts == 1))


SYSTEMS = [pytest.param(name, k, id=f"{name}-{k}") for k in (1, 3) for name in rules_for(k)]


@pytest.mark.slow
@pytest.mark.parametrize(("verifier", "num_drafts"), SYSTEMS)
def test_three_tokens_follow_the_target_for_every_lossless_verifier(verifier, num_drafts):
    """Carries live in the engine's state from one block of a request to the next."""
    engine = engine_of("tabular", verifier=verifier, num_drafts=num_drafts)
    counts = draw(engine, MANY, **LAWS["plain"])
    assert_follows_law(counts, exact_law(**LAWS["plain"]))


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["greedy", "ngram"])
@pytest.mark.parametrize("verifier", ["block", "greedy_block", "multi_draft_block", "spectr_gbv", "traversal"])
def test_case_l2_l6_one_hot_drafts_keep_the_law_under_block_rules(verifier, drafter):
    """Argmax drafts and prompt lookup come with one-hot laws, never with a soft one or none."""
    engine = engine_of(drafter, verifier=verifier)
    assert_follows_law(draw(engine, MANY, **LAWS["plain"]), exact_law(**LAWS["plain"]))


# --- how much is accepted -------------------------------------------------------------------------------------------

# Two tokens whatever the text: the target gives them 1/3 and 2/3, the draft 2/3 and 1/3. Expected accepted tokens of a
# block of two, by exact enumeration; Sun et al. (ICLR 2025) give 10/9, 11/9 and 12/9 for one draft.
EXPECTED_ACCEPTED = {
    ("token", 1): 10 / 9,
    ("block", 1): 11 / 9,
    ("greedy_block", 1): 12 / 9,
    ("spectr", 2): 1.405487,
    ("multi_draft_block", 2): 1.527778,
    ("spectr_gbv", 2): 1.583333,
}


def two_token_target() -> TinyTarget:
    """The same logits after every text: equal embeddings, layers without effect."""
    params = jax.tree.map(jnp.zeros_like, target().params)
    width = target().config.hidden_size
    logits = jnp.asarray([1 / 3, 2 / 3] + [1e-30] * (VOCAB - 2), jnp.float32)
    params |= {
        "embed_tokens": jnp.ones((VOCAB, width), jnp.float32),
        "final_norm": jnp.ones(width, jnp.float32),
        "lm_head": jnp.zeros((width, VOCAB), jnp.float32).at[0].set(jnp.log(logits)),
    }
    return TinyTarget(target().config, params)


@pytest.mark.parametrize("num_drafts", [1, 2])
def test_case_l5_the_engine_accepts_as_much_as_the_exact_laws_say(num_drafts):
    """2,000 first blocks a rule: 5 sigma are 0.1, false alarms 6e-7; neighbouring rules are up to 0.17 apart."""
    table = jnp.broadcast_to(jnp.log(jnp.asarray([2 / 3, 1 / 3] + [1e-30] * (VOCAB - 2), jnp.float32)), (VOCAB, VOCAB))
    rules = tuple(rule for rule, drafts in EXPECTED_ACCEPTED if drafts == num_drafts)
    engine = Engine(
        two_token_target(),
        TabularDrafter(VOCAB),
        {"logits": table},
        num_slots=64,
        cache_length=16,
        draft_length=2,
        num_drafts=num_drafts,
        verifier=rules[0],
        shared_verifiers=rules,
    )
    params = {"temperature": 1.0, "max_new_tokens": 3}
    for place, rule in enumerate(rules):
        engine.verifier = rule
        seeds = range(place * 2000, (place + 1) * 2000)
        completions = engine.generate([Request(str(n), PROMPT, SamplingParams(seed=n, **params)) for n in seeds])
        accepted = np.array([completion.steps[0].num_accepted for completion in completions])
        sigma = accepted.std() / np.sqrt(len(accepted))
        assert abs(accepted.mean() - EXPECTED_ACCEPTED[rule, num_drafts]) < 5 * sigma, rule


# --- against plain decoding, with a language model that drafts ------------------------------------------------------

# Three tokens are looked at, more are decoded: a block of four drafts is then never cut short by the answer's end, and
# a stop at its first positions leaves a carry for tokens that count, nested where the next block stops early too.
NUM_DECODED = NUM_TOKENS + 4
# Answers of one engine are draws with seeds that no other engine uses.
FIRST_SEED = {"plain": 0, 1: 100_000, 3: 200_000}


def prefix_counts(engine: Engine, num_draws: int, first_seed: int) -> np.ndarray:
    """Counts of the first three tokens [V, V, V]."""
    requests = [
        Request(str(seed), PROMPT, SamplingParams(temperature=1.0, seed=seed, max_new_tokens=NUM_DECODED))
        for seed in range(first_seed, first_seed + num_draws)
    ]
    counts = np.zeros((VOCAB,) * NUM_TOKENS, np.int64)
    for completion in engine.generate(requests):
        counts[completion.token_ids[:NUM_TOKENS]] += 1
    return counts


@functools.cache
def plain_counts(num_draws: int) -> np.ndarray:
    return prefix_counts(Engine(target(), num_slots=256, cache_length=16), num_draws, FIRST_SEED["plain"])


def language_model_engine(verifier: str, num_drafts: int, rules: tuple[str, ...]) -> Engine:
    """The target's first layer drafts; `rules` share a compiled step."""
    config, params = keep_layers(target().config, target().params, (0,))
    return Engine(
        target(),
        LanguageModelDrafter(config),
        params,
        num_slots=256,
        cache_length=16,
        draft_length=4,
        num_drafts=num_drafts,
        verifier=verifier,
        shared_verifiers=rules,
    )


def assert_same_as_plain(verifier: str, num_drafts: int, num_draws: int, rules: tuple[str, ...]) -> None:
    """Two samples from one law, which is the exact one; false alarms 2e-6 a call."""
    engine = language_model_engine(verifier, num_drafts, rules)
    counts = prefix_counts(engine, num_draws, FIRST_SEED[num_drafts])
    assert_same_law(counts, plain_counts(num_draws))
    assert_follows_law(counts, exact_law(temperature=1.0))


@pytest.mark.parametrize("verifier", ["multi_draft_block", "spectr_gbv"])
def test_three_tokens_are_those_of_plain_decoding(verifier):
    assert_same_as_plain(verifier, 3, FEW, ("multi_draft_block", "spectr_gbv"))


@pytest.mark.slow
@pytest.mark.parametrize(("verifier", "num_drafts"), SYSTEMS)
def test_three_tokens_are_those_of_plain_decoding_for_every_lossless_verifier(verifier, num_drafts):
    assert_same_as_plain(verifier, num_drafts, MANY, rules_for(num_drafts))


@pytest.mark.parametrize("num_draws", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_a_forgotten_carry_would_be_noticed(num_draws, monkeypatch):
    """As many draws of a rule whose stops do not change the target of the blocks after them: another law."""
    rule = verification.get_verifier("spectr_gbv").rule
    monkeypatch.setattr(type(rule), "next_carry", lambda self, carry, *arguments: carry)
    program_lib.get_program.cache_clear()
    try:
        counts = prefix_counts(language_model_engine("spectr_gbv", 3, ()), num_draws, FIRST_SEED[3])
    finally:
        program_lib.get_program.cache_clear()
    assert chi_squared_test(counts, exact_law(temperature=1.0)).p_value < 1e-6
    if num_draws == MANY:
        assert two_sample_test(counts, plain_counts(MANY)).p_value < 1e-6
