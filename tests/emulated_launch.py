"""What host code needs to launch on emulated ranks: tensors in emulated memory, and `compiled_…` whose kernels say what they were called
with instead of running.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import machine_code
import torch
from emulated_memory import Memory
from ptx_interpreter import Kernel, translate


class Array:
    """A tensor in emulated memory, as far as host code looks at one."""

    def __init__(
        self, memory: Memory, shape: tuple[int, ...], dtype: torch.dtype, address: int | None = None, strides: tuple[int, ...] = ()
    ):  # fmt: skip
        self.memory, self.shape, self.dtype, self._strides = memory, shape, dtype, strides
        self.address = memory.allocate(max(torch.Size(shape).numel() * dtype.itemsize, 16)) if address is None else address

    @classmethod
    def of(cls, memory: Memory, tensor: torch.Tensor) -> Array:
        array = cls(memory, tuple(tensor.shape), tensor.dtype)
        if tensor.numel():
            memory.put(tensor, array.address)
        return array

    @classmethod
    def view(cls, memory: Memory, tensor: torch.Tensor, storage: int) -> Array:
        """A tensor with its strides, whose whole storage lies at address `storage`."""
        address = storage + tensor.storage_offset() * tensor.element_size()
        return cls(memory, tuple(tensor.shape), tensor.dtype, address, tensor.stride())

    def data_ptr(self) -> int:
        return self.address

    def stride(self, dimension: int) -> int:
        return self._strides[dimension]

    def element_size(self) -> int:
        return self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def value(self) -> torch.Tensor:
        return self.memory.get(self.address, self.shape, self.dtype)


@cache
def translated(kernel: Any) -> Kernel:
    return translate(machine_code.content(kernel.__ptx__).decode())


def emulated(compiled: Any) -> Any:
    """`compiled_…` whose kernels say what they were called with instead of running."""

    def made(*options: Any) -> Any:
        kernel = translated(compiled(*options))
        return lambda *arguments: (kernel, arguments)

    return made


def addresses(arguments: tuple[Any, ...]) -> list[int]:
    """Arguments of a launch as a grid takes them."""
    return [argument.address if isinstance(argument, Array) else argument for argument in arguments]
