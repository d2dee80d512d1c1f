"""Which layers become FP8, and why each other one does not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from lightning_fp8.checks import as_patterns, check_flag, check_function, check_number
from lightning_fp8.recipes import Recipe

#: Wrappers put these parts into qualified names (torch.compile, FSDP1, activation checkpointing, DDP).
_WRAPPER_PARTS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


@dataclass(frozen=True)
class Decision:
    """What becomes of one linear layer.

    Attributes:
        name: its qualified name, without wrappers' parts.
        converted: whether it runs in FP8.
        reason: why it does, or why not, for people to read.
    """

    name: str
    converted: bool
    reason: str


class LayerSelection:
    """Chooses layers by name, place and size. By itself it takes every eligible layer but the final head.

    Eligible is a plain ``nn.Linear`` (no subclass, no parametrization) whose sizes the recipe allows.

    Args:
        include: shell patterns (``"*.mlp.*"``) on qualified names; only layers that match one are taken.
        exclude: shell patterns; layers that match one are left out.
        filter: ``filter(module, qualified_name) -> bool`` as torchao's ``module_filter_fn``; false leaves a layer out.
        keep_first_blocks: how many blocks at the start stay in high precision. Blocks are the children of the largest
            ``ModuleList`` or ``Sequential`` that holds linear layers.
        keep_last_blocks: the same at the end.
        min_size: least number of weights of a layer.
        head: convert the final head too: the linear layer tied to an embedding, else the last one registered.

    Raises:
        ValueError: a number is negative, or ``include`` is empty.
        TypeError: a setting is of another type.
    """

    def __init__(
        self,
        include: list[str] | None = None,
        exclude: list[str] | None = None,
        filter: Callable[[nn.Module, str], bool] | None = None,
        keep_first_blocks: int = 0,
        keep_last_blocks: int = 0,
        min_size: int = 0,
        head: bool = False,
    ) -> None:
        check_number(
            whole=True,
            least=0,
            keep_first_blocks=keep_first_blocks,
            keep_last_blocks=keep_last_blocks,
            min_size=min_size,
        )
        check_flag(head=head)
        check_function("a layer and its name", filter=filter)
        self.include = as_patterns("include", include)
        if include is not None and not self.include:
            raise ValueError(
                "include is empty, so that no layer would be taken: leave it out, to take all, or name some."
            )
        self.exclude = as_patterns("exclude", exclude)
        self.filter = filter
        self.keep_first_blocks = keep_first_blocks
        self.keep_last_blocks = keep_last_blocks
        self.min_size = min_size
        self.head = head

    def __repr__(self) -> str:
        settings = ", ".join(f"{key}={value!r}" for key, value in vars(self).items() if value)
        return f"LayerSelection({settings})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LayerSelection) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(repr(self))

    def decide(self, model: nn.Module, recipe: Recipe) -> list[Decision]:
        """Decide on every linear layer of ``model``.

        Returns:
            One decision for each ``nn.Linear`` (subclasses included) in the order of registration; a layer that has
            several names appears under its first.

        Raises:
            ValueError: a pattern matches no linear layer.
        """
        self.check(model)
        layers = linear_layers(model)
        head = None if self.head else find_head(model, layers)
        high_blocks = self._high_blocks(model, layers)
        return [self._decide_one(name, layer, recipe, head, high_blocks) for name, layer in layers.items()]

    def _decide_one(
        self, name: str, layer: nn.Linear, recipe: Recipe, head: str | None, high_blocks: dict[str, str]
    ) -> Decision:
        against = why_not_eligible(layer, recipe)
        if against is None and self.include and not _matches(name, self.include):
            against = "matches no include pattern"
        if against is None and _matches(name, self.exclude):
            against = "matches an exclude pattern"
        if against is None and self.filter is not None and not self.filter(layer, name):
            against = "left out by the filter"
        if against is None and name == head:
            against = "the final head stays in high precision (head=True converts it)"
        if against is None:
            against = next((why for prefix, why in high_blocks.items() if f"{name}.".startswith(prefix)), None)
        if against is None and not is_lazy(layer.weight) and layer.weight.numel() < self.min_size:
            against = f"smaller than min_size={self.min_size}"
        if against is None and is_lazy(layer.weight):
            return Decision(
                name, True, f"{recipe.label}, once its sizes are known to be multiples of {recipe.size_multiple}"
            )
        return Decision(name, against is None, against or recipe.label)

    def check(self, model: nn.Module) -> None:
        """Look whether the patterns fit ``model``, converted or not.

        Raises:
            ValueError: a pattern matches no linear layer.
        """
        matching(linear_layers(model), (*self.include, *self.exclude))

    def _high_blocks(self, model: nn.Module, layers: dict[str, nn.Linear]) -> dict[str, str]:
        """Name prefixes of the blocks kept in high precision, each with the reason."""
        if not (self.keep_first_blocks or self.keep_last_blocks):
            return {}
        blocks = find_blocks(model, layers)
        if not blocks:
            raise ValueError(
                "keep_first_blocks and keep_last_blocks need blocks, and the model has no blocks: no ModuleList or "
                "Sequential with linear layers. Name the layers to keep with exclude=[...]."
            )
        first = dict.fromkeys(blocks[: self.keep_first_blocks], "first blocks stay in high precision")
        last = blocks[max(0, len(blocks) - self.keep_last_blocks) :]
        return first | dict.fromkeys(last, "last blocks stay in high precision")


def matching(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    """Those of the linear layers ``names`` that match one of the shell patterns.

    Raises:
        ValueError: a pattern matches none of them.
    """
    names, patterns = list(names), list(patterns)
    for pattern in patterns:
        if not any(_matches(name, (pattern,)) for name in names):
            raise ValueError(
                f"The layer pattern {pattern!r} matches no linear layer. Patterns are shell patterns on qualified "
                f"names, such as: {', '.join(names[:3]) or 'none at all'}."
            )
    return [name for name in names if _matches(name, patterns)]


def clean_name(name: str) -> str:
    """A qualified name without the parts that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_PARTS)


