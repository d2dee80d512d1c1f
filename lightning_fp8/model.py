"""FP8 for a whole model, with or without a Trainer: convert, step, revert, and what was decided."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from lightning_fp8.backends import Backend, Choice, Runtime, resolve_backend
from lightning_fp8.checks import check_flag, check_number
from lightning_fp8.convert import all_or_nothing
from lightning_fp8.host_copy import on_cpu
from lightning_fp8.recipes import Recipe, get_recipe
from lightning_fp8.selection import Decision, LayerSelection, Looks, linear_layers, matrix_modules
from lightning_fp8.text_table import text_table
from lightning_fp8.tuning.choice import Chosen, choose_layers, choose_saved

log = logging.getLogger(__name__)

#: Where a converted module keeps its :class:`Conversion`.
_ATTRIBUTE = "_lightning_fp8"


class Conversion:
    """What was decided for a model, and its layers at work.

    Attributes:
        recipe: what is cast to what.
        backend: what multiplies.
        backend_reason: why this backend, for people to read.
        layers: the selection asked for.
        tokens: the hint for ``layers="auto"``.
        device: where the model was said to run, or is.
        support: how the backend runs the recipe there.
        decisions: one for each linear layer.
        origin: what ``layers="auto"`` rests on, for people to read.
        saved: the layers of the checkpoint, where the choice is a checkpoint's.
        runtime: the converted layers.
        autocast_only: whether layers run in FP8 under autocast only.
        looks: how each linear layer looked when it was decided on, converted or not.
        step_pending: an optimizer step has completed since the scales last moved.
    """

    def __init__(
        self,
        recipe: Recipe,
        choice: Choice,
        layers: LayerSelection | Literal["auto"],
        tokens: int | None,
        device: torch.device,
        chosen: Chosen,
        runtime: Runtime,
        autocast_only: bool,
        looks: dict[str, Looks],
    ) -> None:
        self.recipe = recipe
        self.backend, self.backend_reason, self.support = choice
        self.layers = layers
        self.tokens = tokens
        self.device = device
        self.decisions, self.origin, self.saved = chosen
        self.runtime = runtime
        self.autocast_only = autocast_only
        self.looks = looks
        self.step_pending = False

    @property
    def converted(self) -> list[str]:
        """Names of the layers that run in FP8."""
        return [decision.name for decision in self.decisions if decision.converted]

    def same_settings(
        self,
        recipe: Recipe,
        choice: Choice,
        layers: LayerSelection | Literal["auto"],
        tokens: int | None,
        autocast_only: bool,
        chosen: Sequence[str] | None,
    ) -> bool:
        """Whether converting anew with these settings would change nothing."""
        mine = (self.recipe, self.backend, self.support, self.layers, self.tokens, self.autocast_only)
        if mine != (recipe, choice.backend, choice.support, layers, tokens, autocast_only):
            return False
        return chosen is None or self.agrees_with(chosen)

    def agrees_with(self, chosen: Sequence[str]) -> bool:
        """Whether these layers, from a checkpoint, are no reason to convert anew."""
        return self.layers != "auto" or set(chosen) in (set(self.converted), self.saved)

    def describes(self, model: nn.Module) -> bool:
        """Whether ``model`` still has the layers that were decided on.

        None came, went, was replaced, got a weight of other sizes or is eligible for another reason than before.
        """
        layers = linear_layers(model)
        return (
            list(layers) == list(self.looks)
            and all("fp8" in vars(layers[name]) for name in self.converted)
            and all(self.looks[name].still(Looks.of(layer, self.recipe)) for name, layer in layers.items())
        )

    def optimizer_stepped(self) -> None:
        """An optimizer step has completed: the weights are others, and scales move as the next training step begins."""
        self.step_pending = True
        self.runtime.weights_changed()

    def step(self, group: dist.ProcessGroup | None = None) -> None:
        """Move the scales if an optimizer step has completed; called as a training step begins."""
        if self.step_pending:
            self.runtime.step(group)
            self.step_pending = False
        self.runtime.before_training()

    def live_state(self) -> dict[str, Any]:
        """What :meth:`state_dict` copies to the CPU, where it is: for copies that do not wait for the device."""
        return {
            "layers": self.converted,
            "step_pending": self.step_pending,
            "runtime": self.runtime.live_state(),
        }

    def state_dict(self) -> dict[str, Any]:
        """Plain values and CPU tensors: enough to resume bit for bit."""
        return on_cpu(self.live_state())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state, whatever backend it comes from; one of another recipe is warned of, and left alone."""
        try:
            missing = self.runtime.load_state_dict(state["runtime"])
        except ValueError as error:
            warnings.warn(
                f"{error} Scales start from the data; weights and optimizer are not concerned. To resume bit for bit "
                "use the checkpoint's recipe.",
                stacklevel=2,
            )
            return
        self.step_pending = bool(state["step_pending"])
        if missing:
            warnings.warn(
                f"The checkpoint holds no FP8 state for {', '.join(missing)}: scales start from the data.", stacklevel=2
            )

    def summary(self) -> str:
        """A table of all linear layers: what runs in FP8 now, and why each other one does not."""
        states = zip(self.runtime.table.names, self.runtime.states, strict=True)
        in_fp8 = {name for name, state in states if state.enabled}
        rows = [("layer", "runs in", "why")]
        for d in self.decisions:
            back = "switched to high precision for a while; " if d.converted and d.name not in in_fp8 else ""
            rows.append((d.name or "(root)", "FP8" if d.name in in_fp8 else "high precision", back + d.reason))
        head = (
            f"FP8: {len(in_fp8)} of {len(self.decisions)} linear layers, {self.recipe!r}, "
            f"{self.backend.name} backend ({self.backend_reason}), {self.support.kind} ({self.support.reason})"
        )
        origin = [f"Layers: {self.origin}"] if self.origin else []
        return "\n".join([head, *origin, *text_table(rows)])


