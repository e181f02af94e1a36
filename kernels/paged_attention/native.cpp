// A gated attention layer between its two products, over keys and values in a pool; see README.md and reference.py.
#include "paged_attention/attend.h"
#include "parallel.h"
#include "rowwise/heads.h"

namespace {

using namespace specmamba;

// The projections [B * N, 2 (Hq + Hkv) D] of new tokens: queries, keys, values, gates; and what is made of them.
struct GatedAttend {
  const void *projected, *cos, *sin;  // cos, sin [B * N, R]
  const float* weight;                // [Hq + Hkv, D]
  const int64_t *write_slots, *indices;
  const bool* mask;
  void *k, *v, *out;
  int64_t batch, queries, query_heads, key_heads, width, length, rotated;
  int64_t k_row, v_row, indices_batch, mask_batch, mask_query;
  double scale, eps;
};

// One head, normalised and rotated; rounded after each of the two, as kernels/rowwise does.
template <typename T>
void prepare(const GatedAttend& p, int64_t token, const T* x, const float* weight, T* y) {
  normalize<false>(x, static_cast<const T*>(nullptr), weight, p.width, static_cast<float>(p.eps), y);
  const int64_t at = token * p.rotated;
  rotate_head(y, static_cast<const T*>(p.cos) + at, static_cast<const T*>(p.sin) + at, p.rotated, y);
}

// What is not finite is stored as 0; see torch_ops.write.
template <typename T>
void store_finite(const T* x, T* y, int64_t size) {
  constexpr int kNotFinite = 0x99;  // NaNs and infinities
  for_vectors(size, [&](int64_t i, auto lanes) {
    const Vector v = load(x + i, lanes);
    store(y + i, _mm512_mask_mov_ps(v, _mm512_fpclass_ps_mask(v, kNotFinite), _mm512_setzero_ps()), lanes);
  });
}

template <typename T>
void gated_attend(const GatedAttend& p, int num_threads) {
  static thread_local std::vector<T> scratch;
  const int64_t tokens = p.batch * p.queries, q_size = p.query_heads * p.width, k_size = p.key_heads * p.width;
  const int64_t size = 2 * (q_size + k_size);
  scratch.resize(tokens * (q_size + k_size));
  T *queries = scratch.data(), *keys = queries + tokens * q_size;
  const T* projected = static_cast<const T*>(p.projected);
  parallel_for(tokens, 1, tokens * size < kSerialBelow ? 1 : num_threads, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      const T* x = projected + t * size;
      for (int64_t at = 0; at < q_size; at += p.width)
        prepare(p, t, x + at, p.weight + at, queries + t * q_size + at);
      for (int64_t at = 0; at < k_size; at += p.width)
        prepare(p, t, x + q_size + at, p.weight + q_size + at, keys + t * k_size + at);
      store_finite(keys + t * k_size, static_cast<T*>(p.k) + p.write_slots[t] * p.k_row, k_size);
      store_finite(x + q_size + k_size, static_cast<T*>(p.v) + p.write_slots[t] * p.v_row, k_size);
    }
  });
  const T* gate = projected + q_size + 2 * k_size;
  const Attend a{queries, p.k, p.v, p.indices, p.mask, gate, p.out,
                 p.batch, p.queries, p.query_heads, p.key_heads, p.width, p.length,
                 p.k_row, p.v_row, p.indices_batch, p.mask_batch, p.mask_query, size,
                 p.scale};
  attend<T>(a, num_threads);
}

}  // namespace

extern "C" void paged_gated_attend(const GatedAttend* p, int is_bfloat16, int num_threads) {
  is_bfloat16 ? gated_attend<BFloat16>(*p, num_threads) : gated_attend<float>(*p, num_threads);
}
