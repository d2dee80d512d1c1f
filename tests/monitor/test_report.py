"""The report's content, and how a real browser takes it."""

from __future__ import annotations

import html
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from monitor_models import EXECUTED, Fault, Net, Plant, StepsByHand, batches, make_trainer, precision

from lightning_fp8.callbacks.health_monitor import FP8HealthMonitor
from lightning_fp8.callbacks.recovery import SkipBatchRecovery
from lightning_fp8.callbacks.report import FP8Report
from lightning_fp8.files import read_text
from lightning_fp8.recovery.events import EventLog, read_events
from lightning_fp8.report.colors import ALARM, MISSING, SCALE, colorize, heat_map
from lightning_fp8.report.page import Event, Maps, Page, Series
from lightning_fp8.selection import Decision

pytestmark = pytest.mark.filterwarnings("ignore")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--virtual-time-budget=2000",
]


def words(page: str) -> str:
    """What a reader sees, without scripts and markup."""
    page = re.sub(r"<(script|style).*?</\1>", " ", page, flags=re.DOTALL)
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", page)))


def fit(path: Path, steps: int, *callbacks: pl.Callback, plugin: Any = None, **settings: Any) -> FP8Report:
    report = FP8Report(path, every_n_steps=1, **settings)
    make_trainer([*callbacks, report], steps, plugin).fit(Net(), batches(steps))
    return report


class Recovery(pl.Callback):
    """Has events as SkipBatchRecovery keeps them."""

    def __init__(self) -> None:
        self.events = EventLog()
        self.events.add("rejected", step=3, action="skip", layer="blocks.0")


def test_the_page_tells_the_story_of_a_run(tmp_path: Path) -> None:
    plant = Plant(Fault(4, "late", "input", math.nan))
    fit(tmp_path / "run" / "page.html", 8, FP8HealthMonitor(), Recovery(), plant, plugin=precision(), title="My <run>")
    text = words((tmp_path / "run" / "page.html").read_text())
    for part in (
        "My <run>",
        "Finished at step 8.",
        "DelayedScaling(amax_history_len=1024",
        "NativeBackend",
        f"torch {torch.__version__}",
        "Loss",
        "Speed (steps/s)",
        "Peak memory (GiB)",
        "Step 4: NaN first seen in the input of 'late' (forward, rank 0)",
        "rejected action skip, layer blocks.0",
        "3 of 4 linear layers",
        "the final head stays in high precision",
        *EXECUTED,
    ):
        assert part in text, part


