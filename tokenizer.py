"""Text to token ids and back: byte-level BPE of a Qwen2/2.5/3 folder, chat format, stop ids.

tiktoken merges the pair whose union has the lowest id, Hugging Face the earliest pair of a list:
the same where ids are in merge order, which `load` checks. Of the folder's chat template only the
default system prompt and the switch of Qwen3's thinking are read.
Invariant: text never becomes a control token; `chat` alone places the ids of <|im_end|> and others.
Source: GPT-2's byte map; split pattern, NFC and chat format of the Qwen2, Qwen2.5, Qwen3 folders.
"""

import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path

import tiktoken

from errors import BadInput, read_json

SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"  # every digit alone
         r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
SAVED = ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json",
         "chat_template.jinja", "generation_config.json")
# The default system prompt, where the template holds it inside one quoted literal.
DEFAULT_SYSTEM = r"""(['"])<\|im_start\|>system(?:\\n|\n)((?:\\.|(?!\1)[^\\])+?)<\|im_end\|>"""

# GPT-2 writes a byte as its Latin-1 character if that is visible, else as the next of U+0100...
_visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_hidden = [b for b in range(256) if b not in _visible]
BYTE = {chr(b): b for b in _visible} | {chr(0x100 + n): b for n, b in enumerate(_hidden)}


class Tokenizer:
    """`control` maps added tokens to ids; any id of `stop_ids` ends a response."""

    def __init__(self, ranks: dict[bytes, int], control: dict[str, int], stop_ids: set[int],
                 template: str, files: dict[str, bytes]):
        self.control, self.stop_ids = control, frozenset(stop_ids)
        self.vocab_size = 1 + max([*ranks.values(), *control.values()])
        self._bpe = tiktoken.Encoding("", pat_str=SPLIT, mergeable_ranks=ranks, special_tokens={})
        self._bytes = {i: token for token, i in ranks.items()}
        self._template, self._files = template, files

    @classmethod
    def load(cls, folder: str | Path) -> "Tokenizer":
        """Read a checkpoint folder; BadInput: a file is missing, malformed or not Qwen's."""
        folder = Path(folder)
        jinja = folder / "chat_template.jinja"
        try:
            config = read_json(folder / "tokenizer_config.json")
            template = jinja.read_text("utf-8") if jinja.is_file() else config.get("chat_template")
            ranks, control = _tables(folder, config)
            names = {config.get("eos_token"), *({"<|im_end|>", "<|endoftext|>"} & control.keys())}
            stop_ids = {control[name] for name in names - {None}}
            for path in (folder / "generation_config.json", folder / "config.json"):
                ids = read_json(path).get("eos_token_id") if path.is_file() else None
                stop_ids.update(ids if isinstance(ids, list) else [ids])
        except (AttributeError, LookupError, OSError, TypeError, UnicodeError) as e:
            raise BadInput(f"{folder}: its tokenizer files are not shaped as Qwen's "
                           f"({type(e).__name__}: {e}); download them again") from e
        files = {n: (folder / n).read_bytes() for n in SAVED if (folder / n).is_file()}
        return cls(ranks, control, stop_ids - {None}, template or "", files)

    def encode(self, text: str) -> list[int]:
        """Ids of `text` after NFC; never a control id."""
        return self._bpe.encode_ordinary(unicodedata.normalize("NFC", text))

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`, invalid UTF-8 replaced. Control ids and unknown (padded) ids have none."""
        return b"".join(self._bytes.get(int(i), b"") for i in ids).decode("utf-8", "replace")

    def chat(self, user: str, *, system: str | None = None, thinking: bool = False) -> list[int]:
        """Ids of one user turn, up to and with the assistant's header. `system` None means the
        template's default prompt, if it has one. BadInput: the template is not Qwen's."""
        names = ["<|im_start|>", "<|im_end|>"]
        names += ["<think>", "</think>"] if "enable_thinking" in self._template else []
        if names[0] not in self._template or not self.control.keys() >= set(names):
            raise BadInput("the checkpoint has no chat template, or not one of <|im_start|> ... "
                           "<|im_end|>; use an instruct model of Qwen2, Qwen2.5 or Qwen3")
        start, end, *think = (self.control[name] for name in names)
        if system is None:
            found = re.search(DEFAULT_SYSTEM, self._template, re.DOTALL)
            system = found and found[2].encode("ascii", "backslashreplace").decode("unicode-escape")
        turns = [f"user\n{user}"] if system is None else [f"system\n{system}", f"user\n{user}"]
        ids = []
        for turn in turns:  # encoded whole: the "\n" after a role merges with newlines of the text
            ids += [start, *self.encode(turn), end, *self.encode("\n")]
        ids += [start, *self.encode("assistant\n")]
        for mark in () if thinking else think:  # an empty block of thoughts: thinking is off
            ids += [mark, *self.encode("\n\n")]
        return ids

    def save(self, folder: str | Path) -> None:
        """Write tokenizer files, chat template and generation_config.json, each as it was read."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, content in self._files.items():
            (Path(folder) / name).write_bytes(content)


def _tables(folder: Path, config: dict) -> tuple[dict[bytes, int], dict[str, int]]:
    """Ids of tokens and of control tokens, from files whose rules are known to be Qwen's."""
    control = {t["content"]: int(i) for i, t in config.get("added_tokens_decoder", {}).items()}
    if (folder / "tokenizer.json").is_file():
        record = read_json(folder / "tokenizer.json")
        model, steps = record["model"], record["pre_tokenizer"]["pretokenizers"]
        kind = [model["type"], record["normalizer"], *(s.get("pattern", s["type"]) for s in steps)]
        known = ["BPE", {"type": "NFC"}, {"Regex": SPLIT}, "ByteLevel"]
        control |= {token["content"]: token["id"] for token in record["added_tokens"]}
        vocab, merges = model["vocab"], model["merges"]
    else:
        kind, known = config.get("tokenizer_class", "").removesuffix("Fast"), "Qwen2Tokenizer"
        vocab, lines = read_json(folder / "vocab.json"), (folder / "merges.txt").read_text("utf-8")
        merges = [line for line in lines.splitlines() if not line.startswith("#version")]
    if kind != known:
        raise BadInput(f"{folder}: its tokenizer is {kind}, expected {known}; "
                       "use an unmodified Qwen2, Qwen2.5 or Qwen3 checkpoint")
    ranks = {char: vocab[char] for char in BYTE}
    last = max(ranks.values())
    for n, merge in enumerate(merges, 1):  # merging by id must be merging by the list
        pair = merge.split(" ") if isinstance(merge, str) else merge
        i = vocab.get("".join(pair), -1)
        if i <= last or not ranks.keys() >= set(pair):
            raise BadInput(f"{folder}: merge {n} {pair} makes id {i}, expected an id over {last}, "
                           "of two tokens made before; use a checkpoint with ids in merge order")
        ranks["".join(pair)] = last = i
    return {bytes(BYTE[char] for char in token): i for token, i in ranks.items()}, control
