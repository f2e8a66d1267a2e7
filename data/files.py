"""Problems, and the files that real ones come from: downloaded once if no folder is named."""

import hashlib
import http.client
import json
import os
import urllib.request
from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from errors import BadInput


@dataclass(frozen=True)
class Problem:
    """A prompt is before + document + after; only the document may be cut to fit."""

    index: int  # place in its file: the identity of the prompt
    before: str
    answer: str  # the reference
    document: str = ""
    after: str = ""

    @property
    def prompt(self) -> str:
        """User text, before the chat format."""
        return self.before + self.document + self.after


def read_rows(task: str, split: str, data_dir: str | None, address: str, sha256: str | None,
              parse: Callable[[dict], tuple], expected: str) -> list[tuple]:
    """The parsed rows of {data_dir}/{split}.jsonl, or of the file at `address`, kept in the user's
    cache: a JSON object a line, or one array of them.

    Args:
        sha256: of the downloaded file; None = checked against the MD5 that the server states.
    Raises:
        BadInput: no file, a broken download, or a row (file:line) that is not as `expected`.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    path = Path(data_dir or cache / "shadow-mask-distillation" / task) / f"{split}.jsonl"
    try:
        if not data_dir and not path.is_file():
            download(address, path, sha256)
        content = path.read_bytes()
    except (OSError, http.client.HTTPException) as e:
        raise BadInput(f"{path}: {e}; expected the file of {address}; "
                       "name a folder that holds it: --data-dir FOLDER") from e
    # Not str.splitlines: a text may hold a U+2028, which that takes for the end of a line.
    content = content.removeprefix(b"\xef\xbb\xbf")
    lines, rows = content.removesuffix(b"\n").split(b"\n"), []
    try:
        whole = (json.loads(content) or [None]) if content.lstrip()[:1] == b"[" else None
    except (RecursionError, ValueError) as e:
        raise BadInput(f"{path}: {e}; expected an array of rows; download it again") from e
    for number, line in enumerate(whole or lines, start=1):
        try:
            rows.append(parse(line if whole else json.loads(line)))
        except Exception as e:
            raise BadInput(f"{path}:{number}: {e!r}; expected {expected}; mend the line") from e
    return rows


def download(address: str, path: Path, sha256: str | None) -> None:
    """Fetch a file with a progress bar and check it; a reader sees the whole file or none."""
    print(f"downloading {address} to {path}", flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    with (urllib.request.urlopen(address, timeout=60) as reply,
          tqdm.wrapattr(reply, "read", reply.length, desc=path.name) as body):
        content = b"".join(iter(lambda: body.read(1 << 16), b""))
        md5 = reply.headers.get("Content-MD5")
    got, stated = hashlib.sha256(content).hexdigest(), sha256
    if sha256 is None and md5 is not None:
        got, stated = b64encode(hashlib.md5(content).digest()).decode(), md5
    if stated is not None and got != stated:
        raise OSError(f"downloaded checksum {got}, expected {stated}")
    aside = path.with_suffix(f".{os.getpid()}")
    aside.write_bytes(content)
    aside.replace(path)
