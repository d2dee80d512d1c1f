"""FP8 on the wire, whatever strategy runs: :class:`FP8Communication`."""

from __future__ import annotations

from typing import Any, Literal

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_fp8.callbacks._loss_factor import loss_factor
from lightning_fp8.checks import check_flag, check_number
from lightning_fp8.comm.codec import BlockCodec
from lightning_fp8.comm.collectives import FP8Collectives
from lightning_fp8.comm.ddp import FP8GradientState, check_gradients, fp8_gradient_hook
from lightning_fp8.comm.fsdp import FSDPCommunication, communicate_fsdp_in_fp8, fsdp_modules
from lightning_fp8.comm.fsdp1 import fp8_shard_hook
from lightning_fp8.comm.links import DEFAULT_MIN_NUMEL, NEVER, Wire, check_wire, link_between
from lightning_fp8.comm.rounding import RoundingKeys
from lightning_fp8.comm.shards import local_numel, managed_parameters, shard_ranks
from lightning_fp8.comm.traffic import Traffic
from lightning_fp8.formats import get_format
from lightning_fp8.optimizers import gradients_of

_HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)


class FP8Communication(Callback):
    """Sends gradients, and the weights that are gathered, in FP8: half the bytes of bf16.

    It looks which strategy runs and installs what fits there: under DDP the gradients' all-reduce, under FSDP2
    (``ModelParallelStrategy``) the gradients' reduce-scatter and the all-gather of FP8 layers' weights, under FSDP1 the
    gradients' reduction. :meth:`summary` tells what goes how, with bytes. Sums are taken in fp32; the error does not
    grow with the number of ranks.

    Args:
        grad: ``"fp8"``, or ``"bf16"`` to leave gradients as the strategy sends them.
        param: the same for weights.
        min_numel: collectives of fewer values go in bf16 (weights: as they are). By default what the link between the
            ranks makes worth it: never between GPUs of one host, where the casts take longer than the bytes saved.
        block: gradients that share a scale.
        format: of gradients, ``"e4m3"`` or ``"e5m2"``.
        stochastic: round gradients stochastically.
        error_feedback: keep what rounding takes from a gradient and add it to the next one; under DDP only.

    Raises:
        TypeError: a setting is of the wrong type.
        ValueError: one is unknown; on setup, if the strategy cannot do what was asked.

    Attributes:
        grad_traffic: what gradients put on the wire.
        param_traffic: what weights put there.
    """

    def __init__(
        self,
        grad: Wire = "fp8",
        param: Wire = "fp8",
        min_numel: int | None = None,
        block: int = 128,
        format: Literal["e4m3", "e5m2"] = "e4m3",
        stochastic: bool = False,
        error_feedback: bool = False,
    ) -> None:
        check_wire(grad=grad, param=param)
        if grad == param == "bf16":
            raise ValueError("With grad='bf16' and param='bf16' nothing goes in FP8: leave FP8Communication out.")
        check_number(whole=True, none=True, least=0, min_numel=min_numel)
        check_number(whole=True, block=block)
        check_flag(stochastic=stochastic, error_feedback=error_feedback)
        if error_feedback and grad != "fp8":
            raise ValueError("error_feedback is about gradients in FP8: set grad='fp8'.")
        self.grad = grad
        self.param = param
        self.min_numel = min_numel
        self.codec = BlockCodec(get_format(format), block, stochastic)
        self.error_feedback = error_feedback
        self._lines: list[str] = []
        self._begin_run()
        self._module: pl.LightningModule | None = None
        self._saved: dict[str, Any] | None = None
        self._optimizer_hooks: list[Any] = []
        self._stepped = False
        self._calls = 0

    def _begin_run(self) -> None:
        """Let go of what an earlier run left."""
        self.grad_traffic = Traffic()
        self.param_traffic = Traffic()
        self._keys = RoundingKeys()
        self._gradients: FP8GradientState | None = None

    def summary(self) -> str:
        """What goes how, with the bytes that one rank sends.

        Raises:
            RuntimeError: training has not begun.
        """
        if not self._lines:
            raise RuntimeError(
                "Nothing is installed yet: summary() is known once trainer.fit has begun, with strategies that spawn "
                "or fork in their processes only."
            )
        sent = [
            f"  {name} so far: {traffic.sent:,} bytes sent in {traffic.calls:,} collectives, {traffic.bf16:,} in bf16"
            for name, traffic in (("gradients", self.grad_traffic), ("weights", self.param_traffic))
            if traffic.calls
        ]
        return "\n".join(["FP8 communication", *self._lines, *sent])

    # --- Lightning's hooks

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse what cannot be, before anything is changed."""
        if stage != "fit":
            return
        self._saved = None  # An evaluation may have loaded another run's.
        if trainer.global_step == 0:
            self._begin_run()
        strategy: Any = trainer.strategy
        name = type(strategy).__name__
        if trainer.world_size == 1:
            return
        if not isinstance(strategy, (DDPStrategy, FSDPStrategy, ModelParallelStrategy)):
            raise ValueError(
                f"FP8Communication cannot change what {name} sends: use DDPStrategy, FSDPStrategy or "
                "ModelParallelStrategy, or leave it out."
            )
        if isinstance(strategy, DDPStrategy) and self.grad == "bf16":
            raise ValueError("DDP gathers no weights and grad='bf16' leaves gradients alone: nothing is left for FP8.")
        if isinstance(strategy, DDPStrategy) and strategy._ddp_comm_hook is not None:
            raise ValueError("DDP takes one communication hook: leave out either ddp_comm_hook or FP8Communication.")
        if isinstance(strategy, FSDPStrategy) and self.param == "fp8":
            raise ValueError(
                "FSDP1 has no hook for its weight all-gather, which stays bf16: FP8Communication(param='bf16'), or use "
                "FSDP2 (ModelParallelStrategy)."
            )
        if isinstance(strategy, FSDPStrategy) and strategy.sharding_strategy in _HYBRID:
            raise ValueError("FSDP1 takes no communication hook under hybrid sharding: use FSDP2 or FULL_SHARD.")
        if self.error_feedback and not isinstance(strategy, DDPStrategy):
            raise ValueError("error_feedback needs whole gradients on every rank, as DDP has them: leave it out here.")

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Install, now that the strategy has wrapped or sharded the model."""
        self._module = pl_module
        if trainer.world_size == 1:
            self._lines = ["  one process: nothing goes over a wire"]
            rank_zero_warn("FP8Communication has nothing to do: there is one process.")
            return
        model, strategy = trainer.strategy.model, trainer.strategy
        group = dist.group.WORLD
        if isinstance(model, (DistributedDataParallel, FullyShardedDataParallel)):
            group = model.process_group
        link = link_between(group, strategy.root_device)
        min_numel = DEFAULT_MIN_NUMEL[link] if self.min_numel is None else self.min_numel
        self._lines = [f"  link: {link}; {_threshold(min_numel, self.min_numel is None)}"]
        if min_numel >= NEVER:
            # Nothing is installed: even a hook that sends no FP8 would change what is sent.
            self._lines.append("  gradients and weights: as the strategy sends them")
        elif isinstance(model, DistributedDataParallel):
            self._install_ddp(model, group, min_numel)
        elif isinstance(model, FullyShardedDataParallel):
            self._install_fsdp1(model, group, min_numel)
        else:
            self._install_fsdp2(pl_module, min_numel)
        rank_zero_info(self.summary())

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Go on from the checkpoint, which is loaded by now under every strategy; watch which steps are taken."""
        saved, self._saved = self._saved, None
        if self._gradients is None:
            if saved is not None:
                self._keys.place = saved["seed"]
            return
        if saved is not None:
            factor = loss_factor(trainer)
            if saved.get("loss_factor", factor) != factor:
                # What was lost of gradients of another size is not to be added to these.
                saved = {**saved, "residuals": {}}
            self._gradients.load_state_dict(saved, pl_module.named_parameters())
        if self.error_feedback:
            for optimizer in trainer.optimizers:
                self._optimizer_hooks.append(optimizer.register_step_post_hook(self._note_step))

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self._stepped = False
        self._calls = self.grad_traffic.calls

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        """Forget the residuals of gradients that were reduced and then thrown away."""
        if self._gradients is not None and self.grad_traffic.calls > self._calls and not self._stepped:
            self._gradients.drop_residuals()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        for hook in self._optimizer_hooks:
            hook.remove()
        self._optimizer_hooks = []

    def state_dict(self) -> dict[str, Any]:
        """Error feedback and the place in the stochastic rounding; every rank must call, but after an exception."""
        if self._module is None:
            return {}
        if self._gradients is None:
            return {"seed": self._keys.place} if self.codec.stochastic else {}
        if self.error_feedback and not self._module.trainer.interrupted:
            self._gradients.average_residuals()
        state = self._gradients.state_dict(self._module.named_parameters())
        return {**state, "loss_factor": loss_factor(self._module.trainer)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict or None

    # --- installation

    def _install_ddp(self, model: DistributedDataParallel, group: Any, min_numel: int) -> None:
        check_gradients(model.module)
        self._gradients = FP8GradientState(
            group,
            codec=self.codec,
            min_numel=min_numel,
            error_feedback=self.error_feedback,
            traffic=self.grad_traffic,
            keys=self._keys,
        )
        model.register_comm_hook(self._gradients, fp8_gradient_hook)
        numel = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        self._lines += [
            self._gradient_line("all-reduce, buckets", numel, 2, group),
            "  weights: DDP gathers none",
        ]

    def _install_fsdp1(self, model: FullyShardedDataParallel, group: Any, min_numel: int) -> None:
        model.register_comm_hook(
            FP8Collectives(group, self.codec, min_numel, self.grad_traffic, self._keys), fp8_shard_hook
        )
        # Each rank holds its shards only.
        numel = sum(parameter.numel() for parameter in model.parameters()) * dist.get_world_size(group)
        self._lines += [
            self._gradient_line("reduce-scatter", numel, 1, group),
            "  weights: bf16 (FSDP1 has no hook for its all-gather)",
        ]

    def _install_fsdp2(self, module: pl.LightningModule, min_numel: int) -> None:
        installed = communicate_fsdp_in_fp8(
            module,
            grad=self.grad == "fp8",
            param=self.param == "fp8",
            codec=self.codec,
            min_numel=min_numel,
            grad_traffic=self.grad_traffic,
            param_traffic=self.param_traffic,
            keys=self._keys,
        )
        self._lines += [
            self._fsdp2_gradients(module, installed, min_numel),
            self._fsdp2_weights(installed),
        ]
        if installed.replicated:
            self._lines.append("  between replicas (HSDP): all-reduce as it is, for FSDP2 has no hook to replace it")

    def _fsdp2_gradients(self, module: pl.LightningModule, installed: FSDPCommunication, min_numel: int) -> str:
        if not installed.reduce_scatters:
            return "  gradients: reduce-scatter, as they are"
        before = after = 0
        for part in fsdp_modules(module):
            parameters = managed_parameters(part)
            if parameters:
                peers, shard = shard_ranks(parameters[0]) - 1, local_numel(parameters)
                before += peers * shard * 2
                in_fp8 = shard * (peers + 1) >= min_numel
                after += peers * (self.codec.message_bytes(shard) if in_fp8 else shard * 2)
        how = f"{self.codec.fmt} in blocks of {self.codec.block}"
        return f"  gradients: reduce-scatter, {how}: {_bytes(before, after)} a step"

    def _fsdp2_weights(self, installed: FSDPCommunication) -> str:
        if not installed.all_gathers:
            return "  weights: all-gather, as they are"
        before = after = layers = 0
        for gather in installed.all_gathers:
            for parameter, in_fp8 in gather.parameters:
                peers, shard = shard_ranks(parameter) - 1, local_numel([parameter])
                before += peers * shard * 2
                after += peers * shard * (1 if in_fp8 else 2)
                layers += in_fp8
        return f"  weights: all-gather, {layers} layers in FP8: {_bytes(before, after)} each time that all are gathered"

    def _gradient_line(self, what: str, numel: int, rounds: int, group: Any) -> str:
        ranks = dist.get_world_size(group)
        before = rounds * (ranks - 1) * numel * 2 // ranks
        after = rounds * (ranks - 1) * self.codec.message_bytes(-(-numel // ranks))
        return f"  gradients: {what}, {self.codec.fmt} in blocks of {self.codec.block}: {_bytes(before, after)} a step"

    def _note_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not gradients_of(optimizer):
            return
        self._stepped = True
        found_inf = getattr(optimizer, "found_inf", None)
        if isinstance(found_inf, Tensor) and self._gradients is not None:
            # A fused optimizer leaves out a step on the device: nobody here knows, and nobody needs to.
            self._gradients.drop_residuals(found_inf.bool())


def _bytes(before: int, after: int) -> str:
    return f"{after:,} bytes sent by a rank, {before:,} in bf16"


def _threshold(min_numel: int, by_default: bool) -> str:
    if min_numel >= NEVER:
        return "FP8 is off, for on this link it is slower than bf16; min_numel=0 forces it"
    origin = "the link's default" if by_default else "as asked for"
    return f"FP8 from {min_numel:,} values on ({origin})"
