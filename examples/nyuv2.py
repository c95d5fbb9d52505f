"""NYUv2: 13-class segmentation, depth and surface normals with SegNet-MTAN (Liu et al. 2019; 795/654 images).

    python examples/nyuv2.py --data synthetic --smoke                       # seconds, on any machine
    python examples/nyuv2.py --data data/nyuv2 --preset stl ls fairgrad fairgrad+cost --seeds 0 1 2
    python examples/nyuv2.py prepare --mat nyu_depth_v2_labeled.mat --splits splits.mat \\
        --classes classMapping40.mat --out data/nyuv2

The first run of a command trains; the same command again goes on from its checkpoints. Results are the mean over the
last ten epochs on the validation set, as in the papers; ``--out`` gets table.md, table.csv, metrics.png and panels.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from dense.engine.cli import Defaults
from dense.errors import run_main
from dense.main import add_dense_arguments, train
from dense.spec import NYUV2

DEFAULTS = Defaults(epochs=200, lr=1e-4, batch_size=2, cost_start=50)
SYNTHETIC_SIZE = (96, 128)


def prepare(argv: list[str]) -> int:
    """Convert the labelled data set to MTAN's layout."""
    from dense.data.prepare_nyuv2 import NyuSources, prepare_nyuv2

    parser = argparse.ArgumentParser("nyuv2.py prepare", description=prepare.__doc__)
    parser.add_argument("--mat", type=Path, required=True, help="nyu_depth_v2_labeled.mat")
    parser.add_argument("--splits", type=Path, required=True, help="splits.mat: the official 795/654 images")
    parser.add_argument("--classes", type=Path, required=True, help="classMapping40.mat: 894 names to 40 classes")
    parser.add_argument("--normals", type=Path, default=None, help="folder with {1..1449}.npy; default: from the depth")
    parser.add_argument(
        "--depth", choices=("raw", "filled"), default="raw", help="the sensor's holes stay, or inpainted"
    )
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    sources = NyuSources(args.mat, args.splits, args.classes, args.normals, args.depth)
    print(f"wrote {prepare_nyuv2(sources, args.out)}")
    return 0


def main(argv: list[str] | None = None) -> int:
    """Entry point: ``prepare`` converts, anything else trains."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["prepare"]:
        return prepare(argv[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_dense_arguments(parser, DEFAULTS, SYNTHETIC_SIZE)
    return train(parser.parse_args(argv), NYUV2, DEFAULTS, SYNTHETIC_SIZE)


if __name__ == "__main__":
    run_main(main)
