"""Random numbers, argmax, penalties, filters and sampling in Triton. See README.md, "On a GPU".

Logits are rows of ``size`` tokens, ``stride`` apart; a row is ``nodes``-th part of a request, whose settings are one
entry each. Vocabularies are cut into chunks of BLOCK tokens, one program each, that later launches put together.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["total", "count", "key", "row_stride", "position_stride"])
def uniform_kernel(seeds, positions, out, total, count, key, row_stride, position_stride, BLOCK: tl.constexpr):
    """Random numbers of counters; unsigned integers wrap around, and shift in zeros."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, inside = index // count, index < total
    entry = row.to(tl.int64) * row_stride + (index % count).to(tl.int64) * position_stride
    position = tl.load(positions + entry, mask=inside, other=0).to(tl.uint64, bitcast=True)
    seed = tl.load(seeds + row, mask=inside, other=0).to(tl.uint64, bitcast=True)
    key = mix(seed + tl.cast(key, tl.int64).to(tl.uint64, bitcast=True))
    bits = mix(key + (position + 1) * 0x9E3779B97F4A7C15)
    tl.store(out + index, (bits >> 40).to(tl.int32).to(tl.float32) * (1.0 / 16777216.0), mask=inside)


@triton.jit
def mix(z):
    """The finalizer of splitmix64."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def chunk_peaks_kernel(logits, peaks, firsts, size, stride, num_chunks, BLOCK: tl.constexpr):
    """The largest logit of a chunk, and its first place; NaN counts as larger than any number."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row.to(tl.int64) * stride + ids, mask=ids < size, other=float("-inf")).to(tl.float32)
    peak, is_peak = largest(x)
    tl.store(peaks + row * num_chunks + chunk, peak)
    tl.store(firsts + row * num_chunks + chunk, tl.min(tl.where(is_peak, ids, size), 0))


@triton.jit
def row_peaks_kernel(peaks, firsts, tokens, is_finite, size, num_chunks, CHUNKS: tl.constexpr):
    """The first of the largest logits of a row, and whether it is a finite number."""
    row, chunk = tl.program_id(0), tl.arange(0, CHUNKS)
    inside = chunk < num_chunks
    peak, is_peak = largest(tl.load(peaks + row * num_chunks + chunk, mask=inside, other=float("-inf")))
    first = tl.load(firsts + row * num_chunks + chunk, mask=is_peak & inside, other=size)
    tl.store(tokens + row, tl.min(first, 0).to(tl.int64))
    tl.store(is_finite + row, tl.abs(peak) < float("inf"))


@triton.jit
def largest(x):
    """The largest of x, and which entries equal it."""
    is_nan = x != x
    has_nan = tl.max(is_nan.to(tl.int32), 0) > 0
    peak = tl.max(tl.where(is_nan, float("-inf"), x), 0)
    return tl.where(has_nan, float("nan"), peak), tl.where(has_nan, is_nan, x == peak)


