"""Cartoon faces in CelebA's layout, so that celeba.py runs on a fresh machine. No benchmark: a check of the path."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from dense.data.synthetic import make_set

__all__ = ["ATTRIBUTES", "FaceSettings", "draw_face", "write_faces"]

ATTRIBUTES = (
    "5_o_Clock_Shadow", "Arched_Eyebrows", "Attractive", "Bags_Under_Eyes", "Bald", "Bangs", "Big_Lips", "Big_Nose",
    "Black_Hair", "Blond_Hair", "Blurry", "Brown_Hair", "Bushy_Eyebrows", "Chubby", "Double_Chin", "Eyeglasses",
    "Goatee", "Gray_Hair", "Heavy_Makeup", "High_Cheekbones", "Male", "Mouth_Slightly_Open", "Mustache", "Narrow_Eyes",
    "No_Beard", "Oval_Face", "Pale_Skin", "Pointy_Nose", "Receding_Hairline", "Rosy_Cheeks", "Sideburns", "Smiling",
    "Straight_Hair", "Wavy_Hair", "Wearing_Earrings", "Wearing_Hat", "Wearing_Lipstick", "Wearing_Necklace",
    "Wearing_Necktie", "Young",
)  # fmt: skip
"""CelebA's 40 attributes, in the order of its file."""

_HAIR = ("Bald", "Black_Hair", "Blond_Hair", "Brown_Hair", "Gray_Hair")
_FACTORS = (
    "Eyeglasses",
    "Smiling",
    "Wearing_Hat",
    "Wearing_Lipstick",
    "Pale_Skin",
    "Big_Nose",
    "Oval_Face",
    "Mustache",
)
"""What is drawn. Every other attribute is one of these with one label in eight wrong: noisy, learnable labels."""


@dataclass(frozen=True)
class FaceSettings:
    """Numbers of images per split, image height, and the seed."""

    train: int = 400
    val: int = 80
    test: int = 80
    height: int = 72
    seed: int = 0


def write_faces(root: Path, settings: FaceSettings) -> Path:
    """Write ``root/{Anno,Eval,Img}`` as CelebA's archive has them and return ``root``; a finished set is reused.

    Raises:
        UserError: if ``root`` exists and is something else.
    """
    return make_set(root, asdict(settings), lambda folder: _write(folder, settings))


def _write(folder: Path, settings: FaceSettings) -> None:
    for name in ("Anno", "Eval", "Img/img_align_celeba"):
        (folder / name).mkdir(parents=True)
    count = settings.train + settings.val + settings.test
    labels, partition = [], []
    for number in range(count):
        rng = np.random.default_rng([settings.seed, number])
        image, attributes = draw_face(settings.height, rng)
        name = f"{number + 1:06d}.jpg"
        image.save(folder / "Img" / "img_align_celeba" / name, quality=95)
        labels.append(f"{name} " + " ".join("1" if value else "-1" for value in attributes))
        split = (number >= settings.train) + (number >= settings.train + settings.val)
        partition.append(f"{name} {split}")
    head = [str(count), " ".join(ATTRIBUTES)]
    (folder / "Anno" / "list_attr_celeba.txt").write_text("\n".join([*head, *labels]) + "\n")
    (folder / "Eval" / "list_eval_partition.txt").write_text("\n".join(partition) + "\n")


def draw_face(height: int, rng: np.random.Generator) -> tuple[Image.Image, NDArray[np.bool_]]:
    """One face and its 40 attributes."""
    factors = {name: bool(rng.random() < 0.45) for name in _FACTORS}
    hair = _HAIR[rng.integers(len(_HAIR))]
    known = factors | {name: name == hair for name in _HAIR}
    attributes = []
    for position, name in enumerate(ATTRIBUTES):
        value = known.get(name, factors[_FACTORS[position % len(_FACTORS)]])
        attributes.append(value if name in known else value != (rng.random() < 0.125))
    width = height * 178 // 218  # the aspect of CelebA's aligned images
    image = Image.new("RGB", (width, height), tuple(int(c) for c in rng.integers(40, 220, 3)))
    _paint(ImageDraw.Draw(image), factors, hair, width, height, rng.normal(0, 0.02, 2))
    noisy = np.asarray(image, np.float32) + rng.normal(0, 6, (height, width, 3))
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8)), np.array(attributes)


def _paint(
    draw: ImageDraw.ImageDraw, has: dict[str, bool], hair: str, width: int, height: int, shift: NDArray[np.float64]
) -> None:
    """Shapes in fractions of the image, moved a little."""

    def box(x0: float, y0: float, x1: float, y1: float) -> tuple[float, float, float, float]:
        return (x0 + shift[0]) * width, (y0 + shift[1]) * height, (x1 + shift[0]) * width, (y1 + shift[1]) * height

    side = 0.24 if has["Oval_Face"] else 0.14
    colours = {"Black_Hair": "#181414", "Blond_Hair": "#e8cf6a", "Brown_Hair": "#6b4226", "Gray_Hair": "#a9a9a9"}
    if hair in colours:
        draw.ellipse(box(side - 0.08, 0.12, 1.08 - side, 0.8), fill=colours[hair])
    draw.ellipse(box(side, 0.22, 1 - side, 0.9), fill="#f6e3d7" if has["Pale_Skin"] else "#c98d63")
    for x in (0.36, 0.64):
        draw.ellipse(box(x - 0.06, 0.44, x + 0.06, 0.5), fill="white")
        draw.ellipse(box(x - 0.025, 0.44, x + 0.025, 0.5), fill="#203050")
        if has["Eyeglasses"]:
            draw.rectangle(box(x - 0.11, 0.4, x + 0.11, 0.54), outline="black", width=2)
    nose = 0.09 if has["Big_Nose"] else 0.03
    draw.ellipse(box(0.5 - nose, 0.52, 0.5 + nose, 0.63), fill="#8f5a3c")
    if has["Mustache"]:
        draw.rectangle(box(0.36, 0.64, 0.64, 0.69), fill="#2a1a10")
    lips = "#d0103a" if has["Wearing_Lipstick"] else "#7d4038"
    if has["Smiling"]:
        draw.chord(box(0.34, 0.62, 0.66, 0.82), 0, 180, fill=lips)
    else:
        draw.rectangle(box(0.38, 0.735, 0.62, 0.765), fill=lips)
    if has["Wearing_Hat"]:
        draw.rectangle(box(0.12, 0.08, 0.88, 0.26), fill="#20409a")
