// An attention layer between its two products, over keys and values in a pool; see README.md and reference.py.
#include <algorithm>

#include "paged_attention/attend.h"
#include "paged_attention/runs.h"
#include "parallel.h"
#include "replayable.h"
#include "rowwise/heads.h"

namespace {

using namespace specmamba;

// What stays from call to call.
struct Config {
  const float* norm;  // [Hq + Hkv, D], or null: queries and keys are not normalised
  int64_t query_heads, key_heads, width, has_gate;
  double scale, eps;
};

// Of one call. The projections of a token are queries, keys, values and, where there is a gate, gates.
struct Layer {
  const void *projected, *cos, *sin;  // [B * N, (Hq + 2 Hkv [+ Hq]) D]; cos, sin [B * N, R], R = 0: nothing turns
  const int64_t* write_slots;
  void *k, *v, *out;
  VisibleKeys visible;
  const int64_t *firsts, *counts;  // [B], the row's first token and its tokens in packed projections; or null
  int64_t batch, queries, rotated, k_row, v_row, tokens;
};

// One head, normalised and rotated where that is asked for; rounded after each of the two, as kernels/rowwise does.
template <typename T>
void prepare(const Config& config, const Layer& p, int64_t token, const T* x, const float* norm, T* y) {
  if (norm != nullptr)
    normalize<false>(x, static_cast<const T*>(nullptr), norm, config.width, static_cast<float>(config.eps), y);
  else
    std::copy_n(x, config.width, y);
  const int64_t at = token * p.rotated;
  rotate_head(y, static_cast<const T*>(p.cos) + at, static_cast<const T*>(p.sin) + at, p.rotated, y);
}

template <typename T>
void attend_layer(const Config& config, const Layer& p, int num_threads) {
  static thread_local std::vector<T> scratch;
  const int64_t width = config.width, tokens = p.tokens;
  const int64_t q_size = config.query_heads * width, k_size = config.key_heads * width, qk_size = q_size + k_size;
  const int64_t size = qk_size + k_size + (config.has_gate ? q_size : 0);
  scratch.resize(tokens * qk_size);
  T *queries = scratch.data(), *keys = queries + tokens * q_size;
  const T* projected = static_cast<const T*>(p.projected);
  static thread_local std::vector<int64_t> at;  // query of each token, among B * N; places of cos, sin and slots
  at.clear();
  for (int64_t b = 0; b < p.batch; ++b)
    for (int64_t i = 0; i < (p.counts == nullptr ? p.queries : p.counts[b]); ++i) at.push_back(b * p.queries + i);
  const int64_t real = static_cast<int64_t>(at.size()), *query_of = at.data();
  parallel_for(real, 1, tokens * size < kSerialBelow ? 1 : num_threads, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      const int64_t place = query_of[t];
      const T* x = projected + t * size;
      const auto prepare_heads = [&](int64_t first, int64_t last, T* y) {
        for (int64_t at = first; at < last; at += width)
          prepare(config, p, place, x + at, config.norm == nullptr ? nullptr : config.norm + at, y + at - first);
      };
      prepare_heads(0, q_size, queries + t * q_size);
      prepare_heads(q_size, qk_size, keys + t * k_size);
      // see torch_ops.write
      store_finite(keys + t * k_size, static_cast<T*>(p.k) + p.write_slots[place] * p.k_row, k_size);
      store_finite(x + qk_size, static_cast<T*>(p.v) + p.write_slots[place] * p.v_row, k_size);
    }
  });
  const T* gate = config.has_gate ? projected + qk_size + k_size : nullptr;
  std::fill_n(static_cast<T*>(p.out) + real * q_size, (tokens - real) * q_size, T{});
  const Attend a{queries, p.k, p.v, gate, p.out, p.visible, p.firsts, p.counts,
                 p.batch, p.queries, config.query_heads, config.key_heads, width, p.k_row, p.v_row, size,
                 config.scale};
  p.queries > kManyQueries && p.visible.roots == nullptr ? attend_run<T>(a, num_threads) : attend<T>(a, num_threads);
}

}  // namespace

extern "C" void paged_attend_layer(const Config* config, const Layer* p, int is_bfloat16, int num_threads) {
  is_bfloat16 ? attend_layer<BFloat16>(*config, *p, num_threads) : attend_layer<float>(*config, *p, num_threads);
}

SPECMAMBA_REPLAYABLE(paged_attend_layer)
