"""The last good state, in this host's memory.

Every rank keeps what it holds itself: of a sharded model its shards. A capture copies to pinned memory on a stream of
its own while the next forward and backward run; only the next optimizer step waits for it, and the host never does.
What a forward moves (buffers, scale state, statistics) is copied on the device first.

Two copies are kept: the newest is a *candidate* until a later step shows that its weights are sound, and never
overwrites the *good* one before.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lightning_fp8.optimizers import parameters_of
from lightning_fp8.ranks import local_values, reshard
from lightning_fp8.recovery.buffers import written_in_place
from lightning_fp8.rng import collect_rng_state, restore_rng_state

#: Of each parameter group of an optimizer, all but the parameters.
Settings = list[dict[str, Any]]


class Stateful(Protocol):
    """Whatever has a state of plain values and tensors: schedulers, scale state, statistics.

    Where there is a ``live_state()``, the same with the tensors themselves, on their device, that is taken.
    """

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


class Snapshot:
    """One copy: host tensors that are reused from capture to capture, and plain values.

    Attributes:
        label: what the caller said about the moment (the step).
        plain: of each optimizer parameter's state the values that are no tensors, such as some optimizers' step count.
        parameters: not copies, by the names that they had.
        unwritable: buffers that cannot be written in place (expanded, sparse, nested, of inference mode), not copies.
    """

    def __init__(self) -> None:
        self.label: Any = None
        self.tensors: dict[str, Tensor] = {}
        self.parameters: dict[str, Tensor] = {}
        self.unwritable: dict[str, Tensor] = {}
        self.plain: dict[str, dict[str, Any]] = {}
        self.settings: list[Settings] = []
        self.states: dict[str, tuple[list[Any], TreeSpec]] = {}
        self.rng: dict[str, Any] = {}


class Snapshots:
    """Captures and restores a module, its optimizers and whatever else has a state.

    Parameter groups may join an optimizer in mid-run. Going back to a state from before them, all weights come back,
    the groups stay, and their parameters lose the optimizer state that they have got since. That optimizer's settings
    and schedules stay as they are: those from before do not know of the groups.

    A parameter that pruning has renamed in mid-run is the same. Parametrizations make others in its stead, or let the
    object hold another quantity, as their removal does: older states lack these, see :meth:`drop_incomplete`.

    Args:
        module: weights and buffers, restored in place.
        optimizers: state and parameter groups, restored in place; also parameters that are none of the module's.
        others: further things with a state, by name; small ones, for their tensors are copied on the device first.
    """

    def __init__(
        self, module: nn.Module, optimizers: Sequence[Optimizer], others: Mapping[str, Stateful] | None = None
    ) -> None:
        self.module, self.optimizers, self.others = module, list(optimizers), dict(others or {})
        self.good: Snapshot | None = None
        self.candidate: Snapshot | None = None
        self._spare = Snapshot()
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None

    @torch.no_grad()
    def capture(self, label: Any = None) -> None:
        """Begin a copy of the present state; it becomes the candidate."""
        self.wait()
        snapshot, self._spare = self.candidate or self._spare, Snapshot()
        snapshot.parameters = self._parameters()
        snapshot.unwritable = {name: buffer for name, buffer in self._buffers() if not written_in_place(buffer)}
        names = {id(parameter): name for name, parameter in snapshot.parameters.items()}
        live = dict(self._tensors(names))
        snapshot.states = {}
        for name, other in self.others.items():
            leaves, spec = tree_flatten(getattr(other, "live_state", other.state_dict)())
            live |= {_place(name, index): leaf for index, leaf in enumerate(leaves) if torch.is_tensor(leaf)}
            plain = [None if torch.is_tensor(leaf) else copy.deepcopy(leaf) for leaf in leaves]
            snapshot.states[name] = plain, spec
        on_gpu = next((t.device for t in live.values() if t.is_cuda), None)
        # The next forward may move these while the copy runs: copies of them on the device are what is copied.
        moving = ("buffer.", "other.")
        staged = {n: t.clone() if n.startswith(moving) and t.is_cuda else t for n, t in live.items()}
        old, snapshot.tensors = snapshot.tensors, {}
        if on_gpu is not None:
            self._stream = self._stream or torch.cuda.Stream(on_gpu)
            self._stream.wait_stream(torch.cuda.current_stream(on_gpu))
        for name, tensor in staged.items():
            host = old.get(name)
            if host is None or host.shape != tensor.shape or host.dtype != tensor.dtype:
                host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            snapshot.tensors[name] = host
            if tensor.is_cuda and self._stream is not None:
                with torch.cuda.stream(self._stream):
                    host.copy_(tensor, non_blocking=True)
                    tensor.record_stream(self._stream)
            else:
                host.copy_(tensor)
        if self._stream is not None:
            self._copied = self._stream.record_event()
        snapshot.plain = self._plain(names)
        snapshot.settings = [settings_of(optimizer) for optimizer in self.optimizers]
        snapshot.rng = collect_rng_state()
        snapshot.label = label
        self.candidate = snapshot

    @property
    def empty(self) -> bool:
        """Whether nothing was captured yet."""
        return self.good is None and self.candidate is None

    def before_optimizer_step(self) -> None:
        """The weights are about to change: on the device, let a copy in progress finish first."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def wait(self) -> None:
        """Wait on the host for a copy in progress."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None

    def promote(self) -> None:
        """A step on the candidate's weights was accepted: it is the good one now."""
        if self.candidate is not None:
            self.good, self.candidate, self._spare = self.candidate, None, self.good or self._spare

    def drop(self) -> None:
        """Let go of all states: there is none to go back to until the next."""
        self.good = self.candidate = None

    def drop_incomplete(self) -> list[str]:
        """Let go of states that lack a parameter the module has by now, or hold it in another shape.

        Returns:
            Names of those that the good state lacked; empty where it is kept.
        """
        lacking = self._lacking(self.good)
        if lacking:
            self.good = None
        if self._lacking(self.candidate):
            self.candidate = None
        return lacking

    def _lacking(self, snapshot: Snapshot | None) -> list[str]:
        if snapshot is None:
            return []
        names, lacking = self._names_in(snapshot), []
        for name, parameter in self._named_parameters():
            if is_lazy(parameter):
                continue
            kept = snapshot.tensors.get(f"parameter.{names.get(id(parameter))}")
            if kept is None or kept.shape != local_values(parameter.detach()).shape:
                lacking.append(name)
        return lacking

    @torch.no_grad()
    def restore(self) -> Any:
        """Put the good state back in place: all of it that the module still has.

        Returns:
            Its label.

        Raises:
            RuntimeError: there is none.
        """
        if self.good is None:
            raise RuntimeError("There is no good state to go back to: capture one and promote it first.")
        self.wait()
        good, names = self.good, self._names_in(self.good)
        if self.candidate is not None:
            self._spare, self.candidate = self.candidate, None
        changed = []
        for optimizer, settings in zip(self.optimizers, good.settings, strict=True):
            if same_groups(optimizer, settings):
                set_settings(optimizer, settings)
            else:
                changed.append(optimizer)
        for index, optimizer in enumerate(self.optimizers):
            for name, parameter in self._optimizer_parameters(index, optimizer, names):
                # What the state did not hold then was made by steps that are undone.
                state, values = optimizer.state.setdefault(parameter, {}), good.plain.get(name, {})
                for key in [key for key in state if key not in values and f"{name}.{key}" not in good.tensors]:
                    del state[key]
                state.update(copy.deepcopy(values))
                if not state:
                    optimizer.state.pop(parameter, None)
        for name, tensor in self._tensors(names):
            kept = good.tensors.get(name)
            # A buffer of another shape, such as a cache that has grown, is another one.
            if kept is not None and (kept.shape == tensor.shape or not name.startswith("buffer.")):
                tensor.copy_(kept)
        self._put_back_whole(good)
        for name, other in self.others.items():
            if any(getattr(other, "optimizer", None) is optimizer for optimizer in changed):
                continue
            plain, spec = good.states[name]
            leaves = [
                good.tensors[place].clone() if (place := _place(name, index)) in good.tensors else copy.deepcopy(leaf)
                for index, leaf in enumerate(plain)
            ]
            other.load_state_dict(tree_unflatten(leaves, spec))
        restore_rng_state(good.rng)
        return good.label

    def _put_back_whole(self, good: Snapshot) -> None:
        """Buffers that could not be written in place then, or cannot now."""
        for name, buffer in self._buffers():
            kept, before = good.tensors.get(f"buffer.{name}"), good.unwritable.get(name)
            if before is None and kept is not None and not written_in_place(buffer):
                before = kept.to(buffer.device, copy=True)
            if before is not None:
                owner, _, own_name = name.rpartition(".")
                self.module.get_submodule(owner)._buffers[own_name] = before

    def _names_in(self, snapshot: Snapshot) -> dict[int, str]:
        """What a snapshot calls the parameters, by their id; those that it lacks are left out.

        The same object is the same parameter if it stands for the same quantity still. An object that has come since
        is, where it has the name of one that went.
        """
        were = {id(parameter): name for name, parameter in snapshot.parameters.items()}
        now = {id(parameter): name for name, parameter in self._named_parameters()}
        same = {p: were[p] for p, name in now.items() if p in were and _stands_for(were[p], name)}
        taken = {were[p] for p in now if p in were}
        new = {p: name for p, name in now.items() if p not in were and name not in taken}
        gone = {p: name for p, name in were.items() if p not in now}  # An optimizer may have them yet.
        return gone | new | same

    def _named_parameters(self) -> list[tuple[str, Tensor]]:
        """The module's own, though FSDP2 may have gathered them."""
        reshard(self.module)
        return list(self.module.named_parameters())

    def _buffers(self) -> list[tuple[str, Tensor]]:
        return [(name, buffer) for name, buffer in self.module.named_buffers() if not is_lazy(buffer)]

    def _parameters(self) -> dict[str, Tensor]:
        """The module's by name, then those that only optimizers have: weights of losses in a plain list, say."""
        parameters = dict(self._named_parameters())
        inside = set(map(id, parameters.values()))
        for index, optimizer in enumerate(self.optimizers):
            for number, parameter in enumerate(parameters_of(optimizer)):
                if id(parameter) not in inside:
                    parameters[f"outside.{index}.{number}"] = parameter
        return parameters

    def _tensors(self, names: Mapping[int, str]) -> list[tuple[str, Tensor]]:
        """All tensors by name, local ones where they are sharded; lazy ones hold nothing yet.

        Args:
            names: of the parameters, by their id.
        """
        live: dict[str, Tensor] = {}
        for parameter in self._parameters().values():
            if id(parameter) in names and not is_lazy(parameter):
                # The module's come first: an optimizer may hold one yet whose place another has taken.
                live.setdefault(f"parameter.{names[id(parameter)]}", parameter)
        live |= {f"buffer.{name}": buffer for name, buffer in self._buffers() if written_in_place(buffer)}
        found = [(name, local_values(tensor.detach())) for name, tensor in live.items()]
        for index, optimizer in enumerate(self.optimizers):
            for name, parameter in self._optimizer_parameters(index, optimizer, names):
                state = optimizer.state.get(parameter, {})
                found += [
                    (f"{name}.{key}", local_values(value)) for key, value in state.items() if torch.is_tensor(value)
                ]
        return found

    def _plain(self, names: Mapping[int, str]) -> dict[str, dict[str, Any]]:
        """What the optimizers' states hold besides tensors, by parameter; copies."""
        plain: dict[str, dict[str, Any]] = {}
        for index, optimizer in enumerate(self.optimizers):
            for name, parameter in self._optimizer_parameters(index, optimizer, names):
                state = optimizer.state.get(parameter, {})
                values = {key: value for key, value in state.items() if not torch.is_tensor(value)}
                if values:
                    plain[name] = copy.deepcopy(values)
        return plain

    def _optimizer_parameters(
        self, index: int, optimizer: Optimizer, names: Mapping[int, str]
    ) -> list[tuple[str, Tensor]]:
        """The optimizer's parameters by names that last, whatever joins: the module's, where it has them."""
        parameters = enumerate(parameters_of(optimizer))
        return [(f"optimizer.{index}.{names.get(id(p), number)}", p) for number, p in parameters]


