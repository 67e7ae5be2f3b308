"""The table of speed ratios runs to its end and says what holds."""

from __future__ import annotations

import json
from typing import Any

import pytest

from eval.speed import Ratio, measure_speed, print_ratios


def test_a_ratio_knows_whether_its_bound_holds() -> None:
    assert Ratio("a", 1.1, 1.15).holds
    assert not Ratio("a", 1.2, 1.15).holds
    assert Ratio("a", 1.6, 1.5, at_least=True).holds
    assert not Ratio("a", 1.4, 1.5, at_least=True).holds
    assert Ratio("a", None, 1.5).holds is None


def test_table_shows_bound_and_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    print_ratios([Ratio("one", 1.2, 1.15).to_json(), Ratio("two", None, 1.5, at_least=True, detail="why").to_json()])
    first, second = capsys.readouterr().out.splitlines()
    assert "1.200  <= 1.15" in first
    assert "MISSED" in first
    assert ">= 1.5" in second
    assert second.endswith("why")


@pytest.mark.slow
def test_all_ratios_are_measured(chat_target: Any) -> None:
    result = measure_speed(chat_target, rounds=1, num_tokens=4, cache_length=256, batch_size=2, with_transformers=False)
    json.dumps(result, allow_nan=False)
    names = [ratio["name"] for ratio in result["ratios"]]
    assert len(names) == len(set(names)) == 9
    values = {ratio["name"]: ratio["value"] for ratio in result["ratios"]}
    assert values["compilations after warm-up"] == 0
    assert values["verifying 5 tokens / plain step"] > 0
    with pytest.raises(ValueError, match="`cache_length` must be at least"):
        measure_speed(chat_target, cache_length=32)


@pytest.mark.slow
@pytest.mark.parity
def test_transformers_decodes_the_same_weights(chat_target: Any) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from eval.bare_forward import BareLoop, transformers_generate
    from specjax.decoding import Engine, Request, SamplingParams

    prompt = chat_target.tokenizer.encode("hello world and the user")
    expected = Engine(chat_target, cache_length=128, draft_length=0).generate(
        [Request("a", tuple(prompt), SamplingParams(max_new_tokens=12, ignore_eos=True))]
    )
    assert tuple(transformers_generate(chat_target, prompt)(12)) == expected[0].token_ids
    loop = BareLoop(chat_target, prompt, 129)
    assert int(loop.run(11)[0, 0]) == expected[0].token_ids[11]
