// Random numbers, argmax and inverse-CDF sampling; see README.md and reference.py.
#include <limits>
#include <vector>

#include "parallel.h"
#include "vector.h"

namespace {

using namespace specmamba;

constexpr int64_t kBlock = 512;            // tokens whose mass is summed up before the cumulative sum
constexpr int64_t kSerialBelow = 1 << 15;  // logits that one thread has done before a second one begins

uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

template <typename T>
Vector load_or(const T* x, float, All lanes) {
  return load(x, lanes);
}
template <typename T>
Vector load_or(const T* x, float other, First lanes) {
  return _mm512_mask_mov_ps(_mm512_set1_ps(other), lanes.mask, load(x, lanes));
}

// What is no number is smaller than any.
template <typename T>
float largest(const T* x, int64_t size) {
  const float least = -std::numeric_limits<float>::infinity();
  Vector best = _mm512_set1_ps(least);
  for_vectors(size, [&](int64_t i, auto lanes) { best = _mm512_max_ps(load_or(x + i, least, lanes), best); });
  return _mm512_reduce_max_ps(best);
}

// The first of the largest; 0 where nothing is a number.
template <typename T>
int64_t argmax(const T* x, int64_t size) {
  const Vector best = _mm512_set1_ps(largest(x, size));
  for (int64_t i = 0; i < size; i += kLanes) {
    const First lanes(std::min(kLanes, size - i));
    const __mmask16 is_best = _mm512_mask_cmp_ps_mask(lanes.mask, load(x + i, lanes), best, _CMP_EQ_OQ);
    if (is_best) return i + __builtin_ctz(is_best);
  }
  return 0;
}

// Whether something is finite, and nothing is no number or infinite upwards.
template <typename T>
bool has_finite_max(const T* x, int64_t size) {
  constexpr int kNumberless = 0x89, kLeast = 0x10;  // NaNs and infinity; minus infinity
  __mmask16 spoilt = 0, finite = 0;
  for_vectors(size, [&](int64_t i, auto lanes) {
    const Vector v = load_or(x + i, -std::numeric_limits<float>::infinity(), lanes);
    spoilt |= _mm512_fpclass_ps_mask(v, kNumberless);
    finite |= static_cast<__mmask16>(~_mm512_fpclass_ps_mask(v, kLeast));
  });
  return spoilt == 0 && finite != 0;
}

// e^((x - largest) / temperature) of up to a block; their sum.
template <typename T>
float weigh(const T* x, int64_t size, float largest, float temperature, float* weights) {
  const Vector shift = _mm512_set1_ps(largest), divisor = _mm512_set1_ps(temperature);
  Vector total = _mm512_setzero_ps();
  for_vectors(size, [&](int64_t i, auto lanes) {
    const Vector logit = load_or(x + i, -std::numeric_limits<float>::infinity(), lanes);
    const Vector weight = exp(_mm512_div_ps(_mm512_sub_ps(logit, shift), divisor));
    total = _mm512_add_ps(total, weight);
    store(weights + i, weight, lanes);
  });
  return sum(total);
}

// The first index whose running sum exceeds a share of the whole; the last where none does.
template <typename T>
int64_t invert(const T* weights, int64_t size, double threshold, double* before) {
  double running = 0;
  for (int64_t i = 0; i < size; ++i) {
    *before = running;
    running += weights[i];
    if (running > threshold) return i;
  }
  return size - 1;
}

// Two levels: the block that the uniform falls into, then the token in it.
template <typename T>
int64_t sample(const T* x, int64_t size, float temperature, float uniform) {
  if (temperature == 0) return argmax(x, size);
  static thread_local std::vector<float> masses;
  const int64_t num_blocks = (size + kBlock - 1) / kBlock;
  masses.resize(num_blocks);
  const float shift = largest(x, size);
  float weights[kBlock];
  auto weigh_block = [&](int64_t block) {
    return weigh(x + block * kBlock, std::min(kBlock, size - block * kBlock), shift, temperature, weights);
  };
  double total = 0, before = 0;
  for (int64_t block = 0; block < num_blocks; ++block) total += masses[block] = weigh_block(block);
  const double threshold = uniform * total;
  const int64_t block = invert(masses.data(), num_blocks, threshold, &before);
  if (num_blocks > 1) weigh_block(block);
  const int64_t count = std::min(kBlock, size - block * kBlock);
  double inside = 0;
  for (int64_t i = 0; i < count; ++i) inside += weights[i];
  // the block's mass is rounded: what is left of the threshold counts as a fraction of it, and never as all of it
  const double fraction = std::min(std::max((threshold - before) / masses[block], 0.0), 1 - 0x1p-50);
  return block * kBlock + invert(weights, count, fraction * inside, &before);
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

// logits [rows, size], uniforms [rows], a temperature for every `nodes` of them -> tokens [rows].
void sampling_sample(const void* logits, const float* temperatures, const float* uniforms, int64_t* tokens,
                     int64_t rows, int64_t nodes, int64_t size, int is_bfloat16, int num_threads) {
  for_rows(rows, size, num_threads, [&](int64_t r) {
    const float t = temperatures[r / nodes], u = uniforms[r];
    tokens[r] = is_bfloat16 ? sample(static_cast<const BFloat16*>(logits) + r * size, size, t, u)
                            : sample(static_cast<const float*>(logits) + r * size, size, t, u);
  });
}

}  // extern "C"
