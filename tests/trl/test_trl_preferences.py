"""The preference losses against TRL's own trainers: the same model, the same tokens; loss and gradients."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sparring.algo.loss.preference.dpo import Dpo
from sparring.algo.loss.preference.kto import Kto
from sparring.algo.loss.preference.pairs import PairLoss
from sparring.algo.rare.preference.ipo import Ipo
from sparring.algo.rare.preference.orpo import Orpo
from sparring.algo.rare.preference.robust_dpo import RobustDpo
from sparring.algo.rare.preference.simpo import SimPo
from sparring.batch.preference import CHOSEN, MISMATCHED, REJECTED, preference_batch, reply
from sparring.batch.units import units
from sparring.model.config import InitConfig
from sparring.model.create import create
from sparring.model.load import load
from sparring.render.train_tokenizer import train_tokenizer
from sparring.train.config import TrainConfig
from sparring.train.trainer import LocalTrainer
from sparring.types import PAIR_SHARE

pytestmark = pytest.mark.trl
ROOT = Path(__file__).parents[2]
PAIRED = frozenset({"preference"})
LABELS = {"chosen": CHOSEN, "rejected": REJECTED, "mismatched": MISMATCHED}

CASES = {
    "dpo": ("dpo", {"beta": 0.3}, PairLoss(Dpo(beta=0.3))),
    "robust_dpo": (
        "dpo",
        {"beta": 0.3, "loss_type": "robust", "label_smoothing": 0.2},
        PairLoss(RobustDpo(beta=0.3, flip_rate=0.2)),
    ),
    "ipo": ("dpo", {"beta": 0.3, "loss_type": "ipo"}, PairLoss(Ipo(beta=0.3, length_averaged=True))),
    "kto": (
        "kto",
        {"beta": 0.3, "desirable_weight": 1.2, "undesirable_weight": 0.9},
        Kto(beta=0.3, wanted=1.2, unwanted=0.9),
    ),
    "simpo": (
        "simpo",
        {"beta": 2.0, "loss_type": "simpo", "cpo_alpha": 0.0, "simpo_gamma": 0.7},
        PairLoss(SimPo(beta=2.0, gamma=0.7)),
    ),
    "orpo": ("orpo", {"beta": 0.4}, PairLoss(Orpo(strength=0.4))),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    """Two random models of one shape and their tokenizer."""
    init = InitConfig(
        hidden_size=48, num_layers=2, head_dim=16, intermediate_size=64, max_positions=256, initializer_range=0.3
    )
    found = []
    for seed in (0, 1):
        path = tmp_path_factory.mktemp("model") / "model"
        train_tokenizer(["a question and an answer"], 420, path)
        created = create(init, 448, path, seed, eos_token_id=1, pad_token_id=0)
        found.append(Path(created))
    return found[0], found[1]


def drawn_rows() -> list[dict[str, str]]:
    draw = random.Random(4)
    words = ["yes", "no", "perhaps", "a", "question", "answer", "7", "42"]

    def text(most: int) -> str:
        return " ".join(draw.choice(words) for _ in range(draw.randint(1, most)))

    return [{"prompt": text(5) + " ?", "chosen": " " + text(8), "rejected": " " + text(8)} for _ in range(6)]


def theirs(name: str, settings: dict[str, object], folders: tuple[Path, Path], tmp_path: Path):
    spec = {
        "name": name,
        "settings": settings,
        "model": str(folders[0]),
        "reference": str(folders[1]),
        "rows": drawn_rows(),
        "folder": str(tmp_path / "trl"),
        "gradients": str(tmp_path / "gradients.safetensors"),
    }
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    words = [str(ROOT / ".venv-trl/bin/python"), str(Path(__file__).with_name("peer.py")), str(tmp_path / "spec.json")]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "PYTHONPATH": ""}
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1]), load_file(spec["gradients"])


def rows_of(found: dict, *, single: bool):
    """Our rows of their batch."""
    for side in LABELS.keys() & found.keys():
        for number, row in enumerate(found[side]):
            group = f"{side} {number}" if single else str(number)
            share = 1.0 if single else PAIR_SHARE
            yield reply(row["tokens"], row["ours"], id=f"{side} {number}", group=group, label=LABELS[side], share=share)


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_trls(name: str, folders: tuple[Path, Path], tmp_path: Path) -> None:
    peer, settings, loss = CASES[name]
    found, gradients = theirs(peer, settings, folders, tmp_path)
    rows = list(rows_of(found, single=peer == "kto"))
    assert len(rows) == (24 if peer == "kto" else 12)
    model = load(folders[0])

    async def ours():
        one = LocalTrainer(load(folders[1]), TrainConfig(), [], name="reference", total_steps=1)
        two = LocalTrainer(model, TrainConfig(token_budget=80), [loss], name="policy", total_steps=1)
        try:
            known = await one.forward(rows, frozenset({"logprob"}))
            referred = [
                replace(row, annotations={"reference": v["logprob"]}) for row, v in zip(rows, known, strict=True)
            ]
            return await two.forward_backward(preference_batch(units(referred, PAIRED), step=1, model="policy"))
        finally:
            await one.close()
            await two.close()

    metrics = asyncio.run(ours())
    assert metrics["micro_batches"] > 1
    assert metrics["loss_preference"] == pytest.approx(found["loss"], rel=1e-5)
    mine = {n: p.grad for n, p in model.module.named_parameters() if p.grad is not None}
    assert mine.keys() == gradients.keys() and len(mine) > 10
    for parameter, expected in gradients.items():
        torch.testing.assert_close(mine[parameter], expected, rtol=1e-3, atol=1e-5 * float(expected.abs().max()) + 1e-7)
