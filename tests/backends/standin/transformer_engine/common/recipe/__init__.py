from __future__ import annotations

import enum
from dataclasses import dataclass


class Format(enum.Enum):
    E4M3 = "e4m3"
    HYBRID = "hybrid"


@dataclass(frozen=True)
class QParams:
    power_2_scale: bool = False
    amax_epsilon: float = 0.0


@dataclass
class DelayedScaling:
    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    reduce_amax: bool = True
    fp8_dpa: bool = False


@dataclass
class Float8CurrentScaling:
    fp8_format: Format = Format.HYBRID
    fp8_quant_fwd_inp = QParams()
    fp8_quant_fwd_weight = QParams()
    fp8_quant_bwd_grad = QParams()


@dataclass
class Float8BlockScaling:
    fp8_format: Format = Format.E4M3
    fp8_quant_fwd_inp = QParams(power_2_scale=True)
    fp8_quant_fwd_weight = QParams(power_2_scale=True)
    fp8_quant_bwd_grad = QParams(power_2_scale=True)


@dataclass
class MXFP8BlockScaling:
    fp8_format: Format = Format.E4M3
