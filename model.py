"""A Qwen2 / Qwen2.5 / Qwen3 (dense) transformer, and Hugging Face folders in and out.

Each layer hands its `q, k, v` to a function it was given, `attend(layer, q, k, v) -> o` like q.
Prefill, decoding and learning differ in `attend` alone, so sampler and learner run the same network
by construction. There is no position counter: RoPE (arXiv 2104.09864, half-split) is fed by `pos`.
Sources: Qwen2.5 (arXiv 2412.15115), Qwen3 (arXiv 2505.09388); modules are named as in checkpoints.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from errors import BadInput, read_json

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
FILES = ["*.json", "*.safetensors", "*.jinja", "merges.txt"]  # of a checkpoint, all that is read
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class ModelConfig:
    """Shape of the network; the letters are those used in shape comments."""

    V: int  # vocabulary
    C: int  # hidden size
    L: int  # layers
    Hq: int  # query heads
    Hkv: int  # key / value heads
    D: int  # head dim: stated, never derived (Qwen3-4B has 32 * 128 != 2560)
    ffn: int
    eps: float
    rope_theta: float
    tied: bool  # the head is the embedding
    qkv_bias: bool  # Qwen2
    qk_norm: bool  # Qwen3
    hf: dict = field(compare=False, repr=False)  # the folder's config.json, written back on saving

    @classmethod
    def from_hf(cls, hf: dict, where: str = "config.json") -> "ModelConfig":
        """Read a Hugging Face config; BadInput names a key that is missing or not implemented."""
        kind = hf.get("model_type")
        if kind not in ("qwen2", "qwen3"):
            raise BadInput(f"{where}: model_type {kind!r}; expected 'qwen2' or 'qwen3' (dense)")
        ropes = [hf.get(key) or {} for key in ("rope_scaling", "rope_parameters")]
        plain = {"use_sliding_window": (False, None), "attention_bias": (kind == "qwen2",),
                 "num_experts": (None, 0), "hidden_act": ("silu",), "quantization_config": (None,)}
        odd = [(key, hf[key]) for key, fine in plain.items() if hf.get(key, fine[0]) not in fine]
        odd += [("layer_types", t) for t in hf.get("layer_types") or () if t != "full_attention"]
        odd += [("rope_scaling", r) for r in ropes
                if r.get("rope_type", r.get("type", "default")) != "default"]
        if odd:
            raise BadInput(f"{where}: {odd[0][0]} = {odd[0][1]!r} is not implemented; "
                           "use a dense Qwen2, Qwen2.5 or Qwen3 with plain RoPE")
        flat = {**hf, **ropes[0], **ropes[1]}  # where rope_theta may be
        sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
                 "num_key_value_heads", "intermediate_size", "rms_norm_eps", "rope_theta")
        if bad := [x for x in sizes if not isinstance(flat.get(x), (int, float)) or flat[x] <= 0]:
            raise BadInput(f"{where}: {bad[0]} is missing or not positive; use a whole checkpoint")
        V, C, L, Hq, Hkv, ffn, eps, theta = (flat[key] for key in sizes)
        D = hf.get("head_dim") or (128 if kind == "qwen3" else C // Hq)  # the format's defaults
        if Hq % Hkv or D % 2:
            raise BadInput(f"{where}: {Hq} query heads, {Hkv} key heads, head_dim {D}; expected "
                           "query heads a multiple of key heads and an even head_dim")
        return cls(V, C, L, Hq, Hkv, D, ffn, eps, theta, hf.get("tie_word_embeddings", False),
                   qkv_bias=kind == "qwen2", qk_norm=kind == "qwen3", hf=dict(hf))


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale).to(x.dtype) * self.weight


def rope_table(pos: Tensor, D: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of each position's angles: two (B, 1, T, D) of `dtype`, from pos (B, T)."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    inv_freq = 1.0 / theta ** (torch.arange(0, D, 2, device=pos.device, dtype=wide) / D)  # (D/2,)
    angle = pos[:, None, :, None].to(wide) * inv_freq.repeat(2)  # (B, 1, T, D)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of x (B, H, T, D), half-split layout."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class SelfAttention(nn.Module):
    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.D = cfg.D
        self.q_proj = nn.Linear(cfg.C, cfg.Hq * cfg.D, bias=cfg.qkv_bias)
        self.k_proj = nn.Linear(cfg.C, cfg.Hkv * cfg.D, bias=cfg.qkv_bias)
        self.v_proj = nn.Linear(cfg.C, cfg.Hkv * cfg.D, bias=cfg.qkv_bias)
        self.o_proj = nn.Linear(cfg.Hq * cfg.D, cfg.C, bias=False)
        self.q_norm = RMSNorm(cfg.D, cfg.eps) if cfg.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(cfg.D, cfg.eps) if cfg.qk_norm else nn.Identity()

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], layer: int, attend: Attend) -> Tensor:
        B, T, C = x.shape
        q = self.q_norm(self.q_proj(x).view(B, T, -1, self.D)).transpose(1, 2)  # (B, Hq, T, D)
        k = self.k_norm(self.k_proj(x).view(B, T, -1, self.D)).transpose(1, 2)  # (B, Hkv, T, D)
        v = self.v_proj(x).view(B, T, -1, self.D).transpose(1, 2)
        o = attend(layer, rotate(q, *rope), rotate(k, *rope), v)
        return self.o_proj(o.transpose(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.gate_proj = nn.Linear(cfg.C, cfg.ffn, bias=False)
        self.up_proj = nn.Linear(cfg.C, cfg.ffn, bias=False)
        self.down_proj = nn.Linear(cfg.ffn, cfg.C, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.input_layernorm = RMSNorm(cfg.C, cfg.eps)
        self.self_attn = SelfAttention(cfg)
        self.post_attention_layernorm = RMSNorm(cfg.C, cfg.eps)
        self.mlp = MLP(cfg)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], layer: int, attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, layer, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Qwen(nn.Module):
    """The transformer. `checkpointing = True` recomputes each block in the backward pass."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.cfg = cfg
        self.checkpointing = False
        self.embed_tokens = nn.Embedding(cfg.V, cfg.C)
        self.layers = nn.ModuleList(Block(cfg) for _ in range(cfg.L))
        self.norm = RMSNorm(cfg.C, cfg.eps)
        if not cfg.tied:
            self.lm_head = nn.Linear(cfg.C, cfg.V, bias=False)

    def forward(self, ids: Tensor, pos: Tensor, attend: Attend) -> Tensor:
        """Final hidden states (B, T, C), normalised, ready for `logits`.

        Args:
            ids, pos: (B, T) int64 tokens and absolute positions; any order, repeats allowed.
            attend: gets a layer's rotated q (B, Hq, T, D), k, v (B, Hkv, T, D), returns o like q;
                checkpointing calls it again and must get the same.
        """
        x = self.embed_tokens(ids)
        rope = rope_table(pos, self.cfg.D, self.cfg.rope_theta, x.dtype)
        for layer, block in enumerate(self.layers):
            if self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, rope, layer, attend, use_reentrant=False)
            else:
                x = block(x, rope, layer, attend)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., V) in float32 or wider, from hidden (..., C)."""
        head = self.embed_tokens if self.cfg.tied else self.lm_head
        z = F.linear(hidden, head.weight)
        return z if z.dtype == torch.float64 else z.float()


def causal(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Plain causal attention of whole sequences without a past: the dense `attend`."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _checkpoint_name(name: str) -> str:
    return name if name.startswith("lm_head.") else f"model.{name}"


def _shards(folder: Path) -> list[Path]:
    if (folder / "model.safetensors").exists():
        return [folder / "model.safetensors"]
    index = folder / "model.safetensors.index.json"
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise BadInput(f"{index}: no usable weight_map; expected weight names and their files")
    return [folder / name for name in sorted(set(files.values()))]


def find_checkpoint(name: str) -> Path:
    """The folder of that name, or that of a model ORG/NAME of the Hugging Face hub: its cache,
    token, mirror and offline mode are huggingface_hub's (HF_HOME, HF_TOKEN, HF_ENDPOINT,
    HF_HUB_OFFLINE). Weights and tokenizer files alone are fetched, with progress bars.

    Raises: BadInput if there is no such folder and no such model, or it cannot be fetched.
    """
    if Path(name).is_dir():
        return Path(name)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise BadInput(f"--model {name}: no such folder; expected that of a checkpoint, or ORG/NAME"
                       " for a model of the Hugging Face hub")
    try:
        return Path(snapshot_download(name, allow_patterns=FILES, ignore_patterns="*/*"))
    except GatedRepoError as e:
        why, todo = e, "accept its terms on its page and set HF_TOKEN"
    except RepositoryNotFoundError as e:
        why, todo = e, "no folder and no public model has that name: correct it, or set HF_TOKEN"
    except LocalEntryNotFoundError as e:
        why, todo = e, "it is not in the cache: connect, or name a downloaded folder"
    except Exception as e:  # of the network, the disk, the server
        why, todo = e, "run again, which goes on where this broke off, or name a folder"
    raise BadInput(f"--model {name}: {str(why).strip().splitlines()[0]} ({type(why).__name__}); "
                   f"{todo}")


def load_model(folder: str | Path, *, dtype: torch.dtype, device: str = "cpu") -> Qwen:
    """Load a Hugging Face folder, one memory-mapped tensor at a time, into `dtype` on `device`.

    Raises: BadInput unless every weight is there, with its shape, and no other; it names which.
    """
    folder = Path(folder)
    cfg = ModelConfig.from_hf(read_json(folder / "config.json"), str(folder / "config.json"))
    with torch.device("meta"):
        model = Qwen(cfg)
    shapes = {_checkpoint_name(name): tuple(p.shape) for name, p in model.state_dict().items()}
    if cfg.tied:  # some writers add a copy of the embedding: compared, then dropped
        shapes["lm_head.weight"] = tuple(model.embed_tokens.weight.shape)
    state: dict[str, Tensor] = {}
    for path in _shards(folder):
        try:
            with safe_open(path, framework="pt") as f:
                for key in f.keys():  # noqa: SIM118 (not a dict)
                    there, want = f.get_slice(key), shapes.get(key, "no weight of this name")
                    shape, kind = tuple(there.get_shape()), there.get_dtype()
                    if shape != want or kind not in ("F64", "F32", "BF16", "F16"):
                        raise BadInput(f"{path}: weight {key} has shape {shape}, dtype {kind}; "
                                       f"expected {want}, not quantised")
                    state[key.removeprefix("model.")] = f.get_tensor(key).to(device, dtype)
        except (SafetensorError, OSError) as e:
            raise BadInput(f"{path}: missing or damaged ({e}); download it again") from None
    if missing := [_checkpoint_name(name) for name in model.state_dict() if name not in state]:
        raise BadInput(f"{folder}: {missing[0]} is missing, {len(missing)} in all; download again")
    embed = state["embed_tokens.weight"]
    if cfg.tied and not torch.equal(state.pop("lm_head.weight", embed), embed):
        raise BadInput(f"{folder}: lm_head is not the embedding; set tie_word_embeddings false")
    model.load_state_dict(state, assign=True)
    return model


def save_model(model: Qwen, folder: str | Path, *, dtype: torch.dtype | None = None,
               state: dict[str, Tensor] | None = None) -> None:
    """Write config.json and model.safetensors into an existing folder, in `dtype` (default: as is);
    tied embeddings once; `state` in place of the model's own, of the same names. Transformers reads
    it too, with the other files, from `Tokenizer.save`."""
    folder, dtype = Path(folder), dtype or next(model.parameters()).dtype
    state = {_checkpoint_name(k): v.detach().to("cpu", dtype).contiguous()
             for k, v in (state or model.state_dict()).items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    hf = {k: v for k, v in model.cfg.hf.items() if k not in ("dtype", "torch_dtype")}
    hf["torch_dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(hf, indent=2) + "\n", encoding="utf-8")
