"""The EAGLE-3 training step in eager PyTorch, written plainly: the baseline of the throughput comparison.

It does what `train.step` does: S unrolled draft steps with one extra diagonal key for each earlier step, a low-rank
or full head, forward KL over the whole vocabulary at the supervised positions, AdamW.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    """Root mean square norm with a learned scale."""

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Drafter(nn.Module):
    """One EAGLE-3 layer with its head."""

    def __init__(self, width: int, inner: int, heads: int, kv_heads: int, head_dim: int, vocab: int, rank: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.fc = nn.Linear(3 * width, width, bias=False)
        self.input_norm, self.hidden_norm = RMSNorm(width), RMSNorm(width)
        self.post_norm, self.norm = RMSNorm(width), RMSNorm(width)
        self.q = nn.Linear(2 * width, heads * head_dim, bias=False)
        self.k = nn.Linear(2 * width, kv_heads * head_dim, bias=False)
        self.v = nn.Linear(2 * width, kv_heads * head_dim, bias=False)
        self.o = nn.Linear(heads * head_dim, width, bias=False)
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)
        self.head = nn.Sequential(nn.Linear(width, rank, bias=False), nn.Linear(rank, vocab, bias=False))

    def _split(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        return x.unflatten(-1, (heads, self.head_dim)).transpose(1, 2)

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        half = self.head_dim // 2
        angles = positions[:, None] * 100000.0 ** (-torch.arange(half) / half)
        cos, sin = angles.cos(), angles.sin()
        first, second = x[..., :half], x[..., half:]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def forward(self, features: torch.Tensor, embedded: torch.Tensor, num_steps: int) -> list[torch.Tensor]:
        """Hidden states after the final norm of each draft step, from teacher-forced embeddings.

        Args:
            features: three concatenated target states, [batch, time, 3 d].
            embedded: embeddings of the tokens, [batch, time, d].
            num_steps: S.

        Returns:
            S tensors [batch, time, d].
        """
        length = features.shape[1]
        hidden = self.fc(features)
        groups = self.heads // self.kv_heads
        causal = torch.full((length, length), -math.inf).triu(1)
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        outputs = []
        for step in range(num_steps):
            shifted = F.pad(embedded[:, step + 1 :], (0, 0, 0, step + 1))
            joined = torch.cat((self.input_norm(shifted), self.hidden_norm(hidden)), dim=-1)
            positions = torch.arange(length) + step
            query = self._rotate(self._split(self.q(joined), self.heads), positions)
            key = self._rotate(self._split(self.k(joined), self.kv_heads), positions).repeat_interleave(groups, 1)
            value = self._split(self.v(joined), self.kv_heads).repeat_interleave(groups, 1)
            keys.append(key)
            values.append(value)
            scale = self.head_dim**-0.5
            scores = [query @ keys[0].transpose(-1, -2) * scale + causal]
            scores += [(query * extra).sum(-1, keepdim=True) * scale for extra in keys[1:]]
            weights = torch.cat(scores, dim=-1).softmax(-1)
            mixed = weights[..., :length] @ values[0]
            for index, extra in enumerate(values[1:]):
                mixed = mixed + weights[..., length + index : length + index + 1] * extra
            hidden = hidden + self.o(mixed.transpose(1, 2).flatten(2))
            normed = self.post_norm(hidden)
            hidden = hidden + self.down(F.silu(self.gate(normed)) * self.up(normed))
            outputs.append(self.norm(hidden))
        return outputs


def loss_of(
    drafter: Drafter,
    lm_head: torch.Tensor,
    features: torch.Tensor,
    embedded: torch.Tensor,
    final_hidden: torch.Tensor,
    rows: torch.Tensor,
    num_steps: int,
    decay: float = 0.8,
) -> torch.Tensor:
    """Weighted forward KL of all draft steps at given positions.

    Args:
        drafter: the module.
        lm_head: the target's head, [V, d].
        features: see `Drafter.forward`.
        embedded: see `Drafter.forward`.
        final_hidden: the target's state before its head, [batch, time, d].
        rows: positions that count, [batch, n].
        num_steps: S.
        decay: weight of step i is `decay ** i`.

    Returns:
        The loss, a scalar.
    """
    total = torch.zeros(())
    batch = torch.arange(rows.shape[0])[:, None]
    for step, hidden in enumerate(drafter(features, embedded, num_steps)):
        # Entry t of step i predicts the token after t + i + 1.
        with torch.no_grad():
            target = F.log_softmax(final_hidden[batch, rows + step + 1] @ lm_head.T, dim=-1)
        draft = F.log_softmax(drafter.head(hidden[batch, rows]), dim=-1)
        total = total + decay**step * F.kl_div(draft, target, log_target=True, reduction="none").sum(-1).mean()
    return total
