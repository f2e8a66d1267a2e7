"""Text to token ids and back: byte-level BPE of a Qwen2/2.5/3 folder, chat format, stop ids.

tiktoken does the merging. Its rule (merge the adjacent pair whose union has the lowest id) is that
of Hugging Face (apply the earliest merge of a list) where ids are in merge order; `load` checks
that they are. The chat format is plain code, not the folder's jinja template, of which two facts
are read: the default system prompt (Qwen2/2.5) and whether thinking can be off (Qwen3).

Invariant: text never becomes a control token. `chat` alone places the ids of <|im_end|> and its
like; a document that spells one is encoded as the letters it is.

Source: GPT-2's byte map; split pattern, NFC and chat format of the Qwen2, Qwen2.5, Qwen3 folders.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable
from operator import index
from pathlib import Path

import tiktoken

from errors import BadInput

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"  # every digit stands alone
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MAX_SPACES = 500_000  # tiktoken panics in a run of 1,000,000 (its regex engine's stack limit)
SAVED = ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json", "added_tokens.json",
         "special_tokens_map.json", "chat_template.jinja", "generation_config.json")

# GPT-2 writes a byte as its Latin-1 character if that is visible, else as the next of U+0100...
_visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_hidden = [b for b in range(256) if b not in _visible]
BYTE = {chr(b): b for b in _visible} | {chr(0x100 + n): b for n, b in enumerate(_hidden)}


class Tokenizer:
    """`control` maps added tokens to ids; any id of `stop_ids` ends a response."""

    def __init__(self, ranks: dict[bytes, int], control: dict[str, int], stop_ids: Iterable[int],
                 template: str, files: dict[str, bytes]):
        self.control, self.stop_ids = control, frozenset(stop_ids)
        self.vocab_size = 1 + max([*ranks.values(), *control.values()])
        self._bpe = tiktoken.Encoding("", pat_str=SPLIT, mergeable_ranks=ranks, special_tokens={})
        self._bytes = {i: token for token, i in ranks.items()}
        self._template, self._files = template, files

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Read a checkpoint folder.

        Args:
            folder: holds tokenizer_config.json, and tokenizer.json or vocab.json with merges.txt.
                chat_template.jinja, generation_config.json, config.json are read where present.
        Raises:
            BadInput: a file is missing or malformed, or it is another kind of tokenizer.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise BadInput(f"tokenizer folder {folder} does not exist; give a checkpoint folder")
        try:
            config = _json(folder / "tokenizer_config.json")
            vocab, merges, control = _tables(folder, config)
            ranks = _ranks({t: i for t, i in vocab.items() if t not in control}, merges, folder)
            if len({*ranks.values(), *control.values()}) < len(ranks) + len(control):
                raise BadInput(f"{folder}: two tokens share an id; download its tokenizer files")
            template = config.get("chat_template") or ""
            if (folder / "chat_template.jinja").is_file():
                template = _text(folder / "chat_template.jinja")
            _expect(folder / "tokenizer_config.json", "chat_template's type", type(template), str)
            stop_ids = _stop_ids(folder, config, control)
        except BadInput:
            raise
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as e:
            raise BadInput(f"{folder}: its tokenizer files are not shaped as Qwen's ({e!r}); "
                           "download them again") from e
        files = {n: (folder / n).read_bytes() for n in SAVED if (folder / n).is_file()}
        return cls(ranks, control, stop_ids, template, files)

    def encode(self, text: str) -> list[int]:
        """Ids of `text` after NFC; never a control id. A lone surrogate counts as U+FFFD.

        Raises:
            BadInput: more than MAX_SPACES whitespace characters in a row.
        """
        if (run := max(map(len, re.findall(r"\s+", text)), default=0)) > MAX_SPACES:
            raise BadInput(f"text has {run} whitespace characters in a row, expected at most "
                           f"{MAX_SPACES}; shorten the run")
        text = re.sub("[\ud800-\udfff]", "\ufffd", text)
        return self._bpe.encode_ordinary(unicodedata.normalize("NFC", text))

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`, invalid UTF-8 replaced. Control tokens have no text, nor have ids past
        the vocabulary, which a model can sample because its embedding is padded."""
        return b"".join(self._bytes.get(int(i), b"") for i in ids).decode("utf-8", "replace")

    def chat(self, user: str, *, system: str | None = None) -> list[int]:
        """Ids of a conversation with one user turn, up to and with the assistant's header.

        Args:
            user: the user's message.
            system: the system prompt; None means the template's default, or none without one.
        Raises:
            BadInput: the folder's chat template is not Qwen's, or thinks without an off switch.
        """
        control, template = self.control, self._template
        hybrid = "enable_thinking" in template
        if "<|im_start|>" not in template or not {"<|im_start|>", "<|im_end|>"} <= control.keys():
            raise BadInput("the checkpoint has no chat template, or not one of <|im_start|> ... "
                           "<|im_end|>; use an instruct model of Qwen2, Qwen2.5 or Qwen3")
        if not hybrid and re.search(r"assistant(\\n|\n)<think>", template):
            raise BadInput("the checkpoint's chat template always starts to think, expected an "
                           "enable_thinking switch; use a hybrid or a non-thinking model")
        system = _default_system(template) if system is None else system
        start, end, ids = control["<|im_start|>"], control["<|im_end|>"], []
        for role, text in (("system", system), ("user", user)):
            if text is not None:
                # One encode for both: the "\n" after the role merges with newlines of the text.
                ids += [start, *self.encode(f"{role}\n{text}"), end, *self.encode("\n")]
        header = "assistant\n" + ("<think>\n\n</think>\n\n" if hybrid else "")
        # A vocabulary without think tokens (before Qwen3) has the empty block as text.
        parts = re.split("(</?think>)", header) if "<think>" in control else [header]
        ids.append(start)
        for part in parts:
            ids += [control[part]] if part in control else self.encode(part)
        return ids

    def save(self, folder: str | Path) -> None:
        """Write tokenizer files, chat template and generation_config.json, each as it was read."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, data in self._files.items():
            (Path(folder) / name).write_bytes(data)


def _tables(folder: Path, config: dict) -> tuple[dict[str, int], list, dict[str, int]]:
    """Vocabulary, merges and control tokens, from files whose rules are known to be Qwen's."""
    control = {t["content"]: int(i) for i, t in config.get("added_tokens_decoder", {}).items()}
    path = folder / "tokenizer.json"
    if path.is_file():
        record = _json(path)
        model, split = record["model"], record["pre_tokenizer"]
        _expect(path, "model type", model.get("type"), "BPE")
        _expect(path, "normalizer", record["normalizer"] and record["normalizer"]["type"], "NFC")
        steps = split.get("pretokenizers", [split])
        _expect(path, "pre_tokenizer", [s["type"] for s in steps], ["Split", "ByteLevel"])
        _expect(path, "split regex", steps[0]["pattern"].get("Regex"), SPLIT)
        _expect(path, "split", (steps[0]["behavior"], steps[0]["invert"]), ("Isolated", False))
        _expect(path, "add_prefix_space", steps[1]["add_prefix_space"], False)
        for token in record["added_tokens"]:
            name, i = token["content"], token["id"]
            _expect(path, f"id of {name}", i, control.setdefault(name, i))
        merges = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
        return model["vocab"], merges, control
    if not (folder / "vocab.json").is_file():
        raise BadInput(f"{folder} has neither tokenizer.json nor vocab.json with merges.txt; "
                       "give the folder of a whole checkpoint")
    kind = config.get("tokenizer_class", "Qwen2Tokenizer").removesuffix("Fast")
    _expect(folder / "tokenizer_config.json", "tokenizer_class", kind, "Qwen2Tokenizer")
    lines = _text(folder / "merges.txt").split("\n")
    merges = [line.split() for line in lines if line.strip() and not line.startswith("#version")]
    return _json(folder / "vocab.json"), merges, control


