"""Tables of the kernels' reports, for a terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from eval.kernel_compiled import KERNEL, XLA


def print_static(report: Mapping[str, Any], file: Any = None) -> None:
    """A line an operation and shape; what could not be compiled is said, not left out."""
    file = file or sys.stdout
    print(f"Static costs on {report['chip']}, from shapes, data sheet and compiler; nothing was run.", file=file)
    if report["missing"] is not None:
        print(f"No registers, memory and kernel counts: {report['missing']}.", file=file)
    header = (
        f"{'operation':<17}{'shape':<37}{'B':>3}{'floor MB':>10}{'GFLOP':>8}{'floor us':>10}{'nu':>7}"
        f"{'MB':>9}{'x floor':>9}{'kernels':>9}{'regs':>6}{'spill':>6}{'smem':>8}"
        f"{'XLA MB':>9}{'kernels':>9}{'temp MB':>9}"
    )
    print(header, file=file)
    for row in report["rows"]:
        print(_static_line(row), file=file)
    if report["missing"] is None:
        print(
            "MB: operands and results of all kernels, each counted whole and once. The verifier's second pass is given "
            "the target's rows after the last drafts, too, which it does not read.",
            file=file,
        )


def _static_line(row: Mapping[str, Any]) -> str:
    nu = row.get("nu_by_moved_bytes") or row["nu_by_bytes"]
    line = (
        f"{row['op']:<17}{row['shape']:<37}{row['batch']:>3}{row['floor_bytes'] / 1e6:>10.1f}{row['flops'] / 1e9:>8.2f}"
        f"{row['floor_us']:>10.1f}{_cell(nu, '.3f'):>7}"
    )
    if KERNEL not in row:
        return line
    kernel, xla = row[KERNEL], row[XLA]
    if "error" in kernel:
        line += f"{'- ' + kernel['error'][:45]:>47}"
    else:
        parts = kernel["mosaic_kernels"]
        line += (
            f"{kernel['bytes_moved'] / 1e6:>9.1f}{kernel['bytes_moved'] / row['floor_bytes']:>9.3f}"
            f"{len(kernel['kernels']):>9}"
            f"{max((part['registers'] for part in parts), default=0):>6}"
            f"{sum(part['spill_bytes'] for part in parts):>6}"
            f"{max((part['smem_bytes'] for part in parts), default=0):>8}"
        )
    if "error" in xla:
        return f"{line} {xla['error'][:30]}"
    return f"{line}{xla['bytes_moved'] / 1e6:>9.1f}{len(xla['kernels']):>9}{xla['temporary_bytes'] / 1e6:>9.1f}"


def print_measured(report: Mapping[str, Any], file: Any = None) -> None:
    """Measured times beside the floors, then nu of each target."""
    file = file or sys.stdout
    print(f"Measured on {report['device']} ({report['jax']}); median of {report['rounds']} rounds.", file=file)
    print(f"{'operation':<17}{'shape':<37}{'B':>3}  {'implementation':<15}{'us':>9}{'floor us':>10}{'x':>6}", file=file)
    for row in report["rows"]:
        line = f"{row['op']:<17}{row['shape']:<37}{row['batch']:>3}  {row['implementation']:<15}"
        if row.get("skipped"):
            print(f"{line}  {row['skipped']}", file=file)
            continue
        print(
            f"{line}{row['microseconds']:>9.1f}{row['floor_us']:>10.1f}{row['microseconds'] / row['floor_us']:>6.2f}",
            file=file,
        )
    for row in report["nu"]:
        print(
            f"nu {row['op']:<8}{row['shape']:<24}B={row['batch']:<3}{row['implementation']:<12}{row['nu']:.3f}",
            file=file,
        )
    for failure in report["failures"]:
        print(f"WRONG VALUES: {failure}", file=file)


def _cell(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)
