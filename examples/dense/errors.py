"""The one exception that the scripts turn into one line and exit code 2."""

from __future__ import annotations

import sys
from collections.abc import Callable

__all__ = ["UserError", "run_main"]


class UserError(Exception):
    """Something the user can put right: a wrong path, a damaged file, contradicting options. One line, one fix.

    The constructor takes exactly one string, so that a DataLoader worker can re-raise it in the main process.
    """


def run_main(main: Callable[[], int]) -> None:
    """Run ``main`` and exit with its code; a :class:`UserError` becomes one line on stderr and exit code 2."""
    try:
        code = main()
    except UserError as error:
        # A worker process wraps the message into its traceback; the last line is the message itself.
        line = str(error).strip().splitlines()[-1]
        print(f"error: {line.removeprefix('dense.errors.UserError: ')}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        print("stopped; the same command goes on from the last checkpoint", file=sys.stderr)
        code = 130
    sys.exit(code)
