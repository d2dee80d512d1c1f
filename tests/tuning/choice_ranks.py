"""What two ranks do when one chooses for both; run in processes of their own."""

from __future__ import annotations

import json
from pathlib import Path

import torch.distributed as dist

from lightning_fp8.selection import Decision
from lightning_fp8.tuning.choice import Chosen, _from_rank_zero


def main(rank: int, folder: Path) -> None:
    """Both meet in ``folder``, and leave there what they found."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)

    def choose() -> Chosen:
        return Chosen([Decision("layer", rank == 0, f"by rank {rank}")], "here")

    def fail() -> Chosen:
        raise ValueError("no memory")

    found = [_from_rank_zero(choose).decisions[0].reason]
    try:
        _from_rank_zero(fail)
    except (ValueError, RuntimeError) as error:
        found.append(f"{type(error).__name__}: {error}")
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
