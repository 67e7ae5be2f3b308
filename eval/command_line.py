"""What the commands share: flags are defined only in a command, user mistakes are one line on standard error."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence

from absl import app, flags

# What a user can cause; anything else is a bug of ours and keeps its traceback.
USER_ERRORS = (ValueError, OSError, ImportError)


def run_command(main: Callable[[], int | None]) -> None:
    """Parses the command line, runs `main` and exits.

    A user mistake (ValueError, OSError, a missing optional package) ends as one line on standard error and exit
    status 1; a wrong flag as one line and exit status 2.

    Args:
        main: the command; returns its exit status, None means 0.
    """

    def wrapped(argv: Sequence[str]) -> None:
        if len(argv) > 1:
            _fail(f"unexpected argument {argv[1]!r}: options are written --name=value", 2)
        try:
            status = main()
        except KeyboardInterrupt:
            _fail("interrupted", 130)
        except USER_ERRORS as error:
            _fail(one_line(error), 1)
        else:
            sys.exit(status or 0)

    # absl's --help lists flags of the main file alone; those that commands share are defined elsewhere.
    for module, own in list(flags.FLAGS.flags_by_module_dict().items()):
        if module.startswith("eval."):
            for flag in own:
                flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)
    # JAX tells at INFO level which accelerators are not there; standard error is for what a user must know.
    logging.getLogger("jax").setLevel(logging.WARNING)
    app.run(wrapped, flags_parser=_parse_flags)


def _parse_flags(argv: Sequence[str]) -> list[str]:
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        _fail(one_line(error), 2)
        raise


def _fail(message: str, status: int) -> None:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(status)


def one_line(error: BaseException) -> str:
    """The message of an error on one line; the class name when it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def int_list(name: str, values: Sequence[str], *, minimum: int) -> tuple[int, ...]:
    """Integers of a comma-separated flag, sorted, without repetition.

    Raises:
        ValueError: if the list is empty or an entry is not an integer of at least `minimum`.
    """
    numbers = set()
    for value in values:
        try:
            number = int(value)
        except ValueError:
            raise ValueError(f"`--{name}` must be integers separated by commas; got {value!r}") from None
        if number < minimum:
            raise ValueError(f"`--{name}` must be at least {minimum}; got {number}")
        numbers.add(number)
    if not numbers:
        raise ValueError(f"`--{name}` must name at least one integer")
    return tuple(sorted(numbers))


def float_list(name: str, values: Sequence[str], *, minimum: float) -> tuple[float, ...]:
    """Numbers of a comma-separated flag, in the given order.

    Raises:
        ValueError: if the list is empty or an entry is not a number of at least `minimum`.
    """
    numbers = []
    for value in values:
        try:
            number = float(value)
        except ValueError:
            raise ValueError(f"`--{name}` must be numbers separated by commas; got {value!r}") from None
        if not number >= minimum or number == float("inf"):
            raise ValueError(f"`--{name}` must be finite and at least {minimum:g}; got {value}")
        numbers.append(number)
    if not numbers:
        raise ValueError(f"`--{name}` must name at least one number")
    return tuple(numbers)
