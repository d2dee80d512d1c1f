from __future__ import annotations

from typing import Any

import torch

from transformer_engine.common.recipe import DelayedScaling, Format

MAXIMA = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


class FP8GlobalStateManager:
    enabled = False
    recipe: Any = None
    depth = 0
    registered: list[Any] = []  # noqa: RUF012

    @classmethod
    def get_buffer_info(cls) -> str:
        return "buffer_index_and_autocast_key"

    @classmethod
    def add_fp8_tensors_to_global_buffer(cls, fp8_meta: dict[str, Any]) -> None:
        if cls.get_buffer_info() not in fp8_meta:
            fp8_meta[cls.get_buffer_info()] = [len(cls.registered)]
            cls.registered.append(fp8_meta)

    @classmethod
    def reduce_and_update_fp8_tensors(cls) -> None:
        for fp8_meta in cls.registered:
            for state in (fp8_meta["scaling_fwd"], fp8_meta["scaling_bwd"]):
                amax = state.amax_history.amax(0)
                state.scale.copy_(torch.where(amax > 0, MAXIMA[state.dtype] / amax, state.scale))


class autocast:
    entered: list[Any] = []  # noqa: RUF012

    def __init__(self, enabled: bool = True, recipe: Any = None, amax_reduction_group: Any = None) -> None:
        self.enabled, self.recipe = enabled, recipe

    def __enter__(self) -> autocast:
        manager = FP8GlobalStateManager
        self.before = (manager.enabled, manager.recipe)
        manager.enabled, manager.recipe = self.enabled, self.recipe
        manager.depth += 1
        autocast.entered.append(self.recipe)
        return self

    def __exit__(self, *args: Any) -> None:
        manager = FP8GlobalStateManager
        manager.enabled, manager.recipe = self.before
        manager.depth -= 1
        if manager.depth == 0 and torch.is_grad_enabled():
            manager.reduce_and_update_fp8_tensors()


class RecipeState:
    def __init__(self, recipe: Any, forward: bool, count: int) -> None:
        hybrid = recipe.fp8_format is Format.HYBRID
        self.dtype = torch.float8_e5m2 if hybrid and not forward else torch.float8_e4m3fn
        self.scale = torch.ones(count)
        self.amax_history = torch.zeros(getattr(recipe, "amax_history_len", 1), count)


class Quantizer:
    """Casts with a scale that it is given, or with the data's own."""

    def __init__(self, scale: torch.Tensor, amax: torch.Tensor, dtype: torch.dtype, delayed: bool) -> None:
        self.scale, self.amax, self.dtype, self.delayed = scale, amax, dtype, delayed
        self.calls = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The values that the FP8 codes stand for, fp32."""
        self.calls += 1
        x = x.detach().float()
        seen = torch.nan_to_num(x.abs(), nan=0.0, posinf=torch.inf).amax()
        if not self.delayed:
            scale = MAXIMA[self.dtype] / seen
        else:
            scale = self.scale.clone()
            self.amax.copy_(torch.fmax(self.amax, seen.view(1)))
        maximum = MAXIMA[self.dtype]
        return (x * scale).clamp(-maximum, maximum).to(self.dtype).float() * (1 / scale)


def make_quantizers(state: RecipeState, recipe: Any) -> list[Quantizer]:
    delayed = isinstance(recipe, DelayedScaling)
    return [
        Quantizer(state.scale[i], state.amax_history[0][i].reshape((1,)), state.dtype, delayed)
        for i in range(state.scale.numel())
    ]
