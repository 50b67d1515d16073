"""firm fit: learn from good images and write a detector, or one for each sub-folder."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Exit, Option

from firm.cli import options as opt
from firm.cli.terminal import detail, report_error, reporting, say, sentence, show, use_device, warn
from firm.errors import DataError, FirmError, SettingError, named

if TYPE_CHECKING:
    from firm.detector.detector import Detector
    from firm.detector.read import Good, Options
    from firm.recipes.recipe import Recipe

CURVE = "curve.png"
MEMORY = 6.0  # GB, as firm.detector.prepare.MEMORY, which takes long to import
LEARNT, KEPT, FAILED = "learnt", "kept", "failed"


def fit(
    data: opt.Data,
    out: Annotated[Path, Option("--out", "-o", help="Where the detector is written.")],
    preset: opt.Preset = None,
    encoder: opt.Pretrained = None,
    weights: opt.Weights = None,
    settings: opt.Settings = None,
    outliers: opt.Source = None,
    minutes: Annotated[
        float | None, Option(min=0.1, help="Train for about so long, and draw how it goes (curve.png).")
    ] = None,
    per_folder: Annotated[
        bool, Option("--per-folder", help="One product per sub-folder of DATA: each gets its own OUT/<name>.firm.")
    ] = False,
    seed: opt.Seed = 0,
    device: opt.Device = "cpu",
    threads: opt.Threads = 0,
    holdout: opt.Holdout = None,
    false_calls: opt.FalseCalls = None,
    fail: opt.Fail = None,
    calibration: Annotated[
        str | None, Option(help="Thresholds from folds of all good images, or from a split. [default: folds]")
    ] = None,
    group_by: opt.GroupBy = None,
    checkpoint_seconds: Annotated[float, Option(help="How much work an interruption may cost.")] = 30.0,
    depth: opt.Bits = None,
    strict: opt.Strict = False,
    ignore: opt.Ignore = None,
    crop: opt.Crop = None,
    smallest_defect: opt.SmallestDefect = None,
    keep_suspects: opt.KeepSuspects = False,
    memory: opt.Gigabytes = MEMORY,
    force: opt.Force = False,
    as_json: opt.AsJson = False,
    output: opt.Output = None,
) -> None:
    """Learn from good images and write a detector. Run it again after an interruption: it resumes."""
    from firm.detector.read import Options
    from firm.types import Depth

    use_device(device, threads)
    recipe = _recipe(data, preset, encoder, weights, settings, outliers)
    options = Options(
        seed=seed, device=device, holdout=holdout, false_calls=false_calls, fail=fail, minutes=minutes, memory=memory,
        depth=None if depth is None else Depth(2**depth - 1), strict=strict, ignored=ignore,
        keep_suspects=keep_suspects, checkpoint_seconds=checkpoint_seconds, calibration=calibration, group_by=group_by,
        crop=crop, smallest_defect=smallest_defect,
        choose_size=not any(each.partition("=")[0] in ("size", "shape") for each in settings or []),
    )  # fmt: skip
    if per_folder:
        raise Exit(_fit_each(data, out, recipe, options, force=force, as_json=as_json))
    good = _read(data, out, recipe, options, force=force)
    _show(_learn(good, out), good, out, as_json=as_json)


def _show(detector: Detector, good: Good, out: Path, *, as_json: bool) -> None:
    """The thresholds and what is stated of them."""
    from firm.decision.calibration import summary_of, to_json

    by = detector.decides
    values = {"model": str(out), **detector.card(), "calibration": to_json(by), "left_out": list(good.left_out)}
    decision, *summary = summary_of(by)
    regions = [text for text in summary if text.startswith("regions")]
    for text in (f"thresholds {by.source}", *regions):
        detail(text)
    lines = [f"{named(out)}: {decision}", *(text for text in summary if text not in regions)]
    show(values, "\n".join(lines), as_json, good.left_out)


def _recipe(
    data: str,
    preset: str | None,
    encoder: str | None,
    weights: Path | None,
    settings: list[str] | None,
    outliers: str | None = None,
) -> Recipe:
    """The preset with what was set; parts start from pretrained features where they are installed, or wavelets."""
    from firm.data.registry import shows_parts, training_files
    from firm.networks.weights import WAVELETS, weights_file
    from firm.recipes.presets import recipe_of, usual

    if weights:
        encoder = weights_file(encoder or "", weights)
    if not preset and not encoder and shows_parts(data):
        training_files(data)  # a folder that is not there is reported first
        encoder = usual().pretrained.name
        if encoder == WAVELETS:
            say("no pretrained weights are installed (pip install 'firm[pretrained]'), so wavelets are used")
    if encoder:
        for setting in settings or []:
            path = setting.partition("=")[0]
            if path == "encoder" or (path.startswith("encoder.") and not path.startswith("encoder.head")):
                how = "fit with --preset inspect and without --encoder"
                raise SettingError(f"{path} is of an encoder trained from scratch, and {encoder} is none; {how}")
        preset = preset or (("wavelets" if encoder == WAVELETS else "adapted") if shows_parts(data) else "semantic")
        settings = [f"pretrained.name={encoder}", *(settings or [])]  # one that is set by path wins
    if outliers:
        settings = [*_chosen(outliers, preset or "fast"), *(settings or [])]
    return recipe_of(preset or "fast", settings)


def _chosen(outliers: str, preset: str) -> list[str]:
    """The settings of a source that makes as many outliers per good image as the preset's: a training is as long."""
    from dataclasses import fields

    from firm.outliers.registry import OUTLIERS
    from firm.recipes.presets import PRESETS

    if outliers not in OUTLIERS:
        raise SettingError(f"no source of outliers {outliers!r}; use one of {', '.join(OUTLIERS)}")
    free = any(setting.name == "per_inlier" for setting in fields(OUTLIERS[outliers]))  # type: ignore[arg-type]
    number = PRESETS[preset].outliers.per_inlier if preset in PRESETS else 1
    return [f"outliers={outliers}", *([f"outliers.per_inlier={number}"] if free else [])]


