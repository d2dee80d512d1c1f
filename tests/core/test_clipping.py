"""Clipping of gradients on one process; over several ranks in tests/comm/strategy_checks.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_fp8.clipping import clip_by_norm, clip_by_value


@pytest.mark.parametrize("clip", [clip_by_norm, clip_by_value])
def test_nothing_is_clipped_where_a_rejected_step_has_left_no_gradients(clip) -> None:
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters())
    clip(optimizer, 1.0)
    assert layer.weight.grad is None
    layer.weight.grad = torch.full((2, 2), 3.0)
    clip(optimizer, 1.0)
    expected = 0.5 if clip is clip_by_norm else 1.0
    torch.testing.assert_close(layer.weight.grad, torch.full((2, 2), expected), rtol=1e-6, atol=0)
