"""Every byte of the symmetric buffer of one expert-parallel rank: the one definition for sizing, kernels, reference and tests.

Expert e lives on rank e // (experts / ranks). A *row* is one (token, pick) pair at its expert. The rows of a rank's experts lie one
expert after another, each expert's rows padded up to the tile, and within an expert by source rank, then token, then pick. From the
counts of all ranks everybody derives the same place of every row (`xstage.moe.routing`), so a sender stores without asking.

Regions, in order; each starts at a multiple of 128 bytes, each row at a multiple of 16:

* `signals`, int64 [meetings · ranks]: word kind · ranks + r is stored by rank r when it comes to that meeting (`xstage.device.meeting`).
* `counts`, int32 [ranks, experts]: row r is stored by rank r, its rows per expert.
* `sources`, 4 × int32 per row: source rank, token, pick, and the bits of the float32 routing weight. One 16-byte store.
* `activations`: the row, `hidden` elements.
* `activation_scales`, float32 per 128 columns of the row (fp8 only), row-major, so that a row's scales are one contiguous store.
* Instead of the last three, where rows arrive ready for the GEMMs (`direct`): `arrived`, int32 per tile: rows that have come;
  `row_weight`, float32, and `row_slot`, int64 per row: routing weight, and the address (as this rank sees it) of the slot where the
  result goes; `spare`, `SPARE_TILES` tiles of rows; `activations`; `scales`, float32 [hidden / 128, rows], as the GEMM reads them. What
  Linear-1 makes of a row lies where `SPARE_TILES` tiles before it a row was that Linear-1 has done with, or in `spare` (`middle`).
* With `once` besides, where a row crosses to a rank once for all its picks there (`once_sm90`): `sources` again; `inbox`, `inbox_scales`,
  row and row-major scales of rank r's token t at r · max tokens + t; `inbox_call`, int32 for each: the call that it came in.
* `staged`, `staged_scales`, with `pull` only: this rank's own rows in e4m3 and their scales, per token, for peers to read.
* `combine` [max tokens, top_k, hidden]: results come back to the token's own pick. Slots of masked picks are never written or read.

The number of rows is the most that any routing can bring to a rank, P = ranks · max tokens · top_k pairs on n = min(P, experts / ranks)
experts: ⌊(P + n · (tile − 1)) / tile⌋ tiles. Picks need not be distinct for it to hold. It grows with every argument; with more ranks
at the same number of experts per rank, and with the tile from one multiple to the next.

Not covered: rings or pools smaller than the worst case, a second buffer for the next call.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from xstage.errors import XStageError

ALIGNMENT = 128
ROW_ALIGNMENT = 16
SCALE_COLUMNS = 128
SOURCE_WORDS = 4
# Limits of the kernels, and the tokens that they count together.
MAX_RANKS, MAX_PICKS, MAX_EXPERTS = 32, 32, 1024
CHUNK_TOKENS = 128
SPARE_TILES = 64  # about four rounds of the machine in Linear-1
ITEM_PAIRS = 16  # that one warp sends at a time: their scales then are runs of 64 bytes
SLOT_BYTES, MOST_SLOTS = 16 * 1024, 16  # of a sending warp's shared memory; of a row, that travel at a time
NEAR_TILES = 32  # of a rank's first rows, which go there per pick even where rows go once: one to four rounds of the machine
AHEAD = 6  # rounds of Linear-1 tiles that a sending warp may be ahead
# Meetings of a call, in order: counts are known, rows have arrived, results have arrived.
MEETINGS = ("counted", "dispatched", "combined")
COUNTED, DISPATCHED, COMBINED = range(len(MEETINGS))
# What a wait can be for: peers, the first layer of the same GPU, rows that a peer sends while the GEMMs run.
PHASES = (*MEETINGS, "linear1", "arrived")
LINEAR1, ARRIVED = len(MEETINGS), len(MEETINGS) + 1
# Element of activations, element of combine slots. float64 is for the reference.
ELEMENTS = {"fp8": ("float8_e4m3fn", "bfloat16"), "bf16": ("bfloat16", "bfloat16"), "float64": ("float64", "float64")}
ITEM_BYTES = {"int64": 8, "int32": 4, "float32": 4, "float8_e4m3fn": 1, "bfloat16": 2, "float64": 8}


def piece_bytes(hidden: int, slot_bytes: int = SLOT_BYTES) -> int:
    """Bytes of an fp8 row that a sending warp moves at a time: a quarter of its memory at most."""
    return max(size for size in range(512, slot_bytes // 4 + 1, 512) if hidden % size == 0)


def slots_of(piece: int, slot_bytes: int = SLOT_BYTES) -> int:
    """Pieces that a sending warp has under way together."""
    return min(slot_bytes // piece, MOST_SLOTS)


def padded_rows(pairs: int, experts: int, tile: int) -> int:
    """The most rows that `pairs` pairs can take on `experts` experts, each expert padded to `tile`."""
    return (pairs + min(pairs, experts) * (tile - 1)) // tile * tile


@dataclass(frozen=True)
class Region:
    """`rows` rows of `columns` elements, `row_bytes` apart, from `offset_bytes`. dtype: torch's name of the element."""

    name: str
    offset_bytes: int
    rows: int
    columns: int
    dtype: str
    row_bytes: int

    @property
    def size_bytes(self) -> int:
        return self.rows * self.row_bytes


