"""An attention layer over scattered keys and values in Triton. See README.md, "On a GPU"."""

import triton
import triton.language as tl

from specmamba.kernels.paged_attention.triton_codes import coded, loads_of_a_unit, widened


@triton.jit(do_not_specialize=["num_queries", "k_scales_stride_t", "v_scales_stride_t"])
def store_kernel(
    projected, norm, cos, sin, write_slots, q, k_pool, v_pool, k_scales, v_scales,
    eps, num_queries,
    projected_stride_b, projected_stride_n, cos_stride_b, cos_stride_n, sin_stride_b, sin_stride_n,
    k_stride_t, k_stride_h, v_stride_t, v_stride_h, k_scales_stride_t, v_scales_stride_t,
    QUERY_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, D: tl.constexpr,
    ROTATED: tl.constexpr, HAS_NORM: tl.constexpr, CODES: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Some heads of one token: queries, keys and values alike. VALUE_HEADS 0: values are a part of their keys."""
    token = tl.program_id(0).to(tl.int64)
    b, n = token // num_queries, token % num_queries
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    is_inside = (head < QUERY_HEADS + KEY_HEADS + VALUE_HEADS)[:, None] & (d < D)[None, :]
    is_turned = (head < QUERY_HEADS + KEY_HEADS)[:, None] & (d < ROTATED)[None, :]
    is_normed = is_inside & (head < QUERY_HEADS + KEY_HEADS)[:, None]
    mine = projected + b * projected_stride_b + n * projected_stride_n + head[:, None] * D
    x = tl.load(mine + d[None, :], mask=is_inside, other=0.0)
    half: tl.constexpr = ROTATED // 2
    partner = tl.where(d < half, d + half, d - half)[None, :]
    if HAS_NORM:
        x32 = x.to(tl.float32)
        inverse = tl.rsqrt(tl.sum(x32 * x32, axis=1) * (1.0 / D) + eps)[:, None]
        weights = norm + head[:, None] * D
        y = tl.where(is_normed, _scaled(x, inverse, weights + d[None, :], is_normed), x)
    else:
        y = x
    if ROTATED > 0:
        other = tl.load(mine + partner, mask=is_turned, other=0.0)
        if HAS_NORM:
            other = _scaled(other, inverse, weights + partner, is_turned)
        c = tl.load(cos + b * cos_stride_b + n * cos_stride_n + d, mask=d < ROTATED, other=0.0).to(tl.float32)[None, :]
        s = tl.load(sin + b * sin_stride_b + n * sin_stride_n + d, mask=d < ROTATED, other=0.0).to(tl.float32)[None, :]
        s = tl.where((d < half)[None, :], -s, s)
        # both products are rounded before their sum is, as they are in torch_ops
        along = (y.to(tl.float32) * c).to(x.dtype).to(tl.float32)
        across = (other.to(tl.float32) * s).to(x.dtype).to(tl.float32)
        y = tl.where(is_turned, (along + across).to(x.dtype), y)
    tl.store(q + (token * QUERY_HEADS + head[:, None]) * D + d[None, :], y,
             mask=is_inside & (head < QUERY_HEADS)[:, None])  # fmt: skip
    slot = tl.load(write_slots + token)
    kept_heads = tl.where(slot != 0, KEY_HEADS, 0)
    y32 = y.to(tl.float32)
    kept = tl.where(tl.abs(y32) < float("inf"), y32, 0.0).to(x.dtype)
    if CODES > 0:
        kept, scales = coded(kept.to(tl.float32), CODES)
        of_head = head - QUERY_HEADS
        tl.store(k_scales + slot * k_scales_stride_t + of_head, scales, mask=(of_head >= 0) & (of_head < kept_heads))
        if VALUE_HEADS > 0:
            of_head -= KEY_HEADS
            of_values = v_scales + slot * v_scales_stride_t + of_head
            tl.store(of_values, scales, mask=(of_head >= 0) & (of_head < kept_heads))
    key = (head - QUERY_HEADS)[:, None]
    is_key = is_inside & (key >= 0) & (key < kept_heads)
    tl.store(k_pool + slot * k_stride_t + key * k_stride_h + d[None, :], kept, mask=is_key)
    if VALUE_HEADS > 0:
        is_value = is_inside & (key >= KEY_HEADS) & (key < KEY_HEADS + kept_heads)
        tl.store(v_pool + slot * v_stride_t + (key - KEY_HEADS) * v_stride_h + d[None, :], kept, mask=is_value)


@triton.jit
def _scaled(x, inverse, weights, mask):
    """x * inverse root * weight in float32, rounded to the dtype of x."""
    return (x.to(tl.float32) * inverse * tl.load(weights, mask=mask, other=0.0)).to(x.dtype)


@triton.jit(
    do_not_specialize=[
        *("num_queries", "num_keys", "first", "num_entries"),
        *("k_scales_stride_t", "v_scales_stride_t"),
        *("table_stride", "last_stride_b", "seen_stride_b", "seen_stride_n"),
    ]
)
def attend_kernel(  # noqa: C901 most branches are constants; parts in functions of their own compile to other code
    q, k_pool, v_pool, k_scales, v_scales, table, rows, last, roots, seen, gate, out, peaks, sums,
    scale, num_queries, num_keys, first, num_entries,
    q_stride_b, q_stride_n, q_stride_h, k_stride_t, k_stride_h, v_stride_t, v_stride_h,
    k_scales_stride_t, v_scales_stride_t, table_stride,
    last_stride_b, last_stride_n, seen_stride_b, seen_stride_n, seen_stride_m, gate_stride_b, gate_stride_n,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, V: tl.constexpr, HAS_TREE: tl.constexpr,
    IS_SPLIT: tl.constexpr, HAS_GATE: tl.constexpr, CODES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, PIECE: tl.constexpr, IS_WIDE: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Some queries' heads of one key head, over a part of the row's keys where IS_SPLIT, else over all of them.

    Rows of the products are (query, query head of the key head): a key is read once for all of them. ``scale`` has
    log2(e) in it: exponentials are of base 2. IS_WIDE: multiply in float32, as the interpreter has no products of bf16.
    WINDOW: of the keys that are shown to a query, so many last ones are seen; 0: all.
    """
    num_blocks = tl.cdiv(num_queries * GROUP, BLOCK_M)
    key_head = tl.program_id(0) // num_blocks
    # the last queries see the most: theirs begin first
    block = num_blocks - 1 - tl.program_id(0) % num_blocks
    b = tl.program_id(2).to(tl.int64)
    m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    n, head = m // GROUP, key_head * GROUP + m % GROUP
    is_query = n < num_queries
    row = tl.load(rows + b)
    is_alive = n < tl.where(row != 0, num_queries, 0)
    place = (b * num_queries + n) * (KEY_HEADS * GROUP) + head

    till = tl.load(last + b * last_stride_b + n.to(tl.int64) * last_stride_n, mask=is_alive, other=-1)
    till = tl.minimum(till, num_keys - 1).to(tl.int32)
    above = tl.max(till, axis=0)
    # keys till `below`, and from `first` till `above`, are seen by some query here
    if HAS_TREE:
        since, below = first, -1
        root = tl.load(roots + b).to(tl.int32)
        end_of_tree = tl.where(row != 0, tl.minimum(root + num_entries, num_keys), 0)
        begin, end = tl.maximum(tl.minimum(first, root), 0), tl.maximum(above + 1, end_of_tree)
    else:
        since = tl.where(till < first, 0, first)[:, None]
        below = tl.max(tl.where(till < first, till, -1), axis=0)
        begin, end = tl.where(below >= 0, 0, first), above + 1
    if WINDOW > 0:
        if HAS_TREE:
            # from here on a query sees the text, and the entries that it is shown
            shown = seen + b * seen_stride_b + n * seen_stride_n
            since_window = _begins_of_windows(
                till, root, shown, seen_stride_m, is_alive, tl.minimum(num_entries, num_keys - root), WINDOW,
                BLOCK_M, BLOCK_T,
            )[:, None]  # fmt: skip
            lowest = tl.maximum(tl.min(tl.where(is_alive[:, None], since_window, num_keys)), first)
            lowest = tl.minimum(lowest, tl.maximum(root, 0))
        else:
            since = tl.maximum(since, till[:, None] - (WINDOW - 1))
            lowest = tl.min(tl.where(is_alive[:, None], since, num_keys))
        begin = tl.maximum(begin, lowest)

    first_block = begin // BLOCK_N
    in_all = tl.maximum(tl.cdiv(end, BLOCK_N) - first_block, 0)
    in_part = tl.cdiv(in_all, tl.num_programs(1))
    begin = (first_block + tl.program_id(1) * in_part) * BLOCK_N
    end = tl.minimum(begin + in_part * BLOCK_N, end)
    if IS_SPLIT:
        place += tl.program_id(1) * tl.num_programs(2).to(tl.int64) * num_queries * (KEY_HEADS * GROUP)
        if begin >= end:
            tl.store(sums + place, tl.zeros([BLOCK_M], tl.float32), mask=is_query)
            tl.store(peaks + place, tl.full([BLOCK_M], -float("inf"), tl.float32), mask=is_query)
            return

    queries = q + b * q_stride_b + n.to(tl.int64)[:, None] * q_stride_n + head[:, None] * q_stride_h
    keys, values, slots = k_pool + key_head * k_stride_h, v_pool + key_head * v_stride_h, table + row * table_stride
    if CODES > 0:
        key_scales, value_scales = k_scales + key_head, v_scales + key_head
    else:
        key_scales, value_scales = None, None
    x, num_flaws = _whole_queries(queries, is_alive, D, BLOCK_D)
    if IS_WIDE:
        x = x.to(tl.float32)
    peak = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mean = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    unit = tl.zeros([1], tl.float32)
    end_of_text = end
    if HAS_TREE:
        end_of_text = tl.minimum(end, root // BLOCK_N * BLOCK_N)
    for start in range(begin, end_of_text, BLOCK_N):
        t = start + tl.arange(0, BLOCK_N)
        is_read = (t <= below) | ((t >= first) & (t <= above))
        if WINDOW > 0:
            is_read &= t >= lowest
        is_seen = (t[None, :] >= since) & (t[None, :] <= till[:, None])
        if WINDOW > 0 and HAS_TREE:
            is_seen &= t[None, :] >= since_window
        scores, slot = _scores(
            x, queries, is_alive, num_flaws, keys, k_stride_t, key_scales, k_scales_stride_t, slots + t, is_read, D,
            CODES, BLOCK_M, BLOCK_N, BLOCK_D, PIECE, IS_WIDE,
        )  # fmt: skip
        peak, total, mean, unit = _attend_to(
            scores * scale, is_seen, values, v_stride_t, value_scales, v_scales_stride_t, slot, is_read, peak, total,
            mean, unit, q.dtype.element_ty, V, CODES, BLOCK_V, IS_WIDE,
        )  # fmt: skip
    if HAS_TREE:
        # in small steps: who sees an entry is read for each query and key
        for start in tl.range(tl.maximum(begin, end_of_text), end, BLOCK_T, num_stages=1):
            t = start + tl.arange(0, BLOCK_T)
            is_seen = (t[None, :] >= since) & (t[None, :] <= till[:, None])
            is_entry = is_alive[:, None] & ((t >= root) & (t < end_of_tree))[None, :]
            of_queries = seen + b * seen_stride_b + n[:, None] * seen_stride_n
            is_seen |= tl.load(of_queries + (t - root)[None, :] * seen_stride_m, mask=is_entry, other=0) != 0
            if WINDOW > 0:
                is_seen &= t[None, :] >= since_window
            is_read = tl.max(is_seen.to(tl.int32), axis=0) > 0
            scores, slot = _scores(
                x, queries, is_alive, num_flaws, keys, k_stride_t, key_scales, k_scales_stride_t, slots + t, is_read,
                D, CODES, BLOCK_M, BLOCK_T, BLOCK_D, PIECE, IS_WIDE,
            )  # fmt: skip
            peak, total, mean, unit = _attend_to(
                scores * scale, is_seen, values, v_stride_t, value_scales, v_scales_stride_t, slot, is_read, peak,
                total, mean, unit, q.dtype.element_ty, V, CODES, BLOCK_V, IS_WIDE,
            )  # fmt: skip

    mean = _in_numbers(mean, unit, CODES)
    d = tl.arange(0, BLOCK_V)
    at = out + place[:, None] * V + d[None, :]
    is_out = is_query[:, None] & (d < V)[None, :]
    if IS_SPLIT:
        tl.store(at, mean, mask=is_out)
        tl.store(sums + place, total, mask=is_query)
        tl.store(peaks + place, peak, mask=is_query)
    else:
        y = (mean / tl.where(total == 0.0, 1.0, total)[:, None]).to(out.dtype.element_ty)
        if HAS_GATE:
            gates = gate + b * gate_stride_b + n.to(tl.int64)[:, None] * gate_stride_n + head[:, None] * V + d[None, :]
            y = _gated(y, gates, is_out)
        tl.store(at, tl.where(is_alive[:, None], y, 0.0), mask=is_out)


@triton.jit
def _begins_of_windows(
    till, root, of_queries, stride, is_alive, num_entries, WINDOW: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    """[BLOCK_M] where the last WINDOW keys begin that are shown to a query: in the text till ``till``, or in a tree."""
    num_shown = tl.zeros([BLOCK_M], tl.int32)
    for start in tl.range(0, num_entries, BLOCK_T, num_stages=1):
        entry = start + tl.arange(0, BLOCK_T)
        mask = is_alive[:, None] & (entry < num_entries)[None, :]
        shown = tl.load(of_queries[:, None] + entry[None, :] * stride, mask=mask, other=0)
        num_shown += tl.sum((shown != 0).to(tl.int32), axis=1)
    since = till - (WINDOW - 1) + num_shown
    if num_entries > WINDOW:  # trees are smaller than windows almost always
        behind = num_shown
        for entry in tl.range(0, num_entries, num_stages=1):
            behind -= (tl.load(of_queries + entry * stride, mask=is_alive, other=0) != 0).to(tl.int32)
            since = tl.where(behind >= WINDOW, root + entry + 1, since)
    return since


@triton.jit
def _whole_queries(queries, is_alive, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """All of the queries, and [BLOCK_M] how many numbers of one are not finite: if any, it is no query at all.

    Its scores are NaN and so is its result, whatever it sees; without that, one whose scores are all -inf would look
    like one that sees nothing.
    """
    d = tl.arange(0, BLOCK_D)
    x = tl.load(queries + d[None, :], mask=is_alive[:, None] & (d < D)[None, :], other=0.0)
    num_flaws = tl.sum(tl.where(tl.abs(x.to(tl.float32)) < float("inf"), 0, 1), axis=1)
    # In float32: the interpreters of Triton before 3.9 have no constants of bfloat16.
    return tl.where((num_flaws > 0)[:, None], float("nan"), x.to(tl.float32)).to(x.dtype), num_flaws


@triton.jit
def _scores(
    x, queries, is_alive, num_flaws, keys, k_stride_t, key_scales, k_scales_stride_t, slots, is_read,
    D: tl.constexpr, CODES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PIECE: tl.constexpr, IS_WIDE: tl.constexpr,
):  # fmt: skip
    """[BLOCK_M, BLOCK_N] products of queries and keys, and the slots [BLOCK_N, 1]; keys that are not read are zeros.

    With a PIECE both are read anew by so many components of a head: of float32 numbers, and of latents, more do not fit
    into registers. Products with codes are multiplied by the scales of their keys.
    """
    slot = tl.load(slots, mask=is_read, other=0)[:, None]
    rows = keys + slot * k_stride_t
    if PIECE == 0:
        d = tl.arange(0, BLOCK_D)
        mask = is_read[:, None]
        if D != BLOCK_D:
            mask = mask & (d < D)[None, :]
        k = widened(tl.load(rows + d[None, :], mask=mask, other=0), CODES)
        scores = tl.dot(x, tl.trans(k.to(x.dtype)))
    else:
        scores = tl.where(num_flaws > 0, float("nan"), 0.0)[:, None] + tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for begin in tl.range(0, D, PIECE, num_stages=1):
            d = begin + tl.arange(0, PIECE)
            mine = tl.load(
                queries + d[None, :], mask=(is_alive & (num_flaws == 0))[:, None] & (d < D)[None, :], other=0.0
            )
            theirs = widened(tl.load(rows + d[None, :], mask=is_read[:, None] & (d < D)[None, :], other=0), CODES)
            theirs = theirs.to(mine.dtype)
            if IS_WIDE:
                mine, theirs = mine.to(tl.float32), theirs.to(tl.float32)
            scores += tl.dot(mine, tl.trans(theirs), input_precision="ieee")
    if CODES > 0:
        of_keys = tl.load(key_scales + slot * k_scales_stride_t, mask=is_read[:, None], other=0.0)
        scores *= tl.trans(of_keys) * loads_of_a_unit(CODES)
    return scores, slot


@triton.jit
def _attend_to(
    scores, is_seen, values, v_stride_t, value_scales, v_scales_stride_t, slot, is_read, peak, total, mean, unit,
    DTYPE: tl.constexpr, V: tl.constexpr, CODES: tl.constexpr, BLOCK_V: tl.constexpr, IS_WIDE: tl.constexpr,
):  # fmt: skip
    """One block of keys more: the softmax of scores so far is mean / total, and ``peak`` is their maximum.

    Weights of codes are multiplied by the scales of their values: in units of the largest scale so far, as float16 has
    no room for small ones. ``mean`` is in this unit.
    """
    d = tl.arange(0, BLOCK_V)
    mask = is_read[:, None]
    if V != BLOCK_V:
        mask = mask & (d < V)[None, :]
    v = widened(tl.load(values + slot * v_stride_t + d[None, :], mask=mask, other=0), CODES).to(DTYPE)
    scores = tl.where(is_seen, scores, -float("inf"))
    new_peak = tl.maximum(peak, tl.max(scores, axis=1))
    shift = tl.where(new_peak == -float("inf"), 0.0, new_peak)
    p = tl.exp2(scores - shift[:, None])
    keep = tl.exp2(peak - shift)
    if CODES > 0:
        of_values = tl.load(value_scales + slot * v_scales_stride_t, mask=is_read[:, None], other=0.0)
        new_unit = tl.maximum(unit, tl.max(of_values))
        divisor = tl.where(new_unit == 0.0, 1.0, new_unit)
        p_of_pool = (p * tl.trans(of_values / divisor)).to(DTYPE)
        keep_of_mean, unit = keep * (unit / divisor), new_unit
    else:
        keep_of_mean = keep
        p_of_pool = p.to(DTYPE)
    if IS_WIDE:
        p_of_pool, v = p_of_pool.to(tl.float32), v.to(tl.float32)
    mean = tl.dot(p_of_pool, v, mean * keep_of_mean[:, None], input_precision="ieee")
    return new_peak, total * keep + tl.sum(p, axis=1), mean, unit


@triton.jit
def _in_numbers(mean, unit, CODES: tl.constexpr):
    """A sum over codes in its unit, as numbers."""
    if CODES > 0:
        mean *= (unit * loads_of_a_unit(CODES))[:, None]
    return mean


@triton.jit
def _gated(y, gates, mask):
    """y * sigmoid(gate), every step rounded to the dtype of y."""
    g = tl.load(gates, mask=mask, other=0.0).to(tl.float32)
    share = (1.0 / (1.0 + tl.exp(-g))).to(y.dtype)
    return (y.to(tl.float32) * share.to(tl.float32)).to(y.dtype)


@triton.jit(do_not_specialize=["num_queries", "num_splits"])
def combine_kernel(
    parts, peaks, sums, rows, gate, out, num_queries, num_splits, gate_stride_b, gate_stride_n,
    QUERY_HEADS: tl.constexpr, V: tl.constexpr, HAS_GATE: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """All parts of one query head's sum, then its gate."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, n = token // num_queries, token % num_queries
    entry, num_entries = token * QUERY_HEADS + head, tl.num_programs(0).to(tl.int64) * QUERY_HEADS
    d = tl.arange(0, BLOCK_V)
    is_out = d < V
    peak, total = tl.full([1], -float("inf"), tl.float32), tl.zeros([1], tl.float32)
    mean = tl.zeros([BLOCK_V], tl.float32)
    for start in range(0, num_splits, BLOCK_S):
        split = start + tl.arange(0, BLOCK_S)
        at = split * num_entries + entry
        of_part = tl.load(sums + at, mask=split < num_splits, other=0.0)
        is_part = of_part != 0.0  # others' means were never written
        peak_of_part = tl.load(peaks + at, mask=is_part, other=-float("inf"))
        new_peak = tl.maximum(peak, tl.max(peak_of_part, axis=0))
        shift = tl.where(new_peak == -float("inf"), 0.0, new_peak)
        keep, weight = tl.exp2(peak - shift), tl.exp2(peak_of_part - shift)
        part = tl.load(parts + at[:, None] * V + d[None, :], mask=is_part[:, None] & is_out[None, :], other=0.0)
        mean = mean * keep + tl.sum(part * weight[:, None], axis=0)
        total = total * keep + tl.sum(of_part * weight, axis=0)
        peak = new_peak
    y = (mean / tl.where(total == 0.0, 1.0, total)).to(out.dtype.element_ty)
    if HAS_GATE:
        y = _gated(y, gate + b * gate_stride_b + n * gate_stride_n + head * V + d, is_out)
    tl.store(out + entry * V + d, tl.where(tl.load(rows + b) != 0, y, 0.0), mask=is_out)
