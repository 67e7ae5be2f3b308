"""The passes of one speculative cycle: the target over one or L + 1 tokens, the draft layer, the whole step.

Counted for B rows that share the weights, each with its own cache of `context` tokens:

* target layers over t tokens a row: attention weights, dense or expert weights once; of E experts those that B t tokens
  with k choices each are expected to touch, E (1 - (1 - k / E)^(B t)) (independent choices: from above);
  keys and values of the visible context once a row;
* the target's head over the same tokens, with an argmax;
* an EAGLE-3 drafter (arXiv 2503.01840): L passes of one layer whose attention reads 2 d, and once a cycle the three
  features' projection and the L + 1 verified tokens;
* what the engine does between passes.

The parts go into `specjax.cost.StepTime`, whose kappa and shares are SlimSpec's (arXiv 2605.10453, section 3).
"""

from __future__ import annotations

import dataclasses

from specjax.cost import StepTime
from specjax.roofline.hardware import Hardware
from specjax.roofline.head_shapes import HeadShape, expected_union, head_work
from specjax.roofline.target_shapes import TargetShape
from specjax.roofline.work import Number, Work

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float8": 1}

ATTENTION_KERNELS = ("norm", "qkv", "rotation", "cache write", "attention", "merge of splits", "output product")
DENSE_KERNELS = ("norm", "gate and up", "activation", "down")
EXPERT_KERNELS = ("norm", "router", "choice", "sort by expert", "gate and up", "activation", "down", "sum of experts")
DRAFTER_KERNELS = ("embedding", "norm of the embedding", "join", *ATTENTION_KERNELS, *DENSE_KERNELS, "final norm")
EXTENSION_KERNELS = ("join of features", "projection")
# Compare drafts with the target's choices, count, gather the bonus, commit.
VERIFICATION_KERNELS = 4


@dataclasses.dataclass(frozen=True)
class DrafterShape:
    """Sizes of a one-layer EAGLE-3 drafter; fields as in `specjax.drafters.eagle3_layer.Eagle3Config`."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    target_hidden_size: int
    vocab_size: int

    @classmethod
    def for_target(cls, target: TargetShape, *, intermediate_size: int | None = None) -> DrafterShape:
        """A layer like the target's own; for a mixture a dense one as wide as the experts that a token uses.

        That width is the one of the drafters in arXiv 2602.23881, from SlimSpec's authors.

        Args:
            target: the target.
            intermediate_size: another width of the feed-forward part.

        Raises:
            ValueError: if that width is below 1.
        """
        width = target.intermediate_size
        if target.num_experts:
            width = target.experts_per_token * target.expert_intermediate_size + target.shared_intermediate_size
        if intermediate_size is not None:
            if intermediate_size < 1:
                raise ValueError(f"`drafter_intermediate_size` must be at least 1; got {intermediate_size}")
            width = intermediate_size
        return cls(
            hidden_size=target.hidden_size,
            intermediate_size=width,
            num_heads=target.num_heads,
            num_kv_heads=target.num_kv_heads,
            head_dim=target.head_dim,
            target_hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
        )

    @property
    def layer_params(self) -> int:
        """Weights of the layer; its attention reads the embedding and the state side by side."""
        attention = (self.target_hidden_size + self.hidden_size) * self.head_dim
        attention *= self.num_heads + 2 * self.num_kv_heads
        output = self.num_heads * self.head_dim * self.hidden_size
        return attention + output + 3 * self.hidden_size * self.intermediate_size

    @property
    def projection_params(self) -> int:
        """Weights of the three features' projection."""
        return 3 * self.target_hidden_size * self.hidden_size


@dataclasses.dataclass(frozen=True)
class Setting:
    """How decoding runs.

    Attributes:
        batch: rows B.
        draft_length: drafts a cycle, L; one chain.
        context: tokens already in each row's cache.
        dtype: of weights that the target does not store otherwise, of the drafter and of the cache.

    Raises:
        ValueError: naming the field, the rule and the value.
    """

    batch: int = 1
    draft_length: int = 6
    context: int = 512
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for name, least in (("batch", 1), ("draft_length", 1), ("context", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"`{name}` must be an integer of at least {least}; got {value!r}")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"`dtype` must be one of {', '.join(DTYPE_BYTES)}; got {self.dtype!r}")

    @property
    def weight_bytes(self) -> int:
        """Bytes of one weight."""
        return DTYPE_BYTES[self.dtype]

    @property
    def state_bytes(self) -> int:
        """Bytes of one value of a state or of the cache: float8 weights keep 16-bit states."""
        return max(2, self.weight_bytes)


