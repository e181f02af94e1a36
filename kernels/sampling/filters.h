// Top-k, top-p and min-p without sorting. What is kept becomes a list, in order of tokens, which is mostly short: it is
// searched, weighed and drawn from in place of the row.
#pragma once

#include <functional>
#include <vector>

#include "sampling/rows.h"

namespace specmamba {

struct Filters {
  int64_t top_k;  // of a row that has none: 0, 1 and 0
  float top_p, min_p;
  bool limits_count(int64_t size) const { return top_k > 0 && top_k < size; }
  bool keeps_all(int64_t size) const { return !limits_count(size) && top_p >= 1 && min_p <= 0; }
};

struct Entry {
  float logit, weight;
  int32_t token;
};
using Entries = std::vector<Entry>;

// By falling probability, equal ones by token.
inline bool is_before(const Entry& a, const Entry& b) {
  return a.weight > b.weight || (a.weight == b.weight && a.token < b.token);
}

// A logit that k tokens reach at least: the k-th largest of the maxima of some 8 k groups of tokens.
template <typename T>
float reached_by(const T* x, int64_t size, int64_t k) {
  static thread_local std::vector<float> maxima;
  const int64_t num_vectors = (size + kLanes - 1) / kLanes;
  const int64_t per_group = std::max<int64_t>(1, num_vectors * kLanes / (8 * k));
  maxima.resize((num_vectors + per_group - 1) / per_group * kLanes);
  for (int64_t begin = 0, at = 0; begin < size; begin += per_group * kLanes, at += kLanes) {
    Vector most = broadcast(-kInfinity);
    const int64_t count = std::min(per_group * kLanes, size - begin);
    for_vectors(count, [&](int64_t i, auto lanes) { most = larger(load_sound(x + begin + i, lanes), most); });
    store(maxima.data() + at, most, All{});
  }
  if (static_cast<int64_t>(maxima.size()) < k) return -kInfinity;
  std::nth_element(maxima.begin(), maxima.begin() + k - 1, maxima.end(), std::greater<float>());
  return maxima[k - 1];
}

// A logit that all tokens reach whose weight is not less than this one (or hardly less).
inline float reached_by_weight(float peak, float temperature, double weight) {
  const double distance = temperature * std::log(weight);
  return static_cast<float>(peak + distance - 1e-6 * (std::fabs(peak) + std::fabs(distance)));
}

// The tokens whose logits reach a bound.
template <typename T>
void collect(const T* x, int64_t size, float bound, Entries& entries) {
  const Vector bounds = broadcast(bound);
  entries.clear();
  for (int64_t i = 0; i < size; i += kLanes) {
    const int64_t count = std::min(kLanes, size - i);
    const Vector v = count == kLanes ? load_sound(x + i, All{}) : load_sound(x + i, First(count));
    if (!any(is_less(bounds, v) | is_equal(bounds, v))) continue;
    for (int64_t j = i; j < i + count; ++j) {
      const float logit = sound(to_float(x[j]));
      if (logit >= bound) entries.push_back({logit, 0, static_cast<int32_t>(j)});
    }
  }
}

inline void weigh(Entries& entries, float peak, float temperature) {
  float block[kBlock];
  for (size_t begin = 0; begin < entries.size(); begin += kBlock) {
    const size_t count = std::min<size_t>(kBlock, entries.size() - begin);
    for (size_t i = 0; i < count; ++i) block[i] = entries[begin + i].logit;
    weigh(block, static_cast<int64_t>(count), peak, temperature, block);
    for (size_t i = 0; i < count; ++i) entries[begin + i].weight = block[i];
  }
}

inline double mass_of(const Entry* first, const Entry* last) {
  double mass = 0;
  for (; first < last; ++first) mass += first->weight;
  return mass;
}
inline double mass_of(const Entries& entries) { return mass_of(entries.data(), entries.data() + entries.size()); }

template <typename Drops>
void drop(Entries& entries, const Drops& drops) {
  entries.erase(std::remove_if(entries.begin(), entries.end(), drops), entries.end());
}

// Ties with the k-th stay.
inline void keep_top_k(Entries& entries, int64_t k) {
  static thread_local std::vector<float> logits;
  if (static_cast<int64_t>(entries.size()) <= k) return;
  logits.clear();
  for (const Entry& entry : entries) logits.push_back(entry.logit);
  std::nth_element(logits.begin(), logits.begin() + k - 1, logits.end(), std::greater<float>());
  const float least = logits[k - 1];
  drop(entries, [&](const Entry& entry) { return entry.logit < least; });
}

// Keeps the entries with less than a goal before them, and the first: the last of them is found by halving.
inline void keep_mass(Entries& entries, double goal) {
  static thread_local Entries scratch;
  if (entries.empty()) return;
  scratch = entries;
  Entry *first = scratch.data(), *end = first + scratch.size();
  for (double before = 0; end - first > 1;) {
    Entry* const middle = first + (end - first) / 2;
    std::nth_element(first, middle, end, is_before);
    const double mass = mass_of(first, middle);
    if (before + mass >= goal) {
      end = middle;
    } else {
      before += mass;
      first = middle;
    }
  }
  const Entry last = *first;
  drop(entries, [&](const Entry& entry) { return is_before(last, entry); });
}

// The sum of all weights.
template <typename T>
double total_mass(const T* x, int64_t size, float peak, float temperature) {
  float weights[kBlock];
  double total = 0;
  for (int64_t i = 0; i < size; i += kBlock)
    total += weigh(x + i, std::min(kBlock, size - i), peak, temperature, weights);
  return total;
}

// What the filters of a row keep, with weights. Lighter tokens than half of an average share of what top-p drops have
// together less than that, so top-p drops them; they need not be collected.
template <typename T>
void filter(const T* x, int64_t size, float temperature, const Filters& filters, Entries& entries) {
  const float peak = peak_of(x, size);
  entries.clear();
  if (peak == -kInfinity) return;
  double total = 0;
  if (filters.limits_count(size)) {
    collect(x, size, reached_by(x, size, filters.top_k), entries);
    keep_top_k(entries, filters.top_k);
  } else if (filters.top_p < 1) {
    total = total_mass(x, size, peak, temperature);
    const double least = 0.5 * (1.0 - filters.top_p) * total / size;
    collect(x, size, reached_by_weight(peak, temperature, std::min(least, 1.0)), entries);
  } else {
    collect(x, size, reached_by_weight(peak, temperature, 0.5 * filters.min_p), entries);
  }
  weigh(entries, peak, temperature);
  if (filters.top_p < 1) keep_mass(entries, filters.top_p * (total > 0 ? total : mass_of(entries)));
  if (filters.min_p > 0) drop(entries, [&](const Entry& entry) { return entry.weight < filters.min_p; });
}

inline int64_t draw(const Entries& entries, double uniform) {
  const double threshold = uniform * mass_of(entries);
  double running = 0;
  for (const Entry& entry : entries)
    if ((running += entry.weight) > threshold) return entry.token;
  return 0;  // nothing has any mass
}

template <typename T>
int64_t draw_unfiltered(const T* x, int64_t size, float temperature, float uniform) {
  static thread_local std::vector<float> masses;
  masses.resize(num_blocks(size));
  const float peak = peak_of(x, size);
  const auto weigh_block = [&](int64_t block, float* weights) {
    return weigh(x + block * kBlock, block_size(size, block), peak, temperature, weights);
  };
  float weights[kBlock];
  for (int64_t block = 0; block < num_blocks(size); ++block) masses[block] = weigh_block(block, weights);
  return draw(masses.data(), size, uniform, weigh_block);
}

template <typename T>
int64_t sample(const T* x, int64_t size, float temperature, const Filters& filters, float uniform) {
  static thread_local Entries entries;
  if (temperature == 0) return argmax(x, size);
  if (filters.keeps_all(size)) return draw_unfiltered(x, size, temperature, uniform);
  filter(x, size, temperature, filters, entries);
  return draw(entries, uniform);
}

template <typename T>
void probabilities(const T* x, int64_t size, float temperature, const Filters& filters, float* y) {
  static thread_local Entries entries;
  if (temperature == 0 || !filters.keeps_all(size)) std::fill(y, y + size, 0.0f);
  if (temperature == 0) {
    y[argmax(x, size)] = 1;
    return;
  }
  if (!filters.keeps_all(size)) {
    filter(x, size, temperature, filters, entries);
    const float total = static_cast<float>(mass_of(entries));
    for (const Entry& entry : entries) y[entry.token] = entry.weight / total;
    return;
  }
  const float peak = peak_of(x, size);
  double total = 0;
  for (int64_t i = 0; i < size; i += kBlock) total += weigh(x + i, std::min(kBlock, size - i), peak, temperature, y + i);
  const Vector divisor = broadcast(total > 0 ? static_cast<float>(total) : 1);
  for_vectors(size, [&](int64_t i, auto lanes) { store(y + i, load(y + i, lanes) / divisor, lanes); });
}

}  // namespace specmamba
