// Random numbers, argmax and inverse-CDF sampling; see README.md and reference.py.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "parallel.h"
#include "replayable.h"
#include "sampling/drafts.h"
#include "sampling/filters.h"
#include "sampling/penalties.h"
#include "sampling/rows.h"

namespace {

using namespace specmamba;

constexpr int64_t kSerialBelow = 1 << 15;  // logits that one thread has done before a second one begins

uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

// Whether something is finite, and nothing is no number or infinite upwards.
template <typename T>
bool has_finite_max(const T* x, int64_t size) {
  const float infinity = std::numeric_limits<float>::infinity();
  Mask sound = every(), finite = none();
  for_vectors(size, [&](int64_t i, auto lanes) {
    const Vector v = load_or(x + i, -infinity, lanes);
    sound = sound & is_less(v, broadcast(infinity));
    finite = finite | is_finite(v);
  });
  return all(sound) && any(finite);
}

constexpr float kOverflow = 1e4f;  // stands for logits that are not finite

inline float finite(float x) {
  return x != x ? -kOverflow : std::isinf(x) ? (x > 0 ? kOverflow : -kOverflow) : x;
}

// The k largest of a row, equal ones by their place, and the logarithms of their shares of sum e^x.
template <typename T>
void likeliest(const T* x, int64_t size, int64_t k, int64_t* tokens, float* logprobs) {
  int64_t count = 0;
  float largest = -std::numeric_limits<float>::infinity();
  Vector total = zero();
  float block[kBlock];
  const auto load_block = [&](int64_t begin) {
    const int64_t length = std::min(kBlock, size - begin);
    Mask is_sound = every();
    Vector most = broadcast(-std::numeric_limits<float>::infinity());
    for_vectors(length, [&](int64_t i, auto lanes) {
      const Vector v = load_or(x + begin + i, 0, lanes);
      is_sound = is_sound & is_finite(v);
      store(block + i, v, lanes);
      most = larger(chosen(lanes, v, most), most);
    });
    if (all(is_sound)) return specmamba::largest(most);
    for (int64_t i = 0; i < length; ++i) block[i] = finite(block[i]);
    return *std::max_element(block, block + length);
  };
  for (int64_t begin = 0; begin < size; begin += kBlock) {
    const float most = load_block(begin);
    largest = std::max(largest, most);
    if (count == k && most <= logprobs[k - 1]) continue;
    for (int64_t i = 0, length = std::min(kBlock, size - begin); i < length; ++i) {
      if (count == k && block[i] <= logprobs[k - 1]) continue;
      int64_t at = count < k ? count++ : k - 1;
      for (; at > 0 && logprobs[at - 1] < block[i]; --at) {
        logprobs[at] = logprobs[at - 1];
        tokens[at] = tokens[at - 1];
      }
      logprobs[at] = block[i];
      tokens[at] = begin + i;
    }
  }
  const Vector shift = broadcast(largest);
  for (int64_t begin = 0; begin < size; begin += kBlock) {
    load_block(begin);
    for_vectors(std::min(kBlock, size - begin), [&](int64_t i, auto lanes) {
      total = chosen(lanes, total + exp(load(block + i, lanes) - shift), total);
    });
  }
  const float log_total = std::log(sum(total));
  for (int64_t i = 0; i < k; ++i) logprobs[i] = logprobs[i] - largest - log_total;
}

// The logarithms of the shares of sum e^x that a given token has, and the k largest, equal ones by their place. NaN counts as
// -inf; where sums are not finite neither are results.
template <typename T>
void token_logprobs(const T* x, int64_t size, int64_t token, int64_t k, float* own, float* top, int64_t* top_tokens) {
  thread_local std::vector<int64_t> order;
  const float peak = largest_of(x, size);
  double mass = 0;
  float weights[kBlock];
  for (int64_t begin = 0; begin < size; begin += kBlock)
    mass += weigh(x + begin, std::min(kBlock, size - begin), peak, 1.0f, weights);
  const double total = peak + std::log(mass);
  const auto value = [x](int64_t i) {
    const float v = to_float(x[i]);
    return v == v ? v : -kInfinity;
  };
  *own = static_cast<float>(to_float(x[token]) - total);
  if (k == 0) return;
  order.resize(size);
  std::iota(order.begin(), order.end(), 0);
  std::partial_sort(order.begin(), order.begin() + k, order.end(), [&](int64_t i, int64_t j) {
    return value(i) > value(j) || (value(i) == value(j) && i < j);
  });
  for (int64_t i = 0; i < k; ++i)
    top_tokens[i] = order[i], top[i] = static_cast<float>(to_float(x[order[i]]) - total);
}

// Settings that are null keep all.
Filters filters_of(const int64_t* top_k, const float* top_p, const float* min_p, int64_t request) {
  return {top_k ? top_k[request] : 0, top_p ? top_p[request] : 1, min_p ? min_p[request] : 0};
}

template <typename Body>
void for_rows(int64_t rows, int64_t size, int num_threads, const Body& body) {
  parallel_for(rows, 1, rows * size < kSerialBelow ? 1 : num_threads, [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) body(r);
  });
}

}  // namespace

