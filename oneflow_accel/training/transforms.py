"""From a PIL image to a normalized float32 array, for training and for evaluation.

Only PIL and numpy: worker processes run this. The evaluation transform gives what torchvision's
Resize, CenterCrop, ToTensor and Normalize give on a PIL image (within 5e-7 of torchvision 0.28); as
there, EXIF orientation is ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from PIL import Image

# Per channel mean and standard deviation (RGB, range 0..1) of the ImageNet training images: what
# torchvision's published weights were trained with.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

Transform = Callable[[Image.Image, np.random.Generator], np.ndarray]

# RandomResizedCrop (Szegedy et al. 2014, "Going deeper with convolutions", section 6): share of the
# image's area, and width / height of the crop.
DEFAULT_SCALE = (0.08, 1.0)
_ASPECT = (3 / 4, 4 / 3)
_ATTEMPTS = 10

# (x / 255 - mean) / std in one multiplication and one addition per value.
_FACTOR = (1 / (255 * np.array(IMAGENET_STD))).astype(np.float32)
_OFFSET = (-np.array(IMAGENET_MEAN) / np.array(IMAGENET_STD)).astype(np.float32)


class TrainTransform:
    """Random resized crop and horizontal flip.

    A JPEG much larger than what the crop needs is decoded at 1/2, 1/4 or 1/8 of its size, which
    libjpeg does several times faster; which one depends on the crop alone.

    Args:
        image_size: height and width of the result, in pixels.
        scale: least and largest share of the image's area in the crop.
        hflip: probability of the flip.
    """

    def __init__(self, image_size: int, scale: tuple[float, float], hflip: float) -> None:
        self.image_size = image_size
        self.scale = scale
        self.hflip = hflip

    def __call__(self, image: Image.Image, rng: np.random.Generator) -> np.ndarray:
        """Returns: float32 array of shape (image_size, image_size, 3)."""
        width, height = image.size
        left, top, crop_width, crop_height = random_crop_box(width, height, rng, self.scale)
        flip = rng.random() < self.hflip
        size = self.image_size
        # Does nothing for other formats than JPEG, or where the crop is not that large.
        image.draft(
            "RGB", (math.ceil(width * size / crop_width), math.ceil(height * size / crop_height))
        )
        # 1, 2, 4 or 8; the reduced size is rounded up, hence not the quotient itself.
        reduced = round(width / image.width)
        right, bottom = left + crop_width, top + crop_height
        box = (left / reduced, top / reduced, right / reduced, bottom / reduced)
        resized = to_rgb(image).resize((size, size), Image.Resampling.BILINEAR, box=box)
        pixels = np.asarray(resized)
        return normalize(pixels[:, ::-1] if flip else pixels)


class EvalTransform:
    """Resize the shorter side to 256/224 of the image size, then crop the center.

    Args:
        image_size: height and width of the result, in pixels.
    """

    def __init__(self, image_size: int) -> None:
        self.image_size = image_size
        self.resize_size = round(image_size * 256 / 224)

    def __call__(self, image: Image.Image, rng: np.random.Generator) -> np.ndarray:
        """Returns: float32 array of shape (image_size, image_size, 3); `rng` is not used."""
        width, height = image.size
        short, long = sorted((width, height))
        new_long = int(self.resize_size * long / short)
        new_size = (self.resize_size, new_long) if width <= height else (new_long, self.resize_size)
        resized = to_rgb(image).resize(new_size, Image.Resampling.BILINEAR)
        size = self.image_size
        # Halves round to the even number, as torchvision's offsets do.
        left = round((new_size[0] - size) / 2)
        top = round((new_size[1] - size) / 2)
        return normalize(np.asarray(resized.crop((left, top, left + size, top + size))))


def train_transform(
    image_size: int, scale: tuple[float, float] = DEFAULT_SCALE, hflip: float = 0.5
) -> Transform:
    """Random resized crop (aspect 3/4 to 4/3) and horizontal flip, normalized."""
    return TrainTransform(image_size, scale, hflip)


def eval_transform(image_size: int) -> Transform:
    """Resize of the shorter side to `image_size * 256 / 224` and center crop, normalized."""
    return EvalTransform(image_size)


def random_crop_box(
    width: int,
    height: int,
    rng: np.random.Generator,
    scale: tuple[float, float] = DEFAULT_SCALE,
) -> tuple[int, int, int, int]:
    """A random part of an image of `width` x `height` pixels.

    Area and logarithm of the aspect are uniform in their ranges. Where ten draws do not fit inside
    the image, it is the largest centered part whose aspect is in range.

    Returns:
        left, top, width, height, in pixels.
    """
    for _ in range(_ATTEMPTS):
        area = width * height * rng.uniform(*scale)
        aspect = math.exp(rng.uniform(math.log(_ASPECT[0]), math.log(_ASPECT[1])))
        crop_width = round(math.sqrt(area * aspect))
        crop_height = round(math.sqrt(area / aspect))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            left = int(rng.integers(0, width - crop_width + 1))
            top = int(rng.integers(0, height - crop_height + 1))
            return left, top, crop_width, crop_height
    crop_width = min(width, max(1, round(height * _ASPECT[1])))
    crop_height = min(height, max(1, round(width / _ASPECT[0])))
    return (width - crop_width) // 2, (height - crop_height) // 2, crop_width, crop_height


def to_rgb(image: Image.Image) -> Image.Image:
    """Decode the whole image and convert it: gray, palette, CMYK, alpha, 16 bits per channel.

    Raises:
        OSError: the file is truncated or damaged.
    """
    if image.mode.startswith("I"):
        # 16-bit gray. Scaled, as PIL's own conversion would clip all above 255 to white.
        eight_bits = np.clip(np.asarray(image).astype(np.int64) >> 8, 0, 255).astype(np.uint8)
        image = Image.fromarray(eight_bits)
    return image.convert("RGB")


def normalize(pixels: np.ndarray) -> np.ndarray:
    """`(pixels / 255 - IMAGENET_MEAN) / IMAGENET_STD`.

    Args:
        pixels: uint8, shape (height, width, 3).

    Returns:
        float32, same shape.
    """
    result = np.multiply(pixels, _FACTOR, dtype=np.float32)
    result += _OFFSET
    return result
