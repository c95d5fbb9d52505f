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
    """Run ``main`` and exit with its code.

    A :class:`UserError`, a path that cannot be read or written, and a package that is not installed become one line on
    stderr and exit code 2; anything else is a fault of the program and keeps its traceback.
    """
    try:
        code = main()
    except UserError as error:
        code = _refuse(_message(error))
    except ModuleNotFoundError as error:
        code = _refuse(f"{error}; pip install 'cost_mtl[examples]' has all that the examples import")
    except OSError as error:
        if error.filename is None:  # no path of the user's: a broken pipe, a lost connection
            raise
        code = _refuse(f"{error.filename}: {error.strerror}")
    except KeyboardInterrupt:
        print("stopped; the same command goes on from the last checkpoint", file=sys.stderr)
        code = 130
    sys.exit(code)


def _refuse(message: str) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return 2


def _message(error: UserError) -> str:
    """The message alone: a worker process wraps it into its traceback."""
    text = str(error)
    return text.rpartition("dense.errors.UserError: ")[2] if text.startswith("Caught UserError") else text
