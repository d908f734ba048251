"""How many heads come first, so that their attention hides the exchange of the others: a model of both, asked once per problem.

At once a call takes the exchange of all heads, then the attention of all. In two parts it takes the exchange of the first heads, then
attention, beside which the rest arrives. Two things make that more than the sum of what is left:

* Attention comes in tiles that take an SM each and all take the same time, up to some 400 µs. SMs that send the rest start their tiles
  later; where tiles fill the GPU's waves, that costs a wave. Where they do not, it costs nothing: the last wave has room.
* Copies by the copy engines take no SM.
* While the rest travels, attention is slower, however it is sent: `BESIDE` of that time is not hidden. What both want is presumably the way
  to the L2 cache.

Rows of a rank's own heads all go with the first part. There they cost what the GPU's memory needs beyond the link's time (`MEMORY`).

So `time_ns` places tiles on SMs, and `choose` compares. Rates are of an H200, measured; on another GPU another choice may be faster.

Not covered: causal tiles, which differ in length (their mean stands for them); copies of narrower rows than the 1,280 bytes of 5 heads of
128 in bf16, which were not measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from xstage.attention.layout import SequenceLayout, head_parts

LINK = 372.5  # bytes/ns that leave a rank: R of platform `h200-nvlink4`
MEMORY = 4e3  # bytes/ns, read and written; an estimate, the memory of an H200 can do 4.8e3
# The next from benchmarks/ulysses_overlap.py: parts alone, and what calls exposed beyond the rest of this model.
STORES, SENDERS = 41.0, 330.0  # bytes/ns that leave a rank: per SM that sends, and at most, by however many SMs
BESIDE = 0.08  # of the time that the rest takes
COPY_NS = 12e3  # of copies, beyond the link's time
MEETING_NS = 6e3  # of an exchange, beyond its bytes: docs/diffusers.md, exchanges alone in a graph
SPLIT_NS = 12e3  # fork, join, launches and a meeting more: an estimate
SM_FLOP = 5.7e3  # flop/ns of an SM: results/h200x2/attention.json, waves of flash-attn-4 at 4,096 to 32,768 rows (5.5 to 5.85)
LEAST_NS = 1e6  # of attention: an eager call in two parts takes the host some 100 µs more, which a shorter one does not hide
REST_CTAS, CTAS = 8, (8, 20, 0)  # SMs that send the rest by default, and what `choose` tries


@dataclass(frozen=True)
class Split:
    """first: key/value heads of every rank that come first. ctas: that send the rest, one to an SM; 0: the copy engines do."""

    first: int
    ctas: int = REST_CTAS


@dataclass(frozen=True)
class Problem:
    """A call as all ranks see it.

    Attributes:
        heads, kv_heads: of each rank. head_bytes: of a row of one head. tile_rows: query rows of a tile. sms: of the GPU.
    """

    layout: SequenceLayout
    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    head_dim: int
    head_bytes: int
    tile_rows: int
    sms: int
    batch: int = 1
    causal: bool = False

    @property
    def group(self) -> int:
        return sum(self.heads) // sum(self.kv_heads)

    @property
    def tile_ns(self) -> float:
        """Of a tile on its SM."""
        return 4.0 * self.tile_rows * self.layout.sequence * self.head_dim / SM_FLOP / (2 if self.causal else 1)

    def tiles(self, kv_heads: int) -> int:
        return self.batch * kv_heads * self.group * ceil(self.layout.sequence / self.tile_rows)

    def exchange_ns(self, part: Sequence[tuple[int, int]], split: Split | None = None) -> float:
        """Of key/value heads from … to of each rank, and of all rows that stay where they are; `split` if they are the rest."""
        counts = [end - begin for begin, end in part]
        row = self.batch * (self.group + 2) * self.head_bytes
        rows = self.layout.local_rows
        sent = max(n * (sum(counts) - mine) for n, mine in zip(rows, counts, strict=True)) * row
        if split is None:
            kept = max(n * heads for n, heads in zip(rows, self.kv_heads, strict=True)) * row
            return max(sent / LINK, 2 * (sent + kept) / MEMORY) + MEETING_NS
        if not split.ctas:
            return sent / LINK + COPY_NS + MEETING_NS
        return sent / min(STORES * split.ctas, SENDERS) + MEETING_NS


def attention_ns(p: Problem) -> float:
    """Of attention alone, on the rank that is last."""
    return max(ceil(p.tiles(n) / p.sms) for n in p.kv_heads) * p.tile_ns


def time_ns(p: Problem, split: Split | None) -> float:
    """Of exchange and attention, on the rank that is last."""
    parts = head_parts(p.kv_heads, split.first if split else 0)
    before = p.exchange_ns(parts[0])
    if split is None or len(parts) == 1:
        return before + attention_ns(p)
    ready = p.exchange_ns(parts[1], split)
    taken = split.ctas + 1 if split.ctas else 0  # the meeting behind the kernel waits beside it
    both = [[p.tiles(end - begin) for begin, end in ranges] for ranges in zip(*parts, strict=True)]
    return before + SPLIT_NS + BESIDE * ready + max(_last_ns(first, rest, p.tile_ns, p.sms, taken, ready) for first, rest in both)


def _last_ns(first: int, rest: int, tile: float, sms: int, taken: int, ready: float) -> float:
    """When the last tile ends: `first` tiles from 0 on, `rest` more from `ready`, on `sms` of which `taken` are free from `ready` only."""
    free = max(sms - taken, 1)
    waves = min(ceil(ready / tile), ceil(first / free))  # that begin before the rest is there
    begun = min(first, waves * free)
    left = first + rest - begun
    # SMs that are busy when the rest is there, until `waves` · tile; the others wait for it.
    busy = (begun - (waves - 1) * free) if waves * tile > ready else 0
    turns, more = divmod(left, sms)
    idle = sms - busy
    ends = [waves * tile + (turns * tile if busy else 0.0), ready + turns * tile if turns else 0.0]
    if more:
        ends.append(ready + (turns + 1) * tile if more <= idle else waves * tile + (turns + 1) * tile)
    return max(ends)


def choose(p: Problem, first: int | None = None, captured: bool = False) -> Split | None:
    """The split that takes least by `time_ns`; None if none takes less than all at once, or attention is short (`LEAST_NS`).

    first: key/value heads to come first, whether that pays or not. captured: in a CUDA graph, whose launches cost the host nothing.
    """
    if first is None and not captured and attention_ns(p) < LEAST_NS:
        return None
    firsts = range(1, max(p.kv_heads)) if first is None else [first]
    best = min((Split(n, ctas) for ctas in CTAS for n in firsts), key=lambda split: time_ns(p, split), default=None)
    return best if best is None or first is not None or time_ns(p, best) < time_ns(p, None) else None
