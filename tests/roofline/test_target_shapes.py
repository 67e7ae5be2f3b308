"""Target shapes out of configuration files of several families, and what a pass over them reads."""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

import pytest

from specjax import models
from specjax.checkpoints.published import PUBLISHED_CONFIGS
from specjax.roofline import HARDWARE, DrafterShape, HeadShape, Setting, load_target_shape, step_time
from specjax.roofline.passes import drafter_work, target_layers_work, target_seconds
from specjax.roofline.target_shapes import MXFP4_BYTES, PUBLISHED_SHAPES, TargetShape

LLAMA = PUBLISHED_SHAPES["meta-llama/Llama-3.1-8B-Instruct"]
GPT_OSS = PUBLISHED_SHAPES["openai/gpt-oss-20b"]
QWEN = PUBLISHED_SHAPES["Qwen/Qwen3-30B-A3B"]
H200 = HARDWARE["h200"]

GPT_OSS_FIELDS = {
    "model_type": "gpt_oss",
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "quantization_config": {"quant_method": "mxfp4"},
}
QWEN_FIELDS = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "sliding_window": None,
    "use_sliding_window": False,
    "mlp_only_layers": [],
}
DENSE_FIELDS: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}


def test_built_in_shapes_are_those_of_their_files() -> None:
    assert TargetShape.from_huggingface("openai/gpt-oss-20b", GPT_OSS_FIELDS) == GPT_OSS
    assert TargetShape.from_huggingface("Qwen/Qwen3-30B-A3B", QWEN_FIELDS) == QWEN


@pytest.mark.parametrize("name", sorted(PUBLISHED_CONFIGS))
def test_a_file_of_a_supported_model_gives_the_same_shape(name: str) -> None:
    config = PUBLISHED_CONFIGS[name]
    assert TargetShape.from_huggingface(name, config.to_huggingface()) == PUBLISHED_SHAPES[name]


@pytest.mark.parametrize(
    ("shape", "low", "high"),
    [(LLAMA, 6.97e9, 6.99e9), (QWEN, 2.70e9, 2.75e9), (GPT_OSS, 3.0e9, 3.1e9)],
)
def test_operations_of_a_token_are_those_of_its_active_parameters(shape: TargetShape, low: float, high: float) -> None:
    # Published active parameters, embedding and head left out: 8.03B - 2 * 0.525B, 3.3B - 2 * 0.311B, 3.6B - 0.579B.
    flops = target_layers_work(shape, Setting(context=0), 1).flops
    assert low < flops / 2 < high


def test_dense_layers_read_the_parameters_of_the_real_model() -> None:
    config = PUBLISHED_CONFIGS["HuggingFaceTB/SmolLM2-135M-Instruct"]
    layer = models.parameter_shapes(config)["layers"][0]
    matrices = sum(shape[0] * shape[1] for shape in layer.values() if len(shape) == 2)
    shape = TargetShape.from_model_config("small", config)
    work = target_layers_work(shape, Setting(dtype="float32"), 1)
    assert work.weight_bytes == 4 * config.num_layers * matrices
    assert target_layers_work(shape, Setting(batch=8, dtype="float32"), 5).weight_bytes == work.weight_bytes


def test_the_draft_layer_reads_the_parameters_of_the_real_drafter() -> None:
    from specjax.drafters.eagle3_layer import Eagle3Config, parameter_shapes

    name = "HuggingFaceTB/SmolLM2-135M-Instruct"
    shapes = parameter_shapes(Eagle3Config.for_target(PUBLISHED_CONFIGS[name], head_kind="full"))
    matrices = sum(shape[0] * shape[1] for shape in shapes["midlayer"].values() if len(shape) == 2)
    drafter = DrafterShape.for_target(PUBLISHED_SHAPES[name])
    assert drafter.layer_params == matrices
    assert drafter.projection_params == shapes["fc"][0] * shapes["fc"][1]
    assert drafter_work(drafter, Setting()).weight_bytes == 2 * matrices


def test_a_mixture_reads_more_experts_for_more_tokens() -> None:
    expert = QWEN.expert_params * 2 * QWEN.num_layers
    one = target_layers_work(QWEN, Setting(), 1).weight_bytes
    rest = one - 8 * expert
    assert rest == 2 * 48 * (QWEN.attention_params + 2048 * 128)
    seven = (target_layers_work(QWEN, Setting(), 7).weight_bytes - rest) / expert
    assert seven == pytest.approx(128 * (1 - (1 - 8 / 128) ** 7))
    many = (target_layers_work(QWEN, Setting(batch=64), 7).weight_bytes - rest) / expert
    assert many == pytest.approx(128, rel=1e-6)
    # Four-bit experts: 32 values and a scale in 17 bytes.
    assert MXFP4_BYTES == 17 / 32


