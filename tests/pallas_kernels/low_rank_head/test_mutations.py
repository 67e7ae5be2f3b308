"""Planted faults: the checks of the other files must find each of them.

A fault is a change of a module's source text. The changed module is run beside the real ones, which then use its
functions.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import sys
import types
from typing import Any

import jax
import pytest
from head_cases import check_greedy, check_logits, check_sample, make_head, make_hidden, row_keys, temperatures

from pallas_kernels import _compat
from pallas_kernels.low_rank_head import noise, portable

PACKAGE = "pallas_kernels.low_rank_head."

PORTABLE_FAULTS = {
    "mask lets one token in": (
        "portable",
        "scores, token, token < num_valid",
        "scores, token, token <= num_valid",
        "greedy",
    ),
    "no rescale where tiles meet": (
        "statistics",
        "jnp.exp(one.logsumexp - shift)",
        "jnp.where(one.logsumexp > -jnp.inf, 1.0, 0.0)",
        "greedy",
    ),
    "factors swapped": ("portable", "values * tempering_ref[:, 0:1]", "values * tempering_ref[:, 1:2]", "sample"),
    "wrong rotation": ("noise", "(13, 15, 26, 6)", "(13, 15, 26, 7)", "sample"),
    "ties take the last token": ("statistics", "-token, -NO_TOKEN", "token, -NO_TOKEN", "greedy"),
}

MOSAIC_FAULTS = {
    "mask lets one token in": ("mosaic_gpu", "token < num_valid", "token <= num_valid", "greedy"),
    "no rescale of the running sum": (
        "statistics",
        "running.total * scale + jnp.float32(1.0)",
        "running.total + jnp.float32(1.0)",
        "greedy",
    ),
    "factors swapped": ("mosaic_gpu", "_over_rows(word(2,", "_over_rows(word(3,", "sample"),
    "no wait for the row's words": ("mosaic_gpu", 'plgpu.barrier_wait(scratch["row_words_filled"])', "pass", "sample"),
    "no fence before the copy out": ("mosaic_gpu", "plgpu.commit_smem()\n        for", "for", "greedy"),
    "no wait for the last copy": ("mosaic_gpu", "plgpu.wait_smem_to_gmem(0)", "pass", "greedy"),
    "tiles of another CTA": ("mosaic_stream", "cta + turn * num_ctas", "cta + turn", "greedy"),
}

# Interpretation copies at once, so that these pass there: the order of operations is checked instead.
ORDER_FAULTS = {
    "no wait for the rows": ("mosaic_stream", "plgpu.barrier_wait(filled.at[slot])", "pass", "greedy"),
    "slot refilled before its product": ("mosaic_stream", "plgpu.wgmma_wait(0)", "pass", "greedy"),
    "buffer reused too early": (
        "mosaic_logits",
        "plgpu.wait_smem_to_gmem(_NUM_BUFFERS - 1, wait_read_only=True)",
        "pass",
        "logits",
    ),
    "no fence before logits leave": ("mosaic_logits", "plgpu.commit_smem()", "pass", "logits"),
}


def plant(monkeypatch: pytest.MonkeyPatch, module_name: str, old: str, new: str) -> None:
    """Replaces the one place with `old` in a module, everywhere the module's functions are used."""
    original = importlib.import_module(PACKAGE + module_name)
    source = inspect.getsource(original)
    assert source.count(old) == 1, f"{source.count(old)} places with {old!r}"
    changed = types.ModuleType(original.__name__)
    changed.__package__ = original.__package__
    exec(compile(source.replace(old, new), f"{module_name} with a fault", "exec"), vars(changed))
    # A class of its own would fail as another pytree, whatever the fault is.
    vars(changed).update({name: value for name, value in vars(original).items() if isinstance(value, type)})
    functions = {name: value for name, value in vars(original).items() if isinstance(value, types.FunctionType)}
    for name, module in list(sys.modules.items()):
        if not name.startswith(PACKAGE):
            continue
        for attribute, value in list(vars(module).items()):
            if attribute in functions and value is functions[attribute]:
                monkeypatch.setattr(module, attribute, vars(changed)[attribute])


