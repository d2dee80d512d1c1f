from __future__ import annotations

from lightning_fp8.text_table import text_table


def test_columns_are_as_wide_as_their_widest_cell_and_nothing_trails() -> None:
    rows = [("name", "ms", "why"), ("a", "10.5", ""), ("longer", "1", "it gains much")]
    assert text_table(rows) == ["name    ms    why", "a       10.5", "longer  1     it gains much"]
    assert text_table(rows, right=(1,)) == ["name      ms  why", "a       10.5", "longer     1  it gains much"]
    assert text_table([]) == []
