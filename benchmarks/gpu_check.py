"""Every check that wants a GPU, on a random model of a 4B's shape; ends with one table.

    python benchmarks/gpu_check.py                               # on CUDA, within 10 minutes
    python benchmarks/gpu_check.py --shape tiny --device cpu     # the same code, in seconds

The contract in float32 and bfloat16; finite gradients under masks at lengths around the tile sizes
of attention kernels; memory over 1,000 decoding steps; seconds and peak bytes of a rollout and of a
learner step with AdamW for dense, naive and SMD. Exits with status 1 if a check is not fine.
"""

import argparse
import gc
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eviction import DENSE, Eviction  # noqa: E402
from grpo import Objective, backward, group_terms, old_policy  # noqa: E402
from model import ModelConfig, Qwen  # noqa: E402
from optim import MasterOptimizer  # noqa: E402
from rollout import Rollout, generate  # noqa: E402
from train import phase  # noqa: E402

COMMON = {"model_type": "qwen3", "rms_norm_eps": 1e-6, "tie_word_embeddings": True}
SHAPES = {  # Qwen3-4B (arXiv 2505.09388), and one for a CPU
    "4b": {**COMMON, "vocab_size": 151936, "hidden_size": 2560, "num_hidden_layers": 36,
           "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
           "intermediate_size": 9728, "rope_theta": 5e6},
    "tiny": {**COMMON, "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 3,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
             "intermediate_size": 128, "rope_theta": 1e4}}
# Prompt tokens, samples, response tokens of the timed step; steps of decoding; allowed growth.
SIZES = {"4b": (1024, 8, 256, 1000, 1 << 20), "tiny": (96, 4, 16, 60, 64 << 20)}
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 0.1}  # of the mean |d log p|: rounding


def random_model(shape: str, dtype: torch.dtype, device: str) -> Qwen:
    """Random weights with attention sharp enough for an evicted key to matter."""
    with torch.device("meta"):
        model = Qwen(ModelConfig.from_hf(SHAPES[shape]))
    model = model.to(dtype).to_empty(device=device)
    draw = torch.Generator(device=device).manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 2:
                p.normal_(0.0, 1.0 if "embed" in name else p.shape[1] ** -0.5, generator=draw)
            else:
                p.fill_(2.0 if "q_norm" in name or "k_norm" in name else 1.0)
        model.embed_tokens.weight *= 4 / model.cfg.C**0.5  # logits of a few nats
    return model


def sample(model: Qwen, P: int, G: int, R: int, eviction: Eviction, N: int = 1) -> Rollout:
    draw = torch.Generator().manual_seed(P)
    prompts = [torch.randint(model.cfg.V, (P,), generator=draw).tolist() for _ in range(N)]
    return generate(model, prompts, sequence=range(N), G=G, max_new=R, stop_ids=frozenset(),
                    eviction=eviction)


def differences(model: Qwen, rollout: Rollout, replay: bool) -> torch.Tensor:
    G = rollout.tokens.shape[1]
    with torch.no_grad():
        logp, *_, mask = group_terms(model, rollout, 0, slice(0, G), temperature=1.0, distil=False,
                                     replay=replay)
    return (logp - rollout.logp[0][mask]).abs()


def contract(shape: str, device: str):
    schedules = {"snapkv keep 0.5": Eviction("snapkv", 0.5),
                 "h2o budget 64 every 16": Eviction("h2o", 1.0, budget=64, evict_every=16)}
    for dtype, bound in BOUNDS.items():
        model = random_model(shape, dtype, device)
        for name, eviction in schedules.items():
            rollout = sample(model, 192, 4, 48, eviction)
            shadow, dense = (differences(model, rollout, replay) for replay in (True, False))
            yield (f"contract, {name}, {str(dtype)[6:]}",
                   f"shadow mean {shadow.mean():.1e}, largest {shadow.max():.1e}; dense mean "
                   f"{dense.mean():.1e}, largest {dense.max():.1e}",
                   shadow.mean() <= bound and dense.mean() > 5 * shadow.mean())