def _stands_for(before: str, now: str) -> bool:
    """Whether a parameter still holds what it held, by its qualified names.

    Torch lets the same object hold a weight and what a parametrization makes it of. Pruning keeps the values and masks
    them as they are used, until it is made permanent.
    """
    parametrized = ["parametrizations" in name.split(".") for name in (before, now)]
    unmasked = before.endswith("_orig") and not now.endswith("_orig")
    return parametrized[0] == parametrized[1] and not unmasked


def _place(name: str, index: int) -> str:
    """Where a tensor of another thing's state is kept: its place among the leaves of that state."""
    return f"other.{name}.{index}"


def settings_of(optimizer: Optimizer) -> Settings:
    """Learning rate and the like of each parameter group."""
    return [
        {key: v.detach().clone() if torch.is_tensor(v) else v for key, v in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def same_groups(optimizer: Optimizer, settings: Settings) -> bool:
    """Whether no parameter group has joined or left since ``settings``, nor then any entry of schedules' lists."""
    return len(optimizer.param_groups) == len(settings)


def set_settings(optimizer: Optimizer, settings: Settings) -> None:
    """Put back what :func:`settings_of` gave, to the same groups."""
    for group, saved in zip(optimizer.param_groups, settings, strict=True):
        for key, value in saved.items():
            if torch.is_tensor(group.get(key)):
                group[key].copy_(value)
            else:
                group[key] = value
