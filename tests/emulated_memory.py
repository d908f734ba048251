"""Device memory of emulated ranks: bytes at addresses, poisoned until somebody writes, and refused where nobody allocated."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

import torch

POISON = 0xA5


class AccessError(Exception):
    """An access outside the allocations, or not aligned to its size."""


class Memory:
    """`size` bytes from address `base` on; only what was allocated may be touched."""

    def __init__(self, size: int, base: int = 1 << 40):
        self.base = base
        self._bytes = bytearray([POISON]) * size
        self._starts: list[int] = []
        self._ends: list[int] = []

    def allocate(self, size: int, fill: int = POISON) -> int:
        """Address of `size` bytes, aligned to 128, with a gap behind them."""
        start = -(-(self._ends[-1] + 128) // 128) * 128 if self._ends else self.base
        if start + size > self.base + len(self._bytes):
            raise MemoryError(f"{size} bytes do not fit into {len(self._bytes)}")
        self._starts.append(start)
        self._ends.append(start + size)
        self._bytes[start - self.base : start - self.base + size] = bytes([fill]) * size
        return start

    def put(self, tensor: torch.Tensor, address: int | None = None) -> int:
        """Copy a tensor to `address`, or to memory of its own; returns where."""
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        if address is None:
            address = self.allocate(len(raw))
        at = self._offset(address, len(raw), 1)
        self._bytes[at : at + len(raw)] = raw
        return address

    def get(self, address: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A copy of what lies there."""
        size = math.prod(shape) * dtype.itemsize
        at = self._offset(address, size, 1)
        return torch.frombuffer(bytearray(self._bytes[at : at + size]) or bytearray(8), dtype=dtype)[: math.prod(shape)].view(*shape)

    def load(self, address: int, size: int) -> int:
        at = self._offset(address, size, size)
        return int.from_bytes(self._bytes[at : at + size], "little")

    def store(self, address: int, size: int, value: int) -> None:
        at = self._offset(address, size, size)
        self._bytes[at : at + size] = value.to_bytes(size, "little")

    def load_vector(self, address: int, size: int, count: int) -> list[int]:
        self._offset(address, size * count, size * count)
        return [self.load(address + i * size, size) for i in range(count)]

    def store_vector(self, address: int, size: int, values: Sequence[int]) -> None:
        self._offset(address, size * len(values), size * len(values))
        for i, value in enumerate(values):
            self.store(address + i * size, size, value)

    def add(self, address: int, size: int, value: int) -> None:
        self.store(address, size, (self.load(address, size) + value) % (1 << 8 * size))

    def compare_and_swap(self, address: int, size: int, expected: int, value: int) -> int:
        before = self.load(address, size)
        if before == expected:
            self.store(address, size, value)
        return before

    def _offset(self, address: int, size: int, alignment: int) -> int:
        i = bisect_right(self._starts, address) - 1
        if i < 0 or address + size > self._ends[i] or address % alignment:
            raise AccessError(f"{size} bytes at {address:#x}: outside what was allocated, or not aligned")
        return address - self.base
