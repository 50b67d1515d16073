"""The recipe: all settings of an experiment as one frozen value, changed by path, written and read as JSON.

JSON names the class of a family's member by `kind`: in lower case, or `module:Class` for your own. Of yours, only a
score, which decides, must be imported to read a card; the rest stays as it is stored (`NotImported`).
"""

import dataclasses
import hashlib
import json
import sys
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache
from operator import attrgetter
from typing import Any

from firm.errors import SettingError
from firm.images.alignment import Conditioning
from firm.images.crop import Crop
from firm.images.preprocess import check_shape
from firm.networks.adaptor import Pretrained
from firm.networks.heads import Encoder
from firm.outliers.registry import OUTLIERS, Rotations
from firm.scoring.image_scores import SCORES, SCORINGS, Knn, Scoring
from firm.scoring.memory import Memory
from firm.scoring.patch_features import KINDS, kinds_of
from firm.scoring.patch_grid import TILINGS, Grid, Whole
from firm.training.loop import Training
from firm.training.methods import Contrastive, Method
from firm.types import OutlierSource, Score, Tiling, Views
from firm.views.registry import VIEWS, SimCLR

NORMALISE = ("published", "inliers", "half")
AFTERWARDS = ("features",)  # chosen after the training
AUTOMATIC = ("foreground", "illumination", "align", "neighbourhood", *AFTERWARDS)
NOT_TRAINED = ("score", "tiling", "memory", "features", "automatic")  # settings that need no training

FAMILIES: dict[Any, Mapping[str, Any]] = {OutlierSource: OUTLIERS, Views: VIEWS, Score: SCORES, Tiling: TILINGS}
EXTENSIBLE = (OutlierSource, Views, Score)  # your own class may implement these protocols
NAMED = FAMILIES | {Scoring: SCORINGS}  # settings that may be given by name
MEMBERS = {type(member) for family in FAMILIES.values() for member in family.values()}


@dataclass(frozen=True)
class NotImported:
    """Your own outlier source or views whose module is not there: enough to load and save a detector, not to train."""

    kind: str
    settings: str  # JSON

    per_inlier = 1
    kinds = 2  # enough for any loss: the recipe was checked when it was made

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise _missing("this recipe", self.kind)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """An experiment: everything except the images and the seed."""

    positives: str = "firm"
    outliers: OutlierSource = field(default_factory=Rotations)
    views: Views = field(default_factory=SimCLR)
    encoder: Encoder = field(default_factory=Encoder)
    pretrained: Pretrained = field(default_factory=Pretrained)  # with a name it replaces the encoder
    training: Training = field(default_factory=Training)
    score: Scoring = field(default_factory=lambda: Scoring(by=Knn(k=1)))
    size: int = 0  # side of the images that are encoded, whole or in patches; 0: the data set's own
    shape: tuple[int, ...] = ()  # height and width of images in patches, in place of a square of `size`
    crop: Crop = field(default_factory=Crop)  # the part of an image that is read
    zoom: float = 1.125  # enlargement before the centre crop when testing
    normalise: str = "published"  # statistics; falls back to those of the inliers
    conditioning: Conditioning = field(default_factory=Conditioning)
    tiling: Tiling = field(default_factory=Whole)
    memory: Memory = field(default_factory=Memory)  # of patches; whole images are all kept
    features: str = "encoder"  # encoder, projection, pixels, backbone, or of patches several joined by +
    automatic: tuple[str, ...] = ()  # settings tuned on the good images

    def __post_init__(self) -> None:
        _check_members(self)
        assert self.method  # validates the loss
        if self.normalise not in NORMALISE:
            raise SettingError(f"normalise is {self.normalise!r}; use one of {', '.join(NORMALISE)}")
        if unknown := sorted(set(self.automatic) - set(AUTOMATIC)):
            raise SettingError(f"{unknown[0]!r} is not chosen automatically; {', '.join(AUTOMATIC)} can be")
        check_shape(self.shape)
        if self.shape and not self.patchwise:
            raise SettingError("shape is of images in patches; whole images are squares, so set size")
        kinds = kinds_of(self.features)
        if len(kinds) > 1 and not self.memory.standardise:
            raise SettingError(f"features={self.features} adds scores of different scales; set memory.standardise=true")
        if len(kinds) > 1 and self.pretrained.name and not self.patchwise:
            raise SettingError(f"features={self.features} are of patches; whole images have one of {', '.join(KINDS)}")
        if "backbone" in kinds and not self.pretrained.name:
            raise SettingError("features=backbone needs a pretrained one; set pretrained.name or use --encoder")
        if self.positives == "rot-supcon" and self.outliers.kinds < 2:
            raise SettingError("rot-supcon needs several kinds of outliers; this source makes one, use supcon or firm")

    @property
    def patchwise(self) -> bool:
        """Whether patches are compared instead of whole images."""
        return self.tiling.patchwise

    @property
    def grid(self) -> Grid:
        """The grid of patches; raises for whole images."""
        if not isinstance(self.tiling, Grid):
            raise SettingError("this recipe compares whole images; set tiling=grid to compare patches")
        return self.tiling

    @property
    def method(self) -> Method[Any]:
        """The training loss; override it in a dataclass of your own, derived from this one, to train by another."""
        return Contrastive(self.positives, self.training.temperature, self.training.layout)


