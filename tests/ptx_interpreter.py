"""Runs the PTX of small kernels on a CPU: what every thread computes, loads and stores, on memory of one or several emulated ranks.

    memory = Memory(1 << 20)
    grid = Grid(translate(ptx), ctas=3, arguments=[memory.put(x), len(x)], memory=memory)
    run([[grid]])                                # a stream of grids per rank; streams run interleaved
    memory.get(address, shape, dtype)

A kernel becomes a Python function, a thread of a CTA a generator of it that runs alone until it meets others: a barrier of the CTA, a
collective of its warp, or a loading acquire, before which other threads and grids get their turn. Warps go on at random, and so do their
threads. So what is wrong in a kernel's index arithmetic, or for want of a barrier, shows; accesses outside the allocations or not
aligned, and threads that wait for each other for ever, are errors.

Covered: integers, byte permutations, float32 sums and quotients, conversions to bf16 and e4m3, global and shared memory, warps whose 32
lanes all take part, one barrier that all threads of a CTA come to, bulk copies with an mbarrier of one arrival (they are over at once).
Everything else is refused when a kernel is translated.

Not covered: the order of memory (every store is seen at once by everybody), timing (`%globaltimer` moves when it is read), CTAs that
wait for each other (those of a grid run one after the other), copies that are late, matrix instructions, clusters, which bits of a NaN
the hardware makes.
"""

from __future__ import annotations

import math
import random
import re
import struct
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from emulated_memory import Memory

_CLOCK_STEP_NS = 1000
_OPERATORS = {"add": "+", "sub": "-", "and": "&", "or": "|", "xor": "^", "shl": "<<", "shr": ">>", "mul": "*", "mad": "*"}
_COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
_SPECIAL = {
    "%tid.x": "tid", "%ctaid.x": "ctaid", "%nctaid.x": "nctaid", "%laneid": "tid % 32", "%lanemask_lt": "(1 << tid % 32) - 1",
    "%globaltimer": "clock()", "%globaltimer_lo": "clock() % (1 << 32)", "__dynamic_shmem__0": "0",
}  # fmt: skip
_STATEMENT = re.compile(r"\s*(?:(?P<brace>[{}])|(?P<label>[$\w]+):(?!:)|(?P<text>[^;]+);)")
_INSTRUCTION = re.compile(r"(?:@(?P<negated>!?)(?P<predicate>%p\d+|P1|[a-z]+)\s+)?(?P<name>[\w.:]+)\s*(?P<operands>.*)", re.DOTALL)


class PtxError(Exception):
    """A kernel uses what is not covered, or its threads wait for ever."""


# ---- arithmetic on bits


def _float(bits: int) -> np.float32:
    return np.uint32(bits).view(np.float32)  # type: ignore[no-any-return]


def _bits(value: np.float32) -> int:
    return int(np.float32(value).view(np.uint32))


def _divide_up(a: int, b: int) -> int:
    """a / b rounded up, b positive and finite."""
    x, y = _float(a), _float(b)
    quotient = x / y
    # Exact: a product of two float32 fits into a float64.
    return _bits(np.nextafter(quotient, np.float32(np.inf)) if float(quotient) * float(y) < float(x) else quotient)


def _multiply_add(a: int, b: int, c: int) -> int:
    """a · b + c, rounded once, to nearest even."""
    x, y, z = (float(_float(bits)) for bits in (a, b, c))
    near = np.float32(x * y + z)  # right but for a second rounding, and the sign of a zero is
    exact = Fraction(x) * Fraction(y) + Fraction(z)
    if not exact:
        return _bits(near)
    around = (near, np.nextafter(near, np.float32(np.inf)), np.nextafter(near, np.float32(-np.inf)))
    return min((_bits(n) for n in around), key=lambda bits: (abs(Fraction(float(_float(bits))) - exact), bits & 1))


