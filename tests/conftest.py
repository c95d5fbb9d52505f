"""One thread: the suite runs in parallel processes, and sums do not depend on how they are split."""

import pytest
import torch

torch.set_num_threads(1)  # here, since fixtures of a whole module run before those of a single test


@pytest.fixture(autouse=True)
def _one_thread_and_a_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)