def _ranks(vocab: dict[str, int], merges: list[list[str]], folder: Path) -> dict[bytes, int]:
    """bytes -> id, after checking that merging by id is merging by the list."""
    made, last = set(BYTE), max(vocab[char] for char in BYTE)
    for n, pair in enumerate(merges, 1):
        i = vocab.get("".join(pair), -1)
        if len(pair) != 2 or not made.issuperset(pair) or i <= last:
            raise BadInput(f"{folder}: merge {n} {pair} makes id {i}, expected an id over {last}, "
                           "of two tokens made before; use a checkpoint with ids in merge order")
        made.add("".join(pair))
        last = i
    if rest := vocab.keys() - made:
        raise BadInput(f"{folder}: {len(rest)} tokens, as {min(rest)!r}, are neither bytes, merges "
                       "nor added tokens; list control tokens in added_tokens_decoder")
    return {bytes(BYTE[char] for char in token): i for token, i in vocab.items()}


def _stop_ids(folder: Path, config: dict, control: dict[str, int]) -> set[int]:
    eos = config.get("eos_token")
    eos = eos["content"] if isinstance(eos, dict) else eos
    if eos is not None:
        _expect(folder / "tokenizer_config.json", "eos_token", eos, *control)
    stop_ids = {control[t] for t in (eos, "<|im_end|>", "<|endoftext|>") if t in control}
    for path in (folder / "generation_config.json", folder / "config.json"):
        ids = _json(path).get("eos_token_id") if path.is_file() else None
        stop_ids.update(map(index, ids if isinstance(ids, list) else [] if ids is None else [ids]))
    return stop_ids


def _default_system(template: str) -> str | None:
    """The system prompt that the template holds inside one quoted literal, if it holds one."""
    literal = r"""(['"])<\|im_start\|>system(?:\\n|\n)((?:\\.|(?!\1)[^\\])+?)<\|im_end\|>"""
    found = re.search(literal, template, re.DOTALL)
    return found and found[2].encode("ascii", "backslashreplace").decode("unicode-escape")


def _expect(path: Path, what: str, got: object, *known: object) -> None:
    if got not in known:
        raise BadInput(f"{path}: {what} is {got!r}, expected {' or '.join(map(repr, known))}; "
                       "use an unmodified Qwen2, Qwen2.5 or Qwen3 checkpoint")


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except FileNotFoundError:
        raise BadInput(f"{path} is missing; give the folder of a whole checkpoint") from None


def _json(path: Path) -> dict:
    try:
        record = json.loads(_text(path))
    except (json.JSONDecodeError, UnicodeDecodeError) as e:
        raise BadInput(f"{path} is not JSON ({e}); download it again") from e
    _expect(path, "type", type(record).__name__, "dict")
    return record
