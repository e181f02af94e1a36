// Products with the experts that have tokens, and what is around them; see README.md. Panels and loops are linear's.
#include <cstring>
#include <memory>
#include <vector>

#include "linear/bf16.h"
#include "linear/grouped.h"
#include "linear/int8.h"
#include "linear/widened.h"
#include "live.h"
#include "parallel.h"
#include "replayable.h"
#include "vector.h"

using namespace specmamba;

namespace {

constexpr int64_t kBytesPart = 1 << 16;  // of rows that a thread moves or sums at a time

// Rows [first, first + rows) are the tokens of one expert.
struct Group {
  int64_t expert, first, rows;
};

// Elements of the packed weight [n, k] of one expert.
int64_t packed_size(int64_t n, int64_t k) { return panels_of(n) * panel_size(k); }

template <int Inputs, typename Element>
void pack_all(const Element* weight, Element* packed, int64_t experts, int64_t n, int64_t k, int num_threads) {
  for (int64_t e = 0; e < experts; ++e)
    pack<Inputs>(weight + e * n * k, packed + e * packed_size(n, k), n, k, num_threads);
}

// False where ends do not part the rows; `partial`: rows behind the last end are padding.
bool find_groups(const int32_t* ends, int64_t num_experts, int64_t rows, int partial, std::vector<Group>* groups) {
  int64_t first = 0;
  for (int64_t expert = 0; expert < num_experts; first = ends[expert++]) {
    if (ends[expert] < first) return false;
    if (ends[expert] > first) groups->push_back({expert, first, ends[expert] - first});
  }
  return partial ? first <= rows : first == rows;
}

// of(group) is the product of one group; all have the same n and k. A part may end in the middle of an expert.
template <typename Of>
void multiply_groups(const std::vector<Group>& groups, const Of& of, int num_threads) {
  if (groups.empty()) return;
  const auto any = of(groups.front());
  const int64_t num_panels = panels_of(any.n), total = num_panels * static_cast<int64_t>(groups.size());
  const int64_t rows = groups.back().first + groups.back().rows;
  if (rows * any.n * any.k < kSerialBelow) num_threads = 1;
  const bool are_few = rows <= kPairRows * static_cast<int64_t>(groups.size());  // of an expert, in the mean
  const int64_t part = panels_of_part(total, any.panel_bytes(), num_threads, are_few);
  parallel_for_ranges(total, part, num_threads, [&](int64_t first, int64_t last) {
    while (first < last) {
      const int64_t group = first / num_panels, begin = first % num_panels;
      const int64_t end = std::min(num_panels, begin + last - first);
      multiply_panels(of(groups[group]), begin, end);
      first += end - begin;
    }
  });
}

// Weights and results have one type.
template <typename Product, typename Inputs, typename T>
void multiply_experts(const std::vector<Group>& groups, const Inputs& inputs, const T* packed, T* y, int64_t n,
                      int64_t k, int num_threads) {
  const auto of = [&](const Group& g) {
    const T* weight = packed + g.expert * packed_size(n, k);
    return Product{inputs.row(g.first), weight, y + g.first * n, g.rows, n, k, inputs.stride()};
  };
  multiply_groups(groups, of, num_threads);
}

template <typename X>
void combine(const X* y, const int64_t* places, const float* weights, X* out, int64_t tokens, int64_t k, int64_t n,
             int num_threads) {
  const int64_t part = std::max<int64_t>(1, kBytesPart / (k * n * static_cast<int64_t>(sizeof(X)) + 1));
  parallel_for(tokens, part, num_threads, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t)
      for_vectors(n, [&](int64_t i, auto lanes) {
        Vector sum = zero();
        for (int64_t j = t * k; j < (t + 1) * k; ++j)
          sum = fma(broadcast(weights[j]), load(y + places[j] * n + i, lanes), sum);
        store(out + t * n + i, sum, lanes);
      });
  });
}

