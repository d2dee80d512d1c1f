"""Recipes: what is cast to what, with which scale, for each of the three GEMMs of a linear layer.

A linear layer multiplies three times (``x`` is the input ``[tokens, in]``, ``w`` the weight ``[out, in]``, ``g`` the
gradient of the output ``[tokens, out]``)::

    output      = x   @ w^T        contracts over in
    grad_input  = g   @ w          contracts over out
    grad_weight = g^T @ x          contracts over tokens

Every operand enters two of them: once *straight* (contracted over its last dimension) and once *transposed*
(contracted over its first)::

    role         straight in    transposed in
    input        output         grad_weight
    weight       output         grad_input
    grad_output  grad_input     grad_weight

A recipe is plain data: one :class:`~.casts.Cast` for each of these six uses, and where their scales come from.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from lightning_fp8.casts import Cast, Granularity, OperandCasts
from lightning_fp8.checks import check_flag, check_number, check_text
from lightning_fp8.formats import E4M3, E5M2, MAX_SCALE, MIN_SCALE, Format, get_format

Role = Literal["input", "weight", "grad_output"]
Gemm = Literal["output", "grad_input", "grad_weight"]
ScaleSource = Literal["history", "constant", "data"]

ROLES: tuple[Role, ...] = ("input", "weight", "grad_output")
#: The (straight, transposed) GEMM of each role.
GEMMS_OF: dict[Role, tuple[Gemm, Gemm]] = {
    "input": ("output", "grad_weight"),
    "weight": ("output", "grad_input"),
    "grad_output": ("grad_input", "grad_weight"),
}
#: The two operands of each GEMM, in the order of multiplication.
OPERANDS_OF: dict[Gemm, tuple[Role, Role]] = {
    "output": ("input", "weight"),
    "grad_input": ("grad_output", "weight"),
    "grad_weight": ("grad_output", "input"),
}
#: With a margin above this, even the largest value of an operand would be no normal number of E4M3, the format of at
#: least one operand of every GEMM.
MAX_MARGIN = math.floor(math.log2(E4M3.max / E4M3.smallest_normal))

#: Named choices of formats, by role or by ``"gemm.role"``.
FORMAT_CHOICES: dict[str, dict[str, str]] = {
    "hybrid": {"input": "e4m3", "weight": "e4m3", "grad_output": "e5m2"},
    "e4m3": {"input": "e4m3", "weight": "e4m3", "grad_output": "e4m3"},
    # E4M3 everywhere, and E5M2 for the gradient of the weight-gradient GEMM only.
    "e5m2_grad_weight": {
        "input": "e4m3",
        "weight": "e4m3",
        "grad_output": "e4m3",
        "grad_weight.grad_output": "e5m2",
    },
}


class Recipe:
    """Base of all recipes. Ordinary classes, compared by value, described by their constructor's arguments.

    Attributes:
        name: the word users write in ``FP8Precision(recipe=...)``.
        source: where scales come from: the ``history`` of amaxes, a ``constant``, or the ``data`` at hand.
        casts: the casts of each role.
    """

    name: ClassVar[str]
    source: ClassVar[ScaleSource] = "data"
    casts: dict[Role, OperandCasts]

    def settings(self) -> dict[str, Any]:
        """The constructor's arguments, as plain values."""
        return {name: getattr(self, name) for name in self._setting_names()}

    @classmethod
    def _setting_names(cls) -> list[str]:
        return [p for p in inspect.signature(cls.__init__).parameters if p != "self"]

    def to_dict(self) -> dict[str, Any]:
        """Plain values that :func:`get_recipe` turns into an equal recipe."""
        return {"name": self.name, **self.settings()}

    @property
    def label(self) -> str:
        """The name for people to read: of a preset, where the settings include one's."""
        mine = self.to_dict()
        return next((preset for preset, given in _PRESETS.items() if given.items() <= mine.items()), self.name)

    def gemm_casts(self, gemm: Gemm) -> tuple[Cast, Cast] | None:
        """The casts of both operands of ``gemm``, or ``None`` where it runs in high precision."""
        pair = [self._cast_for(gemm, role) for role in OPERANDS_OF[gemm]]
        return None if pair[0] is None or pair[1] is None else (pair[0], pair[1])

    @property
    def size_multiple(self) -> int:
        """What a layer's in_features and out_features must be multiples of."""
        return max(cast.multiple for role in ROLES for cast in self.casts[role].uses)

    def _cast_for(self, gemm: Gemm, role: Role) -> Cast | None:
        casts = self.casts[role]
        return casts.straight if GEMMS_OF[role][0] == gemm else casts.transposed

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Settings that the build which pickled it did not know get their defaults.
        self.__init__(**{name: state[name] for name in self._setting_names() if name in state})  # type: ignore[misc]

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.settings() == other.settings()  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        # Equal settings may differ in text: 0 and 0.0, or a mapping in another order.
        return hash(type(self))

    def __repr__(self) -> str:
        # What differs from the default: the rest would bury it, in summaries and in error messages.
        defaults = inspect.signature(type(self).__init__).parameters
        told = (f"{name}={value!r}" for name, value in self.settings().items() if value != defaults[name].default)
        return f"{type(self).__name__}({', '.join(told)})"