def convert_model(
    model: nn.Module,
    recipe: Recipe | Mapping[str, Any] | str = "delayed",
    *,
    backend: Backend | str = "auto",
    layers: LayerSelection | Literal["auto"] = "auto",
    tokens: int | None = None,
    autocast_only: bool = False,
    device: torch.device | str | None = None,
    compiled: bool | None = None,
    chosen: Sequence[str] | None = None,
) -> nn.Module:
    """Convert the linear layers of ``model`` to FP8, in place.

    Converting again with the same settings changes nothing; with other settings the layers are converted anew.

    Args:
        model: any module; it may be on the meta device, and may itself be the linear layer.
        recipe: a name, a mapping with ``name`` and settings, or a recipe.
        backend: ``"auto"``, a name, or a backend with its options.
        layers: a selection, or ``"auto"``: on GPUs with FP8 tensor cores the layers that FP8 makes faster, elsewhere
            every eligible layer. Rank 0 chooses for all ranks, so every rank must call.
        tokens: for ``"auto"``: rows of the layers' inputs in one forward on one device; by default 8192.
        autocast_only: FP8 under ``torch.autocast`` only, for mixed precision.
        device: where the model will run; by default where it is. A model on the meta device is taken to run on the
            current GPU, if there is one.
        compiled: for ``"auto"``: whether the layers will run in compiled code, which the host issues faster; by default
            those that lie in a module which is compiled already.
        chosen: names of the layers that ``"auto"`` chose before (:attr:`Conversion.converted`): they are taken, and
            nothing is chosen anew.

    Returns:
        ``model`` itself.

    Raises:
        TypeError: ``tokens`` is no whole number, or ``autocast_only`` or ``compiled`` no bool.
        ValueError: an unknown name or setting, a recipe that the backend cannot run on the device, a pattern that
            matches nothing, or weights that are already sharded. Nothing is changed then.
    """
    check_layers(layers, tokens)
    check_flag(autocast_only=autocast_only)
    check_flag(none=True, compiled=compiled)
    recipe, selection = get_recipe(recipe), layers if isinstance(layers, LayerSelection) else LayerSelection()
    where = torch.device(device) if device is not None else _device_of(model)
    choice = resolve_backend(backend, recipe, where)
    existing = conversions(model)
    current: Any = getattr(model, _ATTRIBUTE, None)  # Wrapped by torch.compile, a module has it inside.
    alone = isinstance(current, Conversion) and existing == [current] and current.describes(model)
    if alone and current.same_settings(recipe, choice, layers, tokens, autocast_only, chosen):
        return model
    selection.check(model)
    # Out of inference mode: tensors made in an evaluation could not be changed in training.
    with torch.inference_mode(False), all_or_nothing(model):
        if existing:
            log.info("Converting anew: the settings or the layers differ from those the model was converted with.")
            revert_model(model)
        verdict = Chosen(selection.decide(model, recipe), "")
        _refuse_sharded(model, verdict.decisions)
        if layers == "auto" and chosen is not None:
            verdict = choose_saved(verdict.decisions, chosen)
        elif layers == "auto":
            verdict = choose_layers(
                verdict.decisions, model, recipe, choice.backend, choice.support, where, tokens, compiled
            )
        names = [decision.name for decision in verdict.decisions if decision.converted]
        _warn_of_nonfinite(model, names)
        if not names:
            first = verdict.decisions[:5]
            reasons = "; ".join(f"{d.name or '(root)'}: {d.reason}" for d in first) or "it has no nn.Linear"
            if others := matrix_modules(model):
                reasons += f"; {', '.join(others)} has a matrix of weights and is no nn.Linear: make it one"
            warnings.warn(f"No layer of {type(model).__name__} runs in FP8 ({reasons}).", stacklevel=2)
        runtime = choice.backend.convert(model, names, recipe, autocast_only)
        looks = {name: Looks.of(layer, recipe) for name, layer in linear_layers(model).items()}
        conversion = Conversion(recipe, choice, layers, tokens, where, verdict, runtime, autocast_only, looks)
        setattr(model, _ATTRIBUTE, conversion)
    return model