// Softmax of each row of x [rows, n] -> y.
void shares(const float* x, int64_t rows, float* y, int64_t n, int num_threads) {
  const int64_t part = std::max<int64_t>(1, kBytesPart / (n * static_cast<int64_t>(sizeof(float)) + 1));
  parallel_for(rows, part, num_threads, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      const float* own = x + t * n;
      Vector most = broadcast(own[0]), total = zero();
      for_vectors(n, [&](int64_t i, auto lanes) {
        const Vector v = load(own + i, lanes);
        most = chosen(lanes, larger(v, most), most);
      });
      const Vector shift = broadcast(largest(most));
      for_vectors(n, [&](int64_t i, auto lanes) {
        const Vector weight = exp(load(own + i, lanes) - shift);
        total = chosen(lanes, total + weight, total);
        store(y + t * n + i, weight, lanes);
      });
      const Vector whole = broadcast(sum(total));
      for_vectors(n, [&](int64_t i, auto lanes) { store(y + t * n + i, load(y + t * n + i, lanes) / whole, lanes); });
    }
  });
}

}  // namespace

extern "C" {

int64_t moe_packed_size(int64_t n, int64_t k) { return packed_size(n, k); }

// weight [experts, n, k] in float32 or bfloat16 -> packed, expert by expert.
void moe_pack(const void* weight, void* packed, int64_t experts, int64_t n, int64_t k, int is_bf16, int num_threads) {
  if (is_bf16)
    pack_all<kInputsOf<BFloat16>>(static_cast<const BFloat16*>(weight), static_cast<BFloat16*>(packed), experts, n,
                                  k, num_threads);
  else
    pack_all<1>(static_cast<const float*>(weight), static_cast<float*>(packed), experts, n, k, num_threads);
}

// A router's weight [n, k] in float32 or bfloat16 -> packed.
void moe_pack_router(const void* weight, void* packed, int64_t n, int64_t k, int is_bf16, int num_threads) {
  if (is_bf16)
    pack<kInputsOf<BFloat16>>(static_cast<const BFloat16*>(weight), static_cast<BFloat16*>(packed), n, k, num_threads);
  else
    pack<1>(static_cast<const float*>(weight), static_cast<float*>(packed), n, k, num_threads);
}

void moe_pack_int8(const int8_t* weight, int8_t* packed, int64_t experts, int64_t n, int64_t k, int num_threads) {
  pack_all<2>(weight, packed, experts, n, k, num_threads);
}

// x [rows, k] times a router's weight in float32 or bfloat16 -> y [rows, n]; `live` as everywhere, see live.h.
void moe_scores(const float* x, int64_t rows, const int64_t* live, const void* weight, float* y, int64_t n, int64_t k,
                int is_bf16, int num_threads) {
  rows = live_rows(rows, live);
  if (rows == 0) return;
  if (is_bf16)
    multiply(WidenedProduct<BFloat16, float>{x, static_cast<const BFloat16*>(weight), y, rows, n, k, k}, num_threads);
  else
    multiply(WidenedProduct<float, float>{x, static_cast<const float*>(weight), y, rows, n, k, k}, num_threads);
}

// Softmax of each row of x [rows, n], n at least 1 -> y; `live` as above.
void moe_shares(const float* x, int64_t rows, const int64_t* live, float* y, int64_t n, int num_threads) {
  shares(x, live_rows(rows, live), y, n, num_threads);
}

// Each row of x [rows, n] over its sum, from left to right, and `tiny` -> y; `live` as above.
void moe_normalise(const float* x, int64_t rows, const int64_t* live, float* y, int64_t n, double tiny) {
  for (int64_t t = 0; t < live_rows(rows, live); ++t) {
    float total = 0;
    for (int64_t i = t * n; i < (t + 1) * n; ++i) total += x[i];
    total += static_cast<float>(tiny);
    for (int64_t i = t * n; i < (t + 1) * n; ++i) y[i] = x[i] / total;
  }
}

// Sorts pairs by expert and copies the rows of x [tokens, row_bytes] that they need; experts [tokens, k].
// False where there is no such expert: nothing is copied then.
int moe_dispatch(const char* x, int64_t row_bytes, const int64_t* experts, int64_t tokens, const int64_t* live,
                 int64_t k, int64_t num_experts, char* sorted, int64_t* places, int32_t* ends, int num_threads) {
  const int64_t pairs = live_rows(tokens, live) * k;
  std::vector<int64_t> next(num_experts + 1);
  for (int64_t p = 0; p < pairs; ++p) {
    if (experts[p] < 0 || experts[p] >= num_experts) return 0;
    ++next[experts[p] + 1];
  }
  for (int64_t e = 0; e < num_experts; ++e) ends[e] = static_cast<int32_t>(next[e + 1] += next[e]);
  for (int64_t p = 0; p < pairs; ++p) places[p] = next[experts[p]]++;
  parallel_for(pairs, std::max<int64_t>(1, kBytesPart / (row_bytes + 1)), num_threads, [&](int64_t p, int64_t last) {
    for (; p < last; ++p) std::memcpy(sorted + places[p] * row_bytes, x + p / k * row_bytes, row_bytes);
  });
  return 1;
}

// x [rows, k], sorted, times the packed weights of their experts -> y [rows, n], all bfloat16 or all float32. False
// where ends do not part the rows: nothing is multiplied then.
int moe_multiply(const void* x, int64_t rows, const int32_t* ends, const void* packed, void* y, int64_t num_experts,
                 int64_t n, int64_t k, int partial, int is_bf16, int num_threads) {
  std::vector<Group> groups;
  if (!find_groups(ends, num_experts, rows, partial, &groups)) return 0;
  rows = groups.empty() ? 0 : groups.back().first + groups.back().rows;
  if (is_bf16) {
    const Bf16Inputs inputs(static_cast<const BFloat16*>(x), rows, k, num_threads);
    multiply_experts<Bf16Product>(groups, inputs, static_cast<const BFloat16*>(packed), static_cast<BFloat16*>(y), n, k,
                                  num_threads);
  } else {
    const PlainInputs<float> inputs{static_cast<const float*>(x), k};
    multiply_experts<WidenedProduct<float, float>>(groups, inputs, static_cast<const float*>(packed),
                                                   static_cast<float*>(y), n, k, num_threads);
  }
  return 1;
}

// The same for int8 with the scales [num_experts, n] of all outputs; x and y are bfloat16 or float32.
int moe_multiply_int8(const void* x, int64_t rows, const int32_t* ends, const int8_t* packed, const float* scale,
                      void* y, int64_t num_experts, int64_t n, int64_t k, int partial, int is_bf16,
                      int num_threads) {
  std::vector<Group> groups;
  if (!find_groups(ends, num_experts, rows, partial, &groups)) return 0;
  rows = groups.empty() ? 0 : groups.back().first + groups.back().rows;
  const std::unique_ptr<int16_t[]> q(new int16_t[rows * even(k)]);
  const std::unique_ptr<float[]> x_scale(new float[rows]);
  parallel_for(rows, std::max<int64_t>(1, kInputsPart / k), num_threads, [&](int64_t row, int64_t last) {
    for (; row < last; ++row) {
      int16_t* out = q.get() + row * even(k);
      x_scale[row] = is_bf16 ? quantize_row(static_cast<const BFloat16*>(x) + row * k, k, out)
                             : quantize_row(static_cast<const float*>(x) + row * k, k, out);
    }
  });
  const auto of = [&](const Group& g) {
    char* to = static_cast<char*>(y) + g.first * n * (is_bf16 ? 2 : 4);
    return Int8Product{q.get() + g.first * even(k), x_scale.get() + g.first,
                       packed + g.expert * packed_size(n, k), scale + g.expert * n,
                       to, !is_bf16, g.rows, n, k};
  };
  multiply_groups(groups, of, num_threads);
  return 1;
}

// Bytes of the packed codes [n, k] of one expert.
int64_t moe_grouped_size(int64_t n, int64_t k, int64_t group, int bits, int has_minimum) {
  return panels_of(n) * Grouping{n, k, group, bits, has_minimum != 0}.panel_bytes();
}

// codes [experts, n, k], scales and minima [experts, n, groups] -> packed, expert by expert.
void moe_pack_grouped(const uint8_t* codes, const uint16_t* scale, const uint16_t* minimum, uint8_t* packed,
                      int64_t experts, int64_t n, int64_t k, int64_t group, int bits, int num_threads) {
  const Grouping of{n, k, group, bits, minimum != nullptr};
  for (int64_t e = 0; e < experts; ++e) {
    const int64_t at = e * n * of.groups();
    pack_grouped(codes + e * n * k, scale + at, minimum == nullptr ? nullptr : minimum + at,
                 packed + e * panels_of(n) * of.panel_bytes(), of, num_threads);
  }
}

// As moe_multiply, for packed codes less an offset, with the factors [num_experts, n] of their scales; `table` as for
// linear_multiply_grouped.
int moe_multiply_grouped(const void* x, int64_t rows, const int32_t* ends, const uint8_t* packed, const float* factor,
                         const uint8_t* table, void* y, int64_t num_experts, int64_t n, int64_t k, int64_t group,
                         int bits, int offset, int has_minimum, int partial, int is_bf16, int num_threads) {
  std::vector<Group> groups;
  if (!find_groups(ends, num_experts, rows, partial, &groups)) return 0;
  rows = groups.empty() ? 0 : groups.back().first + groups.back().rows;
  const Grouping of{n, k, group, bits, has_minimum != 0};
  GroupedInputs inputs(rows, of, offset);
  const int64_t count = static_cast<int64_t>(groups.size());
  const bool are_few = count < 4 * num_threads;  // then threads share the rows of each
  parallel_for(count, are_few ? count : 1, num_threads, [&](int64_t at, int64_t last) {
    for (; at < last; ++at) {
      const auto& [_, first, of_group] = groups[at];
      if (is_bf16)
        inputs.set(static_cast<const BFloat16*>(x), first, of_group, are_few ? num_threads : 1);
      else
        inputs.set(static_cast<const float*>(x), first, of_group, are_few ? num_threads : 1);
    }
  });
  with_codes(bits, table, group, [&](auto codes, auto unit) {
    using Product = GroupedProduct<decltype(codes), decltype(unit)::value>;
    const auto product = [&](const Group& g) {
      const uint8_t* weight = packed + g.expert * panels_of(n) * of.panel_bytes();
      char* to = static_cast<char*>(y) + g.first * n * (is_bf16 ? 2 : 4);
      return Product{inputs, g.first, weight, factor + g.expert * n, codes, of, to, !is_bf16, g.rows, n, k};
    };
    multiply_groups(groups, product, num_threads);
  });
  return 1;
}

// out[t] = sum_j weights[t, j] y[places[t, j]]; y [tokens * k, n] and out [tokens, n] are bfloat16 or float32.
// False where y has no such place: nothing is summed then.
int moe_combine(const void* y, const int64_t* places, const float* weights, void* out, int64_t tokens,
                const int64_t* live, int64_t k, int64_t n, int is_bf16, int num_threads) {
  tokens = live_rows(tokens, live);
  for (int64_t p = 0; p < tokens * k; ++p)
    if (places[p] < 0 || places[p] >= tokens * k) return 0;
  if (is_bf16)
    combine(static_cast<const BFloat16*>(y), places, weights, static_cast<BFloat16*>(out), tokens, k, n, num_threads);
  else
    combine(static_cast<const float*>(y), places, weights, static_cast<float*>(out), tokens, k, n, num_threads);
  return 1;
}

}  // extern "C"

SPECMAMBA_REPLAYABLE(moe_scores)
SPECMAMBA_REPLAYABLE(moe_shares)
SPECMAMBA_REPLAYABLE(moe_normalise)
SPECMAMBA_REPLAYABLE(moe_dispatch)
SPECMAMBA_REPLAYABLE(moe_multiply)
SPECMAMBA_REPLAYABLE(moe_multiply_int8)
SPECMAMBA_REPLAYABLE(moe_multiply_grouped)
SPECMAMBA_REPLAYABLE(moe_combine)
