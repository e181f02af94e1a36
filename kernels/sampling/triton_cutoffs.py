"""The bounds of what filters keep, in Triton: candidates are gathered by a program for each chunk, then searched.

See README.md, "On a GPU". A row's candidates are all tokens that its filters may keep, and few others: every chunk of
the vocabulary has a list of its own. Where a list is too short for them, the search reads the row.
"""

import triton
import triton.language as tl

from specmamba.kernels.sampling.triton_kernels import keys_of, load_logits, load_temperature, weigh


@triton.jit(do_not_specialize=["nodes"])
def chunk_bounds_kernel(
    logits, temperature, peaks, masses, nodes, size, stride, num_chunks, BLOCK: tl.constexpr, GROUPS: tl.constexpr
):
    """The peaks of a chunk's GROUPS equal parts, and its mass relative to the largest of them, float64."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    t, _ = load_temperature(temperature, row // nodes)
    x = load_logits(logits + row.to(tl.int64) * stride, chunk * BLOCK + tl.arange(0, BLOCK), size)
    of_groups = tl.max(tl.reshape(x, (GROUPS, BLOCK // GROUPS)), 1)
    entry = row * num_chunks + chunk
    tl.store(peaks + entry * GROUPS + tl.arange(0, GROUPS), of_groups)
    tl.store(masses + entry, tl.sum(weigh(x, tl.max(of_groups, 0), t).to(tl.float64), 0))


@triton.jit(do_not_specialize=["nodes"])
def row_bounds_kernel(
    peaks, masses, temperature, top_k, top_p, min_p, lows, totals, levels, cuts, nodes, size, num_chunks,
    SHIFT: tl.constexpr, GROUPS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """A key that all tokens reach which a row's top-k or top-p keeps, and the row's mass relative to its peak.

    The key of a row that has neither filter is larger than all others. ``levels`` and ``cuts`` are those of a row that
    keeps all but what min-p drops: see ``row_cutoffs_kernel``.
    """
    row, chunk = tl.program_id(0), tl.arange(0, CHUNKS)
    request, inside = row // nodes, chunk < num_chunks
    t, is_greedy = load_temperature(temperature, request)
    place = (row * num_chunks + chunk)[:, None] * GROUPS + tl.arange(0, GROUPS)[None, :]
    of_groups = tl.load(peaks + place, mask=inside[:, None], other=float("-inf"))
    of_chunks = tl.max(of_groups, 1)
    top = tl.max(of_chunks, 0)
    mass = tl.load(masses + row * num_chunks + chunk, mask=inside, other=0.0)
    total = tl.sum(mass * weigh(of_chunks, top, t).to(tl.float64), 0)

    nothing = keys_of(tl.full([], float("-inf"), tl.float32), SHIFT)
    low = tl.full([], 0x7FFFFFFF, tl.int32)
    if top_p is not None:
        rest = 1 - tl.maximum(tl.load(top_p + request), 0.0)
        if (rest > 0) & (is_greedy == 0):
            # tokens that are lighter have together less than half of what top-p drops; rounding is far below 2^-16
            lightest = tl.maximum((total * (rest * 0.5).to(tl.float64) / size).to(tl.float32), 1e-37)
            low = keys_of(tl.where(rest > 1.0 / 65536, top + t * tl.log(lightest), float("-inf")), SHIFT)
    if top_k is not None:
        k = tl.load(top_k + request)
        if (k > 0) & (k < size) & (is_greedy == 0):
            low = tl.where(k <= num_chunks * GROUPS, kth_key(of_groups, k, top, nothing, SHIFT), nothing)
    least = tl.full([], 0.0, tl.float32)
    if min_p is not None:
        least = tl.load(min_p + request)
    tl.store(lows + row, low)
    tl.store(totals + row, total)
    tl.store(levels + 2 * row, top)
    tl.store(levels + 2 * row + 1, least)
    tl.store(cuts + 2 * row, nothing)
    tl.store(cuts + 2 * row + 1, size)


@triton.jit
def kth_key(x, k, top, nothing, SHIFT: tl.constexpr):
    """The largest key that at least k entries of x reach, or ``nothing``; by halving."""
    key, low = keys_of(x, SHIFT), nothing.to(tl.int64)
    high = keys_of(top, SHIFT).to(tl.int64) + 1
    while high - low > 1:
        middle = (low + high) >> 1
        is_reached = tl.sum(tl.sum((key >= middle.to(tl.int32)).to(tl.int32), 1), 0) >= k
        low, high = tl.where(is_reached, middle, low), tl.where(is_reached, high, middle)
    return low.to(tl.int32)


@triton.jit
def candidates_kernel(
    logits, lows, values, places, counts, size, stride, num_chunks,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """The candidates of a chunk in order: logits, places in the chunk, and how many there are, also beyond CAPACITY."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    entry, place = row * num_chunks + chunk, tl.arange(0, BLOCK)
    ids = chunk * BLOCK + place
    x = load_logits(logits + row.to(tl.int64) * stride, ids, size)
    is_candidate = (keys_of(x, SHIFT) >= tl.load(lows + row)) & (ids < size)
    rank = tl.cumsum(is_candidate.to(tl.int32), 0) - 1
    target, has_room = entry.to(tl.int64) * CAPACITY + rank, is_candidate & (rank < CAPACITY)
    tl.store(values + target, x.to(values.dtype.element_ty), mask=has_room)
    tl.store(places + target, place.to(tl.int16), mask=has_room)
    tl.store(counts + entry, tl.sum(is_candidate.to(tl.int32), 0))


