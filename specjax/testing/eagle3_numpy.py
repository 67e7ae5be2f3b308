"""EAGLE-3 written a second time, plainly, in float64 NumPy: the yardstick for the drafter's decoding and training.

One entry at a time, no cache, no batch: an entry is (state, token, position, which entries it sees).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from specjax.drafters.eagle3_layer import NUM_FEATURE_LAYERS, Eagle3Config


class Eagle3Reference:
    """Grows a list of entries; each may see any earlier ones.

    Attributes:
        keys: rotated keys of the entries so far, each [KV, head_dim].
        values: values of the entries so far, each [KV, head_dim].
    """

    def __init__(self, config: Eagle3Config, params: dict[str, Any]) -> None:
        self.config = config
        self.params = _float64(params)
        self.keys: list[np.ndarray] = []
        self.values: list[np.ndarray] = []

    def combine(self, features: np.ndarray) -> np.ndarray:
        """The state that stands for three target states, side by side [3 * target width]."""
        features = np.asarray(features, np.float64)
        if self.config.norm_before_fc:
            features = self._norm(features, self.params["fc_norm"])
        if self.config.fc_norm:
            parts = features.reshape(NUM_FEATURE_LAYERS, -1)
            scales = self.params["fc_norm"].reshape(NUM_FEATURE_LAYERS, -1)
            features = np.concatenate([self._norm(part, scale) for part, scale in zip(parts, scales, strict=True)])
        return features @ self.params["fc"]

    def add(self, state: np.ndarray, token: int, position: int, sees: Sequence[int]) -> np.ndarray:
        """Appends an entry that sees itself and the entries `sees`; returns its raw output state, [d]."""
        config, layer = self.config, self.params["midlayer"]
        normed = self._norm(state, layer["hidden_norm"])
        embedding = self.params["embed_tokens"][token]
        inputs = np.concatenate((self._norm(embedding, layer["input_norm"]), normed))
        queries = self._rotate((inputs @ layer["q_proj"]).reshape(config.num_heads, config.head_dim), position)
        keys = (inputs @ layer["k_proj"]).reshape(config.num_kv_heads, config.head_dim)
        self.keys.append(self._rotate(keys, position))
        self.values.append((inputs @ layer["v_proj"]).reshape(config.num_kv_heads, config.head_dim))
        visible = [*sees, len(self.keys) - 1]
        mixed = []
        for head in range(config.num_heads):
            shared = head // (config.num_heads // config.num_kv_heads)
            scores = np.array([queries[head] @ self.keys[entry][shared] for entry in visible])
            weights = np.exp(scores / np.sqrt(config.head_dim) - np.max(scores / np.sqrt(config.head_dim)))
            weights /= weights.sum()
            mixed.append(sum(w * self.values[entry][shared] for w, entry in zip(weights, visible, strict=True)))
        hidden = (normed if config.norm_before_residual else state) + np.concatenate(mixed) @ layer["o_proj"]
        inner = self._norm(hidden, layer["post_attention_norm"])
        gate = inner @ layer["gate_proj"]
        return hidden + (gate / (1 + np.exp(-gate)) * (inner @ layer["up_proj"])) @ layer["down_proj"]

    def fed_back(self, output: np.ndarray) -> np.ndarray:
        """The state that the next draft step starts from."""
        return self._norm(output, self.params["norm"]) if self.config.norm_output else output

    def logits(self, output: np.ndarray) -> np.ndarray:
        """Logits over the vocabulary, [V]."""
        head = self.params["head"]
        matrix = head["kernel"] if "kernel" in head else head["down"] @ head["up"]
        return self._norm(output, self.params["norm"]) @ matrix

    def _norm(self, x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.mean(np.square(x)) + self.config.rms_norm_eps) * scale

    def _rotate(self, heads: np.ndarray, position: int) -> np.ndarray:
        half = self.config.head_dim // 2
        angles = position / self.config.rope_theta ** (np.arange(half) / half)
        pairs = (heads[:, :half] + 1j * heads[:, half:]) * np.exp(1j * angles)
        return np.concatenate((pairs.real, pairs.imag), axis=1)


def _float64(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: _float64(leaf) for name, leaf in tree.items()}
    return np.asarray(tree).astype(np.float64)
