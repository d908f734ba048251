"""Routings: how many (token, expert) pairs each expert gets, named by family, parameter and seed.

`balanced` gives every expert the same load. `power` gives expert popularity p_i ∝ (i + 1)^−α, shuffled over expert ids with a
seed (field practice: α = 0.8 in serving benchmarks, 1.0–1.2 elsewhere). Counts are the expected ones of drawing top-k distinct
experts per token: the inclusion probability of expert i is 1 − exp(−λ·p_i) with λ such that they add up to k. `k_hot` gives
the whole load to a few experts, chosen with a seed, evenly. `from_file` reads counts from a JSON file: a list of one count per expert.

Not covered: correlation between tokens, and sampling noise (a count of n would spread by about √n).
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from xstage.errors import XStageError


@dataclass(frozen=True)
class Routing:
    """Load per expert over all ranks.

    Attributes:
        name: family, parameter and seed, for people. counts: (token, expert) pairs per expert, shape (experts,). top_k, tokens:
        experts per token and tokens over all ranks; counts add up to tokens · top_k.
    """

    name: str
    counts: NDArray[np.int64]
    top_k: int
    tokens: int

    @property
    def gini(self) -> float:
        """Gini coefficient of the counts: 0 even, towards 1 all on one expert."""
        c = np.sort(self.counts)
        total = c.sum()
        return float((2 * np.arange(1, len(c) + 1) - len(c) - 1) @ c / (len(c) * total)) if total else 0.0

    @property
    def max_over_mean(self) -> float:
        return float(self.counts.max() / self.counts.mean())

    def describe(self) -> str:
        """One line: the name, Gini coefficient and maximum over mean."""
        return f"{self.name}: Gini {self.gini:.3f}, max/mean {self.max_over_mean:.2f}"

    def ranks(self, ranks: int) -> NDArray[np.int64]:
        """Counts by rank, shape (ranks, experts/ranks): expert e lives on rank e // (experts/ranks)."""
        if ranks < 1 or len(self.counts) % ranks:
            raise XStageError(f"ranks: {ranks} must divide the number of experts, {len(self.counts)}")
        return self.counts.reshape(ranks, -1)


def balanced(tokens: int, experts: int, top_k: int) -> Routing:
    """Every expert the same load, up to one pair."""
    _check(tokens, experts, top_k)
    return Routing("balanced", _whole(np.full(experts, tokens * top_k / experts), tokens, top_k), top_k, tokens)


def power(tokens: int, experts: int, top_k: int, alpha: float = 0.8, seed: int = 0) -> Routing:
    """Power law of exponent `alpha`, hotness shuffled over experts with `seed`.

    Raises:
        XStageError: tokens, experts, top_k or alpha outside their range.
    """
    _check(tokens, experts, top_k)
    if not 0 <= alpha < 10:
        raise XStageError(f"alpha: {alpha!r} must lie in 0 … 10")
    popularity = np.arange(1, experts + 1, dtype=float) ** -alpha
    popularity /= popularity.sum()
    low, high = 0.0, 1.0
    while (1 - np.exp(-high * popularity)).sum() < top_k and high < 1e12:
        high *= 2
    for _ in range(100):
        middle = 0.5 * (low + high)
        if (1 - np.exp(-middle * popularity)).sum() < top_k:
            low = middle
        else:
            high = middle
    share = 1 - np.exp(-high * popularity)
    counts = _whole(share / share.sum() * top_k * tokens, tokens, top_k)
    return Routing(f"power alpha={alpha:g} seed={seed}", np.random.default_rng(seed).permutation(counts), top_k, tokens)


def k_hot(tokens: int, experts: int, top_k: int, hot: int, seed: int = 0) -> Routing:
    """`hot` experts, chosen with `seed`, share all pairs evenly; with hot = top_k each of them gets every token.

    Raises:
        XStageError: tokens, experts, top_k or hot outside their range.
    """
    _check(tokens, experts, top_k)
    if not top_k <= hot <= experts:
        raise XStageError(f"hot: {hot!r} must lie in {top_k} … {experts}, from top_k to the number of experts")
    counts = np.zeros(experts, np.int64)
    chosen = np.random.default_rng(seed).permutation(experts)[:hot]
    counts[chosen] = _whole(np.full(hot, tokens * top_k / hot), tokens, top_k)
    return Routing(f"k-hot hot={hot} seed={seed}", counts, top_k, tokens)


def named(name: str, tokens: int, experts: int, top_k: int, alpha: float = 1.0, seed: int = 0) -> Routing:
    """`balanced`, `power` (with `alpha` and `seed`), or the path of a JSON file with one count per expert.

    Raises:
        XStageError: sizes that do not fit each other, or no such file.
    """
    if name == "balanced":
        return balanced(tokens, experts, top_k)
    if name == "power":
        return power(tokens, experts, top_k, alpha, seed)
    return from_file(name, tokens, experts, top_k)


def from_file(path: str | os.PathLike[str], tokens: int, experts: int, top_k: int) -> Routing:
    """Counts from a JSON file.

    Raises:
        XStageError: the file cannot be read, has the wrong number of counts, a negative one, or a wrong sum.
    """
    _check(tokens, experts, top_k)
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise XStageError(f"routing: {os.fspath(path)} cannot be read: {error}") from None
    if not isinstance(data, list) or not all(isinstance(v, int) and not isinstance(v, bool) for v in data):
        raise XStageError(f"routing: {os.fspath(path)} must hold a list of whole numbers, one per expert")
    return from_counts(data, tokens, top_k, experts, os.fspath(path))


def from_counts(counts: list[int], tokens: int, top_k: int, experts: int, name: str = "counts") -> Routing:
    """Given counts, checked: one per expert, none negative or above the tokens, adding up to tokens · top_k."""
    _check(tokens, experts, top_k)
    if len(counts) != experts:
        raise XStageError(f"routing: {name} has {len(counts)} counts for {experts} experts")
    for expert, count in enumerate(counts):
        if not 0 <= count <= tokens:
            raise XStageError(f"routing: {name} gives expert {expert} {count} tokens, must lie in 0 … {tokens}")
    if sum(counts) != tokens * top_k:
        raise XStageError(f"routing: {name} adds up to {sum(counts)}, must be tokens · top_k = {tokens * top_k}")
    return Routing(name, np.asarray(counts, np.int64), top_k, tokens)


def _check(tokens: int, experts: int, top_k: int) -> None:
    if tokens < 1:
        raise XStageError(f"tokens: {tokens} must be at least 1")
    if experts < 1:
        raise XStageError(f"experts: {experts} must be at least 1")
    if not 1 <= top_k <= experts:
        raise XStageError(f"top_k: {top_k} must lie in 1 … {experts}, the number of experts")


def _whole(expected: NDArray[np.float64], tokens: int, top_k: int) -> NDArray[np.int64]:
    """Whole counts of the same sum: largest remainders first."""
    counts = np.minimum(np.floor(expected).astype(np.int64), tokens)
    missing = tokens * top_k - int(counts.sum())
    order = np.argsort(-(expected - counts), kind="stable")
    while missing > 0:
        for i in order:
            if missing and counts[i] < tokens:
                counts[i] += 1
                missing -= 1
    return counts
