"""The arguments and options that several verbs share, each described once."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from firm.cli.terminal import set_level

Data = Annotated[str, Argument(help="A folder, or DATASET:CLASS such as mvtec:screw, cifar10:bird or drawn:plate.")]
Model = Annotated[Path, Argument(help="A detector written by `firm fit`.")]
Picture = Annotated[Path, Option("--out", "-o", help="The picture to write (PNG).")]
Settings = Annotated[
    list[str] | None, Option("--set", metavar="PATH=VALUE", help="Change one setting; may be repeated.")
]
Source = Annotated[
    str | None, Option(help="Synthetic defects to learn from, as --set outliers; sia first trains a diffusion model.")
]
Seed = Annotated[int, Option(help="Decides everything random.")]
Device = Annotated[str, Option(help="cpu, cuda, cuda:1, mps, ...")]
Threads = Annotated[int, Option(min=0, help="CPU threads; 0 leaves the choice to torch.")]
Force = Annotated[bool, Option("--force", help="Replace the detector in OUT even if it learnt from other data.")]
Strict = Annotated[bool, Option("--strict", help="Stop at the first unusable file instead of skipping it.")]
Bits = Annotated[
    int | None, Option("--depth", min=8, max=16, help="Bits of deep images (12 in 16, ...); by default found on them.")
]
Preset = Annotated[
    str | None,
    Option(
        help="Where the settings start: inspect, adapted, wavelets, patches, whole, parts, fast, paper or authors. "
        "By default fast for classes of semantic data sets, adapted or wavelets for everything else."
    ),
]
Pretrained = Annotated[
    str | None,
    Option(
        help="Frozen features to start from: efficientnet-lite0, -lite1, -lite2, timm:NAME, a weights file of one of "
        "these, of a ResNet or of dinov2-small (.safetensors or .pth), or wavelets, which need no weights."
    ),
]
Weights = Annotated[
    Path | None, Option("--weights", metavar="FILE", help="The weights of an --encoder that comes without, by name.")
]
Ignore = Annotated[
    Path | None, Option("--ignore", metavar="FILE", help="A mask of the camera's view: white pixels never decide.")
]
Crop = Annotated[
    str | None,
    Option("--crop", metavar="auto|X,Y,W,H", help="Read a part of each image: around the object, or these pixels."),
]
SmallestDefect = Annotated[
    float | None,
    Option("--smallest-defect", metavar="PX", help="The smallest defect to find, in pixels; more cost time."),
]
Gigabytes = Annotated[float, Option(help="Memory to use, in GB; of more good images a random sample is read.")]
KeepSuspects = Annotated[
    bool, Option("--keep-suspects", help="Learn also from images that do not look like the others.")
]
AsJson = Annotated[bool, Option("--json", help="Print the result as JSON.")]
Holdout = Annotated[
    float | None,
    Option(help="Share of the good images kept for the thresholds; by default a tenth, or what they need."),
]
FalseCalls = Annotated[
    float | None,
    Option(help="Target rate of good parts that do not PASS (REVIEW or FAIL). [default: 0.05, more for few images]"),
]
Fail = Annotated[float | None, Option(help="Target rate of good parts that FAIL. [default: 0.01, more for few images]")]
GroupBy = Annotated[
    str | None,
    Option("--group-by", metavar="REGEX", help="Images whose paths match alike show one part. [default: found]"),
]
Output = Annotated[
    bool | None,
    Option(
        "--verbose/--quiet",
        "-v/-q",
        callback=set_level,
        help="Report every step, or only the result, warnings and errors.",
    ),
]
