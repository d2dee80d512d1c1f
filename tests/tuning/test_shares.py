"""What layers add to a step: the GPU runs behind the host, and waits for it where the host is slower on the whole."""

from __future__ import annotations

import pytest

from lightning_fp8.tuning.shares import Place, Share, shares_of_step
from tests.tuning.tables import made_up_table

SMALL, LARGE = Place(1024, 256, 256, False), Place(65536, 4096, 4096, False)


def test_where_the_host_is_slower_no_layer_takes_less_than_its_host() -> None:
    table = made_up_table(fp8_host=0.3)
    share = shares_of_step(table, "delayed", {"small": SMALL})["small"]
    assert share == Share(table.host["bf16"], 0.3, True) and not share.gains
    # In compiled code it needs a quarter: less than the GPU, in bf16.
    share = shares_of_step(table, "delayed", {"small": SMALL._replace(compiled=True)})["small"]
    assert share.bf16 == table.milliseconds("bf16", *SMALL[:3]) and not share.host_bound


def test_work_of_other_layers_gives_the_host_time() -> None:
    """The host has issued the small layer long before the GPU is done with the large one."""
    table = made_up_table(fp8_host=0.3)
    table.times["delayed"] = {point: ms / 2 for point, ms in table.times["bf16"].items()}
    alone = shares_of_step(table, "delayed", {"small": SMALL})["small"]
    shares = shares_of_step(table, "delayed", {"small": SMALL, "large": LARGE})
    assert not alone.gains and alone.host_bound
    assert {name: share.speedup for name, share in shares.items()} == pytest.approx({"small": 2.0, "large": 2.0})
    assert shares["small"].fp8 == table.milliseconds("delayed", *SMALL[:3]) and not shares["small"].host_bound
    # Many of them are too much again: the GPU waits, and what it waits for counts.
    many = {"large": LARGE, **{f"small {n}": SMALL for n in range(100)}}
    shares = shares_of_step(table, "delayed", many)
    assert shares["large"].gains and not any(shares[f"small {n}"].gains for n in range(100))


def test_no_layers_take_no_time() -> None:
    assert shares_of_step(made_up_table(), "delayed", {}) == {}
