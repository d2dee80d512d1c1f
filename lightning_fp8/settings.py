"""What the precision classes of Trainer and Fabric have in common: the settings, checked when they are given."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer

from lightning_fp8.backends import Backend, get_backend, resolve_backend
from lightning_fp8.loss_scaling import LossScale, LossScaler
from lightning_fp8.model import (
    Conversion,
    check_conversion,
    check_layers,
    conversions,
    convert_model,
    default_device,
    named_conversions,
    use_saved_layers,
)
from lightning_fp8.policy import Precision, PrecisionPolicy
from lightning_fp8.ranks import gather_from_ranks, own_part
from lightning_fp8.recipes import Recipe, get_recipe
from lightning_fp8.scaling import with_gradients_times
from lightning_fp8.selection import LayerSelection

log = logging.getLogger(__name__)

#: Key of the FP8 state in a checkpoint of the Trainer's. A plugin's own state is filed under its class name, which
#: subclasses lose.
CHECKPOINT_KEY = "lightning_fp8"


class FP8Settings:
    """The settings of FP8 training, and the conversion of a model under them.

    Args:
        recipe: a name, a mapping with ``name`` and settings, or a recipe.
        backend: ``"auto"``, a name, or a backend with its options.
        precision: the rest of the model: ``"bf16-mixed"``, ``"bf16-true"`` or ``"16-mixed"``.
        loss_scale: ``"dynamic"``, a constant, or ``None``; ``"16-mixed"`` is dynamic by default.
        layers: ``"auto"`` or a selection.
        tokens: the hint for ``"auto"``.

    Raises:
        ValueError: a setting is unknown or out of range.
        TypeError: one is of another type.
    """

    def __init__(
        self,
        recipe: Recipe | dict[str, Any] | str,
        backend: Backend | str,
        precision: Precision,
        loss_scale: LossScale | None,
        layers: LayerSelection | Literal["auto"],
        tokens: int | None,
    ) -> None:
        self.recipe = get_recipe(recipe)
        self.backend = backend if backend == "auto" else get_backend(backend)
        self.policy = PrecisionPolicy(precision)
        if loss_scale is None and precision == "16-mixed":
            loss_scale = "dynamic"
        self.loss_scaler = LossScaler(loss_scale) if loss_scale is not None else None
        check_layers(layers, tokens)
        self.layers = layers
        self.tokens = tokens
        # Whatever runs nowhere is refused here, not at the first step; a device is only known later.
        resolve_backend(self.backend, self.recipe, default_device())

    def convert(
        self, module: nn.Module, device: torch.device | None = None, saved: Sequence[Mapping[str, Any]] = ()
    ) -> list[Conversion]:
        """Give ``module`` its dtype and convert it, in place; where parts were converted by hand, they are kept.

        Args:
            module: the model.
            device: where it will run; by default where it is.
            saved: the states of its conversions in a checkpoint: ``"auto"`` takes their layers and chooses none anew.
        """
        parts = named_conversions(module)
        by_hand = parts and parts[0][0] != ""
        if not by_hand:
            # Before the dtype changes: an error leaves the module as it was.
            check_conversion(module, self.recipe, self.backend, self.layers, device)
        self.policy.convert_module(module)
        if not by_hand:
            convert_model(
                module,
                self.recipe,
                backend=self.backend,
                layers=self.layers,
                tokens=self.tokens,
                autocast_only=self.policy.mixed,
                device=device,
                chosen=saved[0]["layers"] if len(saved) == 1 else None,
            )
        use_saved_layers(module, saved)
        return conversions(module)

    def state_dict(self, parts: Sequence[Conversion], alone: bool = False) -> dict[str, Any]:
        """The state of ``parts`` and of the loss scale, plain values and CPU tensors that stand for all ranks.

        Args:
            parts: the conversions of all models.
            alone: no other rank is waited for; otherwise every rank must call.
        """
        if not alone:
            for conversion in parts:
                # One rank's checkpoint is loaded by all.
                conversion.runtime.share_amaxes()
        states = [conversion.state_dict() for conversion in parts]
        state: dict[str, Any] = {
            "conversions": states,
            "loss_scaler": self.loss_scaler.state_dict() if self.loss_scaler else {},
            "loss_factor": self.loss_factor,
        }
        if not alone and any(conversion.runtime.scaling.differs_by_rank for conversion in parts):
            state["conversions_of_ranks"] = gather_from_ranks(states)
        return state

    @staticmethod
    def saved_conversions(state: Mapping[str, Any]) -> list[dict[str, Any]]:
        """This rank's states of the conversions, of what :meth:`state_dict` gave."""
        saved: list[dict[str, Any]] = own_part(state.get("conversions_of_ranks", [])) or state["conversions"]
        return saved

    @property
    def loss_factor(self) -> float:
        """What losses, and with them the gradients that FP8 layers see, are multiplied by now."""
        return self.loss_scaler.factor if self.loss_scaler is not None else 1.0

    def under_own_loss_scale(self, saved: list[dict[str, Any]], state: Mapping[str, Any]) -> list[dict[str, Any]]:
        """States of conversions in the units of this run's gradients, where the loss was scaled otherwise.

        To be called after the loss scale is resumed.

        Args:
            saved: as :meth:`saved_conversions` gave them.
            state: what :meth:`state_dict` gave. Earlier builds kept no factor but a dynamic one; a constant is taken to
                be this run's.
        """
        mine = self.loss_factor
        theirs = float(state.get("loss_factor", state["loss_scaler"].get("scale", mine)))
        if mine == theirs or not theirs:
            return saved
        log.info(
            "The loss was scaled by %g where the FP8 state was saved, and is by %g here: what is known of gradients "
            "follows.",
            theirs,
            mine,
        )
        factor = mine / theirs
        return [each | {"runtime": with_gradients_times(factor, each["runtime"])} for each in saved]


def check_optimizer(optimizer: Optimizer) -> None:
    """Refuse what takes no steps of one forward and one backward.

    Raises:
        ValueError: it is LBFGS.
    """
    if isinstance(optimizer, LBFGS):
        raise ValueError(
            "LBFGS evaluates the loss several times a step, which FP8 scales cannot follow: use another optimizer."
        )