@triton.jit(do_not_specialize=["nodes"])
def row_cutoffs_kernel(
    logits, values, places, counts, lows, totals, temperature, top_k, top_p, levels, cuts, nodes, size, stride,
    num_chunks, SHIFT: tl.constexpr, BLOCK: tl.constexpr, CAPACITY: tl.constexpr, CHUNKS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Bounds of what filters keep: peak and least weight in ``levels``, least key and its last token in ``cuts``.

    A token is kept if its key is larger, or equal and the token not behind the last; and if its weight (1 at the peak)
    is no less than the least. Here ``cuts`` of rows with top-k or top-p are found, among candidates of all chunks.
    """
    row, chunk = tl.program_id(0), tl.arange(0, CHUNKS)
    request, entry = row // nodes, row * num_chunks + chunk
    low = tl.load(lows + row)
    if low < 0x7FFFFFFF:
        t, _ = load_temperature(temperature, request)
        peak = tl.load(levels + 2 * row)
        limit = tl.load(counts + entry, mask=chunk < num_chunks, other=0)
        fits = tl.max(limit, 0) <= CAPACITY
        limit = tl.where(fits, limit, tl.minimum(size - chunk * BLOCK, BLOCK))
        # one of both sources is read: the lists, or the row
        lists = entry[:, None].to(tl.int64) * CAPACITY
        listed, stored = values + lists, logits + row.to(tl.int64) * stride + chunk[:, None] * BLOCK
        cut, end = low.to(tl.int64), keys_of(peak, SHIFT).to(tl.int64) + 1
        mass, last = tl.load(totals + row), tl.full([], 0, tl.int32) + size
        if top_k is not None:
            k = tl.load(top_k + request)
            if (k > 0) & (k < size):
                cut, _end, _above = find_cut(
                    stored, listed, limit, fits, cut, end, k.to(tl.float64), peak, t, False, SHIFT, CHUNKS, WIDTH
                )
                mass = mass_from(stored, listed, limit, fits, cut, peak, t, SHIFT, CHUNKS, WIDTH)
        if top_p is not None:
            p = tl.load(top_p + request)
            if p < 1:
                goal = p.to(tl.float64) * mass
                cut, end, above = find_cut(
                    stored, listed, limit, fits, cut, end, goal, peak, t, True, SHIFT, CHUNKS, WIDTH
                )
                if end - cut == 1:
                    last = last_of_ties(
                        stored,
                        listed,
                        places + lists,
                        limit,
                        fits,
                        cut,
                        goal - above,
                        peak,
                        t,
                        SHIFT,
                        BLOCK,
                        CHUNKS,
                        WIDTH,
                    )
        tl.store(cuts + 2 * row, cut.to(tl.int32))
        tl.store(cuts + 2 * row + 1, last)


@triton.jit
def load_tile(stored, listed, limit, fits, start, WIDTH: tl.constexpr):
    """WIDTH logits of every chunk, as ``load_logits`` has them; -inf behind a chunk's limit."""
    place = start + tl.arange(0, WIDTH)[None, :]
    x = tl.load(listed + place, mask=place < tl.where(fits, limit, 0)[:, None], other=float("-inf")).to(tl.float32)
    y = tl.load(stored + place, mask=place < tl.where(fits, 0, limit)[:, None], other=float("-inf")).to(tl.float32)
    return tl.maximum(x, tl.where(y < float("inf"), y, float("-inf")))


@triton.jit
def find_cut(
    stored, listed, limit, fits, low, high, goal, peak, temperature,
    IS_MASS: tl.constexpr, SHIFT: tl.constexpr, CHUNKS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Search for the largest key from which on there are ``goal`` tokens, or that mass; it is in [low, high).

    Quarters the interval until it has one key, or one token. Returns the interval, and what there is from its end on.
    """
    above, inside = tl.full([], 0.0, tl.float64), tl.full([], 2, tl.int32)
    longest = tl.max(limit, 0)
    while (high - low > 1) & (inside > 1):
        first, second = low + tl.maximum((high - low) // 4, 1), low + tl.maximum((high - low) // 2, 1)
        third = low + tl.maximum((high - low) * 3 // 4, 1)
        from_first, from_second = tl.zeros([CHUNKS, WIDTH], tl.float32), tl.zeros([CHUNKS, WIDTH], tl.float32)
        from_third, count = tl.zeros([CHUNKS, WIDTH], tl.float32), tl.zeros([CHUNKS, WIDTH], tl.int32)
        for start in range(0, longest, WIDTH):
            x = load_tile(stored, listed, limit, fits, start, WIDTH)
            key = keys_of(x, SHIFT)
            share = tl.full([CHUNKS, WIDTH], 1.0, tl.float32)
            if IS_MASS:
                share = weigh(x, peak, temperature)
            from_first += tl.where(key >= first.to(tl.int32), share, 0.0)
            from_second += tl.where(key >= second.to(tl.int32), share, 0.0)
            from_third += tl.where(key >= third.to(tl.int32), share, 0.0)
            count += ((key >= low.to(tl.int32)) & (key < high.to(tl.int32))).to(tl.int32)
        # a lane sums a few dozen numbers; the lanes are summed in float64
        one, two, three = sum_lanes(from_first), sum_lanes(from_second), sum_lanes(from_third)
        inside = tl.sum(tl.sum(count, 1), 0)
        above = tl.where(three >= goal, above, tl.where(two >= goal, three, tl.where(one >= goal, two, one)))
        high = tl.where(three >= goal, high, tl.where(two >= goal, third, tl.where(one >= goal, second, first)))
        low = tl.where(three >= goal, third, tl.where(two >= goal, second, tl.where(one >= goal, first, low)))
    return low, high, above


@triton.jit
def sum_lanes(x):
    """The sum of a tile of float32 in float64."""
    return tl.sum(tl.sum(x.to(tl.float64), 1), 0)


@triton.jit
def mass_from(
    stored, listed, limit, fits, cut, peak, temperature,
    SHIFT: tl.constexpr, CHUNKS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The mass of all tokens from a key on, float64."""
    mass = tl.zeros([CHUNKS, WIDTH], tl.float32)
    for start in range(0, tl.max(limit, 0), WIDTH):
        x = load_tile(stored, listed, limit, fits, start, WIDTH)
        mass += tl.where(keys_of(x, SHIFT) >= cut.to(tl.int32), weigh(x, peak, temperature), 0.0)
    return sum_lanes(mass)


@triton.jit
def last_of_ties(
    stored, listed, places, limit, fits, cut, missing, peak, temperature,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The last token needed for a mass, of the tokens with the key ``cut``; at least the first of them."""
    longest = tl.max(limit, 0)
    of_chunk = tl.zeros([CHUNKS], tl.int32)
    for start in range(0, longest, WIDTH):
        is_tie = find_ties(load_tile(stored, listed, limit, fits, start, WIDTH), limit, start, cut, SHIFT, WIDTH)
        of_chunk += tl.sum(is_tie.to(tl.int32), 1)
    before = tl.cumsum(of_chunk, 0) - of_chunk
    last = tl.full([], -1, tl.int32)
    for start in range(0, longest, WIDTH):
        x = load_tile(stored, listed, limit, fits, start, WIDTH)
        is_tie = find_ties(x, limit, start, cut, SHIFT, WIDTH)
        rank = before[:, None] + tl.cumsum(is_tie.to(tl.int32), 1) - 1
        mass_before = rank.to(tl.float64) * weigh(x, peak, temperature).to(tl.float64)
        is_kept = is_tie & ((rank == 0) | (mass_before < missing))
        place = start + tl.arange(0, WIDTH)[None, :]
        is_listed = is_kept & (place < tl.where(fits, limit, 0)[:, None])
        place = tl.where(fits, tl.load(places + place, mask=is_listed, other=0).to(tl.int32), place)
        ids = tl.arange(0, CHUNKS)[:, None] * BLOCK + place
        last = tl.maximum(last, tl.max(tl.max(tl.where(is_kept, ids, -1), 1), 0))
        before += tl.sum(is_tie.to(tl.int32), 1)
    return last


@triton.jit
def find_ties(x, limit, start, cut, SHIFT: tl.constexpr, WIDTH: tl.constexpr):
    """Which entries of a tile have the key ``cut``."""
    inside = start + tl.arange(0, WIDTH)[None, :] < limit[:, None]
    return (keys_of(x, SHIFT) == cut.to(tl.int32)) & inside
