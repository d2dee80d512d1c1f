"""What GPUs can do at most: dense tensor-core rates and memory bandwidth."""

from __future__ import annotations

import re
from typing import NamedTuple


class Peak(NamedTuple):
    """Dense peaks of one GPU, with fp32 accumulation.

    Attributes:
        bf16: TFLOP/s of bf16 products.
        fp8: TFLOP/s of FP8 products; where there are no FP8 tensor cores, those of bf16.
        bandwidth: TB/s of its memory.
    """

    bf16: float
    fp8: float
    bandwidth: float

    def ideal_seconds(self, fp8_flops: float, high_flops: float) -> float:
        """Least time for so many FLOPs in FP8 and in high precision, one after the other."""
        return fp8_flops / (self.fp8 * 1e12) + high_flops / (self.bf16 * 1e12)


#: By words of the GPU's name as torch gives it; the first that fits. NVIDIA's sheets print figures "with sparsity" for
#: most of these: halved here.
_PEAKS: tuple[tuple[str, Peak], ...] = (
    # H200 datasheet (3002446): SXM 1979/3958, NVL 1671/3341 with sparsity
    (r"\bH200 NVL\b", Peak(835.5, 1670.5, 4.8)),
    (r"\bH200\b", Peak(989.5, 1979.0, 4.8)),
    # H100 datasheet (2430615): SXM 1979/3958, PCIe 1513/3026, NVL 1671/3341 with sparsity; GH200 as SXM
    (r"\bH100 PCIe\b", Peak(756.5, 1513.0, 2.0)),
    (r"\bH100 NVL\b", Peak(835.5, 1670.5, 3.9)),
    (r"\bH100\b", Peak(989.5, 1979.0, 3.35)),
    (r"\bGH200\b", Peak(989.5, 1979.0, 4.0)),
    # Blackwell datasheet (HGX B200: 36/72 PFLOP/s with sparsity for eight; GB200: 5/10 for one)
    (r"\bGB200\b", Peak(2500.0, 5000.0, 8.0)),
    (r"\bB200\b", Peak(2250.0, 4500.0, 8.0)),
    # L40S and L4 datasheets: 733/1466 and 242/485 with sparsity
    (r"\bL40S\b", Peak(366.5, 733.0, 0.864)),
    (r"\bL4\b", Peak(121.0, 242.5, 0.3)),
    # Ada whitepaper, appendix A: dense, fp32 accumulation
    (r"\bRTX 4090\b", Peak(165.2, 330.3, 1.008)),
    # A100 datasheet: no FP8
    (r"\bA100\b.*80GB", Peak(312.0, 312.0, 2.0)),
    (r"\bA100\b", Peak(312.0, 312.0, 1.555)),
)


def peak_of(gpu: str) -> Peak | None:
    """The peaks of the GPU with that name; ``None`` where they are not known."""
    return next((peak for pattern, peak in _PEAKS if re.search(pattern, gpu, re.IGNORECASE)), None)
