"""A Qwen2 / Qwen2.5 / Qwen3 (dense) transformer, and Hugging Face folders in and out.

The network computes `q, k, v` of a layer and hands them to a function it was given:

    hidden = model(ids, pos, attend)         # attend(layer, q, k, v) -> o, same shape as q

Prefill, decoding and learning differ in `attend` and in nothing else, so the sampler and the
learner run the same network by construction. There is no position counter: RoPE is fed by `pos`.
Module names are those of the checkpoints, so loading is strict by comparing names and shapes.

Sources: Qwen2.5 (arXiv 2412.15115), Qwen3 (arXiv 2505.09388), RoPE (arXiv 2104.09864, in the
half-split layout of the checkpoints).
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from errors import BadInput, read_json

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


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
        rope = [hf.get("rope_scaling") or {}, hf.get("rope_parameters") or {}]
        for key, refused in {
            "use_sliding_window": hf.get("use_sliding_window"),
            "layer_types": set(hf.get("layer_types") or ()) - {"full_attention"},
            "rope_scaling": [r for r in rope if r.get("rope_type", r.get("type", "default"))
                             != "default"],
            "num_experts": hf.get("num_experts"),
            "quantization_config": hf.get("quantization_config"),
            "attention_bias": hf.get("attention_bias", kind == "qwen2") != (kind == "qwen2"),
            "hidden_act": hf.get("hidden_act", "silu") != "silu",
        }.items():
            if refused:
                got = refused if key == "rope_scaling" else hf[key]
                raise BadInput(f"{where}: {key} = {got!r} is not "
                               "implemented; use a dense Qwen2, Qwen2.5 or Qwen3 with plain RoPE")
        flat = {**hf, **rope[0], **rope[1]}  # where rope_theta may be

        def positive(key: str) -> int | float:
            number = (int, float) if key in ("rms_norm_eps", "rope_theta") else int
            if not isinstance(flat.get(key), number) or flat[key] <= 0:
                got = f"= {flat[key]!r}" if key in flat else "is missing"
                raise BadInput(f"{where}: {key} {got}; expected a positive number")
            return flat[key]

        C, Hq, Hkv = map(positive, ("hidden_size", "num_attention_heads", "num_key_value_heads"))
        default = 128 if kind == "qwen3" else C // Hq  # the format's own
        D = default if hf.get("head_dim") is None else positive("head_dim")
        if Hq % Hkv or D % 2:
            raise BadInput(f"{where}: {Hq} query heads, {Hkv} key heads, head_dim {D}; expected "
                           "query heads a multiple of key heads and an even head_dim")
        return cls(V=positive("vocab_size"), C=C, L=positive("num_hidden_layers"), Hq=Hq, Hkv=Hkv,
                   D=D, ffn=positive("intermediate_size"), eps=positive("rms_norm_eps"),
                   rope_theta=positive("rope_theta"), tied=hf.get("tie_word_embeddings", False),
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
    inv_freq = 1.0 / theta ** (torch.arange(0, D, 2, device=pos.device, dtype=wide) / D)
    angle = pos[:, None, :, None].to(wide) * inv_freq  # (B, 1, T, D/2)
    angle = torch.cat((angle, angle), dim=-1)
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
        """Final hidden states.

        Args:
            ids: (B, T) int64 tokens.
            pos: (B, T) int64 absolute positions; any order, repeats allowed (packed responses).
            attend: called once a layer with rotated q (B, Hq, T, D), k, v (B, Hkv, T, D); returns
                o like q, and the same when checkpointing calls it again.
        Returns:
            (B, T, C), normalised, ready for `logits`.
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


def load_model(folder: str | Path, *, dtype: torch.dtype, device: str = "cpu") -> Qwen:
    """Load a Hugging Face folder: every weight must be there, with its shape, and no other.

    Tensors are read one at a time from the memory-mapped files into their final dtype and device.
    BadInput names the file, the weight or the key that is wrong.
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
                    there = f.get_slice(key)
                    got = (tuple(there.get_shape()), there.get_dtype())
                    if got[0] != shapes.get(key) or got[1] not in ("F64", "F32", "BF16", "F16"):
                        want = shapes.get(key, "no weight of this name")
                        raise BadInput(f"{path}: weight {key} has shape {got[0]}, dtype {got[1]}; "
                                       f"expected {want}, not quantised")
                    name = key.removeprefix("model.")
                    state[name] = f.get_tensor(key).to(device, dtype)
        except (SafetensorError, OSError) as e:
            raise BadInput(f"{path}: missing, damaged or truncated safetensors file ({e}); "
                           "download it again") from None
    missing = [_checkpoint_name(name) for name in model.state_dict() if name not in state]
    if missing:
        raise BadInput(f"{folder}: weight {missing[0]} is missing ({len(missing)} in all); "
                       "expected every weight that config.json implies")
    if cfg.tied and not torch.equal(state.pop("lm_head.weight", state["embed_tokens.weight"]),
                                    state["embed_tokens.weight"]):
        raise BadInput(f"{folder}: lm_head.weight differs from the embedding; expected a copy, "
                       "or none, or tie_word_embeddings false in config.json")
    model.load_state_dict(state, assign=True)
    return model


def save_model(model: Qwen, folder: str | Path, *, dtype: torch.dtype | None = None) -> None:
    """Write config.json and model.safetensors into an existing folder, in `dtype` (default: as is).

    Tied embeddings are written once. The folder loads here and in transformers; the tokenizer's
    files are written by `Tokenizer.save`.
    """
    folder, dtype = Path(folder), dtype or next(model.parameters()).dtype
    state = {_checkpoint_name(k): v.detach().to("cpu", dtype).contiguous()
             for k, v in model.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    hf = {k: v for k, v in model.cfg.hf.items() if k not in ("dtype", "torch_dtype")}
    hf["torch_dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(hf, indent=2) + "\n", encoding="utf-8")