class DelayedScaling(Recipe):
    """One scale a tensor, known before the data: from the amaxes of the steps before.

    Args:
        amax_history_len: how many steps are looked back on (Transformer Engine's default is 1024).
        amax_compute_algo: ``"max"`` of the history, or its ``"most_recent"`` entry.
        margin: headroom in powers of two, at most 14; fractions are allowed.
        format: ``"hybrid"`` (gradients E5M2), ``"e4m3"``, ``"e5m2_grad_weight"``, or a mapping from roles (or
            ``"gemm.role"``) to formats.
        smoothing: weight of the previous scale in the new one, in [0, 1); 0.5 is half and half.
        max_scale: upper bound of every scale, or ``None``.
        power_of_two: round scales down to powers of two.
        reduce_amax: take the largest amax of all ranks.

    Raises:
        ValueError: a setting is out of its range.
        TypeError: a setting is of another type.
    """

    name = "delayed"
    source = "history"

    def __init__(
        self,
        amax_history_len: int = 1024,
        amax_compute_algo: Literal["max", "most_recent"] = "max",
        margin: float = 0.0,
        format: str | dict[str, str] = "hybrid",
        smoothing: float = 0.0,
        max_scale: float | None = None,
        power_of_two: bool = False,
        reduce_amax: bool = True,
    ) -> None:
        check_number(whole=True, least=1, amax_history_len=amax_history_len)
        check_number(smoothing=smoothing)
        check_flag(reduce_amax=reduce_amax)
        if amax_compute_algo not in ("max", "most_recent"):
            raise ValueError(f"amax_compute_algo must be 'max' or 'most_recent', got {amax_compute_algo!r}.")
        if not 0.0 <= smoothing < 1.0:
            raise ValueError(f"smoothing must lie in [0, 1), got {smoothing}: it is the weight of the previous scale.")
        check_number(none=True, max_scale=max_scale)
        if max_scale is not None and not MIN_SCALE <= max_scale <= MAX_SCALE:
            raise ValueError(f"max_scale must be None or lie between 2**-126 and 2**126, got {max_scale}.")
        self.amax_history_len = int(amax_history_len)
        self.amax_compute_algo = amax_compute_algo
        self.margin = _checked_margin(margin)
        self.format = format
        self.smoothing = smoothing
        # An int may lie beyond the 64 bits that torch takes.
        self.max_scale = float(max_scale) if max_scale is not None else None
        self.power_of_two = power_of_two
        self.reduce_amax = reduce_amax
        self.casts = _uniform_casts(format, "tensorwise", power_of_two, margin, self.max_scale or MAX_SCALE)


class StaticScaling(Recipe):
    """Constant scales, for comparison: what happens to FP8 without scaling.

    Args:
        scale: one scale for all roles, or one a role.
        format: as in :class:`DelayedScaling`.

    Raises:
        ValueError: a scale is not a positive number, or a role is missing or unknown.
        TypeError: a scale is no number.
    """

    name = "static"
    source = "constant"

    def __init__(self, scale: float | dict[str, float] = 1.0, format: str | dict[str, str] = "e4m3") -> None:
        by_role = dict(scale) if isinstance(scale, Mapping) else dict.fromkeys(ROLES, scale)
        if set(by_role) != set(ROLES):
            got = sorted(map(str, by_role))
            raise ValueError(f"StaticScaling needs one scale for each of {', '.join(ROLES)}; got {got}.")
        scales: dict[str, Any] = {f"scale of {role}": value for role, value in by_role.items()}
        check_number(**scales)
        if not all(MIN_SCALE <= value <= MAX_SCALE for value in by_role.values()):
            raise ValueError(f"Static scales must be positive, between 2**-126 and 2**126, got {by_role}.")
        self.scale = scale
        self.format = format
        self.casts = _uniform_casts(format, "tensorwise")

    def scale_of(self, role: Role) -> float:
        """The constant scale of ``role``."""
        return float(self.scale[role] if isinstance(self.scale, Mapping) else self.scale)


