"""FP8 on the wire: a block codec, collectives on it, and what installs them.

Codec, collectives and DDP know tensors and process groups only, FSDP and tensor parallelism FP8 layers too; none of
them knows Lightning.
"""

from lightning_fp8.comm.codec import BlockCodec, MessageError
from lightning_fp8.comm.collectives import FP8Collectives
from lightning_fp8.comm.ddp import FP8GradientState, fp8_gradient_hook
from lightning_fp8.comm.handle import Handle
from lightning_fp8.comm.traffic import Traffic

__all__ = [
    "BlockCodec",
    "FP8Collectives",
    "FP8GradientState",
    "Handle",
    "MessageError",
    "Traffic",
    "fp8_gradient_hook",
]