@triton.jit
def chunk_likeliest_kernel(
    logits, values, tokens, masses, size, stride, num_chunks,
    NUM_CHOSEN: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest logits of a chunk with their tokens, largest and lowest first, and its mass relative to the largest.

    What is not finite counts as in ``finite``. In place of tokens that a chunk does not have stands ``size``.
    """
    row, chunk = tl.program_id(0), tl.program_id(1)
    ids, j = chunk * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_K)
    is_left = ids < size
    x = tl.load(logits + row.to(tl.int64) * stride + ids, mask=is_left, other=0.0).to(tl.float32)
    x = tl.where(x == float("inf"), 1e4, tl.where((x != x) | (x == float("-inf")), -1e4, x))
    x = tl.where(is_left, x, float("-inf"))
    mass = tl.sum(tl.exp(x - tl.max(x, 0)).to(tl.float64), 0)
    best, chosen = tl.full([BLOCK_K], float("-inf"), tl.float32), tl.zeros([BLOCK_K], tl.int32) + size
    for i in range(NUM_CHOSEN):
        largest_left = tl.max(tl.where(is_left, x, float("-inf")), 0)
        token = tl.min(tl.where(is_left & (x == largest_left), ids, size), 0)
        is_left = is_left & (ids != token)
        best, chosen = tl.where(j == i, largest_left, best), tl.where(j == i, token, chosen)
    entry = row * num_chunks + chunk
    tl.store(values + entry * BLOCK_K + j, best)
    tl.store(tokens + entry * BLOCK_K + j, chosen)
    tl.store(masses + entry, mass)


@triton.jit
def row_likeliest_kernel(
    values, chunk_tokens, masses, tokens, logprobs, size, num_chunks,
    NUM_CHOSEN: tl.constexpr, BLOCK_K: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """The largest logits of a row's chunks as log probabilities, and their tokens."""
    row, chunk, j = tl.program_id(0), tl.arange(0, CHUNKS), tl.arange(0, BLOCK_K)
    inside, entry = chunk < num_chunks, row * num_chunks + chunk
    place = entry[:, None] * BLOCK_K + j[None, :]
    x = tl.load(values + place, mask=inside[:, None], other=float("-inf"))
    ids = tl.load(chunk_tokens + place, mask=inside[:, None], other=size)
    peaks = tl.max(x, 1)
    top = tl.max(peaks, 0)
    mass = tl.load(masses + entry, mask=inside, other=0.0)
    total = tl.sum(mass * tl.exp(peaks - top).to(tl.float64), 0)
    norm = top + tl.log(total.to(tl.float32))
    for i in range(NUM_CHOSEN):
        best = tl.max(tl.max(x, 1), 0)
        token = tl.min(tl.min(tl.where(x == best, ids, size), 1), 0)
        x = tl.where(ids == token, float("-inf"), x)
        tl.store(tokens + row * NUM_CHOSEN + i, token.to(tl.int64))
        tl.store(logprobs + row * NUM_CHOSEN + i, best - norm)


@triton.jit(do_not_specialize=["nodes", "tokens_stride", "tree_stride", "row_stride"])
def penalize_kernel(
    logits, counts, prompt_mask, tokens, mask, presence, frequency, repetition, out, nodes, size, stride,
    counts_stride, prompt_stride, tokens_stride, tree_stride, row_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    """Penalties of one chunk of one node."""
    row, batch, node = tl.program_id(0), tl.program_id(0) // nodes, tl.program_id(0) % nodes
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, batch_long = ids < size, batch.to(tl.int64)
    count = tl.load(counts + batch_long * counts_stride + ids, mask=inside, other=0)
    tokens, mask = tokens + batch_long * tokens_stride, mask + batch_long * tree_stride + node * row_stride
    for other in range(1, nodes):
        if tl.load(mask + other):
            count += (ids == tl.load(tokens + other)).to(tl.int32)
    is_prompt = tl.load(prompt_mask + batch_long * prompt_stride + ids, mask=inside, other=0).to(tl.int1)
    was_said = count > 0
    factor = tl.where(was_said | is_prompt, tl.load(repetition + batch), 1.0)
    x = tl.load(logits + row.to(tl.int64) * stride + ids, mask=inside, other=0.0).to(tl.float32)
    x = tl.where(x > 0, tl.div_rn(x, factor), x * factor)
    x -= tl.load(frequency + batch) * count.to(tl.float32)
    x -= tl.load(presence + batch) * was_said.to(tl.float32)
    tl.store(out + row.to(tl.int64) * size + ids, x, mask=inside)


@triton.jit
def load_logits(logits, ids, size):
    """Logits as float32, -inf behind the end of the row; NaN and +inf count as -inf."""
    x = tl.load(logits + ids, mask=ids < size, other=float("-inf")).to(tl.float32)
    return tl.where(x < float("inf"), x, float("-inf"))


@triton.jit
def load_temperature(temperature, request):
    """A temperature to divide by, and whether it is 0: greedy."""
    t = tl.load(temperature + request)
    return tl.where(t == 0, 1.0, t), t == 0


@triton.jit
def weigh(x, peak, temperature):
    """e^((x - peak) / temperature), float32; 0 where all are -inf."""
    return tl.exp((x - tl.where(peak > float("-inf"), peak, 0.0)) / temperature)


@triton.jit
def keys_of(x, SHIFT: tl.constexpr):
    """Integers in the order of numbers, equal where the numbers are; of bfloat16 (SHIFT 16) of 16 bits."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def keep(weight, x, ids, row, levels, cuts, SHIFT: tl.constexpr):
    """Weights (1 at the row's peak) without those that the row's filters drop."""
    key, cut = keys_of(x, SHIFT), tl.load(cuts + 2 * row)
    is_kept = (key > cut) | ((key == cut) & (ids <= tl.load(cuts + 2 * row + 1)))
    return tl.where(is_kept & (weight >= tl.load(levels + 2 * row + 1)), weight, 0.0)


@triton.jit(do_not_specialize=["nodes"])
def chunk_masses_kernel(
    logits, temperature, levels, cuts, peaks, firsts, masses, nodes, size, stride, num_chunks,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The mass of a chunk as float64, and the peak that it is relative to: the row's if filtered, else the chunk's."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    t, _ = load_temperature(temperature, row // nodes)
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    x = load_logits(logits + row.to(tl.int64) * stride, ids, size)
    peak = tl.max(x, 0)
    if levels is not None:
        peak = tl.load(levels + 2 * row)
    weight = weigh(x, peak, t)
    if levels is not None:
        weight = keep(weight, x, ids, row, levels, cuts, SHIFT)
    entry = row * num_chunks + chunk
    tl.store(peaks + entry, peak)
    tl.store(firsts + entry, tl.min(tl.where(x == peak, ids, size), 0))
    tl.store(masses + entry, tl.sum(weight.to(tl.float64), 0))


@triton.jit
def load_masses(peaks, firsts, masses, row, temperature, size, num_chunks, CHUNKS: tl.constexpr):
    """The masses of a row's chunks relative to its peak, float64; that peak; the first token that has it."""
    chunk = tl.arange(0, CHUNKS)
    entry, inside = row * num_chunks + chunk, chunk < num_chunks
    peak = tl.load(peaks + entry, mask=inside, other=float("-inf"))
    top = tl.max(peak, 0)
    mass = tl.load(masses + entry, mask=inside, other=0.0) * weigh(peak, top, temperature).to(tl.float64)
    first = tl.load(firsts + entry, mask=inside & (peak == top), other=size)
    return mass, top, tl.minimum(tl.min(first, 0), size - 1)


@triton.jit(do_not_specialize=["nodes"])
def draw_kernel(
    logits, temperature, uniforms, levels, cuts, peaks, firsts, masses, tokens, nodes, size, stride, num_chunks,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Invert the cumulative distribution: the chunk, then the token in it; both have mass, where there is any."""
    row = tl.program_id(0)
    t, is_greedy = load_temperature(temperature, row // nodes)
    mass, _, greedy_token = load_masses(peaks, firsts, masses, row, t, size, num_chunks, CHUNKS)
    threshold = tl.load(uniforms + row).to(tl.float64) * tl.sum(mass, 0)
    chunk = first_beyond(mass, threshold, CHUNKS)
    chunks = tl.arange(0, CHUNKS)
    whole = tl.sum(tl.where(chunks == chunk, mass, 0.0), 0)
    fraction = (threshold - tl.sum(tl.where(chunks < chunk, mass, 0.0), 0)) / tl.where(whole > 0, whole, 1.0)

    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    x = load_logits(logits + row.to(tl.int64) * stride, ids, size)
    weight = weigh(x, tl.load(peaks + row * num_chunks + chunk), t)
    if levels is not None:
        weight = keep(weight, x, ids, row, levels, cuts, SHIFT)
    inside = weight.to(tl.float64)
    token = chunk * BLOCK + first_beyond(inside, fraction * tl.sum(inside, 0), BLOCK)
    tl.store(tokens + row, tl.where(is_greedy, greedy_token, token).to(tl.int64))


@triton.jit
def first_beyond(mass, threshold, SIZE: tl.constexpr):
    """The first index with mass at which the running sum exceeds the threshold; where none does, the last with mass."""
    index, has_mass = tl.arange(0, SIZE), mass > 0
    last = tl.max(tl.where(has_mass, index, 0), 0)
    return tl.min(tl.where(has_mass & (tl.cumsum(mass, 0) > threshold), index, last), 0)


@triton.jit(do_not_specialize=["nodes"])
def probabilities_kernel(
    logits, temperature, levels, cuts, peaks, firsts, masses, probs, nodes, size, stride, num_chunks,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """The probabilities of a chunk; all on the first of the largest at temperature 0."""
    row = tl.program_id(0)
    t, is_greedy = load_temperature(temperature, row // nodes)
    mass, peak, greedy_token = load_masses(peaks, firsts, masses, row, t, size, num_chunks, CHUNKS)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = load_logits(logits + row.to(tl.int64) * stride, ids, size)
    weight = weigh(x, peak, t)
    if levels is not None:
        weight = keep(weight, x, ids, row, levels, cuts, SHIFT)
    total = tl.sum(mass, 0)
    prob = weight / tl.where(total > 0, total, 1.0).to(tl.float32)
    prob = tl.where(is_greedy, (ids == greedy_token).to(tl.float32), prob)
    tl.store(probs + row.to(tl.int64) * size + ids, prob, mask=ids < size)
