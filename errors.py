"""How bad input is reported: one line (what, got, expected, what to do) and exit status 2."""

import sys
from collections.abc import Callable


class BadInput(ValueError):
    """Something the user gave cannot be used. The message is the whole report."""


def run_cli(main: Callable[[], None]) -> None:
    """Run a program's `main`; a `BadInput` ends it with one line and status 2, no traceback."""
    try:
        main()
    except BadInput as e:
        print(f"error: {' '.join(str(e).split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