def check_conversion(
    model: nn.Module,
    recipe: Recipe | Mapping[str, Any] | str,
    backend: Backend | str,
    layers: LayerSelection | Literal["auto"],
    device: torch.device | None = None,
) -> Choice:
    """Raise what :func:`convert_model` would with these arguments: for whoever changes ``model`` before.

    Returns:
        The backend that would run the recipe.

    Raises:
        TypeError: as in :func:`convert_model`.
        ValueError: as there.
    """
    recipe, selection = get_recipe(recipe), layers if isinstance(layers, LayerSelection) else LayerSelection()
    choice = resolve_backend(backend, recipe, device or _device_of(model))
    decisions = selection.decide(model, recipe)
    if not conversions(model):  # Others may have been sharded since, as they should.
        _refuse_sharded(model, decisions)
    return choice


def use_saved_layers(model: nn.Module, saved: Sequence[Mapping[str, Any]]) -> None:
    """Where ``layers="auto"`` chose otherwise than in a checkpoint, convert anew with the checkpoint's layers.

    Args:
        model: a model that was converted, or that holds such modules.
        saved: ``state_dict()`` of each of its conversions; another number of states changes nothing.
    """
    found = named_conversions(model)
    if len(found) != len(saved):
        return
    for (name, conversion), state in zip(found, saved, strict=True):
        if conversion.layers == "auto":
            convert_model(
                model.get_submodule(name),
                conversion.recipe,
                backend=conversion.backend,
                tokens=conversion.tokens,
                autocast_only=conversion.autocast_only,
                device=conversion.device,
                chosen=state["layers"],
            )


def revert_model(model: nn.Module) -> nn.Module:
    """Undo :func:`convert_model`, in place; a model that was not converted stays as it is."""
    for module in model.modules():
        conversion = module.__dict__.get(_ATTRIBUTE)
        if conversion is not None:
            conversion.backend.revert(module)
            delattr(module, _ATTRIBUTE)
    return model


def conversions(model: nn.Module) -> list[Conversion]:
    """The conversions of ``model`` and of modules inside it."""
    return [conversion for _, conversion in named_conversions(model)]


def named_conversions(model: nn.Module) -> list[tuple[str, Conversion]]:
    """The same, each with the qualified name of its module, which wrappers may have lengthened."""
    return [(name, vars(m)[_ATTRIBUTE]) for name, m in model.named_modules() if _ATTRIBUTE in vars(m)]


def step(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Move the scales; for training loops without a Trainer, to be called after each optimizer step.

    Args:
        model: one that :func:`convert_model` converted, or that holds such modules.
        group: the ranks that share amaxes; ``None`` is all of them. Every rank of it must call.

    Raises:
        ValueError: nothing in ``model`` was converted.
    """
    found = conversions(model)
    if not found:
        raise ValueError("No module in this model was converted to FP8: call lightning_fp8.convert_model(model) first.")
    for conversion in found:
        conversion.optimizer_stepped()
        conversion.step(group)


def check_layers(layers: LayerSelection | str, tokens: int | None) -> None:
    """Look at what chooses the layers.

    Raises:
        TypeError: ``tokens`` is no whole number.
        ValueError: it is not positive, or ``layers`` is neither ``"auto"`` nor a selection.
    """
    if not isinstance(layers, LayerSelection) and layers != "auto":
        raise ValueError(f"layers must be 'auto' or a LayerSelection, got {layers!r}.")
    check_number(whole=True, none=True, least=1, tokens=tokens)


def default_device() -> torch.device:
    """The current GPU; the CPU, if there is none."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _device_of(model: nn.Module) -> torch.device:
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    return device if device.type != "meta" else default_device()


def _refuse_sharded(model: nn.Module, decisions: Sequence[Decision]) -> None:
    layers = linear_layers(model)
    for decision in decisions:
        if decision.converted and isinstance(layers[decision.name].weight, DTensor):
            raise ValueError(
                f"The weight of {decision.name!r} is already sharded: convert before sharding, inside configure_model. "
                "self.trainer.precision_plugin.shard(self, self.device_mesh) does both in the right order, "
                "self.trainer.precision_plugin.convert(self) the first alone; without a Trainer lightning_fp8.shard."
            )


def _warn_of_nonfinite(model: nn.Module, names: list[str]) -> None:
    layers = linear_layers(model)
    for name in names:
        weight = layers[name].weight
        if is_lazy(weight) or weight.is_meta:
            continue
        if not weight.detach().isfinite().all():
            warnings.warn(
                f"The weight of {name!r} holds NaN or Inf before training begins: FP8 cannot mend that. Check the "
                "initialisation or the checkpoint it was loaded from.",
                stacklevel=3,
            )
