"""Divide a global batch among the ranks: whole samples in proportion to weights, pure arithmetic.

The order and contents of a global batch do not depend on the shares, and each sample goes to exactly one
rank.
"""

from collections.abc import Sequence
from fractions import Fraction

from tandem.errors import ConfigError


def apportion(total: int, weights: Sequence[float], at_least: int = 1) -> tuple[int, ...]:
    """Divide `total` samples in proportion to `weights` (> 0), by the largest remainder method.

    Among equals, the first gets more. Every share is at least `at_least`; a share that would be smaller is
    exactly that. `total` must be large enough.
    """
    assert total >= at_least * len(weights), (total, weights, at_least)
    exact = [Fraction(weight) for weight in weights]  # floats could confuse two different weights
    sizes = [at_least] * len(weights)
    free = list(range(len(weights)))
    while True:
        rest = total - at_least * (len(weights) - len(free))
        sum_of_free = sum(exact[i] for i in free)
        ideal = {i: rest * exact[i] / sum_of_free for i in free}
        low = [i for i in free if ideal[i] < at_least]
        if not low:
            break
        # This removes at least one share in each round, so the loop ends.
        free = [i for i in free if i not in low]
    for i in free:
        sizes[i] = int(ideal[i])
    # sorted() keeps the order of equals, so the first of them get more.
    for i in sorted(free, key=lambda i: sizes[i] - ideal[i])[: total - sum(sizes)]:
        sizes[i] += 1
    return tuple(sizes)


def equal_shares(batch_size: int, ranks: int) -> tuple[int, ...]:
    """Return shares that differ by at most one. Raises ConfigError if there are more ranks than samples."""
    if batch_size < ranks:
        raise ConfigError(
            f"a global batch of {batch_size} leaves some of the {ranks} ranks without a sample; "
            f"use --batch-size {ranks} or more"
        )
    return apportion(batch_size, [1] * ranks)


def check_even(batch_size: int, ranks: int) -> None:
    """Raise ConfigError if equal shares differ by one, which only a resumed run may have."""
    if batch_size % ranks:
        below = batch_size - batch_size % ranks
        use = f"{below} or {below + ranks}" if below else ranks
        raise ConfigError(f"--batch-size {batch_size} does not divide evenly over {ranks} ranks; use {use}")


def fits(sizes: Sequence[int], micro_batch_size: int | None) -> bool:
    """Return True if all ranks can make the same number of micro-batches, none of them empty or too large."""
    return micro_batch_size is None or -(-max(sizes) // micro_batch_size) <= min(sizes)


def halved(sizes: Sequence[int], micro_batch_size: int | None, at_least: int = 1) -> tuple[int, int | None]:
    """Return (the largest micro-batch of these shares, the next smaller one), in samples; it is about half.

    The second is None if no smaller size leaves each micro-batch `at_least` samples.
    """
    largest = max(sizes)
    parts = min(-(-largest // (micro_batch_size or largest)), min(sizes))
    now = -(-largest // parts)
    for half in range(-(-now // 2), now):
        if min(sizes) // -(-largest // half) >= at_least:
            return now, half
    return now, None


def given_shares(
    text: str, batch_size: int, ranks: int, micro_batch_size: int | None = None
) -> tuple[int, ...]:
    """Return each rank's samples for `--batch-shares 3:1`.

    Raises ConfigError if ranks or batch do not fit.
    """
    weights = [float(part) for part in text.split(":")]
    if len(weights) != ranks:
        raise ConfigError(
            f"--batch-shares {text} is for {len(weights)} ranks, but there are {ranks}; "
            "give one number per rank"
        )
    equal_shares(batch_size, ranks)
    sizes = apportion(batch_size, weights)
    if not fits(sizes, micro_batch_size):
        raise ConfigError(
            f"--batch-shares {text} leaves a rank {min(sizes)} of {batch_size} samples, too few for the "
            f"{-(-max(sizes) // (micro_batch_size or 1))} micro-batches that another rank makes of "
            f"its {max(sizes)}; use a larger --micro-batch-size or --batch-size"
        )
    return sizes


def slice_of(sizes: Sequence[int], rank: int, contiguous: bool = False) -> slice:
    """Return the positions of a rank's samples in a global batch.

    They are strided if the shares are equal, unless `contiguous`; otherwise they are one range.
    """
    total = sum(sizes)
    ranks = len(sizes)
    if not contiguous and tuple(sizes) == equal_shares(total, ranks):
        # Versions without uneven shares did the same, so older runs resume to the same bits.
        return slice(rank, None, ranks)
    begin = sum(sizes[:rank])
    return slice(begin, begin + sizes[rank])
