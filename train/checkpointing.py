"""Training checkpoints through Orbax: whole or not there, the last few kept, clear words when the disk is full."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from train.artifacts import RunError

State = TypeVar("State")
_SYSTEM_REASON = re.compile(
    r"No space left on device|Disk quota exceeded|File too large|Read-only file system|Permission denied"
    r"|Input/output error|Too many open files|Cannot allocate memory|RESOURCE_EXHAUSTED"
)
# Storage layers quote whole stacks of status messages.
_LONGEST_REASON = 160


class Checkpoints:
    """The checkpoints of one run.

    Orbax writes a step under a temporary name and renames it when all is on disk, so a step that is listed
    is complete. Saving waits for the end: after `save` returns, a kill loses nothing.
    """

    def __init__(self, folder: Path, *, keep: int) -> None:
        """Opens or makes the folder; leftovers of an interrupted save are removed.

        Args:
            folder: where the steps lie.
            keep: number of newest checkpoints that stay.

        Raises:
            RunError: if a file lies in its place.
        """
        self._folder = folder.absolute()
        if self._folder.exists() and not self._folder.is_dir():
            raise RunError(f"{self._folder} must be a directory; it is a file: move it away")
        self._manager = ocp.CheckpointManager(
            self._folder,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep, create=True, cleanup_tmp_directories=True, enable_async_checkpointing=False
            ),
        )

    def latest_step(self) -> int | None:
        """Step of the newest complete checkpoint, or None."""
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """Steps of all complete checkpoints, ascending."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: Any, meta: dict[str, Any]) -> None:
        """Writes one checkpoint and waits for it.

        Args:
            step: number of optimiser steps behind it.
            state: pytree of arrays; PRNG keys are stored as their data.
            meta: JSON-able facts beside it.

        Raises:
            RunError: if it could not be written; earlier checkpoints stay as they are.
        """
        arguments = ocp.args.Composite(state=ocp.args.StandardSave(_by_name(state)), meta=ocp.args.JsonSave(meta))
        needed = sum(leaf.nbytes for leaf in arguments["state"].item.values())
        free = shutil.disk_usage(self._folder).free
        if free < needed:
            # Asked first: storage threads that hit a full disk log their own tracebacks.
            raise RunError(self._explain(step, f"No space left on device ({free} bytes free, {needed} needed)"))
        try:
            with _quiet_storage_logs():
                self._manager.save(step, args=arguments)
                self._manager.wait_until_finished()
        except Exception as error:
            # Orbax and its storage layer raise many types here; the user needs the reason and what is left.
            raise RunError(self._explain(step, _reason(error))) from error

    def restore(self, step: int, like: State) -> tuple[State, dict[str, Any]]:
        """Reads one checkpoint.

        Args:
            step: one of `steps()`.
            like: a state of the same structure, shapes, dtypes and placement.

        Returns:
            The state and the facts saved beside it.

        Raises:
            RunError: if it cannot be read as such a state; the message says what to remove to go on.
        """
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, _by_name(like))
        arguments = ocp.args.Composite(state=ocp.args.StandardRestore(abstract), meta=ocp.args.JsonRestore())
        try:
            with _quiet_storage_logs():
                restored = self._manager.restore(step, args=arguments)
            return _in_the_form_of(like, restored["state"]), dict(restored["meta"])
        except Exception as error:
            raise RunError(self._unreadable(step, error)) from error

    def close(self) -> None:
        """Releases Orbax's threads."""
        self._manager.close()

    def _unreadable(self, step: int, error: Exception) -> str:
        what = f"the checkpoint of step {step} in {self._folder} cannot be read"
        refused = isinstance(error, MemoryError) or _SYSTEM_REASON.search(str(error))
        if refused:
            # Nothing is wrong with the checkpoint, so nobody should remove it.
            return f"{what}: {_reason(error)}"
        earlier = [s for s in self.steps() if s < step]
        rest = f"go on from step {earlier[-1]}" if earlier else "train again from the start"
        return f"{what}; remove {self._folder / str(step)} to {rest} ({_reason(error)[:_LONGEST_REASON]})"

    def _explain(self, step: int, reason: str) -> str:
        kept = [s for s in self.steps() if s != step]
        left = f"checkpoints of steps {kept} are intact" if kept else "there is no earlier checkpoint"
        return f"the checkpoint of step {step} could not be written to {self._folder}: {reason}; {left}"


@contextmanager
def _quiet_storage_logs() -> Iterator[None]:
    # Orbax logs what it raises, with a traceback a thread; the error itself reaches the caller anyway.
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _by_name(state: Any) -> dict[str, jax.Array]:
    """Leaves by their path, keys of random generators as their data: a form that does not depend on our classes."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): jax.random.key_data(leaf) if _is_key(leaf) else leaf
        for path, leaf in jax.tree.leaves_with_path(state)
    }


def _in_the_form_of(like: Any, stored: dict[str, jax.Array]) -> Any:
    leaves, treedef = jax.tree.flatten(like)
    values = [
        jax.random.wrap_key_data(stored[name], impl=jax.random.key_impl(leaf)) if _is_key(leaf) else stored[name]
        for name, leaf in zip(_by_name(like), leaves, strict=True)
    ]
    return jax.tree.unflatten(treedef, values)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    known = _SYSTEM_REASON.search(str(error))
    if known:
        return known[0]
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__
