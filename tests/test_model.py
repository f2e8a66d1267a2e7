"""model.py against transformers (which only the tests need) and against slow loops.

The random checkpoints are small but not gentle: attention is peaked, biases and norm weights are
far from 0 and 1, eps is large enough to matter. Otherwise half of the mistakes would not show.
"""

import itertools
import json
import math
import os
import struct
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

import model as model_py
from config import parse
from errors import BadInput
from eval import load, load_problems, respond
from eviction import DENSE, Eviction
from model import Qwen, RMSNorm, causal, load_model, rope_table, save_model
from tokenizer import Tokenizer

torch.set_num_threads(1)
V, L, T = 97, 3, 33
HF = {"qwen2": transformers.Qwen2ForCausalLM, "qwen3": transformers.Qwen3ForCausalLM}


def checkpoint(folder, kind="qwen2", Hq=4, Hkv=2, D=None, tied=False, shard="1GB", seed=0, **more):
    """A random checkpoint, saved by transformers, and its model (eager attention)."""
    more |= {} if D is None else {"head_dim": D}
    config = HF[kind].config_class(
        vocab_size=V, hidden_size=56, num_hidden_layers=L, num_attention_heads=Hq,
        num_key_value_heads=Hkv, intermediate_size=80, rms_norm_eps=1e-2, tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0}, eos_token_id=[7, 9], **more)
    config._attn_implementation = "eager"
    hf = HF[kind](config).eval()
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in hf.named_parameters():
            noise = torch.randn(p.shape, generator=rng)
            if name.endswith("norm.weight"):
                p.copy_(1 + 0.3 * noise)
            elif name.endswith("bias"):
                p.copy_(0.5 * noise)
            elif "embed_tokens" in name or "lm_head" in name:
                p.copy_(0.2 * noise)
            else:
                p.copy_(noise * (2 if "q_proj" in name else 1) / p.shape[1] ** 0.5)
    hf.save_pretrained(folder, max_shard_size=shard)
    return hf


def tokens(B=2, seed=1):
    ids = torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(seed))
    return ids, torch.arange(T).expand(B, T)


@torch.no_grad()
def logits(model, ids, pos, attend=causal):
    return model.logits(model(ids, pos, attend))


def gap(a, b):
    assert a.shape == b.shape
    return (a.double() - b.double()).abs().max().item()


def edit_config(folder, drop=(), **new):
    path = Path(folder) / "config.json"
    config = {k: v for k, v in json.loads(path.read_text()).items() if k not in drop}
    path.write_text(json.dumps(config | new))


@pytest.fixture
def folder(tmp_path):
    checkpoint(tmp_path)
    return tmp_path


# --- the network, against transformers ---------------------------------------------------------

CASES = {
    "qwen2-mha": {"Hq": 4, "Hkv": 4},
    "qwen2-gqa-tied": {"Hq": 4, "Hkv": 2, "tied": True},
    "qwen2-gqa7-sharded": {"Hq": 14, "Hkv": 2, "shard": "30KB"},
    "qwen2-own-head-dim": {"Hq": 4, "Hkv": 2, "D": 10},
    "qwen3-mha-tied": {"kind": "qwen3", "Hq": 4, "Hkv": 4, "D": 14, "tied": True},
    "qwen3-gqa-wide": {"kind": "qwen3", "Hq": 4, "Hkv": 2, "D": 24},
    "qwen3-gqa7-tied-sharded":
        {"kind": "qwen3", "Hq": 7, "Hkv": 1, "D": 12, "tied": True, "shard": "30KB"},
    "qwen3-default-head-dim": {"kind": "qwen3", "Hq": 2, "Hkv": 1},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_logits_equal_transformers(tmp_path, case):
    hf = checkpoint(tmp_path, **case)
    files = list(tmp_path.glob("*.safetensors"))
    assert len(files) > 2 if "shard" in case else len(files) == 1
    model = load_model(tmp_path, dtype=torch.float32)
    ids, pos = tokens()
    with torch.no_grad():
        want = hf(ids).logits
    assert want.std() > 0.5
    assert gap(logits(model, ids, pos), want) <= 1e-5
    assert gap(logits(model, ids, pos + 1000), want) < 2e-3  # RoPE is relative

    # Negative controls: each would leave a broken reading of pos or of the theta unnoticed.
    assert gap(logits(model, ids, pos.flip(1)), want) > 0.1
    assert gap(logits(model, ids, pos * 0), want) > 0.1
    assert gap(logits(model, ids, pos, lambda layer, q, k, v: q * 0), want) > 0.1
    edit_config(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 600.0})
    assert gap(logits(load_model(tmp_path, dtype=torch.float32), ids, pos), want) > 1e-3


