"""The examples' loader goes on where a checkpoint was written, alone and under the Trainer."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import TensorDataset

from examples.gpt.data import TextData, TextWindows, read_text
from examples.gpt.model import GPT
from examples.loader import ResumableLoader
from examples.vit.data import DigitsData

SAMPLES = TensorDataset(torch.arange(50))


def values(loader: ResumableLoader) -> list[list[int]]:
    return [batch.tolist() for (batch,) in loader]


def flat(loader: ResumableLoader) -> list[int]:
    return [value for batch in values(loader) for value in batch]


def test_each_epoch_has_its_own_order_and_every_sample_once():
    loader = ResumableLoader(SAMPLES, 8, seed=3, drop_last=False)
    epochs = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        epochs.append(flat(loader))
    assert epochs[0] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(50))


@pytest.mark.parametrize("stop", [0, 1, 5, 6])
def test_goes_on_at_the_batch_where_it_stopped(stop: int):
    loader = ResumableLoader(SAMPLES, 8, seed=3)
    loader.set_epoch(4)
    whole = values(loader)
    assert len(whole) == len(loader) == 6
    iterator = iter(loader)
    for _ in range(stop):
        next(iterator)
    state = loader.state_dict() if stop else {"epoch": 4, "samples": 0}
    resumed = ResumableLoader(SAMPLES, 8, seed=3)
    resumed.load_state_dict(state)
    assert values(resumed) == whole[stop:]
    assert values(resumed) == whole  # the position was used once


def test_the_position_means_nothing_in_another_epoch():
    loader = ResumableLoader(SAMPLES, 8)
    loader.load_state_dict({"epoch": 0, "samples": 48})
    loader.set_epoch(1)
    assert len(values(loader)) == 6


def test_ranks_share_the_epoch_and_resume_on_another_number_of_ranks():
    def ranks(count: int) -> list[ResumableLoader]:
        return [ResumableLoader(SAMPLES, 4, seed=1, num_replicas=count, rank=rank) for rank in range(count)]

    used: set[int] = set()
    for loader in ranks(2):
        iterator = iter(loader)
        for _ in range(3):
            (batch,) = next(iterator)
            used |= set(batch.tolist())
        state = loader.state_dict()
    assert state == {"epoch": 0, "samples": 24} and len(used) == 24
    later: list[int] = []
    for loader in ranks(3):
        loader.load_state_dict(state)
        later += flat(loader)
    assert len(later) == len(set(later)) == 24  # two steps of three ranks; two samples do not fill a third
    assert used.isdisjoint(later)


def test_global_random_numbers_are_left_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    values(ResumableLoader(SAMPLES, 8))
    assert torch.equal(torch.get_rng_state(), before)


def test_too_few_samples_name_the_remedy():
    with pytest.raises(ValueError, match="smaller batch_size"):
        ResumableLoader(SAMPLES, 26, num_replicas=2)


def test_text_is_split_into_disjoint_windows():
    windows = TextWindows(bytes(range(256)) * 20, length=16)
    kept, held_out = windows.split()
    assert len(held_out) == len(windows) // 20
    assert sorted(kept + held_out) == list(range(len(windows)))
    assert windows[1].tolist() == list(range(16, 33))  # 16 bytes to read, the last one to predict


def test_text_of_a_folder_comes_in_the_order_of_names(tmp_path: Path):
    for name, text in {"b.txt": b"second", "a.md": b"first", ".hidden": b"never"}.items():
        (tmp_path / name).write_bytes(text)
    assert read_text(tmp_path, 100) == b"firstsecond"
    assert read_text(tmp_path, 7) == b"firsts"[:6] + b"e"
    assert read_text(tmp_path / "b.txt", 100) == b"second"


def test_default_text_is_the_standard_library():
    assert b"import" in read_text(None, 100_000)


def test_missing_text_is_refused(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="give a file, or a folder"):
        TextData(str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match="use more text"):
        TextWindows(b"short", length=16)


@pytest.mark.parametrize("data", [TextData(), DigitsData()])
def test_data_that_is_not_read_yet_says_how_to_read_it(data: TextData | DigitsData):
    with pytest.raises(RuntimeError, match=r'call setup\("fit"\) first'):
        data.train_dataloader()


class Trace(pl.Callback):
    """What came in and out of each step."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int, float]] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.steps.append((trainer.current_epoch, batch_idx, float(outputs["loss"])))


def fit(folder: Path, *callbacks: pl.Callback, ckpt_path: str | None = None, **trainer_arguments) -> tuple[Trace, GPT]:
    pl.seed_everything(3, verbose=False)
    model = GPT(width=16, layers=1, heads=1, length=32, fused=False, warmup=3, lr=1e-2)
    trace = Trace()
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=2,
        callbacks=[trace, *callbacks],
        logger=False,
        enable_checkpointing=bool(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        **trainer_arguments,
    )
    data = TextData(str(folder / "text"), length=32, batch_size=32, val_windows=32)
    trainer.fit(model, data, ckpt_path=ckpt_path)
    return trace, model


@pytest.mark.filterwarnings("ignore")
def test_a_run_resumes_bit_for_bit_from_any_step(tmp_path: Path):
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(0, 256, (33 * 250,), generator=generator, dtype=torch.uint8)
    (tmp_path / "text").write_bytes(bytes(text.tolist()))
    arguments = {"val_check_interval": 3}
    every_step = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    whole, model = fit(tmp_path, every_step, **arguments)
    assert len(whole.steps) == 14 and whole.steps[-1][:2] == (1, 6)
    for step in (1, 3, 6, 7, 8, 13):  # around a validation, and around the end of an epoch
        resumed, resumed_model = fit(tmp_path, ckpt_path=str(tmp_path / f"step={step}.ckpt"), **arguments)
        assert resumed.steps == whole.steps[step:]
        for ours, theirs in zip(resumed_model.parameters(), model.parameters(), strict=True):
            assert torch.equal(ours, theirs)
