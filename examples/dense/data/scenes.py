"""What stands in a synthetic room or street: shapes with a class and a colour, drawn from a generator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dense.data.geometry import Box, Camera, Ellipsoid, Plane, Shape

__all__ = ["CLASSES", "SCENES", "Item", "room", "street"]

Colour = tuple[float, float, float]


@dataclass(frozen=True)
class Item:
    """A shape with its class and base colour; ``tile`` is the edge of its checkerboard in metres (0: plain)."""

    shape: Shape
    label: int
    colour: Colour
    tile: float = 0.0


BED, BOOKS, CEILING, CHAIR, FLOOR, FURNITURE, OBJECTS, PICTURE, SOFA, TABLE, TV, WALL, WINDOW = range(13)
FLAT, CONSTRUCTION, OBJECT, NATURE, SKY, HUMAN, VEHICLE = range(7)


def _tint(rng: np.random.Generator, colour: Colour, spread: float = 0.08) -> Colour:
    red, green, blue = np.clip(np.asarray(colour) + rng.uniform(-spread, spread, 3), 0.05, 0.95)
    return float(red), float(green), float(blue)


def room(height: int, width: int, rng: np.random.Generator) -> tuple[Camera, list[Item]]:
    """A furnished room with NYUv2's 13 classes: walls, floor and ceiling are always there, the rest by chance."""
    camera = Camera(height, width, focal=0.9 * width, pitch=float(rng.uniform(-0.1, 0.3)))
    floor, top = float(rng.uniform(1.2, 1.6)), -1.3
    left, right, back = -float(rng.uniform(1.8, 2.8)), float(rng.uniform(1.8, 2.8)), float(rng.uniform(4.0, 7.0))
    wall = _tint(rng, (0.75, 0.72, 0.65))
    items = [
        Item(Plane((0, -1, 0), -floor), FLOOR, _tint(rng, (0.5, 0.35, 0.22)), 0.5),
        Item(Plane((0, 1, 0), top), CEILING, _tint(rng, (0.9, 0.9, 0.88), 0.03)),
        Item(Plane((1, 0, 0), left), WALL, wall),
        Item(Plane((-1, 0, 0), -right), WALL, wall),
        Item(Plane((0, 0, -1), -back), WALL, wall),
    ]
    items += _on_the_wall(rng, left, right, back)
    for place in rng.permutation(5)[: rng.integers(3, 6)]:
        x = left + (right - left) * (place + 0.5) / 5 + rng.uniform(-0.15, 0.15)
        items += _furniture(rng, float(x), float(rng.uniform(2.3, back - 0.7)), floor)
    return camera, items


def _on_the_wall(rng: np.random.Generator, left: float, right: float, back: float) -> list[Item]:
    kinds = ((PICTURE, (0.7, 0.25, 0.3)), (WINDOW, (0.65, 0.85, 0.97)), (TV, (0.06, 0.06, 0.08)))
    items = []
    for slot in rng.permutation(3)[: rng.integers(1, 4)]:
        label, colour = kinds[rng.integers(3)]
        x = left + (right - left) * (slot + 0.5) / 3
        half = (float(rng.uniform(0.3, 0.5)), float(rng.uniform(0.25, 0.4)), 0.03)
        items.append(
            Item(Box((float(x), float(rng.uniform(-0.6, -0.2)), back - 0.03), half), label, _tint(rng, colour))
        )
    return items


