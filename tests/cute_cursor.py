"""A kernel of a few lines that walks a tile order with the shared cursor steps; compiled by test_tile_order."""

import cutlass
from cutlass import Int32, cute
from cutlass.cute.runtime import make_fake_compact_tensor

from xstage import tile_order as to

PAIRS1, PAIRS2 = 3, 4


@cute.kernel
def walk(need: cute.Tensor, out: cute.Tensor, end1: Int32, end2: Int32, stride: Int32):
    index, _, _ = cute.arch.block_idx()
    k1 = Int32(index)
    k2 = Int32(index)
    n = Int32(0)
    while k1 < end1 or k2 < end2:
        need_row = Int32(0)
        if k2 < end2:
            need_row = need[to.tile_row(k2, PAIRS2)]
        if to.takes_linear2(k1, k2, end1, end2, PAIRS1, need_row, to.NO_LAG):
            out[n] = -k2
            k2 += stride
        else:
            out[n] = k1
            k1 += stride
        n += 1


@cute.jit
def launch(need: cute.Tensor, out: cute.Tensor, end1: Int32, end2: Int32, stride: Int32):
    walk(need, out, end1, end2, stride).launch(grid=[4, 1, 1], block=[1, 1, 1])


def compile_cursor():
    need, out = (make_fake_compact_tensor(cutlass.Int32, (64,)) for _ in range(2))
    return cute.compile(launch, need, out, Int32(4 * PAIRS1), Int32(4 * PAIRS2), Int32(4))
