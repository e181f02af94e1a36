// An attention layer between its two products, over keys and values in a pool; see README.md and reference.py.
#include <algorithm>

#include "paged_attention/attend.h"
#include "paged_attention/codes.h"
#include "paged_attention/runs.h"
#include "parallel.h"
#include "replayable.h"
#include "rowwise/heads.h"

namespace {

using namespace specmamba;

// What stays from call to call.
struct Config {
  const float* norm;  // [Hq + Hkv, D], or null: queries and keys are not normalised
  int64_t query_heads, key_heads, width, value_width, has_gate;
  int64_t is_latent;  // values are the last value_width numbers of keys, which are one head
  int64_t window;
  double scale, eps;
};

// Of one call. The projections of a token are queries, keys, values that are no part of keys and, where there is a gate,
// gates.
struct Layer {
  const void *projected, *cos, *sin;  // [B * N, (Hq + 2 Hkv [+ Hq]) D]; cos, sin [B * N, R], R = 0: nothing turns
  const int64_t* write_slots;
  void *k, *v, *out;
  VisibleKeys visible;
  const int64_t *firsts, *counts;  // [B], the row's first token and its tokens in packed projections; or null
  float *k_scales, *v_scales;      // of codes, or null
  int64_t batch, queries, rotated, k_row, v_row, tokens, k_scales_row, v_scales_row;
  int64_t codes;     // what the pools hold: numbers like the projections', int8 or FP8
  int64_t is_exact;  // sums have the order of `attend` for any number of queries

  Scales scales() const { return {k_scales, v_scales, k_scales_row, v_scales_row}; }
};
enum Codes : int64_t { kNumbers, kInt8, kFloat8 };

// One head, normalised and rotated where that is asked for; rounded after each of the two, as kernels/rowwise does.
template <typename T>
void prepare(const Config& config, const Layer& p, int64_t token, const T* x, const float* norm, T* y) {
  if (norm != nullptr)
    normalize<Gate::kNone>(x, static_cast<const T*>(nullptr), norm, config.width, static_cast<float>(config.eps), y);
  else
    std::copy_n(x, config.width, y);
  const int64_t at = token * p.rotated;
  rotate_head(y, static_cast<const T*>(p.cos) + at, static_cast<const T*>(p.sin) + at, p.rotated, y);
}

// The heads of one token's keys, or of its values; see torch_ops.write.
template <typename T, typename Stored>
void store_heads(const T* x, const Config& config, Stored* to, float* scales) {
  if constexpr (std::is_same_v<T, Stored>)
    store_finite(x, to, config.key_heads * config.width);
  else
    for (int64_t h = 0; h < config.key_heads; ++h)
      scales[h] = quantize_head(x + h * config.width, config.width, to + h * config.width);
}

// The queries as products read them: these themselves where that is their type.
template <typename Q, typename T>
const Q* read_as(const T* queries, int64_t size) {
  if constexpr (std::is_same_v<Q, T>) {
    return queries;
  } else {
    static thread_local std::vector<Q> wide;
    wide.resize(size);
    for_vectors(size, [&](int64_t i, auto lanes) { store(wide.data() + i, load(queries + i, lanes), lanes); });
    return wide.data();
  }
}

template <typename T, typename Stored>
void attend_layer(const Config& config, const Layer& p, int num_threads) {
  static thread_local std::vector<T> scratch;
  const int64_t width = config.width, tokens = p.tokens;
  const int64_t q_size = config.query_heads * width, k_size = config.key_heads * width, qk_size = q_size + k_size;
  const int64_t out_size = config.query_heads * config.value_width, v_size = config.is_latent ? 0 : k_size;
  const int64_t size = qk_size + v_size + (config.has_gate ? out_size : 0);
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
      const int64_t slot = p.write_slots[place];
      store_heads(keys + t * k_size, config, static_cast<Stored*>(p.k) + slot * p.k_row, p.k_scales + slot * p.k_scales_row);
      if (!config.is_latent)
        store_heads(x + qk_size, config, static_cast<Stored*>(p.v) + slot * p.v_row, p.v_scales + slot * p.v_scales_row);
    }
  });
  const T* gate = config.has_gate ? projected + qk_size + v_size : nullptr;
  std::fill_n(static_cast<T*>(p.out) + real * out_size, (tokens - real) * out_size, T{});
  const auto* read = read_as<Query<T, Stored>>(queries, real * q_size);
  const Attend a{read, p.k, p.v, gate, p.out, {p.visible, config.window}, p.firsts, p.counts,
                 p.batch, p.queries, config.query_heads, config.key_heads, width, config.value_width, p.k_row, p.v_row, size,
                 config.scale, p.scales()};
  if (p.queries > kManyQueries && p.visible.roots == nullptr && !p.is_exact)
    attend_run<T, Stored>(a, num_threads);
  else
    attend<T, Stored>(a, num_threads);
}

template <typename T>
void attend_layer_of(const Config& config, const Layer& p, int num_threads) {
  if (p.codes == kInt8) return attend_layer<T, int8_t>(config, p, num_threads);
  if (p.codes == kFloat8) return attend_layer<T, Float8>(config, p, num_threads);
  attend_layer<T, T>(config, p, num_threads);
}

}  // namespace

extern "C" void paged_attend_layer(const Config* config, const Layer* p, int is_bfloat16, int num_threads) {
  is_bfloat16 ? attend_layer_of<BFloat16>(*config, *p, num_threads) : attend_layer_of<float>(*config, *p, num_threads);
}

SPECMAMBA_REPLAYABLE(paged_attend_layer)