class TensorwiseScaling(Recipe):
    """One scale a tensor, from its own amax (also called current or dynamic scaling).

    Args:
        format: as in :class:`DelayedScaling`.
        margin: headroom in powers of two, at most 14.
        power_of_two: round scales down to powers of two (``"tensorwise_pow2"``). Such a scale is mostly what it was in
            the step before: on GPUs values are cast with that while their amax is found, and once more where it was
            wrong, while any other scale takes a pass for the amax first.

    Raises:
        ValueError: a setting is out of its range.
        TypeError: a setting is of another type.
    """

    name = "tensorwise"

    def __init__(
        self, format: str | dict[str, str] = "hybrid", margin: float = 0.0, power_of_two: bool = False
    ) -> None:
        self.format = format
        self.margin = _checked_margin(margin)
        self.power_of_two = power_of_two
        self.casts = _uniform_casts(format, "tensorwise", power_of_two, margin)


class RowwiseScaling(Recipe):
    """One scale for every row of the left operand and every column of the right one, in each GEMM.

    Args:
        format: as in :class:`DelayedScaling`.
        grad_weight_high_precision: compute the weight gradient in the layer's own precision. The weight then takes one
            scale a tensor in the input-gradient GEMM, as torchao's ``rowwise_with_gw_hp`` does.
        power_of_two: round scales down to powers of two, as torchao's rowwise recipes do.
        margin: headroom in powers of two, at most 14.

    Raises:
        ValueError: a setting is out of its range.
        TypeError: a setting is of another type.
    """

    name = "rowwise"

    def __init__(
        self,
        format: str | dict[str, str] = "e4m3",
        grad_weight_high_precision: bool = False,
        power_of_two: bool = True,
        margin: float = 0.0,
    ) -> None:
        check_flag(grad_weight_high_precision=grad_weight_high_precision)
        self.format = format
        self.grad_weight_high_precision = grad_weight_high_precision
        self.power_of_two = power_of_two
        self.margin = _checked_margin(margin)
        casts = _uniform_casts(format, "rowwise", power_of_two, margin)
        if grad_weight_high_precision:
            tensorwise = _uniform_casts(format, "tensorwise", power_of_two, margin)
            casts = {
                "input": OperandCasts(casts["input"].straight, None),
                "weight": OperandCasts(casts["weight"].straight, tensorwise["weight"].transposed),
                "grad_output": OperandCasts(casts["grad_output"].straight, None),
            }
        self.casts = casts


class BlockwiseScaling(Recipe):
    """1x128 blocks for inputs and gradients, 128x128 tiles for weights (DeepSeek-V3, arXiv 2412.19437, section 3.3).

    Args:
        format: as in :class:`DelayedScaling`.
        power_of_two: round scales down to powers of two.
        tiled_inputs: 128x128 tiles for inputs too where they make the weight's gradient (``"blockwise_tiled"``): Hopper
            multiplies blocks by tiles faster than blocks by blocks. What shares a scale there is 128 tokens of 128
            features, instead of one feature.

    Raises:
        ValueError: a setting is out of its range.
        TypeError: a setting is of another type.
    """

    name = "blockwise"

    def __init__(
        self, format: str | dict[str, str] = "e4m3", power_of_two: bool = False, tiled_inputs: bool = False
    ) -> None:
        check_flag(tiled_inputs=tiled_inputs)
        self.format = format
        self.power_of_two = power_of_two
        self.tiled_inputs = tiled_inputs
        casts = _uniform_casts(format, "1x128", power_of_two)
        tiles = _uniform_casts(format, "128x128", power_of_two)
        casts["weight"] = tiles["weight"]
        if tiled_inputs:
            casts["input"] = OperandCasts(casts["input"].straight, tiles["input"].transposed)
        self.casts = casts


class MXFP8Scaling(Recipe):
    """32 neighbours along the contracted dimension share a power-of-two scale (OCP Microscaling 1.0), rounded up.

    Args:
        format: as in :class:`DelayedScaling`.
    """

    name = "mxfp8"

    def __init__(self, format: str | dict[str, str] = "e4m3") -> None:
        self.format = format
        self.casts = _uniform_casts(format, "1x32")


_CLASSES: dict[str, type[Recipe]] = {
    cls.name: cls
    for cls in (DelayedScaling, TensorwiseScaling, RowwiseScaling, BlockwiseScaling, MXFP8Scaling, StaticScaling)
}
#: Names that stand for a class with settings.
_PRESETS: dict[str, dict[str, Any]] = {
    "tensorwise_pow2": {"name": "tensorwise", "power_of_two": True},
    "blockwise_tiled": {"name": "blockwise", "tiled_inputs": True},
    "rowwise_gw_hp": {"name": "rowwise", "grad_weight_high_precision": True},
}
RECIPE_NAMES: tuple[str, ...] = (*_CLASSES, *_PRESETS)