@dataclass(frozen=True)
class BufferLayout:
    """Where everything is.

    Attributes:
        ranks, experts (over all ranks), hidden, top_k, max_tokens_per_rank. tile: rows that an expert's rows are padded to.
        precision: `fp8`, `bf16` or `float64`, what travels to the experts; results travel as bfloat16 (float64).
        direct: rows arrive ready for the GEMMs, while they run (fp8 only). once: a row goes to a rank once for all its picks there, and
            that rank makes the copies (direct only). pull: experts' ranks read rows instead of being sent them (fp8, not direct): another
            way to do the same, for measurement. near_tiles: of a rank's first rows, which go there per pick, whatever `once` says.

    Raises:
        XStageError: a number outside its range, or one that does not divide another.
    """

    ranks: int
    experts: int
    hidden: int
    top_k: int
    max_tokens_per_rank: int
    tile: int = 128
    precision: str = "fp8"
    direct: bool = False
    once: bool = False
    pull: bool = False
    near_tiles: int = field(default_factory=lambda: NEAR_TILES)

    def __post_init__(self) -> None:
        for name in ("ranks", "experts", "hidden", "top_k", "max_tokens_per_rank", "tile"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise XStageError(f"{name}: {value!r} must be a whole number of at least 1")
        if self.precision not in ELEMENTS:
            raise XStageError(f"precision: {self.precision!r} is not one of {', '.join(ELEMENTS)}")
        if (self.direct or self.pull) and self.precision != "fp8":
            raise XStageError(f"{'direct' if self.direct else 'pull'}: needs precision 'fp8', not {self.precision!r}")
        if self.direct and self.pull:
            raise XStageError("pull: does not go with direct")
        if self.once and not self.direct:
            raise XStageError("once: goes with direct only")
        if self.experts % self.ranks:
            raise XStageError(f"experts: {self.experts} must be a multiple of the number of ranks, {self.ranks}")
        if self.top_k > self.experts:
            raise XStageError(f"top_k: {self.top_k} must lie in 1 … {self.experts}, the number of experts")
        if self.hidden % SCALE_COLUMNS:
            raise XStageError(f"hidden: {self.hidden} must be a multiple of {SCALE_COLUMNS}")
        if self.rows >= 1 << 31:
            raise XStageError(f"max_tokens_per_rank: {self.max_tokens_per_rank} makes {self.rows} rows; the limit is {(1 << 31) - 1}")

    @property
    def experts_per_rank(self) -> int:
        return self.experts // self.ranks

    @property
    def rows(self) -> int:
        """Rows of the worst routing, paddings included."""
        return padded_rows(self.ranks * self.max_tokens_per_rank * self.top_k, self.experts_per_rank, self.tile)

    @cached_property
    def regions(self) -> tuple[Region, ...]:
        element, result = ELEMENTS[self.precision]
        blocks = self.hidden // SCALE_COLUMNS
        wanted = [("signals", 1, len(MEETINGS) * self.ranks, "int64"), ("counts", self.ranks, self.experts, "int32")]
        if self.direct:
            wanted += [
                ("arrived", 1, self.rows // self.tile, "int32"), ("row_weight", 1, self.rows, "float32"),
                ("row_slot", 1, self.rows, "int64"), ("spare", SPARE_TILES * self.tile, self.hidden, element),
                ("activations", self.rows, self.hidden, element),
                ("scales", blocks, self.rows, "float32"),
            ]  # fmt: skip
            if self.once:
                inbox = self.ranks * self.max_tokens_per_rank
                wanted += [
                    ("sources", self.rows, SOURCE_WORDS, "int32"), ("inbox", inbox, self.hidden, element),
                    ("inbox_scales", inbox, blocks, "float32"), ("inbox_call", 1, inbox, "int32"),
                ]  # fmt: skip
        else:
            wanted += [("sources", self.rows, SOURCE_WORDS, "int32"), ("activations", self.rows, self.hidden, element)]
            if self.precision == "fp8":
                wanted.append(("activation_scales", self.rows, blocks, "float32"))
        if self.pull:
            wanted += [
                ("staged", self.max_tokens_per_rank, self.hidden, element),
                ("staged_scales", self.max_tokens_per_rank, blocks, "float32"),
            ]
        wanted.append(("combine", self.max_tokens_per_rank * self.top_k, self.hidden, result))
        regions, offset = [], 0
        for name, rows, columns, dtype in wanted:
            region = Region(name, offset, rows, columns, dtype, _up(columns * ITEM_BYTES[dtype], ROW_ALIGNMENT))
            regions.append(region)
            offset = _up(offset + region.size_bytes, ALIGNMENT)
        return tuple(regions)

    def middle(self, columns: int) -> Region | None:
        """Where Linear-1's output of `columns` e4m3 lies, one row per row of `activations`; None: it has no room in their place."""
        if not self.direct or columns > self.hidden:
            return None
        return Region("middle", self.region("spare").offset_bytes, self.rows, columns, ELEMENTS["fp8"][0], self.hidden)

    def region(self, name: str) -> Region:
        """A region by name.

        Raises:
            XStageError: no such region in this precision.
        """
        for region in self.regions:
            if region.name == name:
                return region
        raise XStageError(f"region: {name!r} is unknown, known are {', '.join(r.name for r in self.regions)}")

    @property
    def size_bytes(self) -> int:
        """Size of the buffer of one rank, known before anything is allocated."""
        last = self.regions[-1]
        return _up(last.offset_bytes + last.size_bytes, ALIGNMENT)

    def describe(self) -> str:
        """A table of the regions, and the total."""
        lines = [f"{'region':<18}{'offset':>14}{'bytes':>14}  shape"]
        for r in self.regions:
            lines.append(f"{r.name:<18}{r.offset_bytes:>14,}{r.size_bytes:>14,}  {r.dtype} [{r.rows:,}, {r.columns:,}]")
        lines.append(f"{'total':<18}{'':>14}{self.size_bytes:>14,}  bytes per rank, {self.size_bytes / 2**20:.1f} MiB")
        return "\n".join(lines)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