def test_both_config_layouts_and_real_keys(folder):
    ids, pos = tokens()
    want = logits(load_model(folder, dtype=torch.float32), ids, pos)
    new = json.loads((folder / "config.json").read_text())
    assert new["rope_parameters"]["rope_theta"] == 500.0 and "rope_theta" not in new
    assert new["dtype"] == "float32" and new["layer_types"] == ["full_attention"] * L

    def same(**keys):
        edit_config(folder, drop=("rope_parameters", "dtype", "layer_types"), **keys)
        model = load_model(folder, dtype=torch.float32)
        return torch.equal(logits(model, ids, pos), want)

    # As Qwen2.5 was published: the older layout, with the keys of an unused sliding window.
    assert same(rope_theta=500.0, torch_dtype="bfloat16", sliding_window=32768,
                use_sliding_window=False, max_window_layers=21, rope_scaling=None)
    assert not same(rope_theta=501.0)
    assert same(rope_theta=500, rope_scaling={"type": "default"})
    assert same(rope_theta=1.0, rope_parameters={"rope_theta": 500.0})  # as transformers reads it


@pytest.mark.parametrize("kind,D", [("qwen2", 14), ("qwen3", 128)])
def test_head_dim_that_the_config_leaves_out(tmp_path, kind, D):
    checkpoint(tmp_path, kind, D=D)
    ids, pos = tokens()
    want = logits(load_model(tmp_path, dtype=torch.float32), ids, pos)
    edit_config(tmp_path, drop=("head_dim",))
    assert torch.equal(logits(load_model(tmp_path, dtype=torch.float32), ids, pos), want)
    with torch.no_grad():
        assert gap(HF[kind].from_pretrained(tmp_path)(ids).logits, want) <= 1e-5
    edit_config(tmp_path, head_dim=None)
    assert torch.equal(logits(load_model(tmp_path, dtype=torch.float32), ids, pos), want)


def test_every_float_format_is_converted(folder):
    weights = load_file(folder / "model.safetensors")
    for stored in (torch.float64, torch.float16, torch.bfloat16):
        save_file({k: w.to(stored) for k, w in weights.items()}, folder / "model.safetensors")
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            model = load_model(folder, dtype=dtype)
            for name, p in model.named_parameters():
                key = name if name.startswith("lm_head") else f"model.{name}"
                assert p.dtype == dtype and p.requires_grad
                assert torch.equal(p, weights[key].to(stored).to(dtype)), name


def test_logits_are_float32_or_wider(folder):
    ids, pos = tokens()
    want = logits(load_model(folder, dtype=torch.float64), ids, pos)
    assert want.dtype == torch.float64
    for dtype, tol in ((torch.float32, 1e-5), (torch.bfloat16, 0.5)):
        model = load_model(folder, dtype=dtype)
        with torch.no_grad():
            hidden = model(ids, pos, causal)
        assert hidden.dtype == dtype
        got = logits(model, ids, pos)
        assert got.dtype == torch.float32 and 0 < gap(got, want) <= tol, dtype


