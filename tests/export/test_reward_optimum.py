"""Reward models through optimum: trained here on a toy preference, exported, and picking right. Marked `optimum`."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from specrun.export.reward import export_reward
from specrun.models_cache import find_reward, verify_reward
from specrun.models_cache.errors import UnsupportedModelError, UsageError
from specrun.runtime.best_of import Candidate
from specrun.runtime.best_of.reward import RewardScore

from ..conftest import Run
from ..tiny_rewards import TEMPLATE, chat_ids, source_logits, tiny_classifier, write_classifier

pytestmark = pytest.mark.optimum

PAIRS = [("hello", "the answer"), ("hi there", "x"), ("hello", "another one\nlonger than the rest <|end|>")]


def ids_of(score: RewardScore, pairs: list[tuple[str, str]]) -> list[list[int]]:
    return [score._format.encode(*pair, None)[0] for pair in pairs]


@pytest.mark.parametrize(
    ("kind", "labels", "pad", "template"),
    [
        ("llama", 1, 299, TEMPLATE),
        ("llama", 3, 299, TEMPLATE),
        ("llama", 1, None, TEMPLATE),
        ("llama", 1, 257, TEMPLATE),  # the id that ends a turn fills rows too
        ("bert", 1, 299, TEMPLATE),
        ("bert", 2, 299, None),
    ],
)
def test_rewards_are_those_of_the_source(
    tmp_path: Path, kind: str, labels: int, pad: int | None, template: str | None
) -> None:
    model = tiny_classifier(labels, kind=kind, pad=pad)
    source = write_classifier(tmp_path / "judge", model, template=template)
    bundle = export_reward(str(source), label="LABEL_1" if labels > 1 else None)
    assert verify_reward(bundle) == []
    assert set(bundle.manifest.files) <= {"model.onnx", "tokenizer.json", "chat_template.jinja"}
    assert (bundle.manifest.context, bundle.manifest.pad) == (256, pad)
    assert bundle.manifest.error < 1e-4
    with RewardScore(bundle, threads=1) as score:
        rewards = score.rewards(PAIRS)
        assert rewards == pytest.approx([score.rewards([pair])[0] for pair in PAIRS], abs=1e-4)
        if template is None:  # then the source would want the token types as well
            assert all(math.isfinite(reward) for reward in rewards)
            return
        logits = source_logits(model, ids_of(score, PAIRS))
    expected = [row[0] if labels == 1 else row[1] - math.log(math.fsum(map(math.exp, row))) for row in logits]
    assert rewards == pytest.approx(expected, abs=1e-4)


def polite(draw: random.Random, yes: bool) -> str:
    words = ["on", "in", "an", "he", "no", "it", "so", "we"]
    text = [draw.choice(words) for _ in range(draw.randint(2, 6))]
    if yes:
        text.insert(draw.randint(0, len(text)), "the")
    return " ".join(text)


def train(model: Any, score_ids: Any, steps: int) -> None:
    """Pairs of answers, of which the one that says "the" is preferred (Bradley-Terry loss)."""
    import torch

    draw = random.Random(0)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.train()
    for _ in range(steps):
        rows = []
        for yes in [True] * 8 + [False] * 8:
            rows.append(score_ids(polite(draw, False), polite(draw, yes)))
        width = max(map(len, rows))
        ids = torch.tensor([row + [299] * (width - len(row)) for row in rows])
        logits = model(input_ids=ids, attention_mask=(ids != 299).long()).logits[:, 0]
        loss = -torch.nn.functional.logsigmoid(logits[:8] - logits[8:]).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    model.eval()


def test_one_trained_on_a_toy_preference_picks_right(run: Run, tmp_path: Path) -> None:
    """Through the command line: export --task reward, then the best of four answers in unseen cases."""
    model = tiny_classifier()
    train(model, chat_ids, 60)
    source = write_classifier(tmp_path / "Polite", model)
    done = run("export", "--task", "reward", str(source), "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert (facts["name"], facts["kind"], facts["label"]) == ("polite", "reward", "LABEL_0")
    assert facts["path"] == str(find_reward("polite").path)
    draw = random.Random(1)
    right = 0
    with RewardScore.load("polite", threads=1) as score:
        for _ in range(40):
            good = draw.randrange(4)
            rows = [Candidate(index, polite(draw, index == good), (1,), "stop", (-1.0,), ()) for index in range(4)]
            rewards = score.scores(polite(draw, False), rows)
            right += max(range(4), key=rewards.__getitem__) == good
    assert right >= 36
    again = run("export", "--task", "reward", str(source))
    assert again.returncode == 0
    assert "polite is here already; --force exports it anew" in again.stderr
    assert again.stdout == f"{facts['path']}\n"
    refused = run("generate", "--model", "polite", "hello")
    assert refused.returncode == 1
    assert "it is a reward model" in refused.stderr


def test_several_labels_need_a_choice(tmp_path: Path) -> None:
    model = tiny_classifier(2)
    model.config.id2label = {0: "bad", 1: "good"}
    model.config.label2id = {"bad": 0, "good": 1}
    source = write_classifier(tmp_path / "judge", model)
    with pytest.raises(UsageError, match="judge has the labels bad, good: say with --label which one is the reward"):
        export_reward(str(source))
    with pytest.raises(UsageError, match="no label 'fine': the model has bad, good"):
        export_reward(str(source), label="fine")
    bundle = export_reward(str(source), label="good")
    assert (bundle.manifest.labels, bundle.manifest.label) == (("bad", "good"), 1)
    assert export_reward(str(source), label="0", force=True).manifest.label == 0


def test_weights_that_are_missing_are_not_made_up(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    source = write_classifier(tmp_path / "judge", tiny_classifier())
    path = source / "model.safetensors"
    tensors = {name: value for name, value in load_file(path).items() if name != "score.weight"}
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=r"lacks the weights score\.weight, so its scores would be random"):
        export_reward(str(source))


def test_code_that_comes_with_a_model_is_not_run(tmp_path: Path) -> None:
    source = write_classifier(tmp_path / "judge", tiny_classifier())
    config = json.loads((source / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoModelForSequenceClassification": "own.Judge"}}
    (source / "config.json").write_text(json.dumps(config))
    sign = tmp_path / "sign"
    (source / "own.py").write_text(f"open({str(sign)!r}, 'w')\n")
    with pytest.raises(UnsupportedModelError, match="transformers cannot load judge"):
        export_reward(str(source))
    assert not sign.exists()


def test_a_tokenizer_of_another_model(tmp_path: Path) -> None:
    source = write_classifier(tmp_path / "judge", tiny_classifier())
    document = json.loads((source / "tokenizer.json").read_text())
    document["model"]["vocab"]["new"] = 300
    (source / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(UnsupportedModelError, match="tokenizer has 301 tokens and the model only 300"):
        export_reward(str(source))


@pytest.mark.parametrize(("kind", "pad", "context"), [("llama", 299, 48), ("gpt2", None, 48), ("roberta", 1, 46)])
def test_a_text_as_long_as_the_context(tmp_path: Path, kind: str, pad: int | None, context: int) -> None:
    """Positions of some encoders begin behind the padding id, and so their table holds fewer than it has rows."""
    model = tiny_classifier(kind=kind, pad=pad, context=48)
    bundle = export_reward(str(write_classifier(tmp_path / "judge", model)))
    assert bundle.manifest.context == context
    pair = ("long " * 20, "answer " * 20)
    with RewardScore(bundle, threads=1, truncate=True) as score:
        ids = score._format.encode(*pair, context)[0]
        assert len(ids) == context
        assert score.rewards([pair]) == pytest.approx(source_logits(model, [ids])[0], abs=1e-4)
