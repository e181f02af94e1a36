// Rows of logits and of weights: maxima, weights e^x, and the inversion of their running sums.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "vector.h"

namespace specmamba {

constexpr int64_t kBlock = 512;  // tokens whose mass is summed up before the cumulative sum
constexpr float kInfinity = std::numeric_limits<float>::infinity();

inline int64_t num_blocks(int64_t size) { return (size + kBlock - 1) / kBlock; }
inline int64_t block_size(int64_t size, int64_t block) { return std::min(kBlock, size - block * kBlock); }

template <typename T, typename Lanes>
Vector load_or(const T* x, float other, Lanes lanes) {
  return chosen(lanes, load(x, lanes), broadcast(other));
}

// NaN and +inf count as -inf: they are never drawn, nor counted as any mass.
inline float sound(float x) { return x < kInfinity ? x : -kInfinity; }
template <typename T, typename Lanes>
Vector load_sound(const T* x, Lanes lanes) {
  const Vector v = load_or(x, -kInfinity, lanes);
  return chosen(is_less(v, broadcast(kInfinity)), v, broadcast(-kInfinity));
}

// The largest number that can be drawn; -inf where there is none.
template <typename T>
float peak_of(const T* x, int64_t size) {
  Vector best = broadcast(-kInfinity);
  for_vectors(size, [&](int64_t i, auto lanes) { best = larger(load_sound(x + i, lanes), best); });
  return largest(best);
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

// e^((x - peak) / temperature) of up to a block; their sum.
template <typename T>
float weigh(const T* x, int64_t size, float peak, float temperature, float* weights) {
  const Vector shift = broadcast(peak > -kInfinity ? peak : 0), divisor = broadcast(temperature);
  Vector total = zero();
  for_vectors(size, [&](int64_t i, auto lanes) {
    const Vector weight = exp((load_sound(x + i, lanes) - shift) / divisor);
    total = total + weight;
    store(weights + i, weight, lanes);
  });
  return sum(total);
}

inline float sum_of(const float* x, int64_t size) {
  Vector total = zero();
  for_vectors(size, [&](int64_t i, auto lanes) { total = total + load(x + i, lanes); });
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

// A token in two levels: the block that the uniform falls into, then the token in it. `fill(block, weights)` writes the
// weights of a block, whose sums are the masses.
template <typename Fill>
int64_t draw(const float* masses, int64_t size, double uniform, const Fill& fill) {
  double total = 0, before = 0, inside = 0;
  for (int64_t block = 0; block < num_blocks(size); ++block) total += masses[block];
  const double threshold = uniform * total;
  const int64_t block = invert(masses, num_blocks(size), threshold, &before);
  float weights[kBlock];
  fill(block, weights);
  const int64_t count = block_size(size, block);
  for (int64_t i = 0; i < count; ++i) inside += weights[i];
  // the block's mass is rounded: what is left of the threshold counts as a fraction of it, and never as all of it
  const double fraction = std::min(std::max((threshold - before) / masses[block], 0.0), 1 - 0x1p-50);
  return block * kBlock + invert(weights, count, fraction * inside, &before);
}

}  // namespace specmamba