def _furniture(rng: np.random.Generator, x: float, z: float, floor: float) -> list[Item]:
    """One piece standing on the floor; its shape and colour tell its class."""
    yaw = float(rng.uniform(-0.6, 0.6))

    def block(label: int, colour: Colour, half: Colour, bottom: float = 0.0, dz: float = 0.0) -> Item:
        return Item(Box((x, floor - bottom - half[1], z + dz), half, yaw), label, _tint(rng, colour))

    kind = rng.integers(7)
    if kind == 0:
        return [block(BED, (0.35, 0.45, 0.8), (0.7, 0.25, 0.9))]
    if kind == 1:
        return [
            block(CHAIR, (0.85, 0.5, 0.1), (0.22, 0.22, 0.22)),
            block(CHAIR, (0.85, 0.5, 0.1), (0.22, 0.45, 0.04), 0.0, 0.2),
        ]
    if kind == 2:
        return [block(FURNITURE, (0.35, 0.2, 0.1), (0.4, float(rng.uniform(0.6, 1.0)), 0.25))]
    if kind == 3:
        return [
            block(SOFA, (0.5, 0.12, 0.18), (0.75, 0.22, 0.35)),
            block(SOFA, (0.5, 0.12, 0.18), (0.75, 0.42, 0.1), 0.0, 0.3),
        ]
    if kind == 4:
        table = block(TABLE, (0.85, 0.75, 0.5), (0.5, 0.3, 0.35))
        return [table, block(BOOKS, (0.15, 0.6, 0.35), (0.15, 0.1, 0.12), 0.6)]
    if kind == 5:
        radius = float(rng.uniform(0.2, 0.4))
        ball = Ellipsoid((x, floor - radius, z), (radius, radius, radius))
        return [Item(ball, OBJECTS, _tint(rng, (0.85, 0.2, 0.75)))]
    return [block(BOOKS, (0.15, 0.6, 0.35), (0.3, 0.35, 0.2))]


def street(height: int, width: int, rng: np.random.Generator) -> tuple[Camera, list[Item]]:
    """A street with CityScapes' 7 classes; the sky is where no ray hits anything."""
    camera = Camera(height, width, focal=1.1 * width, pitch=float(rng.uniform(-0.02, 0.06)))
    ground = float(rng.uniform(1.2, 1.5))
    items = [Item(Plane((0, -1, 0), -ground), FLAT, _tint(rng, (0.35, 0.33, 0.36), 0.04), 2.0)]
    for side in (-1, 1):
        items += _houses(rng, side, ground)
        items += _roadside(rng, side, ground)
    for _ in range(rng.integers(1, 4)):
        items += _car(rng, float(rng.uniform(-2.5, 2.5)), float(rng.uniform(7, 25)), ground)
    return camera, items


def _houses(rng: np.random.Generator, side: int, ground: float) -> list[Item]:
    items, z = [], float(rng.uniform(4, 9))
    while z < 60:
        depth, tall = float(rng.uniform(5, 10)), float(rng.uniform(3, 8))
        if rng.random() < 0.8:
            x = side * float(rng.uniform(8.5, 10.5))
            shape = Box((x, ground - tall, z + depth / 2), (3.0, tall, depth / 2 - 0.3))
            items.append(Item(shape, CONSTRUCTION, _tint(rng, (0.6, 0.45, 0.35), 0.12), 1.5))
        z += depth
    return items


def _roadside(rng: np.random.Generator, side: int, ground: float) -> list[Item]:
    items = []
    for z in np.arange(6, 40, 6) + rng.uniform(-2, 2, 6):
        x, kind = side * float(rng.uniform(3.6, 5.2)), rng.integers(4)
        z = float(z)
        if kind == 0:
            items.append(Item(Box((x, ground - 2, z), (0.08, 2.0, 0.08)), OBJECT, _tint(rng, (0.75, 0.75, 0.2))))
        elif kind == 1:
            crown = float(rng.uniform(0.9, 1.5))
            items.append(Item(Box((x, ground - 1, z), (0.12, 1.0, 0.12)), NATURE, (0.3, 0.2, 0.1)))
            shape = Ellipsoid((x, ground - 2 - crown, z), (crown, crown * 1.2, crown))
            items.append(Item(shape, NATURE, _tint(rng, (0.2, 0.5, 0.15))))
        elif kind == 2:
            shape = Ellipsoid((x, ground - 0.88, z), (0.28, 0.88, 0.28))
            items.append(Item(shape, HUMAN, _tint(rng, (0.85, 0.25, 0.3))))
    return items


def _car(rng: np.random.Generator, x: float, z: float, ground: float) -> list[Item]:
    colour = _tint(rng, (0.15, 0.25, 0.7), 0.1)
    return [
        Item(Box((x, ground - 0.5, z), (0.85, 0.45, 1.9)), VEHICLE, colour),
        Item(Box((x, ground - 1.15, z + 0.2), (0.7, 0.3, 1.0)), VEHICLE, colour),
    ]


CLASSES = {"nyuv2": 13, "cityscapes": 7}
"""Data set -> how many classes its scenes are drawn with."""

SCENES: dict[str, Callable[[int, int, np.random.Generator], tuple[Camera, list[Item]]]] = {
    "nyuv2": room,
    "cityscapes": street,
}
