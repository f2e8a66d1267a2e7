"""Write a random checkpoint of a 4B's shape in shards, to measure loading and a step on it.

    python benchmarks/big_checkpoint.py --tokenizer FOLDER --out out/big       # 8 GB
    python train.py --task gsm8k --model out/big --lora-rank 8 --steps 1 ...   # see results/big.md

The tokenizer's files come from a real Qwen checkpoint. One shard is in memory at a time.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpu_check import SHAPES  # noqa: E402
from errors import run_cli  # noqa: E402
from model import ModelConfig, Qwen  # noqa: E402
from tokenizer import Tokenizer  # noqa: E402

SHARD_BYTES = 2 * 10**9


def write(shape: str, tokenizer: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    hf = {"architectures": ["Qwen3ForCausalLM"], "hidden_act": "silu", **SHAPES[shape],
          "attention_bias": False, "max_position_embeddings": 32768, "torch_dtype": "bfloat16"}
    (out / "config.json").write_text(json.dumps(hf, indent=2))
    Tokenizer.load(tokenizer).save(out)
    with torch.device("meta"):
        model = Qwen(ModelConfig.from_hf(hf))
    shapes = {f"model.{name}": p.shape for name, p in model.named_parameters()}
    shards, size = [[]], 0
    for name in shapes:
        if size + 2 * shapes[name].numel() > SHARD_BYTES and shards[-1]:
            shards, size = [*shards, []], 0
        shards[-1].append(name)
        size += 2 * shapes[name].numel()
    files = {}
    for i, names in enumerate(shards, start=1):
        file, draw = f"model-{i:05d}-of-{len(shards):05d}.safetensors", torch.Generator()
        save_file({name: torch.ones(shapes[name], dtype=torch.bfloat16) if len(shapes[name]) == 1
                   else torch.empty(shapes[name], dtype=torch.bfloat16).normal_(
                       std=0.02, generator=draw.manual_seed(i)) for name in names}, out / file,
                  metadata={"format": "pt"})
        files |= dict.fromkeys(names, file)
        print(f"wrote {out / file}", flush=True)
    total = sum(2 * x.numel() for x in shapes.values())
    (out / "model.safetensors.index.json").write_text(json.dumps(
        {"metadata": {"total_size": total}, "weight_map": files}, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--shape", choices=list(SHAPES), default="4b")
    parser.add_argument("--tokenizer", type=Path, required=True, help="a Qwen checkpoint's folder")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    args = parser.parse_args()
    write(args.shape, args.tokenizer, args.out)


if __name__ == "__main__":
    run_cli(main)
