"""A detector on disk: card.json (settings, origin, digest), weights-<digest>.safetensors and calibration.json.

The card is written atomically after the weights it names, so a folder always holds one complete detector.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from firm.data.folder import refuse_others
from firm.detector.remember import Examples, Fitted
from firm.errors import ModelFileError, SettingError, named
from firm.images.decode import SUFFIXES
from firm.images.preprocess import Preprocessing
from firm.networks.adaptor import Adapted, Adaptor, image_network
from firm.networks.heads import Network, arranged
from firm.networks.weights import rebuild
from firm.recipes.recipe import Recipe, from_json
from firm.runtime.files import UNREADABLE, Card, check_card, check_writable, digest, read_file, write_atomically
from firm.scoring.models import ImageModel, PatchModel, PatchScorer, under
from firm.scoring.patch_features import extractor_of

KIND, SCHEMA = "detector", 3
CARD = "card.json"
WEIGHTS = re.compile(r"weights-[0-9a-f]{16}\.safetensors")
UNFINISHED = re.compile(rf"({WEIGHTS.pattern})|\.({WEIGHTS.pattern}|card\.json)\..+")  # left by an interrupted write
COPY = "copy it again from its source"


def check_target(path: Path, data: str | None = None) -> None:
    """Refuse a target that cannot be written, is neither free nor a detector, or is the detector of other data."""
    if path.is_file():
        raise SettingError(f"{named(path)} is a file; choose another folder for the detector, or remove it")
    foreign = path.is_dir() and any(not UNFINISHED.fullmatch(file.name) for file in path.iterdir())
    if not path.name or (foreign and not (path / CARD).is_file()):
        raise SettingError(f"{named(path)} is not a detector folder; name a new one, such as {path / 'part.firm'}")
    check_writable(path)
    learnt = None if data is None else _learnt_from(path)
    if data is not None and learnt and learnt != data and Path(learnt).resolve() != Path(data).resolve():
        fix = "name another --out, or replace it with --force"
        raise SettingError(f"{named(path)} is a detector of {named(learnt)}, not of {named(data)}; {fix}")


def _learnt_from(path: Path) -> str | None:
    """The name of the data in a detector's card; None if it cannot be read."""
    try:
        return str(json.loads((path / CARD).read_bytes())["origin"]["data"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def write_model(path: Path, tensors: dict[str, Tensor], card: Card) -> None:
    """Write the weights, then the card that names them, then remove the replaced files."""
    check_target(path)
    tensors = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    name = f"weights-{digest(tensors, '')[:16]}.safetensors"
    written: Card = {**card, "kind": KIND, "schema": SCHEMA, "weights": name}
    written["digest"] = digest(tensors, _text(written))
    write_atomically(path / name, save(tensors))
    write_atomically(path / CARD, (json.dumps(written, indent=2) + "\n").encode())
    for file in path.iterdir():
        if UNFINISHED.fullmatch(file.name) and file.name != name:
            file.unlink()


def read_model(path: Path) -> tuple[dict[str, Tensor], Card]:
    """Tensors and card; refuses a newer, foreign, damaged, edited or incomplete detector."""
    if path.suffix.lower() in SUFFIXES and not path.is_dir():
        raise ModelFileError(f"{named(path)} is an image, not a detector; give the folder that firm fit wrote first")
    if not (path / CARD).is_file():
        refuse_others(path)
        raise ModelFileError(f"there is no detector {named(path)}; give the folder that firm fit wrote")
    text = _read(path / CARD).decode(errors="replace")
    card = check_card(path / CARD, text, KIND, SCHEMA)
    if not WEIGHTS.fullmatch(str(card.get("weights"))):
        raise ModelFileError(f"{named(path / CARD)} names no weights; {COPY}")
    file = path / card["weights"]
    try:
        tensors = load(_read(file))
    except UNREADABLE as error:
        raise ModelFileError(f"{named(file)} is not a readable file of weights ({error}); {COPY}") from error
    if card.pop("digest", None) != digest(tensors, _text(card)):
        raise ModelFileError(f"{named(path)} was damaged or edited after it was written; {COPY}")
    return tensors, card


def read_fitted(path: Path, device: torch.device | str = "cpu") -> Fitted:
    """Read a detector without its calibration; needs nothing but the folder."""
    tensors, card = read_model(path)
    try:
        recipe, origin = from_json(card["recipe"]), card["origin"]
        model = _model(recipe, origin, Preprocessing.from_card(card["preprocessing"]), under("model.", tensors))
        return Fitted(recipe, model.to(device), origin, tensors["thumbnails"], Examples(**under("examples.", tensors)))
    except (KeyError, TypeError, RuntimeError) as error:
        raise ModelFileError(f"{path} is not a complete detector ({error}); fit and save it again") from error


def _model(
    recipe: Recipe, origin: dict[str, Any], preprocessing: Preprocessing, tensors: dict[str, Tensor]
) -> ImageModel | PatchModel:
    network = _network(recipe, origin, under("network.", tensors))
    if not recipe.patchwise:
        references = [tensors[f"references_{turn}"] for turn in range(recipe.score.turns)]
        whole = image_network(network, recipe.pretrained, recipe.features)
        return ImageModel(whole, preprocessing, recipe.conditioning, recipe.score, references)
    extractor = extractor_of(
        network, preprocessing, recipe.grid, recipe.features, recipe.pretrained, grey=origin["grey"]
    )
    scorer = PatchScorer.from_tensors(under("scorer.", tensors), recipe.grid, recipe.memory, extractor.kinds)
    masks = {"ignored": tensors.get("ignore_mask"), "typical": tensors.get("typical")}
    return PatchModel(extractor, preprocessing, recipe.conditioning, scorer, **masks)


def _network(recipe: Recipe, origin: dict[str, Any], tensors: dict[str, Tensor]) -> Network | Adapted:
    """Rebuild the network; a pretrained backbone is stored in the folder, so nothing needs to be installed."""
    if not recipe.pretrained.name:
        network = Network(recipe.encoder)
        network.load_state_dict(tensors)
        return arranged(network)
    backbone = rebuild(origin["backbone"], under("backbone.", tensors))
    parts = under("adaptor.", tensors)
    adaptor = Adaptor(len(parts["mean"]), recipe.pretrained, recipe.encoder.head)
    adaptor.load_state_dict(parts)
    return Adapted(backbone, adaptor)


def _read(file: Path) -> bytes:
    try:
        return read_file(file)
    except OSError as error:
        raise ModelFileError(f"{named(file)} cannot be read ({error.strerror}); {COPY}") from error


def _text(card: Card) -> str:
    return json.dumps(card, sort_keys=True)