def join_names(prefix: str, name: str) -> str:
    """The qualified name of what ``name`` is inside ``prefix``; either may be empty."""
    return ".".join(part for part in (prefix, name) if part)


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Every ``nn.Linear`` of ``model``, each once, by its first qualified name (the root's is ``""``)."""
    return {clean_name(name): m for name, m in model.named_modules() if isinstance(m, nn.Linear)}


def matrix_modules(model: nn.Module) -> list[str]:
    """Names of the classes in ``model`` that might multiply as ``nn.Linear`` does and are none, as some libraries'."""
    tables = (nn.Linear, nn.Embedding, nn.EmbeddingBag)
    weights = {type(m).__name__: m._parameters.get("weight") for m in model.modules() if not isinstance(m, tables)}
    return [
        name for name, weight in weights.items() if weight is not None and not is_lazy(weight) and weight.dim() == 2
    ]


def in_compiled(model: nn.Module) -> set[nn.Module]:
    """The modules that lie in one which ``torch.compile`` compiles, or will at its first call."""
    return {inner for module in model.modules() if _is_compiled(module) for inner in module.modules()}


def _is_compiled(module: nn.Module) -> bool:
    # A LightningModule that is compiled as a whole is given to the Trainer wrapped, and unwrapped there with a mark.
    whole = getattr(module, "_compiler_ctx", None) is not None
    return whole or isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl is not None


def why_not_eligible(layer: nn.Linear, recipe: Recipe) -> str | None:
    """The reason why ``layer`` cannot run in FP8 under ``recipe``, or ``None``."""
    if "fp8" in layer.__dict__:
        return "it already runs in FP8, converted with another module: call revert_model on that one first"
    if type(layer) is nn.LazyLinear:
        return None  # It becomes FP8 when its sizes are known; they are looked at then.
    if parametrize.is_parametrized(layer) or "weight" not in layer._parameters:
        return "its weight is parametrized or pruned"
    if type(layer) is not nn.Linear:
        own = " with a forward of its own" if type(layer).forward is not nn.Linear.forward else ""
        return f"{type(layer).__name__} is a subclass of nn.Linear{own}"
    if "forward" in layer.__dict__:
        return "its forward was replaced on the instance"
    return why_not_weight(layer.weight, recipe)


def why_not_weight(weight: Tensor, recipe: Recipe) -> str | None:
    """The reason why a weight of this dtype and these sizes cannot be cast under ``recipe``, or ``None``."""
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"its weight is {str(weight.dtype).removeprefix('torch.')}"
    multiple = recipe.size_multiple
    if weight.numel() == 0 or any(size % multiple for size in weight.shape):
        out_features, in_features = weight.shape
        return f"its sizes {in_features} -> {out_features} are not multiples of {multiple}"
    return None


@dataclass(frozen=True)
class Looks:
    """What a decision on a layer rests on, apart from the selection.

    Attributes:
        sizes: of the weight; ``None`` where the layer does not show it: lazy, parametrized, sharded.
        against: why the layer cannot run in FP8; of a converted one, why it cannot go on.
    """

    sizes: tuple[int, ...] | None
    against: str | None

    @staticmethod
    def of(layer: nn.Linear, recipe: Recipe) -> Looks:
        """How ``layer`` looks now."""
        weight = layer._parameters.get("weight")
        if isinstance(weight, DTensor) or (weight is not None and not is_lazy(weight) and weight.dim() != 2):
            return Looks(None, None)
        shown = weight is not None and not is_lazy(weight)
        if "fp8" not in vars(layer):
            against = why_not_eligible(layer, recipe)
        else:
            against = why_not_weight(layer.weight, recipe) if shown else None
        return Looks(tuple(layer.weight.shape) if shown else None, against)

    def still(self, now: Looks) -> bool:
        """Whether nothing has changed, as far as ``now`` shows it; a lazy weight that fits is what was hoped for."""
        return now.sizes is None or (now.against == self.against and self.sizes in (None, now.sizes))


def find_head(model: nn.Module, layers: dict[str, nn.Linear]) -> str | None:
    """The linear layer tied to an embedding, else the last one registered, if there are several."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))}
    tied = [name for name, layer in layers.items() if id(layer._parameters.get("weight")) in embeddings]
    if tied:
        return tied[-1]
    return list(layers)[-1] if len(layers) > 1 else None


def find_blocks(model: nn.Module, layers: Iterable[str]) -> list[str]:
    """Name prefixes (ending in a dot) of the blocks of ``model``.

    They are the children of the ``ModuleList`` or ``Sequential`` with the most children that contain linear layers
    (that are none themselves: the layers of an MLP are no blocks); of equals, of the one that holds the most of them.
    """
    names = list(layers)
    best: list[str] = []
    best_count = (0, 0)
    for name, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or len(module) < 2:
            continue
        prefix = f"{clean_name(name)}." if name else ""
        blocks = {f"{prefix}{child}.": 0 for child, _ in module.named_children()}
        containers = set()
        for layer in names:
            block = next((block for block in blocks if f"{layer}.".startswith(block)), None)
            if block is not None:
                blocks[block] += 1
                containers.update({block} - {f"{layer}."})
        count = (len(containers), sum(blocks.values()))
        if count > best_count:
            best, best_count = [block for block, held in blocks.items() if held], count
    return best


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
