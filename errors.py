"""How bad input is reported: one line (what, got, expected, what to do) and exit status 2."""

import json
import sys
from collections.abc import Callable
from pathlib import Path


class BadInput(ValueError):
    """Something the user gave cannot be used. The message is the whole report."""


def run_cli(main: Callable[[], None]) -> None:
    """Run a program; `BadInput`, or a file that fails, ends it with one line and status 2."""
    try:
        main()
    except (BadInput, OSError) as e:
        print(f"error: {' '.join(str(e).split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def read_json(path: Path) -> dict:
    """The JSON object in a file; BadInput names the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"a JSON {type(content).__name__}, not an object")
        return content
    except (OSError, ValueError) as e:
        raise BadInput(f"{path}: cannot be read as JSON ({e}); expected an object {{...}} "
                       "in a whole, downloaded folder; name one") from None