def gradients(shape: str, device: str):
    """cuDNN's attention gave NaN in the backward pass under explicit masks at some lengths."""
    model = random_model(shape, torch.bfloat16, device)
    model.checkpointing = True
    for P in (64, 192, 704):
        rollout = sample(model, P, 2, 32, Eviction("snapkv", 0.5, window=16))
        model.zero_grad(set_to_none=True)
        told = backward(model, rollout, torch.tensor([[1.0, 0.0]], device=device), Objective())
        norm = torch.stack([p.grad.float().norm() for p in model.parameters()]).norm()
        yield (f"gradient, prompt of {P} tokens, bfloat16", f"norm {norm:.3g}, loss "
               f"{told['loss']:.3g}", bool(norm.isfinite()) and 0 < float(norm))


def decoding(shape: str, device: str):
    """Allocated memory after each step of decoding: eviction must not make it grow."""
    _, G, _, steps, allowed = SIZES[shape]
    model, seen = random_model(shape, torch.bfloat16, device), []

    def look(*_):
        resident = 4096 * int(Path("/proc/self/statm").read_text().split()[1])
        seen.append(torch.cuda.memory_allocated() if device == "cuda" else resident)

    hook = model.register_forward_pre_hook(look)
    start = time.perf_counter()
    rollout = sample(model, 256, G, steps, Eviction("snapkv", 1.0, budget=128, evict_every=32))
    sec, late = time.perf_counter() - start, seen[len(seen) // 10 :]
    hook.remove()
    yield (f"decoding {steps} steps, {G} samples, budget 128", f"{G * steps / sec:.0f} tokens/s, "
           f"KV {rollout.kv_bytes_peak / 1e6:.1f} of {rollout.kv_bytes_dense / 1e6:.1f} MB, "
           f"growth {(max(late) - late[0]) / 1e6:.2f} MB", max(late) - late[0] <= allowed)


def steps(shape: str, device: str):
    """One whole step, bfloat16 weights with float32 masters; the second of two is timed."""
    P, G, R, *_ = SIZES[shape]
    model = random_model(shape, torch.bfloat16, device)
    model.checkpointing = True
    optim = MasterOptimizer(model, lr=1e-6, max_grad_norm=1.0)
    rewards = torch.arange(2.0 * G, device=device).view(2, G)
    for method in ("dense", "naive", "smd, lambda 0", "smd"):
        o = Objective(method=method.partition(",")[0], lam=0.1 if method == "smd" else 0.0)
        for _ in range(2):
            with phase(device) as rolled:
                rollout = sample(model, P, G, R, DENSE if method == "dense" else
                                 Eviction("snapkv", 0.5), N=2)
            with phase(device) as learned:
                told = backward(model, rollout, rewards, o, old_policy(model, rollout, o))
                norm = optim.step()
        yield (f"step, {method}, 2 prompts of {P} x {G} x {R}",
               f"rollout {rolled['sec']:.1f} s, {rolled['bytes'] / 1e9:.2f} GB, KV "
               f"{rollout.kv_bytes_peak / 1e6:.0f} MB; learner {learned['sec']:.1f} s, "
               f"{learned['bytes'] / 1e9:.2f} GB; mean d log p "
               f"{told['mismatch/logp_abs_mean']:.1e}",
               norm > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--shape", choices=list(SHAPES), default="4b")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    args = parser.parse_args()
    torch.backends.cuda.enable_cudnn_sdp(False)
    start, rows = time.perf_counter(), []
    for check in (contract, gradients, decoding, steps):
        try:
            for row in check(args.shape, args.device):
                rows.append(row)
                print(f"{time.perf_counter() - start:5.0f} s  {row[0]}: {row[1]}", flush=True)
        except (RuntimeError, torch.OutOfMemoryError) as e:  # the other checks are still worth it
            rows.append((check.__name__, f"{type(e).__name__}: {str(e).splitlines()[0]}", False))
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()
    where = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    print(f"\n{args.shape} shape, {where}, torch {torch.__version__}, "
          f"{time.perf_counter() - start:.0f} s\n\n| check | seen | fine |\n|---|---|---|")
    for name, seen, fine in rows:
        print(f"| {name} | {seen} | {'yes' if fine else 'NO'} |")
    return int(not all(fine for *_, fine in rows))


if __name__ == "__main__":
    sys.exit(main())
