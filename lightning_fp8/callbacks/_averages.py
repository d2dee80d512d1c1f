"""Averages of weights, which go back together with the weights."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging, WeightAveraging
from torch import Tensor

from lightning_fp8.ranks import local_values


class Averages:
    """The averages that Lightning's callbacks keep, as one state for a snapshot.

    A bad weight enters them after the very step that is rejected for it, and would stay when the weights go back.
    Lightning offers no public way to these averages.

    Args:
        trainer: in a fit; its callbacks that average weights.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        self._callbacks = [c for c in callbacks if isinstance(c, (WeightAveraging, StochasticWeightAveraging))]

    def live_state(self) -> dict[str, Tensor]:
        """Their tensors, where they are; this rank's part of sharded ones."""
        state: dict[str, Tensor] = {}
        for index, callback in enumerate(self._callbacks):
            model = callback._average_model
            if model is not None:
                tensors = [*model.named_parameters(), *model.named_buffers()]
                state |= {f"{index}.{name}": local_values(tensor.detach()) for name, tensor in tensors}
            if isinstance(callback, StochasticWeightAveraging) and callback.n_averaged is not None:
                state[f"{index}.averaged"] = callback.n_averaged
        return state

    state_dict = live_state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go back to ``state``, in place; averages that had not begun then begin anew."""
        for name, tensor in self.live_state().items():
            if name in state:
                tensor.copy_(state[name])
            else:
                tensor.zero_()


def average_again(trainer: pl.Trainer, module: pl.LightningModule, recovery: Callback) -> None:
    """Let the model hold its average again, after the last good state came back over it at the end of a fit.

    Callbacks behind ``recovery`` have not put theirs in yet. Nor does ``StochasticWeightAveraging`` with BatchNorm at
    the end of the fit: it did an epoch ago.

    Args:
        trainer: whose fit ends.
        module: gets the average.
        recovery: stands among the trainer's callbacks.
    """
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks[: callbacks.index(recovery)]:
        earlier = isinstance(callback, StochasticWeightAveraging) and callback._model_contains_batch_norm
        if isinstance(callback, (WeightAveraging, StochasticWeightAveraging)) and not earlier:
            callback.on_train_end(trainer, module)