def test_figures_are_those_of_the_run(tmp_path: Path) -> None:
    losses: list[float] = []

    class Keep(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            losses.append(outputs["loss"].item())

    report = fit(tmp_path / "page.html", 6, Keep(), plugin=precision())
    assert report._curves.values[:, 0].tolist() == pytest.approx(losses)
    assert report._curves.steps.tolist() == list(range(6))
    page = report._page(make_trainer([], 1), "", False)
    assert page.maps is not None and page.maps.headroom.shape == (6, 4, 3)
    first = page.operands[0]
    assert f"{first.amax:.4g}" in words((tmp_path / "page.html").read_text())
    assert page.maps.names == ["late", "blocks.0", "blocks.1", "head"]


def test_lazy_layers_have_a_page_too(tmp_path: Path) -> None:
    model = Net()
    model.head = torch.nn.LazyLinear(4)
    report = FP8Report(tmp_path / "page.html", every_n_steps=1)
    make_trainer([report], 2).fit(model, batches(2))
    known = sum(p.numel() for name, p in model.named_parameters() if not name.startswith("head"))
    assert f"{known:,} parameters" in words((tmp_path / "page.html").read_text())


def test_an_exception_writes_the_page_and_says_why(tmp_path: Path) -> None:
    class Fail(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
            if trainer.global_step == 3:
                raise RuntimeError("out of <luck>")

    with pytest.raises(RuntimeError, match="luck"):
        fit(tmp_path / "page.html", 6, Fail())
    text = words((tmp_path / "page.html").read_text())
    assert "Stopped at step 3 by RuntimeError: out of <luck>" in text
    assert "The model was not converted to FP8." in text


def test_an_event_of_the_last_step_is_in_the_page_wherever_the_monitor_stands(tmp_path: Path) -> None:
    for monitor_first in (True, False):
        name = f"{monitor_first}.html"
        monitor, report = FP8HealthMonitor(), FP8Report(tmp_path / name, every_n_steps=1)
        pair: list[pl.Callback] = [monitor, report] if monitor_first else [report, monitor]
        make_trainer([*pair, Plant(Fault(3, "late", "input", math.nan))], 4).fit(Net(), batches(4))
        assert "NaN first seen in the input of 'late'" in words((tmp_path / name).read_text())
        assert len(monitor.events) == 1


@pytest.mark.parametrize("obstacle", ["a directory", "a file above", "no permission"])
def test_a_page_that_cannot_be_written_is_refused_before_training(
    obstacle: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, named = tmp_path / "pages" / "page.html", str(tmp_path)
    if obstacle == "a directory":
        page.mkdir(parents=True)
        named = "it is a directory"
    elif obstacle == "a file above":
        page.parent.touch()
        named = f"{page.parent} is no directory"
    else:
        monkeypatch.setattr("lightning_fp8.files.os.access", lambda path, mode: path != tmp_path)
    model = Net()
    with pytest.raises(MisconfigurationException, match=re.escape(named)):
        make_trainer([FP8Report(page)], 1, precision()).fit(model, batches(1))
    assert not hasattr(model.late, "fp8")
    # Evaluation writes none.
    make_trainer([FP8Report(page)], 1).validate(model, batches(1), verbose=False)


def test_a_page_that_cannot_be_written_in_the_end_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    page = tmp_path / "page.html"
    ended = []

    class InTheWay(pl.Callback):
        def on_train_start(self, *args: Any) -> None:
            page.mkdir()

        def on_train_end(self, *args: Any) -> None:
            ended.append(True)

    report = FP8Report(page)
    trainer = make_trainer([report, InTheWay()], 2)
    trainer.fit(Net(), batches(2))
    assert ended and trainer.state.finished
    assert any("FP8Report, as the fit ends: IsADirectoryError" in record.getMessage() for record in caplog.records)
    with pytest.raises(IsADirectoryError):
        report.write(trainer)


@pytest.mark.parametrize("ending", ["the end", "an exception"])
def test_other_monitors_end_once_and_their_last_reading_is_in_the_page(tmp_path: Path, ending: str) -> None:
    """Though they come later in the list."""
    ended = []

    class Ends(FP8HealthMonitor):
        def on_train_end(self, *args: Any) -> None:
            ended.append("the end")
            super().on_train_end(*args)

        def on_exception(self, *args: Any) -> None:
            ended.append("an exception")
            super().on_exception(*args)

    class Raises(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            if ending == "an exception" and trainer.global_step == 3:
                raise ValueError("the user's")

    page, steps = tmp_path / "page.html", 3 if ending == "the end" else 5
    callbacks = [FP8Report(page, every_n_steps=1), Ends("log"), Raises(), Plant(Fault(2, "late", "input", math.inf))]
    trainer = make_trainer(callbacks, steps)
    if ending == "the end":
        trainer.fit(Net(), batches(steps))
    else:
        with pytest.raises(ValueError, match="the user's"):
            trainer.fit(Net(), batches(steps))
    assert ended == [ending]
    assert "Inf first seen in the input of 'late'" in words(page.read_text())


def test_on_demand_and_in_the_log_directory(tmp_path: Path) -> None:
    report = FP8Report(every_n_steps=1)
    states: list[str] = []

    class Ask(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            states.append(words(report.write(trainer, tmp_path / "now.html").read_text()))

    trainer = make_trainer([report, Ask()], 3, default_root_dir=tmp_path)
    with pytest.raises(RuntimeError, match="give a path"):
        report.write(trainer)
    trainer.fit(Net(), batches(3))
    assert "At step 2." in states[1]
    assert (tmp_path / "fp8-report.html").exists()
    assert not list(tmp_path.glob(".*"))


def test_a_fast_dev_run_writes_where_it_is_told_alone(tmp_path: Path) -> None:
    callbacks = [FP8Report(every_n_steps=1), SkipBatchRecovery()]
    make_trainer(callbacks, 3, precision(), default_root_dir=tmp_path, fast_dev_run=True).fit(Net(), batches(3))
    assert not list(tmp_path.iterdir())
    report, recovery = FP8Report(tmp_path / "a.html", every_n_steps=1), SkipBatchRecovery(log=tmp_path / "a.jsonl")
    make_trainer([report, recovery], 3, precision(), fast_dev_run=True).fit(Net(), batches(3))
    assert {path.name for path in tmp_path.iterdir()} == {"a.html", "a.jsonl"}


def test_the_log_directory_may_be_remote() -> None:
    """The page and recovery's log go where checkpoints go, in text and back."""
    root = "memory://bucket/run"
    report, recovery = FP8Report(every_n_steps=1), SkipBatchRecovery(skip_batches=[(0, 1)])
    make_trainer([report, recovery], 3, precision(), default_root_dir=root).fit(Net(), batches(4))
    assert "FP8 training report" in words(read_text(f"{root}/fp8-report.html"))
    assert [event["event"] for event in read_events(f"{root}/recovery.jsonl")] == ["rejected"]
    with pytest.raises(MisconfigurationException, match="nowhere"):
        make_trainer([FP8Report("nowhere://page.html")], 1, precision()).fit(Net(), batches(1))


def test_only_the_layers_with_the_least_headroom_when_there_is_no_room(tmp_path: Path) -> None:
    report = fit(tmp_path / "page.html", 4, plugin=precision(), max_layers=2)
    assert report._last is not None
    least = report._last.headroom.nan_to_num(math.inf).amin(1).argsort()[:2].tolist()
    page = report._page(make_trainer([], 1), "", False)
    assert page.maps is not None
    assert sorted(page.maps.names) == sorted(report._names[row] for row in least)
    assert "2 layers with more headroom are left out" in words((tmp_path / "page.html").read_text())


def test_resuming_goes_on_with_the_curves(tmp_path: Path) -> None:
    def run(steps: int, path: Path | None = None) -> FP8Report:
        report = FP8Report(tmp_path / "page.html", every_n_steps=1)
        save = ModelCheckpoint(tmp_path, filename=f"{steps}", every_n_train_steps=3, save_top_k=-1)
        trainer = make_trainer([report, save], steps, precision(), enable_checkpointing=True)
        trainer.fit(Net(), batches(20), ckpt_path=path)
        return report

    whole = run(6)
    run(3)
    resumed = run(6, tmp_path / "3.ckpt")
    assert torch.equal(resumed._curves.steps, whole._curves.steps)
    assert torch.equal(resumed._curves.values[:, 0], whole._curves.values[:, 0])


def test_readings_where_a_batch_takes_several_steps_and_after_a_resume(tmp_path: Path) -> None:
    class Save(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            trainer.save_checkpoint(tmp_path / f"{trainer.global_step}.ckpt")

    def steps(path: Path | None = None) -> list[int]:
        report = FP8Report(tmp_path / "page.html", every_n_steps=4)
        trainer = make_trainer([report, *([] if path else [Save()])], -1, max_epochs=1)
        trainer.fit(StepsByHand(), batches(10), ckpt_path=path)
        assert trainer.global_step == 21
        return report._curves.steps.tolist()

    assert steps() == [0, 5, 9, 13, 17]
    assert steps(tmp_path / "9.ckpt") == [0, 5, 9, 13, 17]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"every_n_steps": 0}, "every_n_steps must be at least 1, got 0"),
        ({"history": 1}, "history must be at least 2, got 1"),
        ({"history": 4.0}, "history must be a whole number"),
        ({"max_layers": 0}, "max_layers must be at least 1, got 0"),
        ({"max_layers": 2.0}, "max_layers must be a whole number"),
        ({"path": 5}, "path must be a path or None, got 5"),
        ({"path": "pages/"}, "names a directory"),
        ({"title": 5}, "title must be text, got 5"),
        ({"title": None}, "title must be text, got None"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises((ValueError, TypeError), match=named):
        FP8Report(**settings)


def test_a_history_of_any_length_takes_bounded_memory() -> None:
    assert FP8Report(history=2**40)._curves.capacity < 2**22


def test_colours() -> None:
    values = torch.tensor([0.0, 1.0, -5.0, 7.0, math.nan, math.inf])
    colors = [tuple(color) for color in colorize(values, 0.0, 1.0).tolist()]
    assert colors == [SCALE[0], SCALE[-1], SCALE[0], SCALE[-1], MISSING, ALARM]
    assert heat_map(torch.zeros(5, 3), 0, 1).shape == (3 * 8, 5 * 8, 3)
    assert heat_map(torch.zeros(5, 1000), 0, 1).shape == (1000, 5, 3)


def page_with(names: list[str], steps: int = 20) -> Page:
    torch.manual_seed(0)
    amax = torch.arange(len(names) * 3).view(1, -1, 3).float().expand(steps, -1, -1).clone()
    headroom = torch.rand(steps, len(names), 3) * 8
    amax[3, 0, 0] = headroom[3, 0, 0] = math.inf
    amax[5, -1, 0] = headroom[5, -1, 0] = math.nan
    numbers = torch.arange(steps) * 10
    return Page(
        "Report",
        "Finished.",
        series=[Series("Loss", "", numbers, torch.linspace(3, 1, steps))],
        maps=Maps(names, numbers, amax, headroom),
        events=[Event(30, "nonfinite", "NaN in </script><b>a</b>")],
        decisions=[Decision(name, True, "delayed") for name in names],
    )


def browse(folder: Path, page: str, script: str, *flags: str) -> dict[str, str]:
    """Open the page in a headless browser, run a script in it, and return what it put into ``seen``.

    Errors of the page's own scripts, and whatever its policy forbids, come as ``seen.errors``.
    """
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    watch = (
        "<script>const seen = {errors: ''}; addEventListener('error', (e) => (seen.errors += e.message));"
        "addEventListener('securitypolicyviolation', (e) => (seen.errors += e.blockedURI));</script>"
    )
    end = (
        f"<script>addEventListener('load', () => {{ {script};"
        "const out = document.body.appendChild(document.createElement('pre')); out.id = 'seen';"
        "out.textContent = Object.entries(seen).map((e) => e.join('=')).join('\\n'); });</script>"
    )
    path = folder / "page.html"
    path.write_text(page.replace("<title>", watch + "<title>").replace("</body>", end + "</body>"))
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder / 'profile'}", *flags, "--dump-dom", path.as_uri()]
    output = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True).stdout
    found = re.search(r'<pre id="seen">(.*?)</pre>', output, re.DOTALL)
    assert found is not None, output[-2000:]
    return dict(line.split("=", 1) for line in html.unescape(found[1]).splitlines())


def test_a_browser_shows_the_heat_map_by_keyboard_and_pointer(tmp_path: Path) -> None:
    script = """
    const map = document.getElementById('map'), told = document.getElementById('told');
    const press = (key) => map.dispatchEvent(new KeyboardEvent('keydown', {key, cancelable: true}));
    map.focus(); seen.start = told.textContent;
    press('ArrowRight'); press('ArrowRight'); press('ArrowRight'); seen.alarm = told.textContent;
    press('PageDown'); press('ArrowRight'); press('ArrowRight'); seen.missing = told.textContent;
    press('End'); press('ArrowUp'); press('ArrowDown'); press('ArrowDown'); seen.corner = told.textContent;
    document.querySelector('input[value=amax]').click(); seen.amax = told.textContent;
    document.querySelector('input[value=grad_output]').click(); seen.role = told.textContent;
    seen.label = map.getAttribute('aria-label');
    const box = map.getBoundingClientRect();
    map.dispatchEvent(new PointerEvent('pointermove', {clientX: box.right - 2, clientY: box.top + 2}));
    seen.pointed = told.textContent;
    const pixels = map.getContext('2d').getImageData(0, 0, map.width, map.height).data;
    const colours = Array.from({length: pixels.length / 4}, (_, i) => pixels.slice(4 * i, 4 * i + 3).join());
    seen.colours = new Set(colours).size;
    const all = (selector) => [...document.querySelectorAll(selector)];
    seen.tabs = all('a, input, canvas, .table').filter((e) => e.tabIndex < 0).length;
    seen.unnamed = all('svg, canvas, .table').filter((e) => !e.getAttribute('aria-label')).length;
    seen.bold = document.querySelectorAll('section b').length;
    seen.loaded = performance.getEntriesByType('resource').length
    """
    seen = browse(tmp_path, page_with(["a", "b", "c"]).html(), script, "--window-size=1000,800")
    assert seen["errors"] == ""
    assert seen["start"].startswith("a, input, step 0: headroom ")
    assert seen["alarm"] == "a, input, step 30: NaN or Inf"
    assert seen["missing"] == "c, input, step 50: not seen"
    assert seen["corner"].startswith("c, input, step 190: headroom ")
    assert seen["amax"] == "c, input, step 190: amax 64.0"
    assert seen["role"] == "c, grad_output, step 190: amax 256"
    assert seen["role"] in seen["label"]
    assert seen["pointed"] == "a, grad_output, step 190: amax 4.00"
    assert int(seen["colours"]) >= 3
    assert (seen["tabs"], seen["unnamed"], seen["bold"], seen["loaded"]) == ("0", "0", "0", "0")


def test_on_a_phone_nothing_overflows_and_targets_are_large(tmp_path: Path) -> None:
    # Headless windows are at least 500 pixels wide: a frame has the width of a phone.
    names = [f"model.layers.{n}.feed_forward.gate_and_up_projection" for n in range(30)]
    frame = html.escape(page_with(names).html(), quote=True)
    frame = f'<iframe style="width: 360px; height: 3000px; border: 0" srcdoc="{frame}"></iframe>'
    page = f"<!DOCTYPE html><html><head><title>x</title></head><body>{frame}</body></html>"
    script = """
    const inside = document.querySelector('iframe').contentDocument, root = inside.documentElement;
    seen.overflow = root.scrollWidth - root.clientWidth;
    seen.map = inside.getElementById('map').getBoundingClientRect().width;
    const targets = [...inside.querySelectorAll('fieldset label, nav a')];
    seen.least = Math.min(...targets.map((e) => e.getBoundingClientRect().height));
    seen.font = parseFloat(inside.defaultView.getComputedStyle(inside.body).fontSize)
    """
    seen = browse(tmp_path, page, script)
    assert seen["errors"] == "" and float(seen["overflow"]) <= 0
    assert 250 < float(seen["map"]) <= 360
    assert float(seen["least"]) >= 40 and float(seen["font"]) >= 16


@pytest.mark.parametrize("dark", [True, False])
def test_dark_and_light(tmp_path: Path, dark: bool) -> None:
    script = """
    const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    const luminance = (color) => {
      const [r, g, b] = color.match(/[0-9.]+/g).map((v) => linear(v / 255));
      return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const paper = luminance(getComputedStyle(document.body).backgroundColor);
    const contrast = (e) => { const ink = luminance(getComputedStyle(e).color);
      return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05); };
    seen.paper = paper;
    const written = document.querySelectorAll('h1, h2, p, a, dt, dd, td, th, legend, label');
    seen.contrast = Math.min(...[...written].map(contrast))
    """
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    seen = browse(tmp_path, page_with(["a", "b"]).html(), script, scheme)
    assert (float(seen["paper"]) < 0.05) == dark
    assert float(seen["contrast"]) >= 4.5  # WCAG 2.2, level AA


def test_the_page_needs_no_network() -> None:
    page = page_with(["a"]).html()
    assert "default-src 'none'" in page
    assert not re.findall(r"""(?:src|href)=["'](?!#)|url\(|@import""", page)
