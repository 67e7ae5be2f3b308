"""Where a text ends: stop tokens on the device, stop strings on the host."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Int


def count_until_stop(
    tokens: Int[Array, "batch depth"], count: Int[Array, "batch"], stop_ids: Int[Array, "batch stops"]
) -> tuple[Int[Array, "batch"], Array]:
    """Cuts committed tokens behind the first stop token.

    Args:
        tokens: candidates, [B, D].
        count: how many are real, [B].
        stop_ids: each row's stop tokens, padded with -1, [B, M].

    Returns:
        How many remain, the stop token included, [B]; and whether there is one, bool [B].
    """
    steps = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    stops = jnp.any(tokens[:, :, None] == stop_ids[:, None, :], axis=-1) & (steps < count[:, None])
    stopped = jnp.any(stops, axis=1)
    first = jnp.argmax(stops, axis=1).astype(jnp.int32)
    return jnp.where(stopped, first + 1, count), stopped


@dataclasses.dataclass
class StopStrings:
    """Watches a growing text for stop strings and holds back what could still become one.

    Attributes:
        strings: the stop strings, none of them empty.
        text: the text so far, cut before the stop string once there is one.
        released: how many characters of `text` were handed out.
        found: whether a stop string was completed.
    """

    strings: tuple[str, ...] = ()
    text: str = ""
    released: int = 0
    found: bool = False

    def push(self, piece: str) -> bool:
        """Appends text; true once a stop string is complete. The earliest occurrence cuts the text."""
        if self.found:
            return True
        # A new occurrence ends in the new piece, so older text matters only up to the longest string.
        begin = max(0, len(self.text) - max(map(len, self.strings), default=1) + 1)
        self.text += piece
        places = [place for place in (self.text.find(string, begin) for string in self.strings) if place >= 0]
        if places:
            self.text = self.text[: min(places)]
            self.found = True
        return self.found

    def release(self, *, last: bool = False) -> str:
        """Text that is certain and was not handed out before; all of it with `last`."""
        end = len(self.text) if last or self.found else len(self.text) - self._pending()
        piece = self.text[self.released : max(end, self.released)]
        self.released += len(piece)
        return piece

    def _pending(self) -> int:
        """Length of the longest end of the text that is the beginning of a stop string."""
        for length in range(min(len(self.text), max(map(len, self.strings), default=1) - 1), 0, -1):
            if any(string.startswith(self.text[-length:]) for string in self.strings):
                return length
        return 0
