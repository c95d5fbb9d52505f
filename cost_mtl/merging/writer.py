"""Writing a safetensors file one tensor at a time.

The library's ``save_file`` wants all tensors of a file at once; a merge of a model in one file would then hold the
whole model. The format (huggingface.co/docs/safetensors) is a JSON header and the bytes of the tensors, end to end.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from cost_mtl.merging.source import TensorInfo

__all__ = ["CODES", "write_safetensors"]

CODES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The format's names of the dtypes."""

_CODE_OF = {dtype: code for code, dtype in CODES.items()}


def write_safetensors(
    path: Path, infos: Mapping[str, TensorInfo], read: Callable[[str], Tensor], metadata: Mapping[str, str]
) -> int:
    """Writes a file; one tensor is in memory at a time.

    Args:
        path: where to; not atomic by itself.
        infos: key -> shape and dtype, all known before the first tensor is.
        read: key -> tensor of that shape and dtype.
        metadata: the header's free-form part.

    Returns:
        Bytes of the tensors.

    Raises:
        ValueError: a dtype that the format lacks, or a tensor that is not as ``infos`` says.
    """
    # Wide dtypes first, so that each tensor starts at a multiple of its element size.
    order = sorted(infos, key=lambda key: -infos[key].dtype.itemsize)
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for key in order:
        info = infos[key]
        if info.dtype not in _CODE_OF:
            raise ValueError(f"{key!r}: expected a dtype that safetensors files can hold, got {info.dtype}")
        start, end = end, end + info.nbytes
        header[key] = {"dtype": _CODE_OF[info.dtype], "shape": list(info.shape), "data_offsets": [start, end]}
    encoded = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)))
        file.write(encoded)
        for key in order:
            tensor = read(key)
            if TensorInfo(tuple(tensor.shape), tensor.dtype) != infos[key]:
                raise ValueError(f"{key!r}: expected {infos[key]}, got {list(tensor.shape)} in {tensor.dtype}")
            file.write(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return end
