"""``shard``: FP8 layers, tensor parallelism, checkpointed activations, FSDP2 and FP8 messages, in the right order."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from lightning_fp8.backends import Backend, NativeBackend, TransformerEngineBackend
from lightning_fp8.checks import check_flag, check_number
from lightning_fp8.comm.codec import BlockCodec
from lightning_fp8.comm.fsdp import communicate_fsdp_in_fp8
from lightning_fp8.comm.links import DEFAULT_MIN_NUMEL, NEVER, Wire, check_wire, link_between
from lightning_fp8.compiling import module_arguments
from lightning_fp8.linear import Float8Linear
from lightning_fp8.model import check_conversion, convert_model, default_device
from lightning_fp8.recipes import Recipe
from lightning_fp8.selection import LayerSelection, find_blocks, linear_layers

log = logging.getLogger(__name__)

#: Names of the mesh dimension along which layers are split; the other dimensions are data parallel.
TENSOR_PARALLEL_NAMES = ("tensor_parallel", "tp")


def shard(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    recipe: Recipe | Mapping[str, Any] | str = "delayed",
    backend: Backend | str = "auto",
    layers: LayerSelection | Literal["auto"] = "auto",
    tokens: int | None = None,
    autocast_only: bool = False,
    dtype: torch.dtype | None = None,
    tensor_parallel: Mapping[str, ParallelStyle] | None = None,
    blocks: Sequence[str] | None = None,
    activation_checkpointing: bool = False,
    compile: bool | Mapping[str, Any] = False,
    mp_policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool | int | None = None,
    grad: Wire = "bf16",
    param: Wire = "bf16",
    min_numel: int | None = None,
    block: int = 128,
) -> nn.Module:
    """Convert ``module`` to FP8 and shard it with FSDP2, in place; for use inside ``configure_model``.

    In this order: the layers become FP8; the tensor-parallel styles are applied; each block's activations are
    checkpointed; each block is compiled; each block and then the module is sharded; FP8 collectives are installed. A
    module that is sharded already stays as it is, so that ``configure_model`` may run again.

    Args:
        module: the model, on any device; on the meta device it is to be materialised afterwards (Lightning does).
        mesh: one-dimensional, or with a dimension ``"tensor_parallel"`` (or ``"tp"``) behind the data-parallel one, as
            Lightning's ``self.device_mesh``. Of two data-parallel dimensions the first replicates and the second
            shards (HSDP). It holds all ranks.
        recipe: as in :func:`~lightning_fp8.convert_model`, as are the next four.
        backend: native or torchao.
        layers: which layers become FP8.
        tokens: for ``layers="auto"``.
        autocast_only: FP8 under ``torch.autocast`` only.
        dtype: what parameters and buffers of floating point are made first; by default they stay as they are.
        tensor_parallel: styles by module name, as ``torch.distributed.tensor.parallel.parallelize_module`` takes them;
            for FP8 layers those of :mod:`lightning_fp8.comm.tensor_parallel`.
        blocks: names of the modules to shard one by one, those within others first, whatever their order here; by
            default the children of the largest ``ModuleList`` or ``Sequential`` that holds linear layers.
        activation_checkpointing: keep only each block's input, and compute the block again in backward.
        compile: compile each block, as :func:`lightning_fp8.compile` does; a mapping holds ``nn.Module.compile``'s
            arguments, and ``recompute``.
        mp_policy: FSDP2's mixed precision; by default parameters are gathered in bf16, and gradients reduced in fp32.
        reshard_after_forward: as in ``fully_shard``: free a block's weights after its forward, or, where it is a number
            of ranks that divides those that shard, let so many share them until backward.
        grad: ``"fp8"`` reduces gradients in FP8.
        param: ``"fp8"`` gathers the weights of FP8 layers in FP8.
        min_numel: collectives of fewer values go without FP8; by default what the link between the ranks makes worth.
        block: values that share a scale on the wire.

    Returns:
        ``module`` itself.

    Raises:
        TypeError: a setting is of another type.
        ValueError: a setting, the mesh or a name does not fit, blocks share a parameter, or a part of the module is
            sharded already. Nothing is changed then. (What a tensor-parallel style refuses is seen as it is applied.)
    """
    if isinstance(module, FSDPModule):
        return module
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(
            f"shard needs the DeviceMesh of all ranks, got {mesh!r}: self.device_mesh under ModelParallelStrategy, or "
            "torch.distributed.device_mesh.init_device_mesh."
        )
    check_wire(grad=grad, param=param)
    check_flag(activation_checkpointing=activation_checkpointing)
    check_number(whole=True, none=True, least=0, min_numel=min_numel)
    compiler = _compiler_arguments(compile)
    data_mesh, tensor_mesh = _split_mesh(mesh)
    _check(module, mesh, tensor_mesh, tensor_parallel)
    _check_resharding(reshard_after_forward, data_mesh, tensor_mesh)
    check_backend(backend)
    codec = BlockCodec(block=block)
    names = _block_names(module, blocks)
    if data_mesh is not None:
        _refuse_shared_parameters(module, names)
    device = default_device() if mesh.device_type == "cuda" else torch.device("cpu")
    choice = check_conversion(module, recipe, backend, layers, device)
    if param == "fp8" and not isinstance(choice.backend, NativeBackend):
        raise ValueError(
            f"Weights of the {choice.backend.name} backend's layers cannot be gathered in FP8: param='bf16', or "
            "backend='native'."
        )
    if dtype is not None:
        module.to(dtype)
    convert_model(
        module,
        recipe,
        backend=backend,
        layers=layers,
        tokens=tokens,
        autocast_only=autocast_only,
        device=device,
        # Below, for its blocks are parallelized and wrapped first.
        compiled=True if compiler is not None else None,
    )
    if tensor_parallel and tensor_mesh is not None:
        parallelize_module(module, tensor_mesh, dict(tensor_parallel))
    if activation_checkpointing:
        for name in names:
            wrapped = checkpoint_wrapper(module.get_submodule(name), CheckpointImpl.NO_REENTRANT)
            module.set_submodule(name, wrapped)
    if compiler is not None:
        for name in names:
            module.get_submodule(name).compile(**compiler)
    if data_mesh is None:
        return module
    policy = mp_policy or MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    how: dict[str, Any] = {"mesh": data_mesh, "mp_policy": policy, "reshard_after_forward": reshard_after_forward}
    for name in names:
        fully_shard(module.get_submodule(name), **how)
    fully_shard(module, **how)
    for layer in module.modules():
        if isinstance(layer, Float8Linear):
            layer.fp8.follow(layer.weight)
            layer.fp8.shard_weight()
    if "fp8" in (grad, param) and data_mesh.size() > 1:
        if min_numel is None:
            min_numel = DEFAULT_MIN_NUMEL[link_between(None, device)]
        if min_numel >= NEVER:
            log.warning("FP8 communication is off, for on this link it is slower than bf16: min_numel=0 forces it.")
        else:
            communicate_fsdp_in_fp8(module, grad=grad == "fp8", param=param == "fp8", codec=codec, min_numel=min_numel)
    return module


def _split_mesh(mesh: DeviceMesh) -> tuple[DeviceMesh | None, DeviceMesh | None]:
    """The data-parallel and the tensor-parallel part of ``mesh``; beside the other a part of one rank is none.

    Raises:
        ValueError: the dimensions are more, or otherwise named, than they can be.
    """
    names = mesh.mesh_dim_names or ()
    of_tensors = [name for name in names if name in TENSOR_PARALLEL_NAMES]
    of_data = tuple(name for name in names if name not in TENSOR_PARALLEL_NAMES)
    if (mesh.ndim > 1 and not names) or len(of_tensors) > 1 or mesh.ndim - len(of_tensors) > 2:
        raise ValueError(
            f"A mesh has one or two data-parallel dimensions and at most one called {TENSOR_PARALLEL_NAMES[0]!r}; got "
            f"{mesh.ndim} dimensions, {names or 'without names'}: init_device_mesh(..., mesh_dim_names=(...))."
        )
    if not of_tensors:
        return mesh, None
    tensor_mesh = mesh[of_tensors[0]] if mesh.ndim > 1 else mesh
    data_mesh = mesh[of_data] if of_data else None
    # Lightning's mesh has both dimensions always.
    if tensor_mesh.size() == 1:
        # One rank shards with nobody, but its checkpoints are those of sharded models.
        return data_mesh, None
    return data_mesh if data_mesh is not None and data_mesh.size() > 1 else None, tensor_mesh


def _check(
    module: nn.Module,
    mesh: DeviceMesh,
    tensor_mesh: DeviceMesh | None,
    tensor_parallel: Mapping[str, ParallelStyle] | None,
) -> None:
    """Look at module, mesh and styles before anything is changed."""
    sharded = next((name for name, parameter in module.named_parameters() if isinstance(parameter, DTensor)), None)
    if sharded is not None:
        raise ValueError(
            f"{sharded!r} is sharded already: call shard() on the whole module, before fully_shard or "
            "parallelize_module."
        )
    ranks = torch.distributed.get_world_size()
    if mesh.size() != ranks:
        raise ValueError(
            f"The mesh holds {mesh.size()} of {ranks} ranks: all ranks agree on FP8 scales, so it must hold all."
        )
    if tensor_parallel and tensor_mesh is None:
        raise ValueError(
            f"Tensor-parallel styles need a mesh with a dimension {TENSOR_PARALLEL_NAMES[0]!r} of more than one rank; "
            f"got {mesh.mesh_dim_names} of {tuple(mesh.shape)}."
        )
    for pattern in tensor_parallel or ():
        if not any(_fits(name, pattern) for name, _ in module.named_modules(remove_duplicate=False)):
            raise ValueError(
                f"The tensor-parallel style for {pattern!r} fits no module of {type(module).__name__}, which has "
                f"{_names_in_short(module)}: each part of a pattern between dots stands for one part of a name."
            )
    if tensor_mesh is not None and not tensor_parallel:
        # Else these ranks would all train the same whole model, and nobody would know.
        raise ValueError(
            f"{tensor_mesh.size()} ranks of the mesh are tensor-parallel, and no styles say what they share: give "
            "tensor_parallel={...}, or let them share the data: "
            "ModelParallelStrategy(data_parallel_size=..., tensor_parallel_size=1)."
        )


def _check_resharding(
    reshard_after_forward: bool | int | None, data_mesh: DeviceMesh | None, tensor_mesh: DeviceMesh | None
) -> None:
    """Look at what ``fully_shard`` would refuse after the layers are converted.

    Raises:
        TypeError: it is neither true, false, a whole number nor ``None``.
        ValueError: it is a number of ranks that cannot share a block's weights.
    """
    if isinstance(reshard_after_forward, bool):
        return
    check_number(whole=True, none=True, least=1, reshard_after_forward=reshard_after_forward)
    if reshard_after_forward is None or data_mesh is None:
        return
    ranks = data_mesh.shape[-1]
    if ranks % reshard_after_forward or tensor_mesh is not None:
        raise ValueError(
            f"reshard_after_forward={reshard_after_forward} must divide the {ranks} ranks that shard, without tensor "
            "parallelism: give such a number, or true or false."
        )


def _compiler_arguments(compile: bool | Mapping[str, Any]) -> dict[str, Any] | None:
    """``nn.Module.compile``'s arguments; ``None`` where blocks stay as they are.

    Raises:
        ValueError: ``compile`` is neither a bool nor a mapping, or one of its settings is unknown.
    """
    if compile is False:
        return None
    if compile is not True and not isinstance(compile, Mapping):
        raise ValueError(f"compile must be true, false or a mapping of nn.Module.compile's arguments, got {compile!r}.")
    arguments = module_arguments({} if compile is True else compile)
    if unknown := arguments.keys() - inspect.signature(torch.compile).parameters.keys():
        raise ValueError(f"compile holds {', '.join(map(repr, sorted(unknown)))}, which torch.compile does not take.")
    return arguments


def check_backend(backend: Backend | str) -> None:
    """Look whether the layers of ``backend`` can be sharded.

    Raises:
        ValueError: they cannot.
    """
    if isinstance(backend, TransformerEngineBackend) or backend == TransformerEngineBackend.name:
        raise ValueError(
            "Transformer Engine's layers keep references to their weights, which sharding replaces: use "
            "backend='native' or 'torchao'."
        )


def _fits(name: str, pattern: str) -> bool:
    """Whether ``parallelize_module`` takes the module called ``name`` for one that ``pattern`` means."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatch, parts, wanted))