def test_norm_and_rope_are_computed_wide():
    """bfloat16 weights round the results only; float64 is float64 throughout."""
    rng = torch.Generator().manual_seed(4)
    x = 3 * torch.randn(50, 24, generator=rng, dtype=torch.float64)
    weight = torch.randn(24, generator=rng, dtype=torch.float64)
    norm, theirs = RMSNorm(24, 1e-2), Qwen2RMSNorm(24, 1e-2)
    for module in (norm, theirs):
        module.to(torch.float64).load_state_dict({"weight": weight})
    with torch.no_grad():
        want = torch.stack([row / (sum(v * v for v in row) / 24 + 1e-2) ** 0.5 for row in x])
        assert gap(norm(x), want * weight) < 1e-13
        x = x.bfloat16()
        assert torch.equal(norm.bfloat16()(x), theirs.bfloat16()(x))

    pos, D, theta = torch.tensor([[0, 1, 31_999], [7, 257, 4096]]), 10, 1e4
    for dtype, tol in ((torch.float64, 1e-10), (torch.float32, 3e-3), (torch.bfloat16, 7e-3)):
        cos, sin = rope_table(pos, D, theta, dtype)
        assert cos.shape == sin.shape == (2, 1, 3, D) and cos.dtype == sin.dtype == dtype
        for b, t, i in itertools.product(range(2), range(3), range(D)):
            angle = pos[b, t].item() * theta ** (-2 * (i % (D // 2)) / D)
            assert abs(cos[b, 0, t, i].item() - math.cos(angle)) < tol
            assert abs(sin[b, 0, t, i].item() - math.sin(angle)) < tol


# --- saving ----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_saved_folder_loads_here_and_in_transformers(tmp_path, case):
    hf = checkpoint(tmp_path, **case)
    model = load_model(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        for p in model.parameters():  # as after an update, so that the old file cannot pass for it
            p.mul_(1.1)
    saved = tmp_path / "saved"
    saved.mkdir()
    save_model(model, saved)
    again, theirs = load_model(saved, dtype=torch.float32), HF[hf.config.model_type]
    theirs, info = theirs.from_pretrained(saved, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    assert theirs.config._attn_implementation != "eager"  # a second way to compute it
    assert again.cfg == model.cfg
    for name, p in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], p), name
        assert torch.equal(theirs.state_dict()[name if "lm_head" in name else f"model.{name}"], p)
    ids, pos = tokens()
    want = logits(model, ids, pos)
    assert torch.equal(logits(again, ids, pos), want)
    with torch.no_grad():
        assert gap(theirs(ids).logits, want) <= 1e-5
        assert gap(hf(ids).logits, want) > 0.1


def test_tied_embedding_is_written_once_and_stays_tied(tmp_path):
    checkpoint(tmp_path, tied=True)
    model = load_model(tmp_path, dtype=torch.float32)
    for out in (tmp_path / "a", tmp_path / "b"):
        out.mkdir()
        save_model(model, out)
        keys = load_file(out / "model.safetensors")
        assert "model.embed_tokens.weight" in keys and "lm_head.weight" not in keys
        model = load_model(out, dtype=torch.float32)
    assert not any("lm_head" in name for name, _ in model.named_parameters())
    theirs = HF["qwen2"].from_pretrained(tmp_path / "b")
    assert theirs.lm_head.weight is theirs.model.embed_tokens.weight

    hidden = torch.randn(2, model.cfg.C)
    before = model.logits(hidden)
    with torch.no_grad():
        model.embed_tokens.weight[5] += 1
    after = model.logits(hidden)
    changed = (after != before).any(0)
    assert changed[5] and changed.sum() == 1
    after.sum().backward()
    assert model.embed_tokens.weight.grad.abs().sum() > 0


def test_saved_config_is_complete(folder):
    edit_config(folder, max_window_layers=21, _a_key_unknown_here=[1, {"é": None}])
    old = json.loads((folder / "config.json").read_text())
    assert old["architectures"] == ["Qwen2ForCausalLM"] and old["eos_token_id"] == [7, 9]
    for dtype in ("float32", "bfloat16", "float64"):
        out = folder / dtype
        out.mkdir()
        model = load_model(folder, dtype=torch.float32)
        save_model(model, out, dtype=getattr(torch, dtype))
        new = json.loads((out / "config.json").read_text())
        assert new.pop("torch_dtype") == dtype and "dtype" not in new
        assert new == {k: v for k, v in old.items() if k != "dtype"}
        assert {k: old[k] for k in model.cfg.hf} == model.cfg.hf  # saving leaves the model alone
        weights = load_file(out / "model.safetensors")
        assert {w.dtype for w in weights.values()} == {getattr(torch, dtype)}
        assert HF["qwen2"].from_pretrained(out).dtype == getattr(torch, dtype)
        assert HF["qwen2"].from_pretrained(out).config.eos_token_id == [7, 9]


def test_bfloat16_is_saved_as_it_is(folder):
    ids, pos = tokens()
    model = load_model(folder, dtype=torch.bfloat16)
    out = folder / "out"
    out.mkdir()
    save_model(model, out)
    assert {w.dtype for w in load_file(out / "model.safetensors").values()} == {torch.bfloat16}
    again = load_model(out, dtype=torch.bfloat16)
    assert torch.equal(logits(again, ids, pos), logits(model, ids, pos))
    wide = logits(load_model(out, dtype=torch.float32), ids, pos)
    with torch.no_grad():
        theirs = HF["qwen2"].from_pretrained(out, dtype=torch.float32)
        assert gap(theirs(ids).logits, wide) <= 1e-5


def test_saving_over_the_folder_it_came_from(folder):
    """The weights may be views of the mapped file: saving must not pull it away under them."""
    model = load_model(folder, dtype=torch.float32)
    with torch.no_grad():
        model.embed_tokens.weight += 1
    before = {k: v.clone() for k, v in model.state_dict().items()}
    fresh = load_model(folder, dtype=torch.float32)
    assert gap(fresh.embed_tokens.weight, before["embed_tokens.weight"]) > 0.9  # file untouched
    save_model(model, folder)
    again = load_model(folder, dtype=torch.float32).state_dict()
    for name, p in model.state_dict().items():
        assert torch.equal(p, before[name]) and torch.equal(again[name], p), name


# --- gradient checkpointing ------------------------------------------------------------------


@pytest.mark.parametrize("kind,D", [("qwen2", 14), ("qwen3", 24)])
def test_gradient_checkpointing_changes_nothing(tmp_path, kind, D):
    checkpoint(tmp_path, kind, D=D, tied=True)
    ids, pos = tokens()

    def run(checkpointing, grad=True):
        model, calls = load_model(tmp_path, dtype=torch.float64), []
        assert model.checkpointing is False
        model.checkpointing = checkpointing

        def attend(layer, q, k, v):
            calls.append((layer, q.detach().clone()))
            return causal(layer, q, k, v)

        with torch.set_grad_enabled(grad):
            out = model.logits(model(ids, pos, attend)).log_softmax(-1)
        forward = len(calls)
        if grad:
            out[..., 3].mean().backward()
        return out.detach(), [p.grad for p in model.parameters()], calls, forward

    out, grads, calls, forward = run(False)
    out2, grads2, calls2, forward2 = run(True)
    assert torch.equal(out, out2)
    assert max(gap(a, b) for a, b in zip(grads, grads2, strict=True)) <= 1e-12
    assert min(g.abs().max() for g in grads) > 1e-6
    assert [c[0] for c in calls] == list(range(L)) and forward == forward2 == L
    assert [c[0] for c in calls2] == [*range(L), *reversed(range(L))]
    for layer, q in calls2:  # the recomputation asks the same questions
        assert torch.equal(q, calls[layer][1])
    plain, _, calls3, _ = run(True, grad=False)
    assert torch.equal(plain, out) and len(calls3) == L


# --- attention -------------------------------------------------------------------------------


def loop_attention(q, k, v, visible):
    """One query at a time; visible (T, T) bool."""
    B, Hq, T, D = q.shape
    groups, out = Hq // k.shape[1], torch.zeros_like(q)
    for b in range(B):
        for h in range(Hq):
            for t in range(T):
                seen = visible[t].nonzero()[:, 0]
                p = torch.softmax(k[b, h // groups, seen] @ q[b, h, t] / D**0.5, dim=0)
                out[b, h, t] = p @ v[b, h // groups, seen]
    return out


@pytest.mark.parametrize("groups", [1, 2, 7])
def test_causal_equals_a_loop(groups):
    rng = torch.Generator().manual_seed(groups)
    B, Hkv, T, D = 2, 3, 6, 4
    q = torch.randn(B, Hkv * groups, T, D, generator=rng, dtype=torch.float64)
    k, v = torch.randn(2, B, Hkv, T, D, generator=rng, dtype=torch.float64)
    visible = torch.ones(T, T).tril().bool()
    for layer in (0, 5):
        assert gap(causal(layer, q, k, v), loop_attention(q, k, v, visible)) <= 1e-12
    off_by_one = visible | torch.ones(T, T).tril(1).bool()  # negative controls
    assert gap(causal(0, q, k, v), loop_attention(q, k, v, off_by_one)) > 1e-2
    if groups > 1:
        other = torch.arange(Hkv * groups).view(groups, Hkv).T.flatten()  # KV head h % Hkv
        swapped = loop_attention(q[:, other], k, v, visible)[:, other.argsort()]
        assert gap(causal(0, q, k, v), swapped) > 1e-2


def masked(visible):
    """An `attend` with a mask of its own, written apart from `causal`."""

    def attend(layer, q, k, v):
        B, Hq, T, D = q.shape
        q = q.reshape(B, k.shape[1], -1, T, D)
        score = torch.einsum("bkgtd,bksd->bkgts", q, k) / D**0.5
        p = score.masked_fill(~visible, float("-inf")).softmax(-1)
        return torch.einsum("bkgts,bksd->bkgtd", p, v).reshape(B, Hq, T, D)

    return attend


@pytest.mark.parametrize("kind,Hq,Hkv", [("qwen2", 4, 2), ("qwen3", 7, 1)])
def test_packed_row_equals_separate_rows(tmp_path, kind, Hq, Hkv):
    """[prompt | a | b], positions restarting after the prompt, is [prompt | a] and [prompt | b]."""
    checkpoint(tmp_path, kind, Hq=Hq, Hkv=Hkv, D=12)
    model = load_model(tmp_path, dtype=torch.float64)
    P, A, B = 9, 7, 11
    prompt, a, b = tokens(1)[0][0, : P + A + B].split((P, A, B))
    rows = {"a": torch.cat((prompt, a)), "b": torch.cat((prompt, b))}
    want = {k: logits(model, r[None], torch.arange(len(r))[None])[0] for k, r in rows.items()}

    ids = torch.cat((prompt, a, b))[None]
    pos = torch.cat((torch.arange(P + A), torch.arange(P, P + B)))[None]
    owner = torch.tensor([0] * P + [1] * A + [2] * B)
    same_row = (owner[:, None] == owner) | (owner == 0)
    visible = same_row & (pos[0][:, None] >= pos[0])
    got = logits(model, ids, pos, masked(visible))[0]
    assert gap(got[: P + A], want["a"]) <= 1e-12
    assert gap(got[P + A :], want["b"][P:]) <= 1e-12

    order = torch.randperm(P + A + B, generator=torch.Generator().manual_seed(3))  # any order
    mixed = logits(model, ids[:, order], pos[:, order], masked(visible[order][:, order]))[0]
    assert gap(mixed, got[order]) <= 1e-12

    running = torch.arange(P + A + B)[None]  # negative controls: positions, then visibility
    assert gap(logits(model, ids, running, masked(visible))[0, P + A :], want["b"][P:]) > 1e-3
    assert gap(logits(model, ids, pos)[0, P + A :], want["b"][P:]) > 1e-3


def test_rows_of_a_batch_have_their_own_positions(folder):
    model = load_model(folder, dtype=torch.float64)
    ids, pos = tokens()
    pos = torch.stack((pos[0] * 3, pos[1].flip(0) + 5))
    both = logits(model, ids, pos)
    for b in range(2):
        assert gap(both[b], logits(model, ids[b : b + 1], pos[b : b + 1])[0]) <= 1e-12
    assert gap(both, logits(model, ids, pos.flip(0))) > 1e-3


# --- bad input -------------------------------------------------------------------------------


def complaint(folder):
    with pytest.raises(BadInput) as caught:
        load_model(folder, dtype=torch.float32)
    message = str(caught.value)
    assert type(caught.value) is BadInput and message.isprintable() and len(message) < 600, message
    return message


BAD_CONFIGS = {  # id: (keys to set, what the message must name)
    "llama": ({"model_type": "llama"}, ("model_type", "'llama'", "qwen2")),
    "no-type": ({"model_type": None}, ("model_type", "None")),
    "moe": ({"model_type": "qwen3_moe", "num_experts": 8}, ("model_type", "'qwen3_moe'")),
    "experts": ({"num_experts": 8}, ("num_experts = 8",)),
    "yarn": ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, ("rope_scaling", "yarn")),
    "yarn-new": ({"rope_scaling": {"type": "default"},
                  "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}},
                 ("rope_scaling", "yarn")),
    "window": ({"use_sliding_window": True, "sliding_window": 64}, ("use_sliding_window = True",)),
    "layer-types": ({"layer_types": ["full_attention", "sliding_attention"]},
                    ("layer_types", "sliding_attention")),
    "quantised": ({"quantization_config": {"quant_method": "gptq"}},
                  ("quantization_config", "gptq")),
    "no-bias": ({"attention_bias": False}, ("attention_bias = False",)),
    "gelu": ({"hidden_act": "gelu"}, ("hidden_act = 'gelu'",)),
    "odd-head-dim": ({"head_dim": 13}, ("head_dim 13", "even")),
    "heads": ({"num_attention_heads": 5}, ("5 query heads", "2 key heads")),
}
SIZES = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads", "intermediate_size", "rms_norm_eps"]


@pytest.fixture(scope="module")
def good_files(tmp_path_factory):
    """A good checkpoint as {file name: bytes}, for the tests that damage one."""
    out = tmp_path_factory.mktemp("good")
    checkpoint(out)
    load_model(out, dtype=torch.float32)
    return {f.name: f.read_bytes() for f in out.iterdir()}


@pytest.fixture
def victim(good_files, tmp_path):
    for name, content in good_files.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


@pytest.mark.parametrize("keys,named", BAD_CONFIGS.values(), ids=BAD_CONFIGS)
def test_bad_config_is_one_line(victim, keys, named):
    edit_config(victim, **keys)
    message = complaint(victim)
    assert all(word in message for word in (*named, str(victim / "config.json"))), message


def test_missing_config_keys_are_named(victim):
    for key in [*SIZES, "rope_parameters"]:
        old = (victim / "config.json").read_text()
        edit_config(victim, drop=(key,))
        message = complaint(victim)
        named = "rope_theta" if key == "rope_parameters" else key
        assert f"{named} is missing" in message and str(victim / "config.json") in message, message
        (victim / "config.json").write_text(old)


@pytest.mark.parametrize("text", [
    b"", b"{", b'{"model_type": "qwen2",}', b"not json\nat all", b"\xff\xfe\x00", b"[]", b"null",
    b"17", b'"qwen2"', b'[{"model_type": "qwen2"}]',
])
def test_malformed_config_is_one_line(victim, text):
    (victim / "config.json").write_bytes(text)
    message = complaint(victim)
    assert str(victim / "config.json") in message and "JSON" in message, message


def test_wrong_folders(victim):
    assert "No such file" in complaint(victim / "nowhere")
    assert str(victim / "nowhere") in complaint(str(victim / "nowhere"))
    assert str(victim / "config.json") in complaint(victim / "config.json")  # a file
    (victim / "config.json").unlink()
    assert f"{victim / 'config.json'}: cannot be read" in complaint(victim)
    (victim / "config.json").mkdir()
    assert str(victim / "config.json") in complaint(victim)
    (victim / "empty").mkdir()
    assert str(victim / "empty" / "config.json") in complaint(victim / "empty")


def rewrite(folder, change):
    """Apply `change` to the weights of the folder's only file."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


def test_wrong_weights(victim, good_files):
    norm, q = "model.norm.weight", "model.layers.1.self_attn.q_proj.weight"
    cases = [
        (lambda w: w.pop(norm), (norm, "missing", str(victim))),
        (lambda w: w.pop("lm_head.weight"), ("lm_head.weight", "missing")),
        (lambda w: w.pop("model.layers.2.self_attn.k_proj.bias"),
         ("model.layers.2.self_attn.k_proj.bias", "missing")),
        (lambda w: w.clear(), ("model.embed_tokens.weight", "missing")),
        (lambda w: w.update({"model.rotary": torch.ones(3)}), ("model.rotary",)),
        (lambda w: w.update({"model.layers.3.mlp.up_proj.weight": torch.ones(80, 56)}),
         ("model.layers.3.mlp.up_proj.weight",)),  # one layer more than the config says
        (lambda w: w.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(14)}),
         ("model.layers.0.self_attn.q_norm.weight",)),
        (lambda w: w.update({"norm.weight": w.pop(norm)}), ("norm.weight",)),  # without "model."
        (lambda w: w.update({q: torch.ones(56, 55)}), (q, "(56, 55)", "(56, 56)")),
        (lambda w: w.update({norm: torch.ones(56, 1)}), (norm, "(56, 1)", "(56,)")),
        (lambda w: w.update({norm: torch.ones(1)}), (norm, "(1,)", "(56,)")),
        (lambda w: w.update({q: w[q].to(torch.int8)}), (q, "I8")),
        (lambda w: w.update({q: w[q].to(torch.float8_e4m3fn)}), (q, "F8")),
    ]
    for change, named in cases:
        rewrite(victim, change)
        message = complaint(victim)
        assert all(word in message for word in named), message
        (victim / "model.safetensors").write_bytes(good_files["model.safetensors"])
    load_model(victim, dtype=torch.float32)


def test_tied_config_with_a_head_in_the_file(tmp_path):
    """A copy of the embedding is what some writers add. Another matrix contradicts the config."""
    checkpoint(tmp_path, tied=True)
    want = load_model(tmp_path, dtype=torch.float32).state_dict()
    embed, head = "model.embed_tokens.weight", "lm_head.weight"
    rewrite(tmp_path, lambda w: w.update({head: w[embed].clone()}))
    got = load_model(tmp_path, dtype=torch.float32).state_dict()
    assert got.keys() == want.keys() and all(torch.equal(got[k], want[k]) for k in want)
    for shape in ((V - 1, 56), (56, V)):
        rewrite(tmp_path, lambda w, shape=shape: w.update({head: torch.zeros(shape)}))
        assert f"lm_head.weight has shape {shape}" in complaint(tmp_path)
    rewrite(tmp_path, lambda w: w.update({head: w[embed] + 1e-3}))
    assert "tie_word_embeddings false" in complaint(tmp_path)
    edit_config(tmp_path, tie_word_embeddings=False)  # what the message advises
    assert "lm_head.weight" in load_model(tmp_path, dtype=torch.float32).state_dict()


def test_damaged_weight_files(victim, good_files):
    path, good = victim / "model.safetensors", good_files["model.safetensors"]
    header = 8 + struct.unpack("<Q", good[:8])[0]
    size = len(good)
    cuts = (0, 1, 7, 8, 9, header // 2, header - 1, header, header + 1, size // 2, size - 1)
    for content in (
        *(good[:cut] for cut in cuts), good + b"\0",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 988097824\n",
        b"<!DOCTYPE html>\n<html>Not found</html>\n", b"\xff" * 64, good[:8] + b"\n" + good[9:],
    ):
        path.write_bytes(content)
        message = complaint(victim)
        assert str(path) in message and "damaged" in message, message
    path.unlink()
    path.mkdir()
    assert str(path) in complaint(victim)


def test_no_weights_and_bad_indices(victim):
    (victim / "model.safetensors").rename(victim / "part.safetensors")
    index = victim / "model.safetensors.index.json"
    assert "safetensors" in complaint(victim) and str(victim) in complaint(victim)
    (victim / "pytorch_model.bin").write_bytes(b"x")
    assert "safetensors" in complaint(victim)

    names = load_file(victim / "part.safetensors").keys()
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "part.safetensors")}))
    load_model(victim, dtype=torch.float32)
    for content in ("", "{", "[]", "null", "{}", '{"weight_map": null}', '{"weight_map": []}',
                    '{"weight_map": "part.safetensors"}', '{"weight_map": {"a": 1}}',
                    '{"weight_map": {"a": ["b"]}}'):
        index.write_text(content)
        message = complaint(victim)
        assert str(index) in message, (content, message)
    index.write_text('{"weight_map": {}}')
    assert "model.embed_tokens.weight" in complaint(victim)
    shards = dict.fromkeys(names, "part.safetensors") | {"model.norm.weight": "gone.safetensors"}
    index.write_text(json.dumps({"weight_map": shards}))
    assert str(victim / "gone.safetensors") in complaint(victim)


def test_shards_are_checked_as_one_file_is(tmp_path):
    checkpoint(tmp_path, shard="30KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    content = shards[1].read_bytes()
    shards[1].write_bytes(content[:-1])
    assert str(shards[1]) in complaint(tmp_path)
    shards[1].unlink()
    assert str(shards[1]) in complaint(tmp_path)
    shards[1].write_bytes(content)
    weights = load_file(shards[1])
    name = sorted(weights)[0]
    del weights[name]
    save_file(weights, shards[1])
    assert name in complaint(tmp_path)


# --- a real checkpoint -----------------------------------------------------------------------


@pytest.mark.weights
@torch.no_grad()
def test_real_checkpoint():
    folder = os.environ.get("SMD_MODEL")
    if not folder:
        pytest.skip("SMD_MODEL does not name a checkpoint folder")
    text = Path(model_py.__file__).read_text(encoding="utf-8")
    ids = torch.tensor([Tokenizer.load(folder).encode(text)[:200]])
    pos = torch.arange(200)[None]
    hf = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager")
    want = hf(ids).logits
    del hf
    model = load_model(folder, dtype=torch.float32)
    assert isinstance(model, Qwen)
    worst = gap(logits(model, ids, pos), want)
    print(f"{folder}: largest difference of {want.numel()} logits: {worst:.2e}")
    assert worst <= 2e-4
    assert gap(logits(model, ids, pos.flip(1)), want) > 1  # negative control


@pytest.mark.weights
@pytest.mark.skipif(not {"SMD_MODEL", "SMD_DATA"} <= os.environ.keys(),
                    reason="SMD_MODEL and SMD_DATA name no checkpoint and no folder of rows")
@torch.no_grad()
def test_greedy_text_of_a_real_checkpoint():
    """64 tokens after each of 8 questions, chat format and stop ids included."""
    folder = os.environ["SMD_MODEL"]
    cfg = parse(["--task", "gsm8k", "--model", folder, "--data-dir",
                 f"{os.environ['SMD_DATA']}/gsm8k", "--max-new", "64", "--dtype", "fp32"], "x")
    tok, model = load(cfg)
    questions = load_problems(cfg, "test", tok)[:8]
    rollout, texts, _ = respond(model, tok, questions, cfg, greedy=DENSE)
    few = respond(model, tok, questions, cfg, greedy=Eviction(keep=0.3))[0]
    assert not torch.equal(few.tokens, rollout.tokens)  # negative control
    del model
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    hf = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for (problem, ids), (text,) in zip(questions, texts, strict=True):
        chat = theirs.apply_chat_template([{"role": "user", "content": problem.prompt}],
                                          add_generation_prompt=True, return_dict=True,
                                          return_tensors="pt")
        assert chat["input_ids"][0].tolist() == ids
        out = hf.generate(**chat, max_new_tokens=64, do_sample=False, repetition_penalty=1.0)
        assert theirs.decode(out[0, len(ids):], skip_special_tokens=True) == text
