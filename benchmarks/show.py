"""What an evicting cache keeps: every token and, layer by layer, how many heads still see it.

    python benchmarks/show.py --prompt "Tom has 3 apples." --policy h2o --keep 0.5
    python benchmarks/show.py --model FOLDER --prompt "..." --budget 64 --evict-every 8

The prompt is put into the chat format and answered greedily; that rollout's record is printed.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from config import Config, flag, parse  # noqa: E402
from errors import BadInput, run_cli  # noqa: E402
from eval import SCHEDULE, load  # noqa: E402
from eviction import NEVER  # noqa: E402
from rollout import generate  # noqa: E402

FLAGS = ("model", "prompt", "max_new", "dtype", "device", *SCHEDULE)


@dataclass(frozen=True)
class Flags(Config):
    prompt: str = flag("", "text of the user's turn", unset="must be given")
    max_new: int = flag(32, "longest response, tokens")


def column(share: float) -> str:
    """One character for the share of heads that still see a key: . none, 1-9 tenths, # all."""
    return "." if share == 0 else "#" if share == 1 else str(min(9, max(1, round(10 * share))))


def table(tokens: list[str], evict_at: Tensor) -> list[str]:
    """A line a token, a column a layer; from one sample's record (L, Hkv, T) int32. The last token
    was sampled and never read, so no head holds it."""
    share = (evict_at == NEVER).double().mean(1).T.tolist()  # (T, L)
    columns = ["".join(map(column, row)) for row in share[:-1]] + ["-" * len(share[-1])]
    return [f"{i:5}  {row}  {json.dumps(text, ensure_ascii=False)}"
            for i, (text, row) in enumerate(zip(tokens, columns, strict=True))]


def main() -> None:
    cfg = parse(sys.argv[1:], __doc__, FLAGS, Flags)
    if not cfg.prompt:
        raise BadInput("--prompt: expected the text of a question")
    tok, model = load(cfg)
    ids = tok.chat(cfg.prompt)
    rollout = generate(model, [ids], sequence=[0], G=1, max_new=cfg.max_new, temperature=0.0,
                       stop_ids=tok.stop_ids, eviction=cfg.eviction())
    response = rollout.tokens[0, 0, : rollout.lengths[0, 0]].tolist()
    record = rollout.evict_at[0][:, 0, :, : len(ids) + len(response)]  # (L, Hkv, T)
    print("one column a layer: # all heads still see the token at the end, 1-9 tenths, . none, "
          "- never read")
    names = {i: name for name, i in tok.control.items()}
    print("\n".join(table([names.get(i) or tok.decode([i]) for i in ids + response], record)))
    left = (record[..., :-1] == NEVER).sum(-1).double().mean().item()
    print(f"{len(ids)} prompt and {len(response)} response tokens; {left:.1f} keys left a head; "
          f"at most {rollout.kv_bytes_peak:,} bytes of keys and values, {rollout.kv_bytes_dense:,} "
          "dense")
    if (record == NEVER).all():
        print(f"nothing was evicted: {cfg.eviction().floor} keys (--sinks, and --recent or "
              "--window) always stay, and a budget acts when B + N keys are held")


if __name__ == "__main__":
    run_cli(main)
