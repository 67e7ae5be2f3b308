"""Values of flags that are lists or tables in one word."""

from __future__ import annotations


def parse_numbers(name: str, value: str) -> tuple[int, ...]:
    """Comma-separated numbers of a flag, each at least 0.

    Raises:
        ValueError: naming the flag if a part is not such a number.
    """
    parts = [part.strip() for part in value.split(",")]
    # Python itself refuses to read a number of thousands of digits.
    if not all(part.isdecimal() and len(part) < 20 for part in parts):
        raise ValueError(f"`--{name}` must be numbers with commas between, such as 1,2,4; got {value!r}")
    return tuple(int(part) for part in parts)


def parse_mesh(value: str) -> dict[str, int]:
    """Axis sizes of `--mesh`, in order.

    Raises:
        ValueError: if an axis is unknown, named twice or has no positive size.
    """
    axes: dict[str, int] = {}
    for part in value.split(",") if value else ():
        name, _, size = part.strip().partition(":")
        if name not in ("data", "fsdp", "tensor") or name in axes or not size.isdecimal() or int(size) < 1:
            raise ValueError(
                f"`--mesh` must name data, fsdp and tensor once each, such as data:4,fsdp:2; got {value!r}"
            )
        axes[name] = int(size)
    return axes
