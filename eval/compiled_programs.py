"""Lets go of compiled programs between the parts of a long process.

Every compiled program holds memory mappings, hundreds for a large one on a CPU, and a Linux process may have 65,530 of
them. A process that trains and measures drafter after drafter would end there: without an exception, in a compiler
that finds no memory.
"""

from __future__ import annotations

import gc

import jax


def release_compiled_programs() -> None:
    """Frees what no running part needs; functions that are called again are compiled again."""
    # Engines and trainers refer to themselves in circles, and hold their programs until these are collected.
    gc.collect()
    jax.clear_caches()
    gc.collect()


def num_compiled_programs() -> int:
    """Compiled programs that this process holds, of every function."""
    return len(jax.devices()[0].client.live_executables())
