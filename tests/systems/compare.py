# SPDX-License-Identifier: Apache-2.0
"""
Prints how far the parameters of all ranks of a run are from the reference's: the largest |x - y| / max(|x|, rms of x).

    compare.py FOLDER

Tensors that rounding alone moves further than the tolerance, see Run.reference(), are held to ten times what it does
to them, and do not count in the figure; a tensor beyond that makes it infinite.
"""

import sys
from pathlib import Path

import torch

TOLERANCE = 5e-6


def relative(x: torch.Tensor, y: torch.Tensor) -> float:
    x, y = x.double(), y.double()
    if not bool(torch.isfinite(y).all()):
        return float("inf")
    scale = torch.maximum(x.abs(), x.square().mean().sqrt())
    # A tensor of zeros has no scale. Only zeros are equal to it.
    return float(((x - y).abs() / torch.where(scale > 0, scale, torch.finfo(torch.double).tiny)).max())


def difference(folder: Path) -> float:
    reference, perturbed = torch.load(folder / "reference.pt"), torch.load(folder / "reference-perturbed.pt")
    rounding = {name: relative(x, perturbed[name]) for name, x in reference.items()}
    worst = 0.0
    for path in sorted(folder.glob("rank*-params.pt")):
        got = torch.load(path)
        if reference.keys() != got.keys():
            raise SystemExit(f"{path.name}: other parameters: {sorted(reference.keys() ^ got.keys())[:4]}")
        for name, x in reference.items():
            error = relative(x, got[name])
            if rounding[name] <= TOLERANCE:
                worst = max(worst, error)
            elif error > 10 * rounding[name]:
                worst = float("inf")
    return worst


if __name__ == "__main__":
    print(difference(Path(sys.argv[1])))
