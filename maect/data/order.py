"""The order of an epoch's samples, computed when it is needed and never stored.

The index is cut into chunks of consecutive samples. A keyed permutation orders the chunks; the
samples of a window of chunks are shuffled among themselves. Reads stay inside one window, memory
is one window's, and any position of any epoch is computed without what comes before it. Shards are
written in random order, so chunks are random samples of the data set.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from maect.data import random

# These two are part of what a seed means: changing them changes every run's order.
CHUNK = 128
WINDOW = 64
_ROUNDS = 8


class Permutation:
    """A keyed permutation of range(n): a Feistel network walked until it lands inside."""

    def __init__(self, n: int, seed: int, epoch: int, stream: int) -> None:
        """Make the permutation of range(n) that belongs to (seed, epoch, stream)."""
        self.n = n
        self._half = np.uint64(max(1, -(-max(n - 1, 1).bit_length() // 2)))
        self._mask = np.uint64((1 << int(self._half)) - 1)
        self._round_keys = random.bits(seed, epoch, n, 0, stream, _ROUNDS)[0]

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where each of `positions` goes."""
        return self._walk(positions, self._forward)

    def inverse(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where each of `values` comes from."""
        return self._walk(values, self._backward)

    def _walk(self, start: NDArray[np.int64], step) -> NDArray[np.int64]:  # type: ignore[no-untyped-def]
        x = step(np.asarray(start).astype(np.uint64))
        outside = x >= self.n
        while outside.any():
            x[outside] = step(x[outside])
            outside = x >= self.n
        return x.astype(np.int64)

    def _forward(self, x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = x >> self._half, x & self._mask
        for key in self._round_keys:
            left, right = right, left ^ (random.mix(right ^ key) & self._mask)
        return (left << self._half) | right

    def _backward(self, x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = x >> self._half, x & self._mask
        for key in self._round_keys[::-1]:
            left, right = right ^ (random.mix(left ^ key) & self._mask), left
        return (left << self._half) | right


class Order:
    """The sequence of rows that training reads, epoch after epoch without a gap.

    A position counts samples since the start of the run; a batch may straddle two epochs, and
    every row comes exactly once in each.
    """

    def __init__(self, n: int, seed: int, chunk: int = CHUNK, window: int = WINDOW) -> None:
        if n < 1:
            raise ValueError("an order needs at least one sample")
        self.n = n
        self.seed = seed
        self.chunk = chunk
        self.window = window
        self.chunks = -(-n // chunk)
        self._short_by = self.chunks * chunk - n
        # Ranks and batches ask for neighbouring positions: two windows per thread suffice.
        self._cached = lru_cache(maxsize=4)(self._window)
        self._epoch = lru_cache(maxsize=4)(self._epoch_start)

    def take(self, start: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return rows and epochs, int64 [count] each, of `count` positions from `start` on."""
        rows = [np.empty(0, np.int64)]
        epochs = [np.empty(0, np.int64)]
        while count > 0:
            epoch, offset = divmod(start, self.n)
            part = self._from_epoch(epoch, offset, count)
            rows.append(part)
            epochs.append(np.full(len(part), epoch, np.int64))
            start += len(part)
            count -= len(part)
        return np.concatenate(rows), np.concatenate(epochs)

    def _from_epoch(self, epoch: int, offset: int, count: int) -> NDArray[np.int64]:
        """Return up to `count` rows of one window, from `offset` in the epoch on."""
        _, short_at = self._epoch(epoch)
        size = self.window * self.chunk
        number = offset // size
        # The one short chunk moves the windows behind it forward.
        if offset >= (number + 1) * size - self._missing_before(number + 1, short_at):
            number += 1
        start = number * size - self._missing_before(number, short_at)
        return self._cached(epoch, number)[offset - start : offset - start + count]

    def _missing_before(self, window: int, short_at: int) -> int:
        """Return how many samples the windows before this one have less than full ones."""
        return self._short_by if short_at < window * self.window else 0

    def _epoch_start(self, epoch: int) -> tuple[Permutation, int]:
        """Return the permutation of an epoch's chunks, and where it puts the short last one."""
        chunks = Permutation(self.chunks, self.seed, epoch, random.CHUNK)
        return chunks, int(chunks.inverse(np.array([self.chunks - 1]))[0])

    def _window(self, epoch: int, number: int) -> NDArray[np.int64]:
        """Return the rows of a window of an epoch, shuffled."""
        chunks, _ = self._epoch(epoch)
        first = number * self.window
        positions = np.arange(first, min(first + self.window, self.chunks), dtype=np.int64)
        starts = chunks(positions) * self.chunk
        rows = (starts[:, None] + np.arange(self.chunk)).ravel()
        rows = rows[rows < self.n]
        shuffle = np.argsort(
            random.bits(self.seed, epoch, rows, 0, random.ORDER, 1)[:, 0], kind="stable"
        )
        return rows[shuffle]
