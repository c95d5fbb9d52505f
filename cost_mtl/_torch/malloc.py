"""One hint to the C library's allocator, for training on the CPU."""

from __future__ import annotations

import torch

_CAP = 32 * 1024 * 1024
"""glibc's DEFAULT_MMAP_THRESHOLD_MAX on 64-bit machines."""


def keep_freed_memory() -> None:
    """Let glibc keep freed memory for the next gradient instead of giving it back to the system page by page.

    glibc returns a freed block at the top of its heap once it is twice as large as the largest block freed so far, at
    most 64 MiB. The K backward passes free each gradient as soon as it is in its row of G, so in an unlucky layout of
    the heap every one of them is given back, asked for again and filled with zeros: measured, a quarter of the time of
    a step of a 10 M-parameter convolutional trunk. Freeing one block of just under the cap raises the limit for good.
    The block is never touched and costs nothing; other C libraries, and a limit set by the user
    (``MALLOC_TRIM_THRESHOLD_``), are not affected.
    """
    torch.empty(_CAP - 65536, dtype=torch.uint8)
