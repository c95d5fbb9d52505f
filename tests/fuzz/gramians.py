"""Random task gradients of every difficult kind, and their Gramian with rounding errors of a known size."""

from dataclasses import dataclass

import numpy as np

KINDS = (
    "plain",
    "conflicting",
    "deficient",
    "proportional",
    "opposed",
    "duplicates",
    "vanishing sum",
    "near stationary",
)


@dataclass(frozen=True)
class Case:
    """Gradients G [K, m] (float64, taken as exact), and what a solver is shown: M [K, K] and the size of its errors."""

    name: str
    G: np.ndarray
    M: np.ndarray
    noise: float

    @property
    def shown_noise(self):
        """What is left of the digits: a negative eigenvalue of the cosines tells of more errors than was said."""
        norms = np.sqrt(self.M.diagonal())
        C = self.M[np.ix_(norms > 0, norms > 0)] / np.outer(norms[norms > 0], norms[norms > 0])
        return max(self.noise, -1.01 * float(np.linalg.eigvalsh(C)[0]))


def case(seed):
    """The Gramian number ``seed``: the same for ever."""
    random = np.random.default_rng([2026, seed])
    K = int(random.choice((2, 2, 3, 3, 4, 6, 8, 11, 20, 40, 64)))
    kind = KINDS[seed % len(KINDS)]
    G = _gradients(kind, K, random)
    spread = float(random.choice((0, 0, 1, 3, 6)))
    G = G * 10 ** (spread * random.uniform(-1, 1, (K, 1)))
    absent = K > 2 and random.random() < 0.25
    if absent:
        G[random.integers(K, size=max(1, K // 5))] = 0
    noise = 10 ** random.uniform(-9, np.log10(3e-7))
    name = f"{seed}: {kind}, K = {K}, norms over 1e±{spread:g}, {'zeros, ' if absent else ''}noise {noise:.0e}"
    return Case(name, G, _rounded(G, noise, random), noise)


def _gradients(kind, K, random):
    G = random.standard_normal((K, int(random.choice((K + 1, 2 * K + 5)))))
    if kind == "conflicting":
        G = G - random.uniform(0.5, 0.99) * G.mean(axis=0)
    elif kind == "deficient":
        rank = int(random.integers(1, K)) if K > 2 else 1
        G = random.standard_normal((K, rank)) @ random.standard_normal((rank, G.shape[1]))
    elif kind == "proportional":
        G = random.uniform(0.1, 10, (K, 1)) * G[:1] * (1 if random.random() < 0.5 else random.choice((-1, 1), (K, 1)))
    elif kind == "opposed":
        G[1] = -random.uniform(0.1, 10) * G[0]
    elif kind == "duplicates":
        G[1::2] = G[0 : K - K % 2 : 2]
    elif kind == "vanishing sum":
        G[-1] = -G[:-1].sum(axis=0)
    elif kind == "near stationary":
        distance = 10 ** random.uniform(-7, -1)
        G[-1] = -random.dirichlet(np.ones(K - 1)) @ G[:-1] + distance * G[-1]
    return G


def _rounded(G, noise, random):
    exact = (G.astype(np.longdouble) @ G.astype(np.longdouble).T).astype(np.float64)
    norms = np.sqrt(exact.diagonal())
    errors = random.uniform(-1, 1, exact.shape)
    return (
        exact + noise * np.triu(errors) * np.outer(norms, norms) + noise * np.triu(errors, 1).T * np.outer(norms, norms)
    )
