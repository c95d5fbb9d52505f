"""CityScapes: 7-class segmentation and disparity with SegNet-MTAN (Liu et al. 2019; 2975/500 images).

    python examples/cityscapes.py --data synthetic --smoke                  # seconds, on any machine
    python examples/cityscapes.py --data data/cityscapes --preset stl ls fairgrad fairgrad+cost --seeds 0 1 2
    python examples/cityscapes.py prepare --source cityscapes_official --out data/cityscapes

What the tables call depth is the inverse depth (disparity). ``--faithful`` scales it under the zoom augmentation as
the public scripts do, the wrong way round. Everything else is as in nyuv2.py.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from dense.engine.cli import Defaults
from dense.errors import run_main
from dense.main import add_dense_arguments, train
from dense.spec import cityscapes_spec

DEFAULTS = Defaults(epochs=200, lr=1e-4, batch_size=8, cost_start=50)
SYNTHETIC_SIZE = (64, 128)


def prepare(argv: list[str]) -> int:
    """Convert the official folders leftImg8bit, gtFine and disparity to MTAN's layout."""
    from dense.data.prepare_cityscapes import prepare_cityscapes

    parser = argparse.ArgumentParser("cityscapes.py prepare", description=prepare.__doc__)
    parser.add_argument("--source", type=Path, required=True, help="folder with leftImg8bit, gtFine and disparity")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    print(f"wrote {prepare_cityscapes(args.source, args.out)}")
    return 0


def main(argv: list[str] | None = None) -> int:
    """Entry point: ``prepare`` converts, anything else trains."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["prepare"]:
        return prepare(argv[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", type=int, choices=(2, 7, 19), default=7, help="label set (default 7)")
    add_dense_arguments(parser, DEFAULTS, SYNTHETIC_SIZE)
    args = parser.parse_args(argv)
    return train(args, cityscapes_spec(args.classes), DEFAULTS, SYNTHETIC_SIZE)


if __name__ == "__main__":
    run_main(main)
