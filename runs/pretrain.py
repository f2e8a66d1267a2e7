"""Make the embedded model: a small Qwen3 trained from scratch on the generated problems.

    pip install -r requirements-dev.txt && python runs/pretrain.py --out out/embedded

Plain next-token training on documents in the very form of the tasks' prompts, dense attention.
Half-finished on purpose: a final answer ends in `#### N` only sometimes (`FORM_FRAC`), otherwise in
a check of the last step, whose number is not the answer: the first lesson for the RL to teach.
"""

import argparse
import json
import random
import re
import sys
from pathlib import Path

import tokenizers
import torch
import torch.nn.functional as F
from tokenizers import models, pre_tokenizers, trainers
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data import stories, texts  # noqa: E402
from errors import run_cli  # noqa: E402
from model import (  # noqa: E402
    ModelConfig,
    Qwen,
    causal,
    find_checkpoint,
    load_model,
    save_model,
)
from tokenizer import SPLIT, Tokenizer  # noqa: E402

READING = ("hotpotqa", "hotpotqa", "hotpotqa", "tldr", "govreport", "govreport")
# First gsm8k alone, then all: tasks (one a batch), steps, tokens a batch, learning rates.
STAGES = ((("gsm8k",), 5000, 4096, 1.0), (("gsm8k", "gsm8k", *READING), 4000, 2048, 0.5))
FORM_FRAC = {"trade": 0.65, "boxes": 0.65, "chain": 0.65}  # by kind of story, others 0.2
TEXT_FRAC = 0.3  # of the answers to the reading tasks are what the reward asks for
AGAIN_FRAC = 0.6  # of the texts to read are to be repeated: the densest lesson in looking up
STORY_WEIGHT = 0.1  # the facts are random: nearly all that can be learnt is in the answers
AGAIN = "Repeat the facts in another order."
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu",
    "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "head_dim": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
    "rope_theta": 1000.0, "max_position_embeddings": 1024, "tie_word_embeddings": True}
CHAT = ("{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")