def check(op: str, module_name: str, **options) -> None:
    module = importlib.import_module(PACKAGE + module_name)
    head = make_head()
    hidden = make_hidden(head, 4)
    extra = (noise.raw_keys(row_keys(4)), temperatures(4)) if op == "sample" else ()
    result = jax.jit(lambda *args: getattr(module, op)(*args, **options))(hidden, head, *extra)
    jax.block_until_ready(result)
    {"greedy": check_greedy, "sample": check_sample, "logits": check_logits}[op](result, hidden, head)


@pytest.mark.parametrize("fault", PORTABLE_FAULTS)
def test_faults_of_the_portable_kernel_are_found(fault, monkeypatch):
    module, old, new, op = PORTABLE_FAULTS[fault]
    monkeypatch.setattr(portable, "_TILE_BYTES", 1)
    plant(monkeypatch, module, old, new)
    with pytest.raises(AssertionError):
        check(op, "portable", interpret=True)


@pytest.mark.skipif(
    not _compat.HAS_MOSAIC_INTERPRETER, reason="this release of jax cannot interpret Mosaic GPU kernels"
)
@pytest.mark.parametrize("fault", MOSAIC_FAULTS)
def test_faults_of_the_mosaic_kernels_are_found(fault, monkeypatch, capfd):
    module, old, new, op = MOSAIC_FAULTS[fault]
    importlib.import_module(PACKAGE + "mosaic_gpu")
    plant(monkeypatch, module, old, new)
    try:
        check(op, "mosaic_gpu", interpret=_compat.mosaic_interpreter(detect_races=True), num_ctas=2)
    except (AssertionError, RuntimeError):  # Wrong values; a race, or a copy that was not waited for.
        return
    assert "RACE DETECTED" in capfd.readouterr().out, "the fault was not found"


def operations(jaxpr: Any, found: list[list[str]]) -> list[str]:
    """Names of a jaxpr's operations in order; those of every inner jaxpr are added to `found` as a list of its own.

    An operation with inner jaxprs is named after what is in them, too.
    """
    names = []
    for equation in jaxpr.eqns:
        names.append(equation.primitive.name)
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                names += [f"inner {name}" for name in operations(inner, found)]
    found.append(names)
    return names


def check_order(op: str) -> None:
    """Products are waited for on both sides, and a buffer that is copied out is waited for and fenced."""
    module = importlib.import_module(PACKAGE + "mosaic_gpu")
    head = make_head()
    found: list[list[str]] = []
    # A new function: what was traced before the fault is remembered by function.
    traced = jax.make_jaxpr(lambda *args: getattr(module, op)(*args))(make_hidden(head, 4), head)
    operations(traced.jaxpr, found)
    (loop,) = [names for names in found if "wgmma_ref" in names]
    expected = ["barrier_wait", "wgmma_ref", "wgmma_wait", "inner copy_gmem_to_smem"]
    assert [name for name in loop if name in expected] == expected
    if op == "logits":
        loop = next(names for names in found if "copy_smem_to_gmem" in names)
        expected = ["wait_smem_to_gmem", "swap", "commit_smem", "copy_smem_to_gmem"]
        # A row of the batch after the other is put into the buffer.
        assert [name for name, _ in itertools.groupby(name for name in loop if name in expected)] == expected


@pytest.mark.parametrize("op", ["greedy", "logits"])
def test_the_order_of_operations_is_right(op):
    check_order(op)


@pytest.mark.parametrize("fault", ORDER_FAULTS)
def test_faults_of_order_are_found(fault, monkeypatch):
    module, old, new, op = ORDER_FAULTS[fault]
    importlib.import_module(PACKAGE + "mosaic_gpu")
    plant(monkeypatch, module, old, new)
    with pytest.raises(AssertionError):
        check_order(op)


def test_an_unchanged_module_passes(monkeypatch):
    """The harness itself finds no fault where there is none."""
    monkeypatch.setattr(portable, "_TILE_BYTES", 1)
    plant(monkeypatch, "statistics", "other.token < one.token", "one.token > other.token")
    check("greedy", "portable", interpret=True)
