"""A reader of traces made from docs/traces.md alone: nothing of ours, no safetensors."""

import json
import struct

import numpy as np

NUMPY = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "I32": np.int32, "I64": np.int64}


def read_by_the_page(path):
    """The trace's JSON, and its tensors as arrays."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    trace = json.loads(header.pop("__metadata__")["boundedkv_trace"])
    arrays = {}
    for name, tensor in header.items():
        start, stop = (8 + length + offset for offset in tensor["data_offsets"])
        arrays[name] = np.frombuffer(data[start:stop], NUMPY[tensor["dtype"]]).reshape(tensor["shape"])
    return trace, arrays
