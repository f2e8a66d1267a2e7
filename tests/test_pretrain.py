"""runs/pretrain.py: its documents are the tasks' prompts, and its stages make a checkpoint."""

import random
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from data import stories, texts
from errors import BadInput
from model import causal, load_model
from runs import pretrain
from tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tok(tmp_path_factory):
    return pretrain.train_tokenizer(tmp_path_factory.mktemp("tok"), 0)


@pytest.fixture
def pretrained(tok, monkeypatch, tmp_path):
    """The folder of a model of other, shorter stages."""
    def go(*stages):
        monkeypatch.setattr(pretrain, "STAGES", stages)
        monkeypatch.setattr(torch, "compile", lambda model, dynamic: model)
        monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
        monkeypatch.setattr(pretrain, "train_tokenizer",
                            lambda folder, seed: tok.save(folder) or tok)
        pretrain.train(tmp_path / "both", None, 0)
        return tmp_path / "both"
    return go


@pytest.mark.parametrize("task", ["gsm8k", *dict.fromkeys(pretrain.READING)])
@pytest.mark.parametrize("size", [0, 1, 2])
def test_a_document_is_prompt_and_answer(tok, task, size):
    r = random.Random(f"{task} {size}")
    for _ in range(20):
        ids, weight = pretrain.document(r, tok, task, size)
        text = tok.decode(ids)
        assert len(ids) == len(weight) and {*weight} == {0.0, 0.1, 1.0}
        assert text.startswith("user\n") and "\nassistant\n" in text
        ends = [i for i, x in enumerate(ids) if x == tok.control["<|im_end|>"] and weight[i] == 1]
        assert len(ends) == text.count("\nassistant\n")  # each answer's end counts
    prompts = ([stories.prompt(r, *stories.story(r, 2)[:1], size)] if task == "gsm8k" else
               [texts.problem(task, "train", 0).prompt])
    instruction = prompts[0].split("\n")[0]
    assert f"user\n{instruction}" in text


def test_what_is_repeated_is_in_the_text_and_the_choice_of_it_hardly_counts(tok):
    r, seen = random.Random(0), 0
    for _ in range(30):
        turns = pretrain.reading(r, "hotpotqa", 2)
        if turns[-1][0] != pretrain.AGAIN:
            continue
        seen += 1
        facts = turns[-1][1].removeprefix("Again: ").split(". ")
        assert len(facts) == 10 and all(x.rstrip(".") + "." in turns[0][0] for x in facts)
    assert 5 < seen < 30


def test_stages_and_start(tok, monkeypatch, pretrained):
    folder = pretrained((("gsm8k",), 2, 300, 1.0), (("tldr",), 2, 300, 0.5))
    made = load_model(folder, dtype=torch.float32)
    assert Tokenizer.load(folder).vocab_size == tok.vocab_size <= made.cfg.V
    assert all(p.isfinite().all() for p in made.parameters())

    # From a model with another tokenizer: the rows of the tokens that both know, and all the rest.
    old, known = load_model(stories.MODEL, dtype=torch.float32), Tokenizer.load(stories.MODEL)
    pretrain.start(made, tok, stories.MODEL)
    (here,), (there,) = (x.encode(" apples") for x in (tok, known))
    assert torch.equal(made.embed_tokens.weight[here], old.embed_tokens.weight[there])
    assert torch.equal(made.layers[3].mlp.up_proj.weight, old.layers[3].mlp.up_proj.weight)
    # And with one that names its tokens the other way round, and has one more.
    V = known.vocab_size
    monkeypatch.setattr(pretrain.Tokenizer, "load", lambda folder: known)
    turned = SimpleNamespace(control={key: V - 1 - i for key, i in known.control.items()},
                             _bytes={V - 1 - i: piece for i, piece in known._bytes.items()})
    turned._bytes[V] = b"a new token"
    before = made.embed_tokens.weight.detach().clone()
    pretrain.start(made, turned, stories.MODEL)
    assert torch.equal(made.embed_tokens.weight[:V], old.embed_tokens.weight[:V].flip(0))
    assert torch.equal(made.embed_tokens.weight[V], before[V])


def test_it_learns_the_next_token(tok, monkeypatch, pretrained):
    """Two stages of the same document: the loss of what counts falls far below that at random."""
    fixed = pretrain.document(random.Random(0), tok, "gsm8k", 0)
    monkeypatch.setattr(pretrain, "document", lambda *a: fixed)
    folder = pretrained((("gsm8k",), 25, 10, 1.0), (("gsm8k",), 25, 10, 1.0))
    model = load_model(folder, dtype=torch.float32)
    ids, weight = (torch.tensor(x) for x in fixed)
    with torch.no_grad():
        z = model.logits(model(ids[None], torch.arange(len(ids))[None], causal)[0])
    loss = F.cross_entropy(z[:-1], ids[1:], reduction="none")[weight[1:] == 1]
    assert loss.mean() < 1 < 5 < F.cross_entropy(z[:-2], ids[2:])


def test_forms_of_the_answers(tok):
    r = random.Random(0)
    kinds = [pretrain.wanted(r, "as rewarded", "other") for _ in range(300)]
    assert kinds.count("as rewarded") / 300 == pytest.approx(pretrain.TEXT_FRAC, abs=0.08)
    steps = stories.story(r, 2)[1]
    for kind, share in (("trade", 0.65), ("another", 0.2)):
        ends = ["####" in pretrain.final_answer(r, steps, kind) for _ in range(300)]
        assert sum(ends) / 300 == pytest.approx(share, abs=0.08)


def test_a_start_that_is_not_there_writes_nothing(tmp_path):
    with pytest.raises(BadInput, match="nowhere"):
        pretrain.train(tmp_path / "out", tmp_path / "nowhere", 0)
    assert not (tmp_path / "out").exists()
