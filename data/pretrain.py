"""Make the embedded model: a small Qwen3 trained from scratch on the generated stories.

    pip install -r requirements-dev.txt && python data/pretrain.py --out out/embedded

Plain next-token training on documents in the very form of the task's prompts, with the dense cache
and no hand-built weights. Half-finished on purpose in one respect: a final answer ends in the
`#### N` form only sometimes (`FORM_FRAC`), and otherwise in a check of the last step, whose number
is not the answer. That is the first lesson that reinforcement learning has to teach.
"""

import argparse
import json
import random
import re
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data import stories  # noqa: E402
from model import ModelConfig, Qwen, causal, save_model  # noqa: E402
from tokenizer import SPLIT, Tokenizer  # noqa: E402

FORM_FRAC = {"trade": 0.65, "boxes": 0.65, "chain": 0.65}  # by kind of story, others 0.2
STORY_WEIGHT = 0.1  # the facts are random: nearly all that can be learnt is in the answers
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu",
    "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "head_dim": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
    "rope_theta": 1000.0, "max_position_embeddings": 1024, "tie_word_embeddings": True,
}
CHAT = ("{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")


def train_tokenizer(folder: Path, seed: int) -> Tokenizer:
    """Byte-level BPE with Qwen's split pattern: every word of the stories becomes one token."""
    import tokenizers
    from tokenizers import models, normalizers, pre_tokenizers, trainers

    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(tokenizers.Regex(SPLIT), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    r, corpus = random.Random(f"tokenizer {seed}"), []
    for text, steps, _ in (stories.story(r, 3) for _ in range(3000)):
        corpus += [stories.prompt(r, text), f"{stories.solution(steps)}\nassistant\nuser\nsystem",
                   f" Check: {stories.work(steps)}"]
    bpe.train_from_iterator(corpus, trainers.BpeTrainer(
        vocab_size=2048, min_frequency=20, show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())))
    bpe.model.save(str(folder))
    pad = bpe.get_vocab_size()
    control = {pad + i: {"content": text, "special": True} for i, text in enumerate(CONTROL)}
    for name, value in (("tokenizer_config.json", {
            "tokenizer_class": "Qwen2Tokenizer", "eos_token": CONTROL[2], "pad_token": CONTROL[0],
            "chat_template": CHAT, "added_tokens_decoder": control}),
            ("generation_config.json", {"eos_token_id": [pad + 2, pad], "pad_token_id": pad})):
        (folder / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    return Tokenizer.load(folder)


def final_answer(r: random.Random, steps: list[stories.Step], kind: str) -> str:
    if r.random() < FORM_FRAC.get(kind, 0.2):
        return stories.solution(steps)
    a, op, b = steps[-1]
    back = {"+": "-", "-": "+", "*": "/", "/": "*"}[op]
    return f"{stories.work(steps)} Check: {stories.result(steps[-1])} {back} {b} = {a}."


def document(r: random.Random, tok: Tokenizer, examples: int) -> tuple[list[int], list[float]]:
    """Token ids and loss weights of one prompt with its answer."""
    question, steps, kind = stories.story(r, r.randint(0, 3))
    text = stories.prompt(r, question, examples)
    ids = [tok.control["<|im_start|>"], *tok.encode("user\n")]
    weight = [0.0] * len(ids)
    # Odd pieces are the solved examples' answers, which count in full.
    for i, piece in enumerate(re.split(r"(?<=\nAnswer:)(.*?)(?=\n\n)", text, flags=re.DOTALL)):
        new = tok.encode(piece)
        ids, weight = ids + new, weight + [1.0 if i % 2 else STORY_WEIGHT] * len(new)
    prompt = tok.chat(text)
    assert ids == prompt[: len(ids)], "the document must be what the task's prompt will be"
    answer = [*tok.encode(final_answer(r, steps, kind)), tok.control["<|im_end|>"]]
    weight += [0.0] * (len(prompt) - len(ids)) + [1.0] * len(answer)
    return prompt + answer, weight


def make_batch(r: random.Random, tok: Tokenizer, examples: int, tokens: int = 4096):
    """Padded ids (n, T), next-token weights (n, T - 1): about `tokens` tokens of documents."""
    docs = []
    while sum(len(ids) for ids, _ in docs) < tokens:
        docs.append(document(r, tok, examples))
    T = max(len(ids) for ids, _ in docs)
    ids, weight = torch.zeros(len(docs), T, dtype=torch.long), torch.zeros(len(docs), T)
    for i, (a, w) in enumerate(docs):
        ids[i, : len(a)], weight[i, : len(a)] = torch.tensor(a), torch.tensor(w)
    return ids, weight[:, 1:]


def train(model: Qwen, tok: Tokenizer, out: Path, steps: int, seed: int) -> None:
    """Muon for the matrices, AdamW for the rest; linear decay over the last 40 % of the steps."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in named if p.ndim != 2 or "embed" in name]
    optimisers = [(torch.optim.Muon(matrices, weight_decay=0.01), 0.02),
                  (torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0), 0.004)]
    r, begin, digits = random.Random(f"pretrain {seed}"), time.time(), tok.encode("0123456789")
    for step in range(steps):
        done = step / steps
        # Short contexts first: what is learnt there costs a third of the tokens.
        examples = 0 if done < 0.2 else r.choice((0, 1, 2) if done < 0.4 else (1, 2, 2, 2))
        ids, weight = make_batch(r, tok, examples)
        pos = torch.arange(ids.shape[1] - 1).expand(len(ids), -1)
        counted, target = weight > 0, ids[:, 1:][weight > 0]
        with torch.autocast("cpu", torch.bfloat16):
            logits = model.logits(model(ids[:, :-1], pos, causal)[counted])
        loss = F.cross_entropy(logits.float(), target, reduction="none")
        loss = (loss * weight[counted]).sum() / weight.sum()
        loss.backward()
        for optimiser, lr in optimisers:
            optimiser.param_groups[0]["lr"] = lr * min(1.0, (step + 1) / 100, (1 - done) / 0.4)
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        if (step + 1) % 100 == 0 or step + 1 == steps:
            figure = (weight[counted] == 1) & torch.isin(target, torch.tensor(digits))
            right = (logits.argmax(-1) == target)[figure].float().mean()
            print(f"step {step + 1} {(time.time() - begin) / 60:.1f} min, loss {loss:.4f}, "
                  f"digits of answers right {right:.3f}", flush=True)
    save_model(model, out, dtype=torch.bfloat16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True, help="checkpoint folder to write")
    parser.add_argument("--steps", type=int, default=5000, help="of the optimiser (default 5000)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # for one result on every machine
    tok = train_tokenizer(args.out, args.seed)
    model = Qwen(ModelConfig.from_hf({**CONFIG, "vocab_size": -(-tok.vocab_size // 16) * 16,
                                      "eos_token_id": tok.control["<|im_end|>"]}))
    for p in model.parameters():
        if p.ndim == 2:
            torch.nn.init.normal_(p, std=0.02)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, "
          f"vocabulary {tok.vocab_size}", flush=True)
    train(model, tok, args.out, args.steps, args.seed)


if __name__ == "__main__":
    main()
