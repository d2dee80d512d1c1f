"""Counting what goes over the wire."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Traffic:
    """What one rank put on the wire; hand one object to all that should be counted together.

    Attributes:
        sent: bytes this rank sent to other ranks. Collectives left to the backend count as rings do.
        bf16: bytes the same collectives would have sent in bf16, over a ring.
        calls: collectives counted; a long all-reduce between CPUs counts once for each of its segments.
    """

    sent: int = 0
    bf16: int = 0
    calls: int = 0

    def record(self, sent: int, bf16: int) -> None:
        """Count one collective."""
        self.sent += sent
        self.bf16 += bf16
        self.calls += 1
