// Random numbers, argmax and inverse-CDF sampling; see README.md and reference.py.
#include <cmath>
#include <limits>
#include <vector>

#include "parallel.h"
#include "replayable.h"
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

template <typename T, typename Lanes>
Vector load_or(const T* x, float other, Lanes lanes) {
  return chosen(lanes, load(x, lanes), broadcast(other));
}

// What is no number is smaller than any.
template <typename T>
float largest_of(const T* x, int64_t size) {
  const float least = -std::numeric_limits<float>::infinity();
  Vector best = broadcast(least);
  for_vectors(size, [&](int64_t i, auto lanes) { best = larger(load_or(x + i, least, lanes), best); });
  return largest(best);
}

// The first of the largest; 0 where nothing is a number.
template <typename T>
int64_t argmax(const T* x, int64_t size) {
  const Vector best = broadcast(largest_of(x, size));
  for (int64_t i = 0; i < size; i += kLanes) {
    const First lanes(std::min(kLanes, size - i));
    const Mask is_best = lanes.mask() & is_equal(load(x + i, lanes), best);
    if (any(is_best)) return i + first(is_best);
  }
  return 0;
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

// e^((x - largest) / temperature) of up to a block; their sum.
template <typename T>
float weigh(const T* x, int64_t size, float largest, float temperature, float* weights) {
  const Vector shift = broadcast(largest), divisor = broadcast(temperature);
  Vector total = zero();
  for_vectors(size, [&](int64_t i, auto lanes) {
    const Vector logit = load_or(x + i, -std::numeric_limits<float>::infinity(), lanes);
    const Vector weight = exp((logit - shift) / divisor);
    total = total + weight;
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
  const float shift = largest_of(x, size);
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

// logits [rows, size] -> tokens and logprobs [rows, k].
void sampling_likeliest(const void* logits, int64_t* tokens, float* logprobs, int64_t rows, int64_t size, int64_t k,
                        int is_bfloat16, int num_threads) {
  for_rows(rows, size, num_threads, [&](int64_t r) {
    is_bfloat16 ? likeliest(static_cast<const BFloat16*>(logits) + r * size, size, k, tokens + r * k, logprobs + r * k)
                : likeliest(static_cast<const float*>(logits) + r * size, size, k, tokens + r * k, logprobs + r * k);
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

SPECMAMBA_REPLAYABLE(sampling_uniform)
SPECMAMBA_REPLAYABLE(sampling_argmax)
SPECMAMBA_REPLAYABLE(sampling_has_finite_max)
SPECMAMBA_REPLAYABLE(sampling_likeliest)
SPECMAMBA_REPLAYABLE(sampling_sample)