def _divide(a: int, b: int) -> int:
    """Towards zero."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _bf16(bits: int) -> int:
    return 0x7FFF if bits & 0x7FFFFFFF > 0x7F800000 else bits + 0x7FFF + (bits >> 16 & 1) >> 16


def _e4m3(bits: int) -> int:
    """Nearest, ties to even, largest finite at most; 2⁻⁹ is the smallest step."""
    (value,) = struct.unpack("<f", bits.to_bytes(4, "little"))
    if math.isnan(value):
        return 0x7F
    magnitude = min(abs(value), 448.0)
    exponent = max(math.frexp(magnitude)[1] - 1, -6) if magnitude else -6
    return bits >> 31 << 7 | (exponent + 6 << 3) + round(math.ldexp(magnitude, 3 - exponent))


def _permute(a: int, b: int, selector: int) -> int:
    """Byte i is the one of b:a that bits 4 i … 4 i + 2 of the selector name; bit 4 i + 3: its sign instead, eight times."""
    result = 0
    for i in range(4):
        byte = (b << 32 | a) >> 8 * (selector >> 4 * i & 7) & 0xFF
        result |= (byte if not selector >> 4 * i & 8 else 0xFF * (byte >> 7)) << 8 * i
    return result


# ---- PTX to Python


@dataclass(frozen=True)
class Kernel:
    """threads: of a CTA. sizes: bytes of the parameters. thread: the function that a thread runs."""

    name: str
    threads: int
    sizes: tuple[int, ...]
    thread: Callable[..., Generator[tuple[Any, ...], int, None]]


def translate(ptx: str) -> Kernel:
    """The one kernel of a PTX text.

    Raises:
        PtxError: it uses something that is not covered.
    """
    match = re.search(r"\.visible \.entry (\w+)\((.*?)\)\s*\.reqntid (\d+), 1, 1(.*?)\n\{(.*)\}", re.sub(r"//.*", "", ptx), re.DOTALL)
    if match is None:
        raise PtxError("no kernel of a fixed number of threads")
    name, parameters, threads, _, body = match.groups()
    sizes = [int(a or 0) // 8 * int(b or 1) for a, b in re.findall(r"\.param (?:\.align \d+ )?\.[ub](\d+) \w+(?:\[(\d+)\])?", parameters)]
    blocks: list[list[str]] = [[]]
    labels: dict[str, int] = {}
    scope_of = ""  # labels in braces are of these braces
    for statement in _STATEMENT.finditer(body):
        if statement["brace"]:
            scope_of = f"@{statement.start()}" if statement["brace"] == "{" else ""
        elif statement["label"]:
            labels[statement["label"] + scope_of] = len(blocks)
            blocks.append([])
        elif statement["text"] and not statement["text"].startswith((".reg", ".pragma")):
            blocks[-1].append(re.sub(r"(\bbra(?:\.uni)?\s+\w+)$", rf"\1{scope_of}", statement["text"]))
    lines = ["def thread(tid, ctaid, nctaid, parameters, memory, shared, clock):", " pc = 0", " while True:"]
    for i, block in enumerate(blocks):
        lines.append(f"  if pc == {i}:")
        lines += [f"   {_statement(text, labels)}" for text in block] + [f"   pc = {i + 1}"]
    lines += ["  return", "  yield"]
    scope: dict[str, Any] = dict(globals())
    exec("\n".join(lines), scope)
    return Kernel(name, int(threads), tuple(sizes), scope["thread"])


def _statement(text: str, labels: dict[str, int]) -> str:
    match = _INSTRUCTION.fullmatch(text.strip())
    if match is None:
        raise PtxError(f"not covered: {text}")
    arguments = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", match["operands"])
    words = match["name"].split(".")
    if words[0] == "bra":
        action = f"pc = {labels[arguments[0]]}; continue"
    elif words == ["ret"]:
        action = "return"
    else:
        try:
            action = _action(words, arguments)
        except (KeyError, IndexError, ValueError, AttributeError):
            raise PtxError(f"not covered: {text}") from None
    condition = f"if {'not ' if match['negated'] else ''}{_operand(match['predicate'], 1)}: " if match["predicate"] else ""
    return condition + action


def _operand(text: str, bits: int) -> str:
    """Python for a register or a number; registers hold their bits as an unsigned number, predicates a truth value."""
    text = text.strip()
    if text in _SPECIAL:
        return f"({_SPECIAL[text]})"
    if re.fullmatch(r"-?(\d+|0x[0-9A-Fa-f]+)", text):
        return str(int(text, 0) % (1 << bits))
    if re.fullmatch(r"0f[0-9A-Fa-f]{8}", text):
        return str(int(text[2:], 16))
    return "r_" + re.sub(r"\W", "_", text)


def _address(text: str) -> str:
    register, offset = re.fullmatch(r"\[(\S+?)(\+-?\d+)?\]", text).groups()  # type: ignore[union-attr]
    return f"{_operand(register, 64)}{offset or ''}"


def _parts(text: str, bits: int) -> list[str]:
    """Operands of a vector in braces, or the one operand."""
    return [_operand(part, bits) for part in text.strip("{}").split(",")]


def _action(words: list[str], arguments: list[str]) -> str:
    """Python for an instruction. words: its name at the dots."""
    kind, what = words[0], words[-1]
    bits = 1 if what == "pred" else int(what[1:]) if what[1:].isdigit() else 32
    if kind in ("ld", "st", "red", "atom"):
        return _access(words, arguments, bits)
    if kind == "griddepcontrol":
        return "pass"  # the grid before is done
    if words == ["bar", "sync"] and arguments == ["0"]:
        return "yield 'cta',"
    if words == ["bar", "warp", "sync"] and arguments == ["-1"]:
        return "yield 'warp',"
    if kind == "mbarrier" or words[:3] == ["cp", "async", "bulk"]:
        return _copying(words, arguments)
    if kind in ("nanosleep", "fence"):
        return "yield" if kind == "nanosleep" else "pass"
    to = _operand(arguments[0], bits)
    mask, wide = (1 << bits) - 1, (1 << 2 * bits) - 1
    plain = [_operand(argument, bits) for argument in arguments[1:]]
    signed = [f"(({a} & {mask} ^ {1 << bits - 1}) - {1 << bits - 1})" for a in plain] if what[0] == "s" else plain
    a, b, c = (plain + [""] * 3)[:3]
    sa, sb, _ = (signed + [""] * 3)[:3]
    match words:
        case ["match", "any", "sync", "b32"] if arguments[2] == "-1":
            return f"{to} = yield 'match', {a}"
        case ["vote", "sync", "any", "pred"] if arguments[2] == "-1":
            return f"{to} = yield 'any', {a}"
        case ["vote", "sync", "all" | "ballot" as mode, "pred" | "b32"] if arguments[2] == "-1":
            return f"{to} = yield '{mode}', {_operand(arguments[1], 1)}"
        case ["shfl", "sync", "up" | "bfly" | "idx" as mode, "b32"] if arguments[3:] == ["0" if mode == "up" else "31", "-1"]:
            return f"{to} = yield '{mode}', {a}, {b}"
        case ["mov", _] if arguments[0][0] == "{":
            low, high = _parts(arguments[0], bits)
            return f"{low}, {high} = {a} & {(1 << bits // 2) - 1}, {a} >> {bits // 2}"
        case ["mov", _] if arguments[1][0] == "{":
            low, high = _parts(arguments[1], bits // 2)
            value = f"{low} | {high} << {bits // 2}"
        case ["mov", _] | ["cvta", *_]:
            value = a
        case ["prmt", "b32"]:
            value = f"_permute({a}, {b}, {c})"
        case ["add", "f32"]:
            value = f"_bits(_float({a}) + _float({b}))"
        case ["div", "u32"]:
            value = f"{a} // {b}"
        case ["div", "rn", "f32"]:
            value = f"_bits(_float({a}) / _float({b}))"
        case ["rcp", "rn", "f32"]:
            value = f"_bits(1 / _float({a}))"
        case ["mul", "rn", "f32"]:
            value = f"_bits(_float({a}) * _float({b}))"
        case ["fma", "rn", "f32"]:
            value = f"_multiply_add({a}, {b}, {c})"
        case ["neg", "f32"]:
            value = f"{a} ^ 0x80000000"
        case ["div", "rp", "f32"]:
            value = f"_divide_up({a}, {b})"
        case ["div", "s32" | "s64"]:
            value = f"_divide({sa}, {sb}) & {mask}"
        case ["cvt", "rn", "bf16x2", "f32"]:
            value = f"_bf16({a}) << 16 | _bf16({b})"
        case ["cvt", "rn", "satfinite", "e4m3x2", "f32"]:
            value = f"_e4m3({a}) << 8 | _e4m3({b})"
        case ["cvt", target, _] if target[0] in "us" and what[0] in "us":
            value = f"{sa} & {(1 << min(int(target[1:]), 64 if what[0] == 's' else bits)) - 1}"
        case ["and" | "or" | "xor", "pred"]:
            value = f"{a} {_OPERATORS[kind]} {b}"
        case ["not", "pred"]:
            value = f"not {a}"
        case ["not", _]:
            value = f"~{a} & {mask}"
        case ["setp", comparison, _] if what[0] != "f":
            value = f"{sa} {_COMPARISONS[comparison]} {sb}"
        case ["setp", comparison, "and", _] if what[0] != "f":
            value = f"{sa} {_COMPARISONS[comparison]} {sb} and {_operand(arguments[3], 1)}"
        case ["selp", _]:
            value = f"{a} if {_operand(arguments[3], 1)} else {b}"
        case ["mul", "wide", _]:
            value = f"{sa} * {sb} & {wide}"
        case ["mul", "hi", _]:
            value = f"{sa} * {sb} >> {bits} & {mask}"
        case ["mul", "lo", _] | ["mad", "lo", _]:
            value = f"({a} * {b}{f' + {c}' if c else ''}) & {mask}"
        case ["shl", _] | ["shr", _]:
            value = f"({sa} {_OPERATORS[kind]} {_operand(arguments[2], 32)}) & {mask}"
        case ["shf", "l", "wrap", "b32"] if arguments[3].isdigit():
            value = f"({b} << {int(c) % 32} | {a} >> {32 - int(c) % 32}) & {mask}"
        case ["add" | "sub" | "and" | "or" | "xor", _] if what[0] != "f":
            value = f"({a} {_OPERATORS[kind]} {b}) & {mask}"
        case ["max", "u16x2"]:
            value = f"max({a} & 0xFFFF, {b} & 0xFFFF) | max({a} >> 16, {b} >> 16) << 16"
        case ["min" | "max", _] if what[0] in "us":
            value = f"{kind}({sa}, {sb}) & {mask}"
        case ["min" | "max", "relu", "s32"]:
            value = f"max({kind}({sa}, {sb}), 0)"
        case ["abs", _] if what[0] == "s":
            value = f"abs({sa}) & {mask}"
        case ["neg", _] if what[0] == "s":
            value = f"-{a} & {mask}"
        case ["popc", "b32"]:
            value = f"{a}.bit_count()"
        case _:
            raise ValueError
    return f"{to} = {value}"


def _access(words: list[str], arguments: list[str], bits: int) -> str:
    """Loads, stores and atomics."""
    if words[:2] == ["ld", "param"]:
        (index,) = re.fullmatch(r"\[\w+_param_(\d+)\]", arguments[1]).groups()  # type: ignore[union-attr]
        return f"{_operand(arguments[0], bits)} = parameters[{index}]"
    space = {"global": "memory", "shared": "shared"}[next(word for word in words if word in ("global", "shared"))]
    size, vector = bits // 8, any(word in ("v2", "v4") for word in words)
    if words[0] == "ld":
        names = _parts(arguments[0], bits)
        load = f"load_vector({_address(arguments[1])}, {size}, {len(names)})" if vector else f"load({_address(arguments[1])}, {size})"
        return f"{'yield; ' if 'acquire' in words else ''}{', '.join(names)} = {space}.{load}"
    if words[0] == "st":
        values = ", ".join(_parts(arguments[1], bits))
        return f"{space}.store_vector({_address(arguments[0])}, {size}, ({values}))" if vector else (
            f"{space}.store({_address(arguments[0])}, {size}, {values})"
        )  # fmt: skip
    if words[0] == "red" and words[-2] == "add":
        return f"{space}.add({_address(arguments[0])}, {size}, {_operand(arguments[1], bits)})"
    if words[0] == "atom" and "cas" in words:
        expected, value = (_operand(argument, bits) for argument in arguments[2:])
        return f"{_operand(arguments[0], bits)} = {space}.compare_and_swap({_address(arguments[1])}, {size}, {expected}, {value})"
    raise ValueError


def _copying(words: list[str], arguments: list[str]) -> str:
    """Bulk copies, which are over at once, and the mbarriers that count their bytes."""
    if words[1] == "init" or words[1:3] == ["arrive", "expect_tx"]:
        word, number = (arguments[0], arguments[1]) if words[1] == "init" else (arguments[1], arguments[2])
        return f"{words[1]}_barrier(shared, {_address(word)}, {_operand(number, 32)})"
    if words[1:3] == ["try_wait", "parity"]:
        return f"yield; {_operand(arguments[0], 1)} = shared.load({_address(arguments[1])}, 8) >> 32 & 1 != {_operand(arguments[2], 32)}"
    if words[3] in ("commit_group", "wait_group"):
        return "pass"
    to, source = _address(arguments[0]), _address(arguments[1])
    size = _operand(arguments[2], 32)
    if words[3].startswith("shared"):
        return f"copy(memory, {source}, shared, {to}, {size}); complete(shared, {_address(arguments[3])}, {size})"
    return f"copy(shared, {source}, memory, {to}, {size})"


# A barrier's word: phase << 32 | bytes that are expected. One thread arrives in a phase, so all that is awaited are bytes.


def init_barrier(shared: Memory, word: int, arrivals: int) -> None:
    if arrivals != 1:
        raise PtxError(f"mbarrier of {arrivals} arrivals: only one is covered")
    shared.store(word, 8, 0)


def arrive_barrier(shared: Memory, word: int, size: int) -> None:
    if shared.load(word, 8) & 0xFFFFFFFF:
        raise PtxError("mbarrier: an arrival before the last phase was over")
    shared.add(word, 8, size)


def complete(shared: Memory, word: int, size: int) -> None:
    expected = shared.load(word, 8)
    if expected & 0xFFFFFFFF < size:
        raise PtxError(f"mbarrier: {size} bytes came, {expected & 0xFFFFFFFF} were expected")
    expected -= size
    shared.store(word, 8, expected if expected & 0xFFFFFFFF else expected + (1 << 32))


def copy(source: Memory, at: int, target: Memory, to: int, size: int) -> None:
    """A bulk copy."""
    if size % 16:
        raise PtxError(f"bulk copy of {size} bytes; it must be a multiple of 16")
    for i in range(0, size, 8):
        if i % 16 == 0:
            source.load_vector(at + i, 8, 2)  # is aligned to 16
        target.store(to + i, 8, source.load(at + i, 8))


# ---- threads


class Grid:
    """A launch. arguments: a number per parameter; of a tensor its address. Its CTAs run one after the other, in random order."""

    def __init__(
        self, kernel: Kernel, ctas: int, arguments: Sequence[int], memory: Memory, *, shared_bytes: int = 64 << 10, seed: int = 0
    ):  # fmt: skip
        if len(arguments) != len(kernel.sizes):
            raise PtxError(f"{kernel.name}: {len(arguments)} arguments for {len(kernel.sizes)} parameters")
        self._kernel, self._count, self._arguments, self._memory, self._shared_bytes = kernel, ctas, arguments, memory, shared_bytes
        self._random = random.Random(seed)
        self._left = self._random.sample(range(ctas), ctas)
        self._now = 0
        self._threads: dict[int, Generator[Any, int | None, None]] = {}
        self._waits: dict[int, Any] = {}  # what a thread came to
        self._answers: dict[int, int | None] = {}  # to threads that may go on

    def step(self) -> bool:
        """Threads of some warps of the current CTA go on, each until it waits. False once the grid is done."""
        if not self._threads:
            if not self._left:
                return False
            shared = Memory(self._shared_bytes, base=0)
            shared.allocate(self._shared_bytes)
            given = (self._count, self._arguments, self._memory, shared, self._clock)
            cta = self._left.pop()
            self._threads = {i: self._kernel.thread(i, cta, *given) for i in range(self._kernel.threads)}
            self._answers, self._waits = dict.fromkeys(self._threads), dict.fromkeys(self._threads)
        warps = {i // 32 for i in self._answers}
        held = {warp for warp in warps if self._random.random() < 0.5}  # so that warps are not all equally far
        ready = [(i, self._answers.pop(i)) for i in list(self._answers) if i // 32 not in held or held == warps]
        self._random.shuffle(ready)
        for i, answer in ready:
            try:
                self._waits[i] = self._threads[i].send(answer)
            except StopIteration:
                del self._threads[i]
                del self._waits[i]
                continue
            if self._waits[i] is None:
                self._answers[i] = None
        self._meet()
        if self._threads and not self._answers:
            raise PtxError(f"{self._kernel.name}: threads wait for ever: {sorted({wait[0] for wait in self._waits.values()})}")
        return bool(self._threads or self._left)

    def _meet(self) -> None:
        """Answer warps all of whose lanes came to a collective, or the CTA."""
        for first in range(0, self._kernel.threads, 32):
            waits = [self._waits.get(i) or ("",) for i in range(first, first + 32)]
            kind = waits[0][0]
            if kind in ("", "cta") or any(wait[0] != kind for wait in waits):
                continue
            for lane, wait in enumerate(waits):
                self._answers[first + lane] = None if kind == "warp" else _collective(kind, lane, wait, waits)
        if len(self._waits) == self._kernel.threads and all(wait == ("cta",) for wait in self._waits.values()):
            self._answers.update(dict.fromkeys(self._threads))
        for i in self._answers:
            self._waits[i] = None

    def _clock(self) -> int:
        self._now += _CLOCK_STEP_NS
        return self._now


def _collective(kind: str, lane: int, wait: Any, waits: Sequence[Any]) -> int:
    if kind == "match":
        return sum(1 << other for other in range(32) if waits[other][1] == wait[1])
    if kind == "any":
        return int(any(other[1] for other in waits))
    if kind == "all":
        return int(all(other[1] for other in waits))
    if kind == "ballot":
        return sum(1 << other for other in range(32) if waits[other][1])
    source = {"bfly": lane ^ wait[-1], "up": lane - wait[-1] if lane >= wait[-1] else lane, "idx": wait[-1] % 32}[kind]
    return int(waits[source][1])


def run(streams: Iterable[Sequence[Grid]], seed: int = 0) -> None:
    """The grids of each stream one after the other, streams interleaved at random, until all are done.

    Raises:
        PtxError: threads that wait for ever. AccessError: see `Memory`.
    """
    chance = random.Random(seed)
    left = [list(stream) for stream in streams if stream]
    with np.errstate(all="ignore"):
        while left:
            stream = chance.choice(left)
            if not stream[0].step():
                del stream[0]
            left = [stream for stream in left if stream]
