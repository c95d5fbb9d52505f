"""Gramians and weightings that the tests of this folder share."""

import math

import numpy as np
import torch

from benchmarks.weightings import gradients
from cost_mtl.weighting import IMTLG, MGDA, CAGrad, EqualWeighting, FairGrad, NashMTL

SOLVABLE = [name for name in gradients(2) if name != "Pareto-stationary"]
TASKS = (2, 3, 11, 40, 100)

# Everything that maps a Gramian of any K to non-negative weights.
NON_NEGATIVE = {
    "equal": EqualWeighting(),
    "fairgrad 2": FairGrad(),
    "fairgrad 1/2": FairGrad(0.5),
    "fairgrad 5": FairGrad(5.0),
    "fairgrad 0": FairGrad(0),
    "max-min": FairGrad(math.inf),
    "official fairgrad": FairGrad.official(),
    "nash": NashMTL(),
    "nash, sum": NashMTL(scale="sum"),
    "official nash": NashMTL.official(),
    "cagrad": CAGrad(),
    "cagrad 0": CAGrad(0.0),
    "cagrad 2": CAGrad(2.0, rescale=2),
    "libmtl cagrad": CAGrad.libmtl(),
    "mgda": MGDA(),
}
WEIGHTINGS = NON_NEGATIVE | {"imtl-g": IMTLG()}
SOLVING = {name: w for name, w in WEIGHTINGS.items() if name != "equal"}


def gramian(G, dtype=torch.float64):
    return torch.from_numpy(G @ G.T).to(dtype)


def random_gradients(K, seed=0, m=None):
    return np.random.default_rng(seed).standard_normal((K, m or 2 * K + 5))


def residual(M, w, alpha):
    """max_i |w_i^(1/alpha) (M w)_i - 1|, in float64."""
    M, w = M.double().numpy(), w.double().numpy()
    return float(np.abs(w ** (1 / alpha) * (M @ w) - 1).max())
