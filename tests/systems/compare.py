# SPDX-License-Identifier: Apache-2.0
"""
Prints how far the parameters of all ranks of a run are from the reference's: the largest |x - y| / max(|x|, rms of x).

    compare.py FOLDER
"""

import sys
from pathlib import Path

import torch


def difference(reference: dict[str, torch.Tensor], got: dict[str, torch.Tensor]) -> float:
    if reference.keys() != got.keys():
        raise SystemExit(f"other parameters: {sorted(reference.keys() ^ got.keys())[:4]}")
    worst = 0.0
    for name, x in reference.items():
        x, y = x.double(), got[name].double()
        scale = torch.maximum(x.abs(), x.square().mean().sqrt())
        # A tensor of zeros has no scale: there only zeros are right.
        error = (x - y).abs() / torch.where(scale > 0, scale, torch.finfo(torch.double).tiny)
        worst = max(worst, float(error.max()) if bool(torch.isfinite(y).all()) else float("inf"))
    return worst


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    reference = torch.load(folder / "reference.pt")
    ranks = sorted(folder.glob("rank*-params.pt"))
    print(max(difference(reference, torch.load(path)) for path in ranks))
