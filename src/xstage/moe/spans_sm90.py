"""Marks of time from inside the MoE kernel: its roles write down when their steps began and ended. For measurement; compiled out else.

Four recorders per CTA: a thread of each math warpgroup, the loading warp, the sending warp. A record is `RECORD_WORDS` words for one
tile or one item: what it is, times, and its number, from 1. Times are `%globaltimer`, low half: all SMs of a GPU share it, so that CTAs
can be laid side by side without the calibration that cycle counters would need; a step of 32 ns averages out over thousands of tiles.

No register lives from one mark to the next: where the next record goes stands in shared memory (`STATE_WORDS`), and a mark is
straight-line code with one predicated store, so it may stand where matrix instructions are under way. A recorder that has filled its
records writes over one more, the spare behind them, and goes on counting: what was dropped is known.

Not covered: the warp that stores Linear-1's tiles; order between recorders beyond the clock's step.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from xstage.device import registers
from xstage.device.clock import now_ns_low
from xstage.device.stores import thread_anew
from xstage.moe.spans import NUMBER, RECORD_WORDS, ROLES

# Shared memory of a CTA, behind one word of another use: address of the next record per role, then records begun per role.
STATE_WORDS = 1 + 3 * len(ROLES)
_RECORD_BYTES = 4 * RECORD_WORDS
LOADS, SENDS = ROLES.index("loads"), ROLES.index("sends")
MATH = -1  # the role of the calling thread's math warpgroup


@cute.jit
def start(state: Int32, records: Int64, capacity: Int32, block: Int32) -> None:
    """One thread, before the others go on: no records yet. records: address; capacity: of a role, without the spare."""
    for role in cutlass.range_constexpr(len(ROLES)):
        at = records + Int64(block * len(ROLES) + role) * Int64((capacity + 1) * _RECORD_BYTES)
        registers.store_shared_32(state + 8 * role, Int32(at & 0xFFFFFFFF))
        registers.store_shared_32(state + 8 * role + 4, Int32(at >> 32))
        registers.store_shared_32(state + 8 * len(ROLES) + 4 * role, Int32(0))


def begin(state: Int32, role: int, what: Int32) -> None:
    """A record begins: `what` it is of, and the time. Like all marks, called by every thread of the role; one of them writes."""
    _write(state, role, "@lead st.global.v2.b32 [record], {{$r3}, {$r1}};", what)


def mark(state: Int32, role: int, field: int) -> None:
    """The time as word `field` of the record."""
    _write(state, role, f"@lead st.global.b32 [record+{4 * field}], {{$r1}};")


def close(state: Int32, role: int, field: int, capacity: Int32) -> None:
    """The time as word `field`, the record's number, and on to the next."""
    counts = 8 * len(ROLES)
    _write(
        state, role,
        f"""@lead st.global.b32 [record+{4 * field}], {{$r1}};
        mad.lo.u32 slot, role, 4, {{$r0}};
        ld.volatile.shared.b32 number, [slot+{counts}];
        add.u32 number, number, 1;
        @lead st.global.b32 [record+{4 * NUMBER}], number;
        @lead st.volatile.shared.b32 [slot+{counts}], number;
        setp.le.and.u32 more, number, {{$r3}}, lead;
        add.u64 record, record, {_RECORD_BYTES};
        mad.lo.u32 slot, role, 8, {{$r0}};
        @more st.volatile.shared.b64 [slot], record;""",
        capacity,
    )  # fmt: skip


def _write(state: Int32, role: int, body: str, *given: Int32) -> None:
    """`body` with the time, the address of the role's next record, and who leads. All of it from special registers and shared memory."""
    who = "shr.u32 role, {$r2}, 7; and.b32 lane, {$r2}, 127;" if role == MATH else f"mov.u32 role, {role}; and.b32 lane, {{$r2}}, 31;"
    cute.arch.inline_ptx(
        f"""{{ .reg .b32 lane, role, slot, number; .reg .b64 record; .reg .pred lead, more;
        {who}
        setp.eq.u32 lead, lane, 0;
        mad.lo.u32 slot, role, 8, {{$r0}};
        ld.volatile.shared.b64 record, [slot];
        {body} }}""",
        read_only_args=[state, now_ns_low(), thread_anew(), *given],
    )
