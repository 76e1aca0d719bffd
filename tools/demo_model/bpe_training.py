"""Byte-pair merges from counted words."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict

Pair = tuple[str, str]


def train_merges(words: dict[str, int], count: int) -> list[Pair]:
    """`words` are spelt with one character per byte. The most frequent pair is merged first, of
    equal ones the smallest, until there are `count` merges. Raises ValueError if the words do not
    have as many."""
    symbols = [list(word) for word in words]
    counts = list(words.values())
    pairs: Counter[Pair] = Counter()
    where: dict[Pair, set[int]] = defaultdict(set)
    for i, parts in enumerate(symbols):
        for pair in zip(parts, parts[1:]):
            pairs[pair] += counts[i]
            where[pair].add(i)
    # Entries may be out of date; the count tells.
    heap = [(-n, pair) for pair, n in pairs.items()]
    heapq.heapify(heap)

    merges: list[Pair] = []
    while len(merges) < count:
        if not heap:
            raise ValueError(f"the words give {len(merges)} merges; {count} are wanted")
        negative, best = heapq.heappop(heap)
        if pairs[best] != -negative or negative == 0:
            continue
        merges.append(best)
        changed: set[Pair] = set()
        for i in where.pop(best):
            old = symbols[i]
            new = _merged(old, best)
            for pair in zip(old, old[1:]):
                pairs[pair] -= counts[i]
                where[pair].discard(i)
                changed.add(pair)
            for pair in zip(new, new[1:]):
                pairs[pair] += counts[i]
                where[pair].add(i)
                changed.add(pair)
            symbols[i] = new
        for pair in changed:
            if pairs[pair] > 0:
                heapq.heappush(heap, (-pairs[pair], pair))
    return merges


def _merged(parts: list[str], pair: Pair) -> list[str]:
    result: list[str] = []
    i = 0
    while i < len(parts):
        if i + 1 < len(parts) and (parts[i], parts[i + 1]) == pair:
            result.append(parts[i] + parts[i + 1])
            i += 2
        else:
            result.append(parts[i])
            i += 1
    return result