def _names_in_short(module: nn.Module, most: int = 20) -> str:
    """Names of the modules in ``module``, with a star for the numbers that repeat them."""
    names = list(dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name, _ in module.named_modules() if name))
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + more


def _block_names(module: nn.Module, blocks: Sequence[str] | None) -> list[str]:
    """Names of the modules to shard one by one, the inner ones first, as ``fully_shard`` wants it.

    Raises:
        ValueError: ``module`` has no module of that name.
    """
    if blocks is None:
        return [prefix.rstrip(".") for prefix in find_blocks(module, linear_layers(module))]
    known = dict(module.named_modules())
    unknown = [name for name in blocks if name not in known or not name]
    if unknown:
        raise ValueError(f"There are no modules {', '.join(map(repr, unknown))} in {type(module).__name__} to shard.")
    return sorted(dict.fromkeys(blocks), key=lambda name: -name.count("."))


def _refuse_shared_parameters(module: nn.Module, blocks: Sequence[str]) -> None:
    """FSDP2 shards a parameter with one block.

    Raises:
        ValueError: modules in several of ``blocks``, or in one and in none, share a parameter.
    """
    block_of: dict[int, str] = {}
    for block in blocks:
        for part in module.get_submodule(block).modules():
            block_of.setdefault(id(part), block)
    owners: dict[int, dict[str, str]] = {}
    for name, part in module.named_modules():
        for full_name, parameter in part.named_parameters(name, recurse=False):
            owners.setdefault(id(parameter), {})[block_of.get(id(part), "")] = full_name
    for shared in owners.values():
        if len(shared) > 1:
            where = " and ".join(
                f"{name!r} ({f'block {block!r}' if block else 'in no block'})" for block, name in shared.items()
            )
            raise ValueError(
                f"{where} are one parameter, and FSDP2 shards each parameter with one block: give blocks=[...] such "
                "that both lie in the same block or in none, or do not tie them."
            )
