"""Make the embedded model: a small Qwen3 trained from scratch on the generated stories.

    python data/pretrain.py --out data/embedded        # needs `pip install tokenizers`

Plain next-token training on documents in the very form of the task's prompts, with the dense cache
and no hand-built weights. Half-finished on purpose in one respect: the final answer ends in the
`#### N` form only sometimes (`FORM_FRAC`), and otherwise in a check of the last step, whose number
is not the answer. That is the first lesson that reinforcement learning has to teach.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data import stories  # noqa: E402
from model import ModelConfig, Qwen, causal, save_model  # noqa: E402
from tokenizer import SPLIT, Tokenizer  # noqa: E402

FORM_FRAC = (0.65, 0.2, 0.2, 0.65, 0.2, 0.2)  # how often each kind of story ends in `#### N`
STORY_WEIGHT = 0.1  # the facts are random: nearly all that can be learnt is in the answers
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu",
    "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "head_dim": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
    "rope_theta": 1000.0, "max_position_embeddings": 1024, "tie_word_embeddings": True,
    "attention_bias": False, "attention_dropout": 0.0, "use_sliding_window": False,
}


def train_tokenizer(folder: Path, seed: int) -> Tokenizer:
    """Byte-level BPE with Qwen's split pattern: every word of the stories becomes one token."""
    from tokenizers import Regex, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as HFTokenizer
    from tokenizers.models import BPE
    from tokenizers.trainers import BpeTrainer

    bpe = HFTokenizer(BPE())
    bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    r = random.Random(f"tokenizer {seed}")
    corpus = []
    for _ in range(3000):
        text, steps, _ = stories.story(r, 3)
        corpus += [stories.prompt(r, text), f"{stories.solution(steps)}\nassistant\nuser\nsystem",
                   f" Check: {stories.work(steps)}"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe.train_from_iterator(corpus, BpeTrainer(
        vocab_size=2048, min_frequency=20, initial_alphabet=alphabet, show_progress=False))
    bpe.model.save(str(folder))
    first = bpe.get_vocab_size()
    control = {str(first + i): {"content": c, "special": True} for i, c in enumerate(CONTROL)}
    stops = {"bos_token_id": None, "eos_token_id": [first + 2, first], "pad_token_id": first}
    for name, value in (("tokenizer_config.json", {
            "tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": control,
            "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "model_max_length": 1024,
            "add_prefix_space": False, "split_special_tokens": False,
            "chat_template": "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content"
                             " + '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}"
                             "{{ '<|im_start|>assistant\\n' }}{% endif %}"}),
            ("generation_config.json", stops)):
        (folder / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    return Tokenizer.load(folder)


def final_answer(r: random.Random, steps: list[stories.Step], kind: int) -> str:
    if r.random() < FORM_FRAC[kind]:
        return stories.solution(steps)
    a, op, b = steps[-1]
    c, back = stories.result(steps[-1]), {"+": "-", "-": "+", "*": "/", "/": "*"}[op]
    return f"{stories.work(steps)} Check: {c} {back} {b} = {a}."


def document(r: random.Random, tok: Tokenizer, examples: int) -> tuple[list[int], list[float]]:
    """Token ids and loss weights of one prompt with its answer."""
    question, steps, kind = stories.story(r, r.randint(0, 3))
    text = stories.prompt(r, question, examples)
    pieces, rest = [], text
    while "\nAnswer:" in rest:  # solved examples: their answers count in full
        head, rest = rest.split("\nAnswer:", 1)
        answer, rest = rest.split("\n\n", 1)
        rest = "\n\n" + rest
        pieces += [(head + "\nAnswer:", STORY_WEIGHT), (answer, 1.0)]
    pieces.append((rest, STORY_WEIGHT))
    start, end = tok.control["<|im_start|>"], tok.control["<|im_end|>"]
    ids, weight = [start, *tok.encode("user\n")], []
    weight += [0.0] * len(ids)
    for piece, w in pieces:
        new = tok.encode(piece)
        ids += new
        weight += [w] * len(new)
    new = [end, *tok.encode("\n"), start, *tok.encode("assistant\n")]
    assert ids + new == tok.chat(text), "the document must be what the task's prompt will be"
    answer = [*tok.encode(final_answer(r, steps, kind)), end]
    return ids + new + answer, weight + [0.0] * len(new) + [1.0] * len(answer)


def batch(r: random.Random, tok: Tokenizer, tokens: int, examples: int):
    """Padded ids (n, T), next-token weights (n, T - 1): about `tokens` tokens of documents."""
    docs, count = [], 0
    while count < tokens:
        docs.append(document(r, tok, examples))
        count += len(docs[-1][0])
    T = max(len(ids) for ids, _ in docs)
    ids, weight = torch.zeros(len(docs), T, dtype=torch.long), torch.zeros(len(docs), T)
    for i, (a, w) in enumerate(docs):
        ids[i, : len(a)], weight[i, : len(a)] = torch.tensor(a), torch.tensor(w)
    return ids, weight[:, 1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True, help="checkpoint folder to write")
    parser.add_argument("--steps", type=int, default=8000, help="optimiser steps")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens a step")
    parser.add_argument("--lr", type=float, default=0.02, help="of Muon; AdamW's is a fifth")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    tok = train_tokenizer(args.out, args.seed)
    hf = {**CONFIG, "vocab_size": -(-tok.vocab_size // 16) * 16,
          "eos_token_id": tok.control["<|im_end|>"]}
    model = Qwen(ModelConfig.from_hf(hf))
    for p in model.parameters():
        if p.ndim == 2:
            torch.nn.init.normal_(p, std=0.02)
    n = sum(p.numel() for p in model.parameters())
    print(f"{n / 1e6:.2f} M parameters, vocabulary {tok.vocab_size}", flush=True)
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    optimisers = [torch.optim.Muon(matrices, lr=args.lr, weight_decay=0.01),
                  torch.optim.AdamW(others, lr=args.lr / 5, betas=(0.9, 0.98), weight_decay=0.0)]
    base = [o.param_groups[0]["lr"] for o in optimisers]
    r, begin, step, seen = random.Random(f"pretrain {args.seed}"), time.time(), 0, 0
    while step < args.steps:
        done, spent = step / args.steps, (time.time() - begin) / 60
        scale = min(1.0, (step + 1) / 100) * min(1.0, (1 - done) / 0.4)
        for o, lr in zip(optimisers, base, strict=True):
            o.param_groups[0]["lr"] = lr * scale
        # Short contexts first: arithmetic and fetching a fact are learnt there at a third of
        # the cost.
        examples = 0 if done < 0.25 else r.choice((0, 1, 2) if done < 0.5 else (1, 2, 2, 2))
        ids, weight = batch(r, tok, args.tokens, examples)
        pos = torch.arange(ids.shape[1] - 1).expand(len(ids), -1)
        with torch.autocast("cpu", torch.bfloat16):
            hidden = model(ids[:, :-1], pos, causal)
            picked = weight > 0
            logits = model.logits(hidden[picked])
        loss = F.cross_entropy(logits.float(), ids[:, 1:][picked], reduction="none")
        loss = (loss * weight[picked]).sum() / weight.sum()
        loss.backward()
        for o in optimisers:
            o.step()
            o.zero_grad(set_to_none=True)
        step, seen = step + 1, seen + ids.numel()
        if step % 100 == 0:
            full = (weight == 1) & (torch.cumsum(weight.flip(1), 1).flip(1) > 0)
            right = torch.zeros_like(picked)
            right[picked] = logits.argmax(-1) == ids[:, 1:][picked]
            wrong_digit = ~right & full & torch.isin(ids[:, 1:], torch.tensor(
                tok.encode("0123456789")))
            last = _last_span(full)
            exact = 1 - (wrong_digit & last).any(1).float().mean()
            print(f"step {step} {spent:.1f} min {seen / 1e6:.1f} Mtok, {examples} examples, "
                  f"loss {loss:.4f}, answers with every digit right {exact:.2f}", flush=True)
        if step % 1000 == 0:
            save_model(model, args.out, dtype=torch.bfloat16)
    save_model(model, args.out, dtype=torch.bfloat16)
    print(f"wrote {args.out} after {step} steps, {seen / 1e6:.1f} M tokens, {spent:.0f} minutes")


def _last_span(full: torch.Tensor) -> torch.Tensor:
    """The last run of True in each row: the final answer."""
    after = torch.cumsum(full.flip(1).int(), 1).flip(1)  # how many True from here on
    gaps = (~full & (after > 0)).flip(1).int()
    return full & (torch.cumsum(gaps, 1).flip(1) == 0)


if __name__ == "__main__":
    main()