def parse_settings(settings: Sequence[str]) -> dict[str, Any]:
    """`path=value` as typed on a command line; the value is JSON where it parses as such, else text."""
    changes: dict[str, Any] = {}
    for setting in settings:
        path, equals, text = setting.partition("=")
        if not equals or not path:
            raise SettingError(f"{setting!r} is not of the form path=value, for example training.epochs=20")
        try:
            changes[path] = json.loads(text)
        except ValueError:
            changes[path] = text
    return changes


def change(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """A copy with values replaced by path: `{"training.batch": 16, "outliers": "cutpaste"}`."""
    return _changed(recipe, {tuple(path.split(".")): value for path, value in changes.items()}, "")


def to_json(value: Any, *, defaults: bool = True) -> Any:
    """Settings as plain JSON values; a member of a family carries its kind."""
    if isinstance(value, NotImported):
        return {"kind": value.kind, **json.loads(value.settings)}
    if not is_dataclass(value) or isinstance(value, type):
        return list(value) if isinstance(value, tuple) else value
    kind = _kind(type(value))
    content = {"kind": kind} if kind else {}
    defaults = defaults or ":" in (kind or "")  # those of your own class may be unknown to a reader
    for setting in fields(value):
        default = setting.default if setting.default_factory is MISSING else setting.default_factory()
        if (current := getattr(value, setting.name)) != default or defaults:
            content[setting.name] = to_json(current, defaults=defaults)
    return content


def sparse(value: Any) -> Any:
    """Like `to_json` without defaults, so a setting added later changes nothing."""
    return to_json(value, defaults=False)


def from_json(data: Mapping[str, Any]) -> Recipe:
    """Read the recipe of a card; names an unknown or invalid entry."""
    training = {name: _stored(data[name]) for name in ("outliers", "views") if name in data}
    own = data.get("kind")
    return _read(_imported(str(own), "recipe") if own else Recipe, {**data, **training}, "recipe")


def _stored(value: Any) -> Any:
    """What only a training needs, as it is stored if it is your own and its module is not imported."""
    if not isinstance(value, Mapping) or ":" not in (kind := str(value.get("kind"))) or _own_class(kind):
        return value
    return NotImported(kind, json.dumps({name: each for name, each in value.items() if name != "kind"}))


def digest(recipe: Recipe, **further: Any) -> str:
    """A digest of a training: the sparse recipe without settings that need no training, and `further`."""
    content = {k: v for k, v in sparse(recipe).items() if k not in NOT_TRAINED}
    text = json.dumps(content | further | {"format": 1}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _changed(owner: Any, changes: Mapping[tuple[str, ...], Any], prefix: str) -> Any:
    """Apply all changes below one owner at once, so that settings are validated together."""
    types = _types(owner.__class__) if is_dataclass(owner) else {}
    fresh = {}
    for name in dict.fromkeys(path[0] for path in changes):
        path = f"{prefix}{name}"
        if name not in types:
            has = f"{type(owner).__name__} has {', '.join(types)}" if types else f"{prefix[:-1]} has no settings"
            raise SettingError(f"no setting {path!r}; {has}")
        value = _typed(types[name], changes[name,], path) if (name,) in changes else getattr(owner, name)
        deeper = {rest[1:]: new for rest, new in changes.items() if rest[0] == name and len(rest) > 1}
        fresh[name] = _changed(value, deeper, f"{path}.") if deeper else value
    return dataclasses.replace(owner, **fresh)


def _read(cls: type, data: Mapping[str, Any], path: str) -> Any:
    """Build a settings class from JSON."""
    types = _types(cls)
    content = {name: value for name, value in data.items() if name != "kind" or value != _kind(cls)}
    if unknown := sorted(set(content) - set(types)):
        raise SettingError(f"{path} has an unknown setting {unknown[0]!r}; it has {', '.join(types)}")
    return cls(**{name: _typed(types[name], value, f"{path}.{name}") for name, value in content.items()})


def _typed(wanted: Any, value: Any, path: str) -> Any:
    """Convert a value to the field's type, or raise."""
    origin = typing.get_origin(wanted) or wanted
    if wanted in NAMED and isinstance(value, str):
        return _by_name(NAMED[wanted], value, path)
    if wanted in FAMILIES:
        return _member(wanted, value, path)
    if is_dataclass(wanted) and isinstance(value, Mapping):
        return _read(typing.cast(type, wanted), value, path)
    if origin is tuple and isinstance(value, list | tuple):
        types = typing.get_args(wanted)
        types = types[:1] * len(value) if types[-1] is Ellipsis else types
        if len(types) != len(value):
            raise SettingError(f"{path} is {list(value)}; it must hold {len(types)} values")
        return tuple(_typed(kind, item, path) for kind, item in zip(types, value, strict=True))
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, origin) or (isinstance(value, bool) and wanted is not bool):
        raise SettingError(f"{path} is {value!r}; it must be of type {getattr(wanted, '__name__', wanted)}")
    return value


def _member(family: Any, value: Any, path: str) -> Any:
    """A member of a family: itself, or the JSON that names its kind."""
    built_in = {_kind(type(member)): type(member) for member in FAMILIES[family].values()}
    if isinstance(value, Mapping) and "kind" in value:
        kind = str(value["kind"])
        own = ":" in kind and family in EXTENSIBLE
        value = _read(_imported(kind, path) if own else _by_name(built_in, kind, f"{path}.kind"), value, path)
    if type(value) in built_in.values():
        return value
    if family not in EXTENSIBLE or type(value) in MEMBERS or not isinstance(value, family):
        raise SettingError(f"{path} is {value!r}; use one of {', '.join(FAMILIES[family])}")
    if not is_dataclass(value):
        raise SettingError(f"{path} is a {type(value).__name__}; make it a dataclass, so that it can be saved")
    try:
        json.dumps(to_json(value))
    except (TypeError, ValueError) as error:
        raise SettingError(f"{path} cannot be saved ({error}); give {type(value).__name__} plain settings") from error
    return value


def _check_members(owner: Any, prefix: str = "") -> None:
    """Check the members of families, also of settings made in Python."""
    for name, wanted in _types(owner.__class__).items():
        value = getattr(owner, name)
        if wanted in FAMILIES:
            _member(wanted, value, f"{prefix}{name}")
        elif is_dataclass(value):
            _check_members(value, f"{prefix}{name}.")


def _kind(cls: type) -> str | None:
    """The `kind` of a class in JSON; None if the field determines it."""
    if cls in MEMBERS:
        return cls.__name__.lower()
    return None if cls.__module__.split(".")[0] == "firm" else f"{cls.__module__}:{cls.__qualname__}"


def _by_name(table: Mapping[Any, Any], name: str, path: str) -> Any:
    if name not in table:
        raise SettingError(f"{path} is {name!r}; use one of {', '.join(table)}")
    return table[name]


def _imported(kind: str, path: str) -> type:
    if (own := _own_class(kind)) is None:
        raise _missing(path, kind)
    return own


def _own_class(kind: str) -> type | None:
    """The user's own class, from the imported modules only: a file must not run code."""
    module, _, name = kind.partition(":")
    try:
        own = attrgetter(name)(sys.modules[module])
    except (KeyError, AttributeError):
        return None
    return own if isinstance(own, type) and is_dataclass(own) else None


def _missing(path: str, kind: str) -> SettingError:
    module, _, name = kind.partition(":")
    how = f"import {module} first, with {name} as a dataclass at its top level"
    return SettingError(f"{path} needs your class {name} of module {module}; {how}")


@cache
def _types(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {setting.name: hints[setting.name] for setting in fields(cls)}
