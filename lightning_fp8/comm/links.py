"""What joins the ranks of a group, and from which size on FP8 is worth sending there."""

from __future__ import annotations

import socket
from typing import Literal, get_args

import torch
import torch.distributed as dist

#: What may be asked of a collective: FP8, or what it sends without.
Wire = Literal["fp8", "bf16"]

#: ``cpu``: ranks on CPUs. ``nvlink``: GPUs of one host. ``network``: GPUs of several hosts.
Link = Literal["cpu", "nvlink", "network"]

#: Stands for "never": no message is as large.
NEVER = 2**62

#: Messages with fewer values go in bf16, unless the user names another threshold.
#: ``nvlink``: on two H200s an all-reduce of fp32 values is faster in FP8 from 64 to 128 Mi on, as the host is quick
#: (docs/benchmarks/comm-nccl.md), but a step with bf16 gradients, which bf16 sends as they are, became 2 to 3% slower
#: (comm-step.md).
#: ``network``: below this the scales' and the padding's share and the extra launches outweigh the bytes.
#: ``cpu``: whoever trains on CPU ranks and asks for FP8 has a slow link; only what is lost in padding goes in bf16.
DEFAULT_MIN_NUMEL: dict[Link, int] = {"cpu": 2**12, "nvlink": NEVER, "network": 2**16}


def check_wire(**words: str) -> None:
    """Look whether settings are a :data:`Wire`.

    Raises:
        ValueError: one is another word.
    """
    for name, word in words.items():
        if word not in get_args(Wire):
            raise ValueError(f"{name} must be 'fp8' or 'bf16', got {word!r}.")


def link_between(group: dist.ProcessGroup | None, device: torch.device) -> Link:
    """What joins the ranks of ``group``; every rank of it must call.

    Args:
        group: the ranks; ``None`` means all.
        device: where their tensors are.
    """
    if device.type == "cpu":
        return "cpu"
    hosts: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(hosts, socket.gethostname(), group=group)
    return "nvlink" if len(set(hosts)) == 1 else "network"
