"""SIA: an image of a diffusion model whose sampling is perturbed shows through a Perlin mask (section 5, RealNet).

The images are a folder. Without one, a fit trains a diffusion model on its good images, samples the folder, and names
it here (`firm.detector.generate`), which needs the package diffusers; a ready-made folder needs nothing.
"""

from dataclasses import dataclass

from torch import Generator, Tensor

from firm.errors import SettingError
from firm.outliers.drawing import Copy, check
from firm.outliers.perlin_blend import PerlinBlend
from firm.types import Outliers, Scene

MODELS = ("tiny", "paper")  # the keys of `firm.diffusion.model.SIZES`, which stands below


@dataclass(frozen=True, kw_only=True)
class Sia:
    """A generated image of the product, blended into the object inside a Perlin mask."""

    folder: str = ""  # of ready-made images of the product, such as sdas/screw; empty: a fit makes them
    model: str = "tiny"  # the diffusion model that a fit trains
    steps: int = 0  # of its training; 0: those of its size
    images: int = 512  # that are sampled from it
    strength: tuple[float, float] = (0.1, 0.2)  # of the perturbation; drawn for each batch of samples
    seed: int = 0  # of the diffusion model and its samples: fits of all seeds share them
    opacity: tuple[float, float] = (0.5, 1.0)
    least: int = 16  # pixels an anomaly must have
    per_inlier: int = 1

    kinds = 1

    def __post_init__(self) -> None:
        check(
            self,
            ("model", self.model in MODELS, f"use one of {', '.join(MODELS)}"),
            ("steps", self.steps >= 0, "use 1 or more, or 0 for those of the model"),
            ("images", self.images >= 1, "use 1 or more"),
            ("strength", 0 <= self.strength[0] <= self.strength[1], "it must rise, from 0 or more"),
        )
        assert self.blend  # validates the others

    @property
    def blend(self) -> PerlinBlend:
        """The source that blends the folder's images."""
        return PerlinBlend(folder=self.folder, opacity=self.opacity, least=self.least, per_inlier=self.per_inlier)

    def __call__(self, inliers: Tensor, *, rng: Generator, copy: Copy = None, scene: Scene | None = None) -> Outliers:
        if not self.folder:
            raise SettingError(
                "outliers=sia has no images yet: a fit makes them; else sample some with firm sia, "
                "and set outliers.folder"
            )
        return self.blend(inliers, rng=rng, copy=copy, scene=scene)
