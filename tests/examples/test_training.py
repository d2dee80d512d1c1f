"""The examples train: their losses fall, and what they print and write is there."""

from __future__ import annotations

import json
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch

from examples.gpt import compare as comparison
from examples.gpt.data import TextData
from examples.gpt.model import GPT, BitsPerByte
from lightning_fp8 import FP8Precision, RowwiseScaling

TINY = {"width": 32, "layers": 1, "heads": 1, "length": 32, "warmup": 2}
EVERY_25 = {"val_check_interval": 25, "check_val_every_n_epoch": None}
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text"
    path.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 400)
    return str(path)


def fit(module: pl.LightningModule, data: pl.LightningDataModule, plugin: FP8Precision, **arguments) -> pl.Trainer:
    trainer = pl.Trainer(
        accelerator="cpu",
        plugins=[plugin],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        gradient_clip_val=1.0,
        **arguments,
    )
    trainer.fit(module, data)
    return trainer


def test_gpt_learns_in_fp8(text: str):
    pl.seed_everything(0, verbose=False)
    trainer = fit(GPT(**TINY, lr=1e-2), TextData(text, 32, 16), FP8Precision(), max_steps=25, **EVERY_25)
    assert trainer.callback_metrics["train/loss"] < 3.0  # log(256) is 5.5
    bits = trainer.callback_metrics["train/loss"] / 0.6931472
    assert trainer.callback_metrics["train/bits_per_byte"] == pytest.approx(float(bits), rel=1e-5)
    assert trainer.callback_metrics["val/bits_per_byte"] < 4.5


def test_gpt_without_tied_head_trains(text: str):
    model = GPT(**TINY, tied=False)
    assert model.head.weight is not model.embedding.weight
    assert fit(model, TextData(text, 32, 16), FP8Precision(), max_steps=2).global_step == 2


def test_gpt_sees_no_later_bytes():
    model = GPT(**TINY).eval()
    text = torch.randint(0, 256, (1, 32))
    changed = text.clone()
    changed[0, 20:] = 0
    assert torch.allclose(model(text)[0, :20], model(changed)[0, :20], atol=1e-5)


@pytest.mark.parametrize(("setting", "value"), [("width", 40), ("heads", 3), ("warmup", 0)])
def test_settings_that_cannot_work_are_refused(setting: str, value: int, text: str):
    with pytest.raises(ValueError, match=setting):
        fit(GPT(**{**TINY, setting: value}), TextData(text, 32, 16), FP8Precision(), max_steps=1)


def test_bits_per_byte_weighs_batches():
    metric = BitsPerByte()
    metric.update(torch.tensor(2.0), 3)
    metric.update(torch.tensor(4.0), 1)
    assert metric.compute() == pytest.approx(2.5 / 0.6931472)


def test_vit_learns_digits_in_fp8():
    pytest.importorskip("sklearn")
    from examples.vit.data import DigitsData
    from examples.vit.model import ViT

    pl.seed_everything(0, verbose=False)
    trainer = fit(ViT(width=32, layers=1, heads=1, lr=1e-2), DigitsData(), FP8Precision(RowwiseScaling()), max_epochs=3)
    assert trainer.callback_metrics["val/accuracy"] > 0.5  # chance is 0.1


def test_comparison_keeps_its_noise_and_draws(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]):
    config = tmp_path / "tiny.yaml"
    config.write_text(
        json.dumps(
            {
                "model": {"init_args": TINY},
                "data": {"init_args": {"path": text, "length": 32, "batch_size": 16, "val_windows": 16}},
                "trainer": {
                    "plugins": {"init_args": {"recipe": "delayed"}},
                    "max_steps": 6,
                    "val_check_interval": 1,
                    "gradient_clip_val": 1.0,
                },
            }
        )
    )
    noise = tmp_path / "runs" / "noise.json"
    arguments = {"config": config, "noise_file": noise, "accelerator": "cpu", "seeds": 1}
    code = comparison.compare(**arguments)
    printed = capsys.readouterr().out
    assert code in (0, 1, 2) and "control" in printed and "4 layers in FP8" in printed
    (entry,) = json.loads(noise.read_text()).values()
    assert len(entry["runs"]) >= 8 and entry["noise"]["sigma"] > 0
    before = printed.count("bf16     seed")
    comparison.compare(**arguments)
    assert before >= 8 and "bf16     seed" not in capsys.readouterr().out  # measured once

    pytest.importorskip("matplotlib")
    picture = tmp_path / "loss.png"
    assert comparison.compare(**arguments, picture=picture) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
