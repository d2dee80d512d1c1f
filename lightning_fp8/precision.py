"""``FP8Precision``: FP8 training in Lightning's Trainer with one plugin."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Literal

import torch
from lightning.pytorch.plugins.precision import Precision as LightningPrecision
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_fp8.backends import Backend
from lightning_fp8.clipping import are_mixed, clip_by_norm, clip_by_value
from lightning_fp8.loss_scaling import LossScale
from lightning_fp8.model import Conversion, conversions, use_saved_layers
from lightning_fp8.optimizers import gradients_of
from lightning_fp8.policy import Precision
from lightning_fp8.ranks import gather_from_ranks, own_part
from lightning_fp8.recipes import Recipe
from lightning_fp8.rng import collect_rng_state, restore_rng_state
from lightning_fp8.selection import LayerSelection
from lightning_fp8.settings import CHECKPOINT_KEY, FP8Settings, check_optimizer
from lightning_fp8.shard import shard

log = logging.getLogger(__name__)

#: Strategies whose own engine steps the optimizer or shards the weights in a way that bypasses this plugin.
_REFUSED_STRATEGIES = {
    "DeepSpeedStrategy": "DeepSpeed runs backward and the optimizer in its own engine. Use DDP, FSDP2 or one device.",
    "XLAStrategy": "TPUs have no FP8 training here. Use a CUDA device or the CPU.",
    "SingleDeviceXLAStrategy": "TPUs have no FP8 training here. Use a CUDA device or the CPU.",
}


class TrainerPrecision:
    """What :class:`FP8Precision` adds to Lightning's base class, whichever namespace that comes from."""

    _elsewhere = (
        "for pytorch_lightning's Trainer use lightning_fp8.pytorch_lightning.FP8Precision; "
        "for FSDPStrategy use lightning_fp8.FP8FSDPPrecision"
    )

    def __init__(
        self,
        recipe: Recipe | dict[str, Any] | str = "delayed",
        *,
        backend: Backend | str = "auto",
        precision: Precision = "bf16-mixed",
        loss_scale: LossScale | None = None,
        layers: LayerSelection | Literal["auto"] = "auto",
        tokens: int | None = None,
    ) -> None:
        super().__init__()
        self.settings = FP8Settings(recipe, backend, precision, loss_scale, layers, tokens)
        self.precision = precision
        self._module: nn.Module | None = None
        self._conversions: list[Conversion] = []
        self._device = torch.device("cpu")
        self._manual_optimization = False
        self._rng_of_first_step: dict[str, Any] | None = None

    def __repr__(self) -> str:
        settings = self.settings
        scale = f"loss_scale={settings.loss_scaler.loss_scale!r}, " if settings.loss_scaler else ""
        tokens = f", tokens={settings.tokens}" if settings.tokens is not None else ""
        return (
            f"{type(self).__name__}(recipe={settings.recipe!r}, backend={settings.backend!r}, "
            f"precision={self.precision!r}, {scale}layers={settings.layers!r}{tokens})"
        )

    def __str__(self) -> str:
        # Lightning names a plugin it refuses by this string: the place to say what is right there.
        return f"{self!r} ({self._elsewhere})"

    # --- what users call

    def convert(self, module: nn.Module) -> nn.Module:
        """Convert ``module`` in place, for use inside ``configure_model``; the recipe is written once, here."""
        trainer = getattr(module, "_trainer", None)
        self._module = module
        self._conversions = self.settings.convert(module, trainer.strategy.root_device if trainer is not None else None)
        return module

    def shard(self, module: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
        """Convert ``module`` and shard it over ``mesh``, in place, for use inside ``configure_model``.

        Args:
            module: the LightningModule, or a part of it. Of a LightningModule the methods for steps of training and
                evaluation count as forward methods: they find its own parameters gathered.
            mesh: ``self.device_mesh`` under ``ModelParallelStrategy``.
            options: those of :func:`lightning_fp8.shard` that are not settings of this plugin. ``mp_policy`` is by
                default the plugin's precision, with gradients reduced in fp32.
        """
        settings, policy = self.settings, self.settings.policy
        options.setdefault("mp_policy", MixedPrecisionPolicy(param_dtype=policy.dtype, reduce_dtype=torch.float32))
        shard(
            module,
            mesh,
            recipe=settings.recipe,
            backend=settings.backend,
            layers=settings.layers,
            tokens=settings.tokens,
            autocast_only=policy.mixed,
            dtype=None if policy.mixed else policy.dtype,
            **options,
        )
        _register_steps(module)
        self._module = module
        self._conversions = conversions(module)
        return module

    def summary(self) -> str:
        """Layer by layer: what runs in FP8, with which recipe and kernel, and why not.

        Raises:
            RuntimeError: no model was converted yet in this process.
        """
        if not self._conversions:
            raise RuntimeError(
                "No model was converted yet in this process: summary() is known once trainer.fit has begun, under "
                "strategies that spawn or fork in their processes only."
            )
        return "\n\n".join(conversion.summary() for conversion in self._conversions)

    @property
    def conversions(self) -> list[Conversion]:
        """The conversions of the model that was last set up."""
        return self._conversions

    # --- Lightning's hooks, in the order of a run

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert the model; called by the strategy each time the Trainer sets it up."""
        trainer = getattr(module, "_trainer", None)
        if trainer is None:
            raise TypeError(
                "lightning_fp8.FP8Precision is for the Trainer: in Fabric use lightning_fp8.fabric.FP8Precision."
            )
        for cls in type(trainer.strategy).__mro__:
            if cls.__name__ in _REFUSED_STRATEGIES:
                raise ValueError(f"FP8Precision cannot run under {cls.__name__}: {_REFUSED_STRATEGIES[cls.__name__]}")
        self._device = trainer.strategy.root_device
        self._manual_optimization = not trainer.lightning_module.automatic_optimization
        # Most strategies have loaded the checkpoint by now; the others' choice is put right in on_load_checkpoint.
        saved = trainer._checkpoint_connector._loaded_checkpoint.get(CHECKPOINT_KEY, {}).get("conversions", ())
        self._module = module
        self._conversions = self.settings.convert(module, self._device, saved)
        log.info(self.summary())
        return module

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Look at the optimizers before training, and leave behind what an interrupted run left half done."""
        for optimizer in optimizers:
            check_optimizer(optimizer)
            if self.settings.loss_scaler is not None:
                self.settings.loss_scaler.check(optimizer)
        self._rng_of_first_step = None
        if self.settings.loss_scaler is not None:
            self.settings.loss_scaler.begin()
        return model, optimizers, lr_schedulers

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """New tensors get the dtype of the parameters."""
        return self.settings.policy.init_context()

    def module_init_context(self) -> AbstractContextManager[Any]:
        """New modules get the dtype of the parameters."""
        return self.settings.policy.init_context()

    def convert_input(self, data: Any) -> Any:
        """Under true bf16 the batch becomes bf16; under mixed precision it stays as it is, as in Lightning."""
        return data if self.settings.policy.mixed else self.settings.policy.convert_input(data)

    @contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        """Surrounds every step of training and evaluation."""
        with ExitStack() as stack:
            stack.enter_context(self.settings.policy.forward_context(self._device.type))
            for conversion in self._conversions:
                stack.enter_context(conversion.runtime.forward_context())
            yield

    @contextmanager
    def train_step_context(self) -> Generator[None, None, None]:
        """Surrounds a training step; scales move here, as a step begins after a completed optimizer step."""
        for conversion in self._conversions:
            conversion.step()
        if self._rng_of_first_step is not None:
            restore_rng_state(self._rng_of_first_step)
            self._rng_of_first_step = None
        with self.forward_context():
            yield

    def pre_backward(self, tensor: Tensor, module: Any) -> Tensor:
        """Scale the loss."""
        if self.settings.loss_scaler is not None:
            tensor = self.settings.loss_scaler.scale(tensor)
        return super().pre_backward(tensor, module)  # type: ignore[misc, no-any-return]

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Forward, backward, clipping and the step; afterwards the scales may move.

        Fused optimizers may clip: gradients are unscaled before, so that their step has nothing to undo.
        """
        scaler = self.settings.loss_scaler
        if scaler is None:
            result = super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)  # type: ignore[misc]
        else:
            result = closure()
            # In automatic optimization None means that training_step returned none and no backward ran.
            skipped = result is None and model.automatic_optimization
            if not skipped:
                scaler.unscale_(optimizer)
            self._after_closure(model, optimizer)  # type: ignore[attr-defined]
            if skipped:
                return result
            result = scaler.step(optimizer, **kwargs)
        for conversion in self._conversions:
            conversion.optimizer_stepped()
        return result

    def clip_gradients(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Clip the true gradients: in manual optimization users clip before the step has undone the loss scale."""
        if self._manual_optimization and self.settings.loss_scaler is not None:
            # What users hold is Lightning's wrapper of the optimizer that steps.
            self.settings.loss_scaler.unscale_(getattr(optimizer, "optimizer", optimizer))
        # torch clips no empty list by value: training_step gave its batch up.
        if gradients_of(optimizer):
            super().clip_gradients(optimizer, *args, **kwargs)  # type: ignore[misc]

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        """Clip by the norm of all gradients, also of tensor-parallel parameters beside whole ones."""
        if are_mixed(gradients_of(optimizer)):
            clip_by_norm(optimizer, clip_val)
        else:
            super().clip_grad_by_norm(optimizer, clip_val)  # type: ignore[misc]

    def clip_grad_by_value(self, optimizer: Any, clip_val: float) -> None:
        """Clip each value, also of tensor-parallel parameters beside whole ones."""
        if any(isinstance(gradient, DTensor) for gradient in gradients_of(optimizer)):
            clip_by_value(optimizer, clip_val)
        else:
            super().clip_grad_by_value(optimizer, clip_val)  # type: ignore[misc]

    # --- checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the FP8 state, the loss scale and every rank's random states under ``"lightning_fp8"``.

        After an exception, which may be this rank's alone, nobody is waited for: the random states are this rank's.
        """
        trainer = getattr(self._module, "_trainer", None)
        alone = trainer is not None and trainer.interrupted
        rng = collect_rng_state()
        checkpoint[CHECKPOINT_KEY] = {
            **self.settings.state_dict(self._conversions, alone),
            "rng": [rng] if alone else gather_from_ranks(rng),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Resume the FP8 state; a checkpoint without one starts from the data's own scales.

        An evaluation takes the layers and scales alone: loss scale and random states are a training run's.
        """
        state = checkpoint.get(CHECKPOINT_KEY)
        if state is None:
            log.info("The checkpoint holds no FP8 state: scales start from the data.")
            return
        saved_states = self.settings.saved_conversions(state)
        if self._module is not None:
            self._refuse_other_layers_once_sharded(saved_states)
            use_saved_layers(self._module, saved_states)
            self._conversions = conversions(self._module)
        evaluates = self._evaluates()
        if self.settings.loss_scaler is not None and not evaluates:
            self.settings.loss_scaler.load_state_dict(state["loss_scaler"])
        if len(saved_states) != len(self._conversions):
            warnings.warn(
                f"The checkpoint holds the FP8 state of {len(saved_states)} converted modules, this model has "
                f"{len(self._conversions)}: scales start from the data.",
                stacklevel=2,
            )
        else:
            saved_states = self.settings.under_own_loss_scale(saved_states, state)
            for conversion, saved in zip(self._conversions, saved_states, strict=True):
                conversion.load_state_dict(saved)
        if not evaluates:
            self._resume_random_numbers(state, checkpoint)

    def _evaluates(self) -> bool:
        """Whether the Trainer loads a checkpoint to evaluate it: it calls the same hook then."""
        trainer = getattr(self._module, "_trainer", None)
        return trainer is not None and trainer.state.fn != "fit"

    def _resume_random_numbers(self, state: dict[str, Any], checkpoint: dict[str, Any]) -> None:
        """Go on with the random states of ``state``, the FP8 state of ``checkpoint``."""
        rng = own_part(state["rng"])
        if rng is None:
            warnings.warn(
                "The number of ranks changed, or the checkpoint was written after an exception: random states are not "
                "resumed.",
                stacklevel=2,
            )
            return
        restore_rng_state(rng)
        if _saved_in_mid_epoch(checkpoint):
            # Making the loader's iterator draws numbers that the uninterrupted run did not draw here.
            self._rng_of_first_step = rng

    def _refuse_other_layers_once_sharded(self, saved: list[dict[str, Any]]) -> None:
        """Sharded strategies load a checkpoint when it is too late to convert other layers.

        Raises:
            ValueError: the checkpoint's choice of layers is another than this run's.
        """
        trainer = getattr(self._module, "_trainer", None)
        if trainer is None or not trainer.strategy.restore_checkpoint_after_setup:
            return
        for conversion, state in zip(self._conversions, saved, strict=False):
            if not conversion.agrees_with(state["layers"]):
                raise ValueError(
                    "layers='auto' chose other layers than the run that wrote the checkpoint (the token hint, the GPU "
                    "or the table of times has changed), and the model is sharded already. Go on with the "
                    "checkpoint's: "
                    f"layers=LayerSelection(include={state['layers']!r}, head=True)."
                )


class FP8Precision(TrainerPrecision, LightningPrecision):  # type: ignore[misc]
    """FP8 training for the Trainer: ``Trainer(plugins=[FP8Precision()])``.

    Args:
        recipe: ``"delayed"``, ``"tensorwise"``, ``"tensorwise_pow2"``, ``"rowwise"``, ``"rowwise_gw_hp"``,
            ``"blockwise"``, ``"blockwise_tiled"``, ``"mxfp8"``, ``"static"``, a mapping with ``name`` and settings,
            or a recipe object.
        backend: ``"auto"``, a name, or a backend object with its options.
        precision: the rest of the model: ``"bf16-mixed"`` (fp32 parameters, cast straight to FP8), ``"bf16-true"`` or
            ``"16-mixed"``.
        loss_scale: ``"dynamic"`` or a constant factor on the loss, undone before the step; ``None`` is dynamic under
            ``"16-mixed"`` and none elsewhere.
        layers: a :class:`LayerSelection`, or ``"auto"``: on GPUs with FP8 tensor cores the layers that FP8 makes
            faster, elsewhere every eligible layer. A checkpoint keeps the choice, and a resumed run uses it again.
        tokens: for ``"auto"``: tokens in one batch on one device; by default 8192.

    Raises:
        ValueError: a setting is unknown or out of range, or the recipe cannot run here.
        TypeError: one is of another type.
    """


def _register_steps(module: nn.Module) -> None:
    """Let FSDP2 gather a LightningModule's own parameters for the steps that Lightning calls instead of ``forward``."""
    if not isinstance(module, FSDPModule):
        return
    for name in ("training_step", "validation_step", "test_step", "predict_step"):
        owner = next((cls for cls in type(module).__mro__ if name in vars(cls)), None)
        # The base class of all LightningModules has the methods too; whoever does not override them has no such step.
        overridden = owner is not None and owner.__name__ != "LightningModule"
        if overridden and not getattr(getattr(module, name), "_gathers_weights", False):
            register_fsdp_forward_method(module, name)
            # Seen through wrappers around it, which take a function's attributes over.
            vars(module)[name].__func__._gathers_weights = True


def _saved_in_mid_epoch(checkpoint: dict[str, Any]) -> bool:
    """Whether the fit loop had batches of its epoch left when the checkpoint was written."""
    progress = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_loop.batch_progress", {})
    return not progress.get("is_last_batch", True)