extern "C" {

// seeds [rows], counters [rows, count] -> numbers in [0, 1); the stream comes multiplied.
void sampling_uniform(const int64_t* seeds, const int64_t* counters, float* y, int64_t rows, int64_t count,
                      uint64_t stream) {
  constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;
  for (int64_t r = 0; r < rows; ++r) {
    const uint64_t key = mix(static_cast<uint64_t>(seeds[r]) + kGolden + stream);
    for (int64_t i = r * count; i < (r + 1) * count; ++i)
      y[i] = static_cast<float>(mix(key + (static_cast<uint64_t>(counters[i]) + 1) * kGolden) >> 40) * 0x1p-24f;
  }
}

// logits [rows, size] -> tokens [rows].
void sampling_argmax(const void* logits, int64_t* tokens, int64_t rows, int64_t size, int is_bfloat16,
                     int num_threads) {
  for_rows(rows, size, num_threads, [&](int64_t r) {
    tokens[r] = is_bfloat16 ? argmax(static_cast<const BFloat16*>(logits) + r * size, size)
                            : argmax(static_cast<const float*>(logits) + r * size, size);
  });
}

// logits [rows, size] -> answers [rows].
void sampling_has_finite_max(const void* logits, bool* answers, int64_t rows, int64_t size, int is_bfloat16,
                          int num_threads) {
  for_rows(rows, size, num_threads, [&](int64_t r) {
    answers[r] = is_bfloat16 ? has_finite_max(static_cast<const BFloat16*>(logits) + r * size, size)
                             : has_finite_max(static_cast<const float*>(logits) + r * size, size);
  });
}

// logits [rows, size] -> tokens and logprobs [rows, k].
void sampling_likeliest(const void* logits, int64_t* tokens, float* logprobs, int64_t rows, int64_t size, int64_t k,
                        int is_bfloat16, int num_threads) {
  for_rows(rows, size, num_threads, [&](int64_t r) {
    is_bfloat16 ? likeliest(static_cast<const BFloat16*>(logits) + r * size, size, k, tokens + r * k, logprobs + r * k)
                : likeliest(static_cast<const float*>(logits) + r * size, size, k, tokens + r * k, logprobs + r * k);
  });
}

// logits [rows, size], tokens [rows] -> own [rows], top and top_tokens [rows, k].
void sampling_token_logprobs(const void* logits, const int64_t* tokens, float* own, float* top, int64_t* top_tokens,
                             int64_t rows, int64_t size, int64_t k, int is_bfloat16, int num_threads) {
  for_rows(rows, size, num_threads, [&](int64_t r) {
    const auto run = [&](const auto* x) {
      token_logprobs(x + r * size, size, std::clamp<int64_t>(tokens[r], 0, size - 1), k, own + r, top + r * k, top_tokens + r * k);
    };
    is_bfloat16 ? run(static_cast<const BFloat16*>(logits)) : run(static_cast<const float*>(logits));
  });
}

// logits [rows, size], uniforms [rows], settings of every `nodes` of them -> tokens [rows].
void sampling_sample(const void* logits, const float* temperatures, const int64_t* top_k, const float* top_p,
                     const float* min_p, const float* uniforms, int64_t* tokens, int64_t rows, int64_t nodes,
                     int64_t size, int is_bfloat16, int num_threads) {
  for_rows(rows, size, num_threads, [&](int64_t r) {
    const Filters filters = filters_of(top_k, top_p, min_p, r / nodes);
    const float t = temperatures[r / nodes], u = uniforms[r];
    tokens[r] = is_bfloat16 ? sample(static_cast<const BFloat16*>(logits) + r * size, size, t, filters, u)
                            : sample(static_cast<const float*>(logits) + r * size, size, t, filters, u);
  });
}

// logits [rows, size], settings of every `nodes` of them -> probs [rows, size].
void sampling_probabilities(const void* logits, const float* temperatures, const int64_t* top_k, const float* top_p,
                            const float* min_p, float* probs, int64_t rows, int64_t nodes, int64_t size,
                            int is_bfloat16, int num_threads) {
  for_rows(rows, size, num_threads, [&](int64_t r) {
    const Filters filters = filters_of(top_k, top_p, min_p, r / nodes);
    const float t = temperatures[r / nodes];
    float* y = probs + r * size;
    is_bfloat16 ? probabilities(static_cast<const BFloat16*>(logits) + r * size, size, t, filters, y)
                : probabilities(static_cast<const float*>(logits) + r * size, size, t, filters, y);
  });
}

// logits [rows, size], counts and is_prompt [rows / nodes, size], tokens [rows / nodes, nodes], ancestors [rows, nodes]
// -> y [rows, size].
void sampling_penalize(const void* logits, const int32_t* counts, const uint8_t* is_prompt, const int64_t* tokens,
                       const uint8_t* ancestors, const float* presence, const float* frequency,
                       const float* repetition, float* y, int64_t rows, int64_t nodes, int64_t size, int is_bfloat16,
                       int num_threads) {
  for_rows(rows, size, num_threads, [&](int64_t r) {
    const int64_t b = r / nodes;
    std::vector<int64_t> path;  // below the root, which is committed
    for (int64_t n = 1; n < nodes; ++n)
      if (ancestors[r * nodes + n]) path.push_back(tokens[b * nodes + n]);
    const auto run = [&](const auto* x) {
      const Penalties strengths{presence[b], frequency[b], repetition[b]};
      penalize(x + r * size, counts + b * size, is_prompt + b * size, size, path.data(),
               static_cast<int64_t>(path.size()), strengths, y + r * size);
    };
    is_bfloat16 ? run(static_cast<const BFloat16*>(logits)) : run(static_cast<const float*>(logits));
  });
}

// probs [rows, size], uniforms [rows, k] -> tokens and is_drawn [rows, k].
void sampling_draw_children(const float* probs, const float* uniforms, int64_t* tokens, bool* is_drawn, int64_t rows,
                            int64_t size, int64_t k, int num_threads) {
  for_rows(rows, size, num_threads, [&](int64_t r) {
    draw_children(probs + r * size, size, uniforms + r * k, k, tokens + r * k, is_drawn + r * k);
  });
}

// probs and draft_probs (or null) [rows, size]; tokens, parents and uniforms (float32, or all float64) [rows] of trees
// of `nodes` -> choice [rows].
void sampling_residual_choice(const float* probs, const float* draft_probs, const int64_t* tokens,
                              const int64_t* parents, const void* accept_uniforms, const void* choice_uniforms,
                              int64_t* choice, int64_t rows, int64_t nodes, int64_t size, int64_t max_children,
                              int is_double, int num_threads) {
  const auto number = [&](const void* x, int64_t i) {
    return is_double ? static_cast<const double*>(x)[i] : static_cast<double>(static_cast<const float*>(x)[i]);
  };
  for_rows(rows, size, num_threads, [&](int64_t r) {
    const int64_t tree = r / nodes * nodes;
    std::vector<Child> children;
    for (int64_t n = tree; n < tree + nodes && static_cast<int64_t>(children.size()) < max_children; ++n)
      if (parents[n] == r - tree) children.push_back({tokens[n], number(accept_uniforms, n)});
    const float* q = draft_probs == nullptr ? nullptr : draft_probs + r * size;
    choice[r] = choose(probs + r * size, q, size, children, number(choice_uniforms, r));
  });
}

// logits [count] -> y [count].
void sampling_finite(const void* logits, float* y, int64_t count, int is_bfloat16) {
  for (int64_t i = 0; i < count; ++i)
    y[i] = finite(is_bfloat16 ? to_float(static_cast<const BFloat16*>(logits)[i]) : static_cast<const float*>(logits)[i]);
}

// Natural logarithms of x [count].
void sampling_log(const float* x, float* y, int64_t count) {
  for (int64_t i = 0; i < count; ++i) y[i] = std::log(x[i]);
}

}  // extern "C"

SPECMAMBA_REPLAYABLE(sampling_uniform)
SPECMAMBA_REPLAYABLE(sampling_argmax)
SPECMAMBA_REPLAYABLE(sampling_has_finite_max)
SPECMAMBA_REPLAYABLE(sampling_likeliest)
SPECMAMBA_REPLAYABLE(sampling_token_logprobs)
SPECMAMBA_REPLAYABLE(sampling_sample)
SPECMAMBA_REPLAYABLE(sampling_probabilities)
SPECMAMBA_REPLAYABLE(sampling_penalize)
SPECMAMBA_REPLAYABLE(sampling_draw_children)
SPECMAMBA_REPLAYABLE(sampling_residual_choice)
SPECMAMBA_REPLAYABLE(sampling_finite)
SPECMAMBA_REPLAYABLE(sampling_log)