def target_layers_work(target: TargetShape, setting: Setting, tokens: int) -> Work:
    """The target's layers over `tokens` tokens of each row, its head left out."""
    size, state = setting.weight_bytes, setting.state_bytes
    dense_size = size if target.weight_bytes is None else target.weight_bytes
    expert_size = size if target.expert_bytes is None else target.expert_bytes
    total = setting.batch * tokens
    mixtures, dense = target.num_expert_layers, target.num_layers - target.num_expert_layers
    router = target.hidden_size * target.num_experts
    shared = 3 * target.hidden_size * target.shared_intermediate_size
    feed_forward = 3 * target.hidden_size * target.intermediate_size
    weights = target.num_layers * target.attention_params * dense_size + dense * feed_forward * dense_size
    active = target.num_layers * target.attention_params + dense * feed_forward
    if mixtures:
        touched = expected_union(target.num_experts, target.experts_per_token, total)
        weights += mixtures * (touched * target.expert_params * expert_size + shared * dense_size + router * size)
        active += mixtures * (target.experts_per_token * target.expert_params + shared + router)
    full_layers = target.num_layers - target.num_sliding_layers
    window = min(setting.context, target.sliding_window or setting.context)
    visible = full_layers * setting.context + target.num_sliding_layers * window
    cache = 2 * target.num_kv_heads * target.head_dim * state * setting.batch * (visible + target.num_layers * tokens)
    attention = 4 * target.num_heads * target.head_dim * total * (visible + target.num_layers * (tokens + 1) / 2)
    inner = target.intermediate_size if not mixtures else target.experts_per_token * target.expert_intermediate_size
    return Work(
        weight_bytes=weights,
        cache_bytes=cache,
        activation_bytes=total * target.num_layers * _layer_states(target, inner) * state,
        flops=2 * active * total + attention,
        kernels=target.num_layers * len(ATTENTION_KERNELS)
        + mixtures * len(EXPERT_KERNELS)
        + dense * len(DENSE_KERNELS),
    )


def _layer_states(shape: TargetShape | DrafterShape, inner: int) -> int:
    """Values that one token's layer writes and reads: residual and norms, q, k, v and attention, the inner width."""
    return 12 * shape.hidden_size + (4 * shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim + 5 * inner


def target_head_work(target: TargetShape, setting: Setting, tokens: int) -> Work:
    """The target's own head over the same tokens; quantised checkpoints keep it in the plan's dtype."""
    full = HeadShape("full", target.hidden_size, target.vocab_size)
    return head_work(full, rows=setting.batch * tokens, weight_bytes=setting.weight_bytes)


def drafter_work(drafter: DrafterShape, setting: Setting, tokens: int = 1) -> Work:
    """One pass of the draft layer over `tokens` tokens of each row, its head left out."""
    total, state = setting.batch * tokens, setting.state_bytes
    visible = setting.context + tokens
    return Work(
        weight_bytes=drafter.layer_params * setting.weight_bytes,
        cache_bytes=2 * drafter.num_kv_heads * drafter.head_dim * state * setting.batch * visible,
        activation_bytes=total * _layer_states(drafter, drafter.intermediate_size) * state,
        flops=2 * drafter.layer_params * total + 4 * drafter.num_heads * drafter.head_dim * total * visible,
        kernels=len(DRAFTER_KERNELS),
    )


def extension_work(drafter: DrafterShape, setting: Setting) -> Work:
    """What the first pass of a cycle does beyond the others: project the verified tokens' features."""
    total = setting.batch * (setting.draft_length + 1)
    return Work(
        weight_bytes=drafter.projection_params * setting.weight_bytes,
        activation_bytes=total * 4 * drafter.target_hidden_size * setting.state_bytes,
        flops=2 * total * drafter.projection_params,
        kernels=len(EXTENSION_KERNELS),
    )


def target_seconds(target: TargetShape, setting: Setting, hardware: Hardware, tokens: int = 1) -> float:
    """Time of the target over `tokens` tokens of each row, its head and an argmax included."""
    layers = target_layers_work(target, setting, tokens)
    dtype = "float8" if target.weight_bytes == 1 and "float8" in hardware.flops_per_second else setting.dtype
    return layers.seconds(hardware, dtype) + target_head_work(target, setting, tokens).seconds(hardware, setting.dtype)


def cycle_work(
    target: TargetShape, drafter: DrafterShape, head: HeadShape, setting: Setting
) -> dict[str, tuple[int, Work]]:
    """What one cycle consists of: name -> (calls a cycle, work of one call)."""
    tokens = setting.draft_length + 1
    return {
        "plain step: layers": (0, target_layers_work(target, setting, 1)),
        "verification: layers": (1, target_layers_work(target, setting, tokens)),
        "verification: target's head": (1, target_head_work(target, setting, tokens)),
        "feature projection": (1, extension_work(drafter, setting)),
        "draft layer": (setting.draft_length, drafter_work(drafter, setting)),
        f"draft head ({head.label})": (
            setting.draft_length,
            head_work(head, rows=setting.batch, weight_bytes=setting.weight_bytes),
        ),
    }


def step_time(
    target: TargetShape, drafter: DrafterShape, head: HeadShape, setting: Setting, hardware: Hardware
) -> StepTime:
    """One greedy speculative cycle, taken apart.

    Args:
        target: the target.
        drafter: the draft layer.
        head: its head.
        setting: batch, draft length, context, dtype.
        hardware: the machine.

    Returns:
        verify: the target over L + 1 tokens; backbone: a drafter pass and the engine's time around it; head: a head
        call; extend: the features' projection; overhead: the acceptance test.

    Raises:
        ValueError: if the machine has no rate for the dtype.
    """

    def seconds(work: Work) -> float:
        return work.seconds(hardware, setting.dtype)

    length = setting.draft_length
    # The first pass runs over all verified tokens, the others over one.
    first, other = (seconds(drafter_work(drafter, setting, tokens)) for tokens in (length + 1, 1))
    backbone: Number = (first + (length - 1) * other) / length + hardware.pass_overhead_seconds
    return StepTime(
        draft_length=length,
        verify=target_seconds(target, setting, hardware, length + 1),
        backbone=backbone,
        head=seconds(head_work(head, rows=setting.batch, weight_bytes=setting.weight_bytes)),
        extend=seconds(extension_work(drafter, setting)),
        overhead=VERIFICATION_KERNELS * hardware.kernel_seconds,
    )
