"""From a PIL image to a normalized float32 array, for training and for evaluation.

Only PIL and numpy: worker processes run this. The evaluation transform gives what torchvision's
Resize, CenterCrop, ToTensor and Normalize give on a PIL image (within 5e-7 of torchvision 0.28); as
there, EXIF orientation is ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageOps

# Per channel mean and standard deviation (RGB, range 0..1) of the ImageNet training images: what
# torchvision's published weights were trained with.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

Transform = Callable[[Image.Image, np.random.Generator], np.ndarray]
# Steps inside a training transform: on the 8-bit image, and on the normalized array.
AugmentImage = Callable[[Image.Image, np.random.Generator], Image.Image]
AugmentArray = Callable[[np.ndarray, np.random.Generator], np.ndarray]

# RandomResizedCrop (Szegedy et al. 2014, "Going deeper with convolutions", section 6): share of the
# image's area, and width / height of the crop.
DEFAULT_SCALE = (0.08, 1.0)
DEFAULT_RATIO = (3 / 4, 4 / 3)
_ATTEMPTS = 10

# What a random interpolation is drawn from, with equal chances.
_INTERPOLATIONS = (Image.Resampling.BILINEAR, Image.Resampling.BICUBIC)


class Normalization:
    """`(pixels / 255 - mean) / std`, per channel: one value for each of three (RGB) or one (gray),
    range 0..1. `mean_color` is the mean as eight-bit values."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        if len(mean) != len(std) or len(mean) not in (1, 3):
            raise ValueError(
                f"mean {tuple(mean)} and std {tuple(std)}: expected 1 or 3 values each"
            )
        if min(std) <= 0:
            raise ValueError(f"std {tuple(std)}: expected positive values")
        self.channels = len(mean)
        self.mean_color = tuple(min(255, round(255 * value)) for value in mean)
        # Division, mean and std in one multiplication and one addition per value.
        self._factor = (1 / (255 * np.array(std))).astype(np.float32)
        self._offset = (-np.array(mean) / np.array(std)).astype(np.float32)

    def __call__(self, pixels: np.ndarray) -> np.ndarray:
        """uint8 (..., height, width, channels) to float32 of the same shape."""
        result = np.multiply(pixels, self._factor, dtype=np.float32)
        result += self._offset
        return result

    def decode(self, image: Image.Image) -> Image.Image:
        """The whole image, decoded, from gray, palette, CMYK, alpha or 16 bits per channel to RGB,
        or to gray (ITU-R 601 luma); OSError if the file is truncated or damaged."""
        return _eight_bits(image).convert("RGB" if self.channels == 3 else "L")

    def pixels(self, image: Image.Image) -> np.ndarray:
        """The image in this many channels: uint8, (height, width, channels)."""
        if image.mode != ("RGB" if self.channels == 3 else "L"):
            image = self.decode(image)
        pixels = np.asarray(image)
        return pixels if pixels.ndim == 3 else pixels[:, :, None]


IMAGENET = Normalization(IMAGENET_MEAN, IMAGENET_STD)


@dataclass(frozen=True, kw_only=True)
class _Training:
    """What follows a random crop: the flip, `augment` of the image, the normalization, which also
    decides between color and gray, and `erase` on the normalized array, maybe in place."""

    normalization: Normalization = IMAGENET
    augment: AugmentImage | None = None
    erase: AugmentArray | None = None

    def finish(self, image: Image.Image, flip: bool, rng: np.random.Generator) -> np.ndarray:
        if flip:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        if self.augment is not None:
            image = self.augment(image, rng)
        array = self.normalization(self.normalization.pixels(image))
        return array if self.erase is None else self.erase(array, rng)


@dataclass(frozen=True)
class TrainTransform(_Training):
    """Random resized crop and horizontal flip.

    A JPEG much larger than what the crop needs is decoded at 1/2, 1/4 or 1/8 of its size, which
    libjpeg does several times faster; which one depends on the crop alone.

    Attributes:
        image_size: height and width of the result, in pixels.
        scale: least and largest share of the image's area in the crop.
        hflip: probability of the flip.
        ratio: least and largest width / height of the crop.
        interpolation: None for bilinear or bicubic, drawn for each image.
    """

    image_size: int
    scale: tuple[float, float] = DEFAULT_SCALE
    hflip: float = 0.5
    ratio: tuple[float, float] = DEFAULT_RATIO
    interpolation: Image.Resampling | None = Image.Resampling.BILINEAR

    def __call__(self, image: Image.Image, rng: np.random.Generator) -> np.ndarray:
        """A float32 array of shape (image_size, image_size, channels)."""
        width, height = image.size
        left, top, crop_width, crop_height = random_crop_box(
            width, height, rng, self.scale, self.ratio
        )
        flip = rng.random() < self.hflip
        interpolation = self.interpolation
        if interpolation is None:
            interpolation = _INTERPOLATIONS[int(rng.integers(len(_INTERPOLATIONS)))]
        size = self.image_size
        # This does nothing for other formats than JPEG, or where the crop is not that large.
        image.draft(
            "RGB", (math.ceil(width * size / crop_width), math.ceil(height * size / crop_height))
        )
        # 1, 2, 4 or 8; the reduced size is rounded up, hence not the quotient itself.
        reduced = round(width / image.width)
        right, bottom = left + crop_width, top + crop_height
        box = (left / reduced, top / reduced, right / reduced, bottom / reduced)
        resized = self.normalization.decode(image).resize((size, size), interpolation, box=box)
        return self.finish(resized, flip, rng)


