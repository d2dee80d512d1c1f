"""``FP8Precision`` for Fabric."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Literal

import torch
from lightning.fabric.plugins.precision import Precision as LightningPrecision
from torch import Tensor, nn

from lightning_fp8.backends import Backend
from lightning_fp8.loss_scaling import LossScale
from lightning_fp8.model import Conversion, conversions, default_device, use_saved_layers
from lightning_fp8.optimizers import parameters_of
from lightning_fp8.policy import Precision
from lightning_fp8.recipes import Recipe
from lightning_fp8.selection import LayerSelection
from lightning_fp8.settings import FP8Settings, check_optimizer


class FP8Precision(LightningPrecision):
    """FP8 training for Fabric: ``Fabric(plugins=[FP8Precision()])``.

    Arguments but the last are those of the Trainer's :class:`lightning_fp8.FP8Precision`. Fabric saves no plugin state:
    put ``precision.state_dict()`` into what you save, and give it to ``precision.load_state_dict`` after
    ``fabric.setup``.

    Args:
        device: where modules will run that ``fabric.setup`` finds on the CPU; it converts them before it moves them. By
            default the current GPU, if there is one: under ``Fabric(accelerator="cpu")`` say ``"cpu"`` there.

    Raises:
        ValueError: a setting is unknown or out of range, or the recipe cannot run here.
        TypeError: one is of another type.
    """

    def __init__(
        self,
        recipe: Recipe | dict[str, Any] | str = "delayed",
        *,
        backend: Backend | str = "auto",
        precision: Precision = "bf16-mixed",
        loss_scale: LossScale | None = None,
        layers: LayerSelection | Literal["auto"] = "auto",
        tokens: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.settings = FP8Settings(recipe, backend, precision, loss_scale, layers, tokens)
        self.precision = precision
        self._device = None if device is None else torch.device(device)
        # Fabric tells neither which module runs nor when one is given up: all that are alive, in the order of setup.
        self._modules: weakref.WeakKeyDictionary[nn.Module, list[Conversion]] = weakref.WeakKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        # Modules are set up in the processes that train them.
        return {**self.__dict__, "_modules": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._modules = weakref.WeakKeyDictionary()

    def __repr__(self) -> str:
        # Lightning names a plugin it refuses by this string: the place to say which class is right there.
        return (
            f"lightning_fp8.fabric.FP8Precision(recipe={self.settings.recipe!r}, precision={self.precision!r}) "
            "(for Fabric; in a Trainer use lightning_fp8.FP8Precision)"
        )

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert ``module`` in place; called by ``fabric.setup``, once for each module."""
        on_cpu = all(parameter.device.type == "cpu" for parameter in module.parameters())
        device = self._device or default_device()
        self._modules[module] = self.settings.convert(module, device if on_cpu else None)
        return module

    @property
    def conversions(self) -> list[Conversion]:
        """The conversions of all modules that are set up, in the order of their setup."""
        return [conversion for parts in self._modules.values() for conversion in parts]

    def summary(self) -> str:
        """Layer by layer: what runs in FP8, with which recipe and kernel, and why not.

        Raises:
            RuntimeError: no model was set up yet.
        """
        if not self.conversions:
            raise RuntimeError("No model was set up yet: call fabric.setup(model) first.")
        return "\n\n".join(conversion.summary() for conversion in self.conversions)

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        return self.settings.policy.init_context()

    def module_init_context(self) -> AbstractContextManager[Any]:
        return self.settings.policy.init_context()

    def forward_context(self) -> AbstractContextManager[Any]:
        """Surrounds every forward; a module's scales move as the first one after its optimizer's step begins.

        That is in training mode only: evaluation moves nothing.
        """
        if torch.is_grad_enabled():
            for module, parts in self._modules.items():
                if module.training:
                    for conversion in parts:
                        conversion.step()
        stack = ExitStack()
        parameter = next((p for module in self._modules for p in module.parameters()), None)
        device_type = parameter.device.type if parameter is not None else "cpu"
        stack.enter_context(self.settings.policy.forward_context(device_type))
        for conversion in self.conversions:
            stack.enter_context(conversion.runtime.forward_context())
        return stack

    def convert_input(self, data: Any) -> Any:
        return self.settings.policy.convert_input(data)

    def convert_output(self, data: Any) -> Any:
        return self.settings.policy.convert_output(data)

    def backward(self, tensor: Tensor, model: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Scale the loss and run backward."""
        if self.settings.loss_scaler is not None:
            tensor = self.settings.loss_scaler.scale(tensor)
        super().backward(tensor, model, *args, **kwargs)

    def unscale_gradients(self, optimizer: Any) -> None:
        """Undo the loss scale before Fabric clips."""
        if self.settings.loss_scaler is not None:
            self.settings.loss_scaler.unscale_(optimizer)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Step; afterwards the scales of the modules that ``optimizer`` trains may move."""
        check_optimizer(optimizer)
        scaler = self.settings.loss_scaler
        output = super().optimizer_step(optimizer, **kwargs) if scaler is None else scaler.step(optimizer, **kwargs)
        for conversion in self._trained_by(optimizer):
            conversion.optimizer_stepped()
        return output

    def _trained_by(self, optimizer: Any) -> list[Conversion]:
        """The conversions of the modules that have parameters in ``optimizer``; all, if no module has.

        With two modules and two optimizers one module's backward may still be to come when the other's optimizer steps.
        """
        if len(self._modules) > 1:
            stepped = {id(p) for p in parameters_of(optimizer)}
            trained = [m for m in self._modules if any(id(p) in stepped for p in m.parameters())]
            if trained:
                return [conversion for module in trained for conversion in self._modules[module]]
        return self.conversions

    def state_dict(self) -> dict[str, Any]:
        """Plain values and CPU tensors that stand for all ranks; every rank must call."""
        return self.settings.state_dict(self.conversions)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` gave; the model must be set up.

        Raises:
            ValueError: the number of converted modules differs.
        """
        saved = self.settings.saved_conversions(state_dict)
        if len(saved) != (here := len(self.conversions)):
            raise ValueError(
                f"The state is of {len(saved)} converted modules, {here} are set up: call "
                "fabric.setup(model) before loading the precision's state."
            )
        if self.settings.loss_scaler is not None:
            self.settings.loss_scaler.load_state_dict(state_dict["loss_scaler"])
        saved = self.settings.under_own_loss_scale(saved, state_dict)
        for module, parts in self._modules.items():
            states, saved = saved[: len(parts)], saved[len(parts) :]
            use_saved_layers(module, states)
            self._modules[module] = conversions(module)
            for conversion, state in zip(self._modules[module], states, strict=True):
                conversion.load_state_dict(state)
