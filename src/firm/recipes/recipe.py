"""Settings live in one value: a frozen Recipe, changed by path, written and read as JSON."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any

from firm.adaptor import Pretrained
from firm.bank import Memory
from firm.conditioning import Conditioning
from firm.encoder import Encoder
from firm.localiser import kinds_of
from firm.objective import POSITIVES
from firm.outliers import OUTLIERS, Rotations
from firm.scores import SCORES, SCORINGS, Knn, Scoring
from firm.tiling import TILINGS, Whole
from firm.training import Training
from firm.types import FirmError, OutlierSource, Score, Tiling, Views
from firm.views import VIEWS, Augment

NORMALISE = ("published", "inliers", "half")
AFTERWARDS = ("features",)  # what is chosen when the training is over
AUTOMATIC = ("foreground", "light", "align", "reach", *AFTERWARDS)
NOT_TRAINED = ("score", "tiling", "memory", "features", "automatic")  # settings that cost no training


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """An experiment as a value: everything but the images and the seed."""

    positives: str = "firm"
    outliers: OutlierSource = field(default_factory=Rotations)
    views: Views = field(default_factory=Augment)
    encoder: Encoder = field(default_factory=Encoder)
    pretrained: Pretrained = field(default_factory=Pretrained)  # with a name it takes the place of the encoder
    training: Training = field(default_factory=Training)
    score: Scoring = field(default_factory=lambda: Scoring(by=Knn(k=1)))
    size: int = 0  # side of the image the encoder sees, whole or in patches; 0 is the data set's own
    zoom: float = 1.125  # enlargement before the centre crop when testing
    normalise: str = "published"  # statistics; where none are published, those of the inliers
    conditioning: Conditioning = field(default_factory=Conditioning)
    tiling: Tiling = field(default_factory=Whole)
    memory: Memory = field(default_factory=Memory)  # of patches; whole images are all remembered
    features: str = "encoder"  # of patches: encoder, projection, pixels, backbone, or several joined by +
    automatic: tuple[str, ...] = ()  # what is chosen on the good images

    def __post_init__(self) -> None:
        if self.positives not in POSITIVES:
            raise FirmError(f"no positive set {self.positives!r}; use one of {', '.join(POSITIVES)}")
        if self.normalise not in NORMALISE:
            raise FirmError(f"normalise is {self.normalise!r}; use one of {', '.join(NORMALISE)}")
        unknown = set(self.automatic) - set(AUTOMATIC)
        if unknown:
            raise FirmError(f"{sorted(unknown)[0]!r} is not chosen automatically; {', '.join(AUTOMATIC)} can be")
        self._check_features()
        if self.positives == "rot-supcon" and self.outliers.kinds < 2:
            raise FirmError("rot-supcon needs several kinds of outliers and this source makes one; use supcon or firm")

    def _check_features(self) -> None:
        kinds = kinds_of(self.features)
        if len(kinds) > 1 and not self.memory.standardise:
            raise FirmError(f"features={self.features} adds scores of different scales; set memory.standardise=true")
        if "backbone" in kinds and not self.pretrained.name:
            raise FirmError("features=backbone needs a pretrained one; set pretrained.name or use --encoder")


# where a field holds one of a family: the names a person may write, each a value of the family
NAMED: dict[type, Mapping[str, Any]] = {
    OutlierSource: OUTLIERS,
    Views: VIEWS,
    Score: SCORES,
    Tiling: TILINGS,
    Scoring: SCORINGS,
}
FAMILIES = (OutlierSource, Views, Score, Tiling)  # fields that hold any member; JSON names its kind


def change(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """A copy with values replaced by path: `{"training.batch": 16, "outliers": "cutpaste"}`."""
    return _changed(recipe, {tuple(path.split(".")): value for path, value in changes.items()}, "")


def parse_settings(settings: list[str]) -> dict[str, Any]:
    """`path=value` as typed on a command line; the value is JSON where it parses as such, else text."""
    changes: dict[str, Any] = {}
    for setting in settings:
        path, equals, text = setting.partition("=")
        if not equals or not path:
            raise FirmError(f"{setting!r} is not of the form path=value, for example training.epochs=20")
        try:
            changes[path] = json.loads(text)
        except ValueError:
            changes[path] = text
    return changes


def to_json(value: Any) -> Any:
    """Settings as plain JSON values; a member of a family carries its kind."""
    if is_dataclass(value) and not isinstance(value, type):
        kind = {"kind": _kind(type(value))} if type(value) in _members() else {}
        return kind | {f.name: to_json(getattr(value, f.name)) for f in fields(value)}
    return list(value) if isinstance(value, tuple) else value


def from_json(data: Mapping[str, Any]) -> Recipe:
    """The recipe a card holds; an unknown or ill-typed entry is named."""
    return _read(Recipe, data, "recipe")


def digest(recipe: Recipe, **further: Any) -> str:
    """Names a training: the recipe less what costs no training, and what else decides it.

    Settings at their defaults are left out, so a setting added later does not rename the trainings before it.
    """
    content = {k: v for k, v in sparse(recipe).items() if k not in NOT_TRAINED}
    text = json.dumps(content | further | {"format": 1}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def sparse(value: Any) -> Any:
    """As `to_json`, without the fields that have their default: what a setting added later leaves as it was."""
    if not is_dataclass(value) or isinstance(value, type):
        return to_json(value)
    kind = {"kind": _kind(type(value))} if type(value) in _members() else {}
    given = [f.name for f in fields(value) if getattr(value, f.name) != _default(f)]
    return kind | {name: sparse(getattr(value, name)) for name in given}


def _default(one: dataclasses.Field[Any]) -> Any:
    return one.default_factory() if one.default_factory is not dataclasses.MISSING else one.default


def _changed(owner: Any, changes: Mapping[tuple[str, ...], Any], prefix: str) -> Any:
    """All changes below one owner at once: what must fit together is judged together, in no order."""
    hints = {f.name: _hints(owner.__class__)[f.name] for f in fields(owner)} if is_dataclass(owner) else {}
    fresh = {}
    for name in dict.fromkeys(path[0] for path in changes):
        path = f"{prefix}{name}"
        if name not in hints:
            has = f"{type(owner).__name__} has {', '.join(hints)}" if hints else f"{prefix[:-1]} has no settings"
            raise FirmError(f"no setting {path!r}; {has}")
        value = getattr(owner, name)
        if (name,) in changes:
            value = _typed(hints[name], changes[name,], path)
        deeper = {rest[1:]: new for rest, new in changes.items() if rest[0] == name and len(rest) > 1}
        fresh[name] = _changed(value, deeper, f"{path}.") if deeper else value
    return dataclasses.replace(owner, **fresh)


def _typed(hint: Any, value: Any, path: str) -> Any:
    """The value as the field's type wants it, or a sentence saying what it wants."""
    if hint in NAMED and isinstance(value, str):
        return _named(NAMED[hint], value, path)
    if hint in FAMILIES:
        return _member(hint, value, path)
    if isinstance(hint, type) and is_dataclass(hint) and isinstance(value, Mapping):
        return _read(hint, value, path)
    if typing.get_origin(hint) is tuple and isinstance(value, list | tuple):
        return _tuple(typing.get_args(hint), value, path)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    wanted = typing.get_origin(hint) or hint
    if not isinstance(value, wanted) or (isinstance(value, bool) and hint is not bool):
        raise FirmError(f"{path} is {value!r}; it must be of type {getattr(hint, '__name__', hint)}")
    return value