def train_tokenizer(folder: Path, seed: int) -> Tokenizer:
    """Byte-level BPE with Qwen's split pattern: every word of the problems becomes one token."""
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(tokenizers.Regex(SPLIT), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    r, corpus = random.Random(f"tokenizer {seed}"), []
    for task in ("govreport", "hotpotqa", "tldr"):
        for _ in range(1500):
            *prompt, answer, other = getattr(texts, task)(r)
            corpus += ["".join(prompt), answer, other, f"{AGAIN} Again:"]
    for text, steps, _ in (stories.story(r, 3) for _ in range(3000)):
        corpus += [stories.prompt(r, text), f"{stories.solution(steps)}\nassistant\nuser\nsystem",
                   f" Check: {stories.work(steps)}"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe.train_from_iterator(corpus, trainers.BpeTrainer(
        vocab_size=2048, min_frequency=20, show_progress=False, initial_alphabet=alphabet))
    bpe.model.save(str(folder))
    pad = bpe.get_vocab_size()
    control = {pad + i: {"content": text, "special": True} for i, text in enumerate(CONTROL)}
    config = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": CONTROL[2], "pad_token": CONTROL[0],
              "chat_template": CHAT, "added_tokens_decoder": control}
    generation = {"eos_token_id": [pad + 2, pad], "pad_token_id": pad}
    for name, value in (("tokenizer_config", config), ("generation_config", generation)):
        (folder / f"{name}.json").write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    return Tokenizer.load(folder)


def final_answer(r: random.Random, steps: list[stories.Step], kind: str) -> str:
    if r.random() < FORM_FRAC.get(kind, 0.2):
        return stories.solution(steps)
    a, op, b = steps[-1]
    back = {"+": "-", "-": "+", "*": "/", "/": "*"}[op]
    return f"{stories.work(steps)} Check: {stories.result(steps[-1])} {back} {b} = {a}."


def gsm8k(r: random.Random, size: int) -> list[tuple[str, str]]:
    question, steps, kind = stories.story(r, r.randint(0, 3))
    return [(stories.prompt(r, question, size), final_answer(r, steps, kind))]


def reading(r: random.Random, task: str, size: int) -> list[tuple[str, str]]:
    """A problem; for hotpotqa more questions about the same paragraphs; and the text again."""
    if task == "hotpotqa":
        before, body, ask = *texts.hotpotqa(r)[:1], *texts.world(r, 1 + size)
        asked = [ask() for _ in range(3)]
        turns = [(f"Question: {question}", wanted(r, *texts.replies(work, answer)))
                 for question, work, answer in asked]
        turns[0] = (f"{before}{body}\n\n{turns[0][0]}", turns[0][1])
    else:
        idle = {"tldr": (5, 10, 15), "govreport": (5, 15, 29)}[task][size]
        before, body, after, *answers = getattr(texts, task)(r, idle)
        turns = [(before + body + after, wanted(r, *answers))]
    if r.random() < AGAIN_FRAC:
        facts = [x for x in re.findall(r"\w[^.]*\.", body) if x not in texts.EMPTY]
        turns.append((AGAIN, " ".join(["Again:", *r.sample(facts, len(facts))])))
    return turns


def wanted(r: random.Random, answer: str, other: str) -> str:
    return answer if r.random() < TEXT_FRAC else other


def document(r: random.Random, tok: Tokenizer, task: str, size: int) -> tuple[list, list]:
    """Token ids and loss weights of a prompt with its answer, or of several turns; size 0 to 2."""
    turns = gsm8k(r, size) if task == "gsm8k" else reading(r, task, size)
    ids, weight = [], []
    for text, answer in turns:
        prompt, piecewise = tok.chat(text), [tok.control["<|im_start|>"], *tok.encode("user\n")]
        start = len(ids)
        weight += [0.0] * len(piecewise)
        # Odd pieces are the solved examples' answers, which count in full.
        for i, piece in enumerate(re.split(r"(?<=\nAnswer:)(.*?)(?=\n\n)", text, flags=re.DOTALL)):
            piecewise += tok.encode(piece)
            weight += [1.0 if i % 2 else STORY_WEIGHT] * (start + len(piecewise) - len(weight))
        assert piecewise == prompt[: len(piecewise)], "the document must be as the task's prompt"
        weight += [0.0] * (len(prompt) - len(piecewise))
        ids += prompt
        # Which sentence is repeated next is random: its first two tokens count less.
        for piece in re.split(r"(?<=[.:])(?= )", answer) if text == AGAIN else [answer]:
            said = tok.encode(piece)
            weight += ([STORY_WEIGHT] * 2 + [1.0] * len(said))[2 * (text != AGAIN):][: len(said)]
            ids += said
        ids, weight = [*ids, tok.control["<|im_end|>"], *tok.encode("\n")], [*weight, 1.0, 0.0]
    return ids[:-1], weight[:-1]


def make_batch(r: random.Random, tok: Tokenizer, tasks: tuple[str, ...], tokens: int, size: int):
    """Padded ids (n, T) and next-token weights (n, T - 1) of documents of one task."""
    task, docs = r.choice(tasks), []
    while sum(len(ids) for ids, _ in docs) < tokens:
        docs.append(document(r, tok, task, size))
    ids, weight = (pad_sequence([*map(torch.tensor, x)], True) for x in zip(*docs, strict=True))
    return ids, weight[:, 1:]


def start(model: Qwen, tok: Tokenizer, init: Path) -> None:
    """The weights of another checkpoint; a token that it does not know keeps its random row."""
    other, known = load_model(init, dtype=torch.float32).state_dict(), Tokenizer.load(init)
    embed, rows = model.embed_tokens.weight.detach(), other["embed_tokens.weight"]
    pieces = [{token: i for i, token in x._bytes.items()} for x in (tok, known)]
    for here, there in ((tok.control, known.control), pieces):
        for token in here.keys() & there.keys():
            embed[here[token]] = rows[there[token]]
    model.load_state_dict({**other, "embed_tokens.weight": embed})


def train(out: Path, init: Path | None, seed: int) -> None:
    """Muon for the matrices, AdamW for the rest; linear decay over the last 40 % of the steps."""
    if init:
        find_checkpoint(str(init))  # before anything is written
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    torch.set_num_threads(2)
    tok = train_tokenizer(out, seed)
    model = Qwen(ModelConfig.from_hf({**CONFIG, "vocab_size": -(-tok.vocab_size // 16) * 16,
                                      "eos_token_id": tok.control["<|im_end|>"]}))
    embed, *matrices = [p for p in model.parameters() if p.ndim == 2]
    for p in (embed, *matrices):
        torch.nn.init.normal_(p, std=0.02)
    if init:
        start(model, tok, init)
    others = [embed, *(p for p in model.parameters() if p.ndim == 1)]
    forward = torch.compile(model, dynamic=True)  # a fifth faster; needs a C++ compiler
    for number, (tasks, steps, tokens, scale) in enumerate(STAGES):
        if init and number == 0:
            continue
        optimisers = [(torch.optim.Muon(matrices, weight_decay=0.01), 0.02 * scale),
                      (torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0),
                       0.004 * scale)]
        r = random.Random(f"pretrain {seed} {number}")
        for step in (bar := tqdm(range(steps), mininterval=10)):
            done = step / steps
            # Short contexts first: what is learnt there costs a third of the tokens.
            size = 0 if done < 0.2 else r.choice((0, 1, 2) if done < 0.4 else (1, 2, 2, 2))
            ids, weight = make_batch(r, tok, tasks, tokens, size)
            pos = torch.arange(ids.shape[1] - 1).expand(len(ids), -1)
            counted, target = weight > 0, ids[:, 1:][weight > 0]
            with torch.autocast("cpu", torch.bfloat16):
                logits = model.logits(forward(ids[:, :-1], pos, causal)[counted])
            loss = F.cross_entropy(logits.float(), target, reduction="none")
            loss = (loss * weight[counted]).sum() / weight.sum()
            loss.backward()
            for optimiser, lr in optimisers:
                optimiser.param_groups[0]["lr"] = lr * min(1.0, (step + 1) / 100, (1 - done) / 0.4)
                optimiser.step()
                optimiser.zero_grad(set_to_none=True)
            bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
            if step + 1 == steps or (step + 1) % 500 == 0:
                save_model(model, out, dtype=torch.bfloat16)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True, help="checkpoint folder to write")
    parser.add_argument("--init", type=Path, help="begin the second stage from this checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    run_cli(lambda: train(**vars(parser.parse_args())))
