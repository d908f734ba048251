"""Clocks read in place: both are volatile, so that stores before and after stay on their side."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32, Int64


@cute.jit
def ticks() -> Int64:
    """`%clock64`: cycles of this multiprocessor. Only differences on one SM mean anything; the rate must be measured."""
    return cute.arch.clock64()


@cute.jit
def now_ns() -> Int64:
    """`%globaltimer`: nanoseconds common to all SMs of a GPU; steps by 32 ns on the GPUs measured so far."""
    return cute.arch.globaltimer()


@cute.jit
def now_ns_low() -> Int32:
    """The low half of `now_ns`, in one register; differences up to 2 s come out right."""
    return cute.arch.globaltimer_lo()


@cute.jit
def sleep_ns(duration: Int32) -> None:
    """Leave the SM's issue slots to other warps for about `duration` nanoseconds, at most 2 · duration."""
    cute.arch.inline_ptx("nanosleep.u32 {$r0};", read_only_args=[duration])


@cute.jit
def spin_until_ns(deadline: Int64) -> Int64:
    """Return once `%globaltimer` reaches `deadline`, with the time read last."""
    now = now_ns()
    while now < deadline:
        now = now_ns()
    return now