def _named(table: Mapping[str, Any], name: str, path: str) -> Any:
    if name not in table:
        raise FirmError(f"{path} is {name!r}; use one of {', '.join(table)}")
    return table[name]


def _member(family: type, value: Any, path: str) -> Any:
    """A member of a family: itself, or the JSON that names its kind."""
    kinds = {_kind(type(member)): type(member) for member in NAMED[family].values()}
    if isinstance(value, Mapping) and "kind" in value:
        kind = _named(kinds, str(value["kind"]), f"{path}.kind")
        return _read(kind, {k: v for k, v in value.items() if k != "kind"}, path)
    if type(value) not in kinds.values():
        raise FirmError(f"{path} is {value!r}; use one of {', '.join(NAMED[family])}")
    return value


def _tuple(arguments: tuple[Any, ...], value: list[Any] | tuple[Any, ...], path: str) -> tuple[Any, ...]:
    if arguments[-1] is Ellipsis:
        arguments = (arguments[0],) * len(value)
    if len(arguments) != len(value):
        raise FirmError(f"{path} is {list(value)}; it must hold {len(arguments)} values")
    return tuple(_typed(hint, item, path) for hint, item in zip(arguments, value, strict=True))


def _read(kind: type, data: Mapping[str, Any], path: str) -> Any:
    hints = _hints(kind)
    unknown = set(data) - {f.name for f in fields(kind)}
    if unknown:
        raise FirmError(f"{path} has an unknown setting {sorted(unknown)[0]!r}; it has {', '.join(hints)}")
    return kind(**{name: _typed(hints[name], value, f"{path}.{name}") for name, value in data.items()})


@cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


@cache
def _members() -> frozenset[type]:
    """Every class that stands in a family's field."""
    return frozenset(type(value) for family in FAMILIES for value in NAMED[family].values())


def _kind(member: type) -> str:
    return member.__name__.lower()