def test_cache_bytes_of_rows_and_windows() -> None:
    per_token = 2 * 8 * 128 * 2 * 32
    work = target_layers_work(LLAMA, Setting(batch=3, context=1000), 1)
    assert work.cache_bytes == 3 * 1001 * per_token
    sliding = target_layers_work(GPT_OSS, Setting(context=1000), 1).cache_bytes
    assert sliding == 2 * 8 * 64 * 2 * (12 * 1000 + 12 * 128 + 24)


def test_a_mixture_has_a_dense_draft_layer_as_wide_as_its_active_experts() -> None:
    assert DrafterShape.for_target(GPT_OSS).intermediate_size == 4 * 2880
    assert DrafterShape.for_target(QWEN).intermediate_size == 8 * 768
    assert DrafterShape.for_target(QWEN, intermediate_size=100).intermediate_size == 100
    with pytest.raises(ValueError, match="`drafter_intermediate_size` must be at least 1; got 0"):
        DrafterShape.for_target(QWEN, intermediate_size=0)


def test_a_step_grows_with_everything_that_it_does() -> None:
    drafter, head = DrafterShape.for_target(LLAMA), HeadShape("full", 4096, 128256)

    def total(setting: Setting) -> float:
        return step_time(LLAMA, drafter, head, setting, H200).total

    base = total(Setting())
    for setting in (Setting(batch=8), Setting(draft_length=7), Setting(context=8192), Setting(dtype="float32")):
        assert total(setting) > base
    # Compute takes over from memory: 64 rows of 7 tokens take longer than their weights alone.
    wide = target_seconds(LLAMA, Setting(batch=64, context=0), H200, 7)
    assert wide > 1.5 * target_seconds(LLAMA, Setting(context=0), H200, 7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": None}, "lacks `vocab_size`"),
        ({"hidden_size": 0}, "`hidden_size` must be a positive integer; got 0"),
        ({"intermediate_size": None}, "lacks `intermediate_size`"),
        ({"num_attention_heads": 32, "num_key_value_heads": 7}, "`num_kv_heads` must divide `num_heads`; got 7 and 32"),
        ({"kv_lora_rank": 512}, "`kv_lora_rank` must be absent"),
        ({"quantization_config": {"quant_method": "exotic"}}, "must be mxfp4, fp8, awq or gptq; got 'exotic'"),
        ({"num_experts": 4, "num_experts_per_tok": 5}, "`experts_per_token` must be at most"),
        ({"num_experts": 4}, "`experts_per_token` must be a positive integer; got 0"),
    ],
)
def test_files_that_cannot_be_counted(changes: dict[str, Any], message: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(DENSE_FIELDS | changes))
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        load_target_shape(str(path))
    assert str(error.value).startswith(str(path))


def test_sources(tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": DENSE_FIELDS, "model_type": "wrapped"}))
    shape = load_target_shape(str(tmp_path))
    assert (shape.hidden_size, shape.num_kv_heads, shape.head_dim) == (64, 4, 16)
    assert load_target_shape("Llama-3.1-8B") == LLAMA
    with pytest.raises(FileNotFoundError, match="nope: must be a"):
        load_target_shape("nope")
    with pytest.raises(FileNotFoundError, match="no model configuration at"):
        load_target_shape(str(tmp_path / "none.json"))
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(ValueError, match=r"config.json: not JSON \("):
        load_target_shape(str(tmp_path))


def test_quantised_weights() -> None:
    fp8 = TargetShape.from_huggingface("a", DENSE_FIELDS | {"quantization_config": {"quant_method": "fp8"}})
    plain = TargetShape.from_huggingface("a", DENSE_FIELDS)
    assert (
        target_layers_work(fp8, Setting(), 1).weight_bytes * 2 == target_layers_work(plain, Setting(), 1).weight_bytes
    )
    four = {"quant_method": "awq", "bits": 4, "group_size": 128}
    assert TargetShape.from_huggingface("a", DENSE_FIELDS | {"quantization_config": four}).weight_bytes == 0.51953125