def _read(data: str, out: Path, recipe: Recipe, options: Options, *, force: bool) -> Good:
    """The good images, after everything that can be refused at once was refused."""
    from firm.data.registry import full_name
    from firm.detector.model_folder import check_target
    from firm.detector.read import read_good

    check_target(out, None if force else full_name(data))
    with reporting() as listener:
        return read_good(data, recipe, replace(options, folder=_run(out)), listener)


def _run(out: Path) -> Path:
    return out.with_name(out.name + ".run")


def _learn(good: Good, out: Path) -> Detector:
    """Fit where it was left and write the detector."""
    from firm.decision.calibration import warnings_of
    from firm.detector.detector import Detector
    from firm.training.runs import CHECKPOINT

    with reporting() as listener:
        detector = Detector.learn(good, listener)
    detector.save(out)
    if detector.probes:
        from firm.report.evaluation import draw_progress

        draw_progress(detector.probes, out / CURVE)
        detail(f"the training is drawn in {named(out / CURVE)}")
    for file in _run(out).rglob(CHECKPOINT):  # the history stays
        file.unlink()
    for text in warnings_of(detector.decides):
        warn(text)
    return detector


@dataclass(frozen=True)
class Outcome:
    """What became of one product."""

    product: str
    model: str
    state: str  # learnt, kept as it was, failed
    summary: str  # what its detector guarantees, or why there is none
    left_out: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        where = "" if self.state == FAILED else f" {named(self.model)}:"
        short = f" ({len(self.left_out)} files left out)" if self.left_out else ""
        return f"{self.state:<6}  {named(self.product)} {where} {self.summary}{short}"


def _fit_each(tree: str, out: Path, recipe: Recipe, options: Options, *, force: bool, as_json: bool) -> int:
    """A detector OUT/<name>.firm per product; what the same fit would give again is kept. Returns the exit code."""
    from firm.detector.prepare import frozen_backbone

    products = _products(tree, out)
    frozen_backbone(recipe)  # refused once, not for each product
    outcomes = list[Outcome]()
    for number, product in enumerate(products, 1):
        say(f"{named(product.name)}: product {number} of {len(products)}")
        outcomes.append(_fit_product(product, out / f"{product.name}.firm", recipe, options, force=force))
    counts = [f"{[each.state for each in outcomes].count(state)} {state}" for state in (LEARNT, KEPT, FAILED)]
    lines = [*map(str, outcomes), f"{len(outcomes)} products: {', '.join(counts)}"]
    show({"products": [asdict(each) for each in outcomes]}, "\n".join(lines), as_json)
    done = [each for each in outcomes if each.state != FAILED]
    return 2 if not done else int(len(done) < len(outcomes) or any(each.left_out for each in done))


def _products(tree: str, out: Path) -> list[Path]:
    """The sub-folders by name; anything but a tree of products and a place for detectors is refused."""
    from firm.data.folder import GOOD, folders_in, image_files, list_mvtec, refuse_mixing
    from firm.data.registry import folder_named
    from firm.detector.model_folder import CARD

    home = folder_named(tree)
    if home is None or not home.is_dir():
        raise DataError(f"--per-folder takes a folder with a sub-folder for each product, and {tree!r} is no folder")
    if (home / GOOD).is_dir() or list_mvtec(home) is not None:
        raise DataError(f"{named(home)} is laid out as one product; leave --per-folder out, or give the folder above")
    refuse_mixing(out, [home])
    if out.is_file() or (out / CARD).is_file():
        raise SettingError(f"{named(out)} is not a folder of detectors; name one in which each product gets its own")
    products = list(folders_in(home).values())
    if not products:
        raise DataError(f"{named(home)} has no sub-folder; --per-folder takes one for each product")
    stray = image_files(home)
    if stray:
        warn(f"{len(stray)} images in {named(home)} itself belong to no product and are not learnt from")
    return products


def _fit_product(product: Path, model: Path, recipe: Recipe, options: Options, *, force: bool) -> Outcome:
    """One product; a failure is reported and costs no other."""
    from firm.decision.calibration import summary_of

    name = product.name
    try:
        good = _read(str(product), model, recipe, options, force=force)
        kept = _finished(good, model)
        if kept:
            say(f"{named(name)}: images and settings are those of {named(model)}, which is kept")
        detector = kept or _learn(good, model)
        summary = f"{detector.origin['good_images']} good images learnt; {summary_of(detector.decides)[1]}"
        return Outcome(name, str(model), KEPT if kept else LEARNT, summary, list(good.left_out))
    except (FirmError, OSError) as error:
        report_error(f"{named(name)}: {sentence(error)}")
        return Outcome(name, str(model), FAILED, sentence(error))


def _finished(good: Good, model: Path) -> Detector | None:
    """The detector that is there, if it is whole, decides, and the same fit would give it again."""
    from firm.detector.detector import Detector

    try:
        detector = Detector.load(model, device=good.options.device)
    except FirmError:
        return None
    return detector if detector.calibration and detector.origin.get("asked") == good.key else None
