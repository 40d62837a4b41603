"""Strategies for tensors of every kind that a model may produce: type, shape, layout and special values."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
COMPLEX = (torch.complex64, torch.complex128)
DTYPES = (*FLOATS, *INTEGERS, torch.bool, *COMPLEX)

# The largest float64 here. Squares of larger ones exceed the range of float64, which the moments do not support.
HUGE = 1e150


def _floats(dtype: torch.dtype) -> st.SearchStrategy[float]:
    info = torch.finfo(dtype)
    largest = min(info.max, HUGE)
    special = [0.0, -0.0, 1.0, -1.0, float("inf"), -float("inf"), float("nan"), largest, -largest]
    special += [info.tiny, -info.tiny, info.smallest_normal / 2, info.eps, 1 + info.eps, 10000.001]
    if dtype == torch.float64:
        special += [1e39, -1e39, 1e-46, 5e-324, 2.0**128, 1 - 2.0**-53, 3.4028235677973366e38]
    width = {torch.float16: 16, torch.float64: 64}.get(dtype, 32)
    plain = st.floats(min_value=-largest, max_value=largest, width=width)  # type: ignore[arg-type]  # one of 16, 32, 64
    return st.one_of(st.sampled_from(special), plain, st.floats(-2, 2, width=16))


def _elements(dtype: torch.dtype) -> st.SearchStrategy[complex]:
    if dtype == torch.bool:
        return st.booleans()
    if dtype in INTEGERS:
        info = torch.iinfo(dtype)
        return st.integers(info.min, info.max)
    if dtype.is_complex:
        part = _floats(dtype.to_real())
        return st.builds(complex, part, part)
    return _floats(dtype)


@st.composite
def tensors(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...] = DTYPES) -> Tensor:
    """Draw a tensor of up to three dimensions, including empty and 0-d ones, with one of several memory layouts."""
    dtype = draw(st.sampled_from(dtypes))
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 5, 0]), max_size=3))
    numel = torch.Size(shape).numel()
    elements = draw(st.lists(_elements(dtype), min_size=numel, max_size=numel))
    tensor = torch.tensor(elements, dtype=dtype).reshape(shape)
    match draw(st.sampled_from(["contiguous", "transposed", "strided", "expanded", "offset"])):
        case "transposed":
            return tensor.permute(list(reversed(range(tensor.dim()))))
        case "strided":
            return torch.stack((tensor, tensor), dim=-1)[..., 0]
        case "expanded":
            return tensor.expand(3, *shape)
        case "offset":
            return torch.stack((tensor, tensor))[1]
    return tensor


streams = st.lists(tensors(), max_size=4)
"""Strategy for a sequence of tensors of any types and shapes."""