def get_recipe(recipe: Recipe | Mapping[str, Any] | str) -> Recipe:
    """A recipe from its name, from a mapping with its ``name`` and settings, or itself.

    Raises:
        ValueError: the name or a setting is unknown.
        TypeError: ``recipe`` is of another type.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, str):
        recipe = {"name": recipe}
    if not isinstance(recipe, Mapping):
        got = f"the class itself: write {recipe.__name__}()" if isinstance(recipe, type) else type(recipe).__name__
        raise TypeError(f"A recipe is a name, a mapping or a Recipe object, got {got}.")
    if "class_path" in recipe:
        # How a command line leaves a class whose settings it could not match: the error below then names the setting.
        by_class = {cls.__name__: name for name, cls in _CLASSES.items()}
        class_name = str(recipe["class_path"]).rpartition(".")[2]
        recipe = {"name": by_class.get(class_name, class_name), **(recipe.get("init_args") or {})}
    settings = dict(recipe)
    if "name" not in settings:
        _check_values(settings)
        raise ValueError(f"A recipe's mapping needs a 'name', got {settings}: choose one of {', '.join(RECIPE_NAMES)}.")
    name = settings.pop("name")
    check_text(name=name)
    settings = {**_PRESETS.get(name, {"name": name}), **settings}
    name = settings.pop("name")
    if name not in _CLASSES:
        raise ValueError(f"Unknown FP8 recipe {name!r}: choose one of {', '.join(RECIPE_NAMES)}.")
    known = _CLASSES[name]._setting_names()
    unknown = sorted(map(str, set(settings) - set(known)))
    if unknown:
        choices = ", ".join(known)
        raise ValueError(f"Recipe {name!r} has no setting {', '.join(unknown)}: choose among {choices}.")
    return _CLASSES[name](**settings)


def _check_values(settings: Mapping[str, Any]) -> None:
    """Raise what is wrong with settings of an unnamed recipe.

    jsonargparse (seen with 4.53) drops the name of a class whose settings it could not match, and leaves the settings.
    """
    for cls in _CLASSES.values():
        if settings.keys() <= set(cls._setting_names()):
            cls(**settings)


def _uniform_casts(
    format: str | dict[str, str],
    granularity: Granularity,
    power_of_two: bool = False,
    margin: float = 0.0,
    max_scale: float = MAX_SCALE,
) -> dict[Role, OperandCasts]:
    """The same granularity for all operands, in the formats asked for."""
    check_flag(power_of_two=power_of_two)
    formats = _resolve_formats(format)

    def cast(gemm: Gemm, role: Role) -> Cast:
        return Cast(formats[gemm, role], granularity, power_of_two, margin, max_scale)

    return {role: OperandCasts(*(cast(gemm, role) for gemm in GEMMS_OF[role])) for role in ROLES}


def _resolve_formats(choice: str | Mapping[str, str]) -> dict[tuple[Gemm, Role], Format]:
    """The format of each operand of each GEMM."""
    if not isinstance(choice, Mapping):
        if not isinstance(choice, str) or choice not in FORMAT_CHOICES:
            known = ", ".join(repr(name) for name in FORMAT_CHOICES)
            raise ValueError(f"Unknown format {choice!r}: choose {known}, or give a mapping from roles to formats.")
        choice = FORMAT_CHOICES[choice]
    uses = [(gemm, role) for gemm, roles in OPERANDS_OF.items() for role in roles]
    known_keys = {*ROLES, *(f"{gemm}.{role}" for gemm, role in uses)}
    unknown = sorted(map(str, set(choice) - known_keys))
    if unknown:
        raise ValueError(
            f"Unknown operand {', '.join(unknown)} in format: choose among {', '.join(sorted(known_keys))}."
        )
    named = {**FORMAT_CHOICES["e4m3"], **choice}
    formats = {(gemm, role): get_format(named.get(f"{gemm}.{role}", named[role])) for gemm, role in uses}
    for gemm, (left, right) in OPERANDS_OF.items():
        if formats[gemm, left] is E5M2 and formats[gemm, right] is E5M2:
            raise ValueError(
                f"The {gemm} GEMM would multiply E5M2 by E5M2, which no tensor core does: give {left} or {right} E4M3."
            )
    return formats


def _checked_margin(margin: float) -> float:
    check_number(margin=margin)
    if not 0 <= margin <= MAX_MARGIN:
        raise ValueError(
            f"margin must be a number of powers of two from 0 to {MAX_MARGIN}, got {margin}: more headroom leaves next "
            "to no FP8 codes for the values."
        )
    return margin