@dataclass(frozen=True)
class PadCropTransform(_Training):
    """Pads with black, crops at random and flips: the usual shifts of small images. An image is
    shifted by at most `padding` pixels."""

    image_size: int
    padding: int
    hflip: float

    def __call__(self, image: Image.Image, rng: np.random.Generator) -> np.ndarray:
        """A float32 array of shape (image_size, image_size, channels)."""
        size = self.image_size
        image = self.normalization.decode(image)
        if image.size != (size, size):
            image = image.resize((size, size), Image.Resampling.BICUBIC)
        left, top = (int(shift) for shift in rng.integers(2 * self.padding + 1, size=2))
        flip = rng.random() < self.hflip
        image = ImageOps.expand(image, self.padding).crop((left, top, left + size, top + size))
        return self.finish(image, flip, rng)


class EvalTransform:
    """Resize the shorter side to `resize_size` (by default 256/224 of `image_size`), then crop the
    center. The normalization decides between color and gray."""

    def __init__(
        self,
        image_size: int,
        *,
        resize_size: int | None = None,
        interpolation: Image.Resampling = Image.Resampling.BILINEAR,
        normalization: Normalization = IMAGENET,
    ) -> None:
        self.image_size = image_size
        self.resize_size = round(image_size * 256 / 224) if resize_size is None else resize_size
        if self.resize_size < image_size:
            raise ValueError(f"a crop of {image_size} from a side of {self.resize_size} pixels")
        self.interpolation = interpolation
        self.normalization = normalization

    def __call__(self, image: Image.Image, rng: np.random.Generator) -> np.ndarray:
        """A float32 array of shape (image_size, image_size, channels); `rng` is not used."""
        width, height = image.size
        short, long = sorted((width, height))
        new_long = int(self.resize_size * long / short)
        new_size = (self.resize_size, new_long) if width <= height else (new_long, self.resize_size)
        resized = self.normalization.decode(image).resize(new_size, self.interpolation)
        size = self.image_size
        # Halves round to the even number, as torchvision's offsets do.
        left = round((new_size[0] - size) / 2)
        top = round((new_size[1] - size) / 2)
        crop = resized.crop((left, top, left + size, top + size))
        return self.normalization(self.normalization.pixels(crop))


@dataclass(frozen=True)
class PlainTransform:
    """Only the normalization, of images that have the right size already: the one transform that
    data sets held in memory apply to many images at once."""

    normalization: Normalization = IMAGENET

    def __call__(self, image: Image.Image, rng: np.random.Generator) -> np.ndarray:
        """A float32 array of the image's size; `rng` is not used."""
        return self.normalization(self.normalization.pixels(image))


def random_crop_box(
    width: int,
    height: int,
    rng: np.random.Generator,
    scale: tuple[float, float] = DEFAULT_SCALE,
    ratio: tuple[float, float] = DEFAULT_RATIO,
) -> tuple[int, int, int, int]:
    """A random part of an image of `width` x `height` pixels: left, top, width, height.

    Area and logarithm of the aspect are uniform in their ranges. Where ten draws do not fit inside
    the image, it is the largest centered part whose aspect is in range.
    """
    for _ in range(_ATTEMPTS):
        area = width * height * rng.uniform(*scale)
        aspect = math.exp(rng.uniform(math.log(ratio[0]), math.log(ratio[1])))
        crop_width = round(math.sqrt(area * aspect))
        crop_height = round(math.sqrt(area / aspect))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            left = int(rng.integers(0, width - crop_width + 1))
            top = int(rng.integers(0, height - crop_height + 1))
            return left, top, crop_width, crop_height
    crop_width = min(width, max(1, round(height * ratio[1])))
    crop_height = min(height, max(1, round(width / ratio[0])))
    return (width - crop_width) // 2, (height - crop_height) // 2, crop_width, crop_height


def _eight_bits(image: Image.Image) -> Image.Image:
    """Gray values of more than 8 bits in 8. PIL's own conversion would clip all above 255 to white,
    and what is between 0 and 1 to black."""
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image).astype(np.int64) >> 8).astype(np.uint8))
    if image.mode not in ("I", "F"):
        return image
    # 32-bit files do not say which value is white: take the least usual bound that holds all
    # values.
    values = np.nan_to_num(np.asarray(image).astype(np.float64), posinf=0, neginf=0)
    most = values.max(initial=0)
    bounds = [1.0] * (image.mode == "F") + [255.0, 65535.0, 2.0**31 - 1]
    white = next((bound for bound in bounds if most <= bound), most)
    return Image.fromarray(np.clip(values * (255 / white), 0, 255).round().astype(np.uint8))
