"""Meetings of ranks: one warp per rank that says "I am here" to every peer and waits, within a bound, until every peer has said so.

A kernel of one warp (`Meeting`) stands on the stream between the kernels whose work it separates; a larger kernel may use `Protocol` in
its middle. Kernel order, or a barrier of the CTA, puts a rank's work before its `publish`, whose `st.release.sys` orders all of it:
causality is transitive. Whoever acquired the signal of every rank, and everything after it, sees what they did before theirs.

A rank has one signal word per *kind* of meeting and peer: `words[kind · world + peer]`, in memory that peers can store into. A word is
generation << 32 | signature, see `xstage.device.signals`. The generation is the number of the call; it lives in the control block, in
device memory, and the last meeting of a call advances it, so a replayed CUDA graph counts on. Kinds are numbered as they come in a call.

A wait that gave up, met another signature, or heard that a peer gave up, writes a status word: the host's (`xstage.symmetric.Watch`) and
the control block's FAILED, which every kernel reads before it stores anything; it is never cleared. A rank that failed publishes that it
gave up.

Not covered: meetings of some of the ranks, and calls of one object that overlap on a rank.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from xstage.device import signals
from xstage.device.kept import kept

# Words of the control block (local memory, int64), made by the host.
GENERATION, FAILED, CONTROL_WORDS = 0, 1, 2
# Words of a call's description (int64), made by the host. Addresses of every rank's signal words follow at PEERS.
SIGNATURE, RANK, TIMEOUT_NS, STATUS_ADDRESS, PEERS = 0, 1, 2, 3, 4


class Protocol:
    """What a meeting does with the signal words of a call; `world` ranks."""

    def __init__(self, world: int, control: cute.Tensor, call: cute.Tensor, words: cute.Tensor):
        self.world, self.control, self.call, self.words = world, control, call, words

    # Branches at run time carry `self` as an object without runtime values.
    def __extract_mlir_values__(self) -> list[Any]:
        return []

    def __new_from_mlir_values__(self, values: list[Any]) -> Protocol:
        return self

    @cute.jit
    def generation(self) -> Int32:
        return Int32(self.control[GENERATION]) + 1

    def failed_address(self) -> Int64:
        return self.control.iterator.toint() + 8 * FAILED

    @cute.jit
    def publish(self, kind: cutlass.Constexpr[int], peer: Int32, what: Int64) -> None:
        """Tell `peer` this call's generation and `what` it is about: the signature, or that this rank gave up."""
        slot = 8 * (Int64(kind * self.world) + self.call[RANK])
        word = (Int64(self.generation()) << 32) | what
        signals.store_release_sys(self.call[PEERS + peer] + slot, word)

    @cute.jit
    def wait(self, kind: cutlass.Constexpr[int], peer: Int32) -> Int32:
        """Wait for `peer`'s signal of this call. 1, and a status word, if it did not come, is about something else, or says that
        the peer gave up; 1 too if this rank has failed before.
        """
        generation, signature, failed = self.generation(), self.call[SIGNATURE], self.failed_address()
        address = self.words.iterator.toint() + 8 * (Int64(kind * self.world) + Int64(peer))
        word = signals.wait_for_generation(address, generation, failed, self.call[TIMEOUT_NS])
        late = Int32(word >> 32) - generation < 0
        # A peer that does not wait may be a call ahead; its signature then says nothing about this one. That it gave up does: it may
        # have done so in this call already.
        what = word & 0xFFFFFFFF
        other = ((Int32(word >> 32) == generation) & (what != signature)) | (what == signals.GAVE_UP)
        broken = signals.load_relaxed_gpu(failed) != 0
        refused = Int32(0)
        if late or other or broken:
            refused = Int32(1)
            reason = Int64(signals.MISMATCH)
            if what == signals.GAVE_UP:
                reason = Int64(signals.PEER_GAVE_UP)
            if late:
                reason = Int64(signals.TIMED_OUT)
            status = (Int64(generation) << 32) | (reason << 16) | (Int64(peer) << 8) | Int64(kind + 1)
            if signals.claim_gpu(failed, status) == 0:
                signals.store_relaxed_sys(self.call[STATUS_ADDRESS], status)
        return refused

    @cute.jit
    def say(self, kind: cutlass.Constexpr[int], peer: Int32) -> None:
        """Publish to `peer` that this rank has come; one thread per peer calls it, and `wait` afterwards."""
        # A rank that refused stored nothing: peers must not take its rows for complete.
        what = self.call[SIGNATURE]
        if signals.load_relaxed_gpu(self.failed_address()) != 0:
            what = Int64(signals.GAVE_UP)
        self.publish(kind, peer, what)


class Meeting:
    """One warp: publish `kind` to every rank, then wait for every rank's. The `last` meeting of a call advances the generation.

    With `ahead` it is launched while the kernel before it on the stream still runs (programmatic dependent launch), and waits for that
    kernel's end and for its stores, as kernel order would have it, before it does anything. The kernel behind it may do the same once
    every peer has come: CTAs that waited for a peer would hold SMs that the peer's own call may need to go on.
    """

    def __init__(self, world: int, kind: int, last: bool, ahead: bool = False):
        self.world, self.kind, self.last, self.ahead = world, kind, last, ahead

    @cute.jit
    def __call__(self, control: cute.Tensor, call: cute.Tensor, words: cute.Tensor, stream: cuda.CUstream) -> None:
        self.kernel(control, call, words).launch(grid=(1, 1, 1), block=[32, 1, 1], stream=stream, use_pdl=self.ahead)

    @cute.kernel
    def kernel(self, control: cute.Tensor, call: cute.Tensor, words: cute.Tensor):
        if const_expr(self.ahead):
            cute.arch.griddepcontrol_wait()
        protocol = Protocol(self.world, control, call, words)
        lane = cute.arch.thread_idx()[0]
        if lane < self.world:
            protocol.say(self.kind, lane)
            protocol.wait(self.kind, lane)
        cute.arch.sync_warp()
        if const_expr(self.ahead):
            cute.arch.griddepcontrol_launch_dependents()
        if const_expr(self.last):
            if lane == 0:
                control[GENERATION] = Int64(protocol.generation())


@kept
def compiled_meeting(world: int, kind: int, last: bool, ahead: bool = False) -> Any:
    """A meeting of `world` ranks; call it with (control, call, words), it runs on torch's current stream."""
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(Meeting(world, kind, last, ahead), *fake_words(3), stream, options="--enable-tvm-ffi")


def fake_words(count: int) -> list[Any]:
    """Stand-ins for `count` vectors of int64 of any length, to compile with."""
    return [cute.runtime.make_fake_tensor(Int64, (cute.sym_int(),), stride=(1,), assumed_align=8) for _ in range(count)]
