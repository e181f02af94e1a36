// Attention of many queries over keys and values that lie anywhere in a pool: products of blocks, with the softmax of
// each row brought up to date block by block (arXiv 2205.14135). See README.md and reference.py.
#pragma once

#include <algorithm>
#include <limits>
#include <memory>
#include <vector>

#include "paged_attention/attend.h"
#include "parallel.h"
#include "tiles.h"

namespace specmamba {

constexpr int64_t kKeyBlock = 64;      // keys in one product
constexpr int64_t kKeysAtOnce = 1024;  // that are gathered before queries attend to them
constexpr int64_t kQueryRows = 96;     // of one key head in a task: query heads, query after query
constexpr int64_t kManyQueries = 64;   // with more than these in a row, and no tree, products of blocks are faster

// Keys [begin, begin + count) of one row of the batch and all its heads, widened: of each head and block, keys by
// columns [D, kKeyBlock] and values [kKeyBlock, V]; of codes also the scales of keys and of values, [kKeyBlock] each.
class GatheredKeys {
 public:
  GatheredKeys(const Attend& p, int64_t capacity)
      : width_(p.width), value_width_(p.value_width), blocks_((capacity + kKeyBlock - 1) / kKeyBlock),
        block_size_(kKeyBlock * (width_ + value_width_ + (p.scales.k == nullptr ? 0 : 2))),
        data_(new float[p.key_heads * blocks_ * block_size_]) {}

  template <typename Stored>
  void gather(const Attend& p, int64_t b, int64_t begin, int64_t count, int num_threads) {
    const int64_t blocks = (count + kKeyBlock - 1) / kKeyBlock;
    parallel_for(p.key_heads * blocks, 1, num_threads, [&](int64_t first, int64_t last) {
      for (int64_t t = first; t < last; ++t) {
        const int64_t head = t / blocks, at = t % blocks * kKeyBlock;
        gather_block<Stored>(p, b, head, begin + at, std::min(kKeyBlock, count - at), of(head, at / kKeyBlock));
      }
    });
  }

  const float* keys(int64_t head, int64_t block) const { return of(head, block); }
  const float* values(int64_t head, int64_t block) const { return of(head, block) + kKeyBlock * width_; }
  const float* key_scales(int64_t head, int64_t block) const { return of(head, block) + kKeyBlock * (width_ + value_width_); }
  const float* value_scales(int64_t head, int64_t block) const { return key_scales(head, block) + kKeyBlock; }

 private:
  float* of(int64_t head, int64_t block) const {
    return data_.get() + (head * blocks_ + block) * block_size_;
  }

  // What a block lacks is 0.
  template <typename Stored>
  void gather_block(const Attend& p, int64_t b, int64_t head, int64_t first, int64_t count, float* keys) {
    float* values = keys + kKeyBlock * width_;
    const Stored* of_keys[kKeyBlock];
    for (int64_t j = 0; j < count; ++j) {
      const int64_t slot = p.visible.slot(b, first + j);
      of_keys[j] = static_cast<const Stored*>(p.k) + slot * p.k_row + head * width_;
      const Stored* of_value = static_cast<const Stored*>(p.v) + slot * p.v_row + head * value_width_;
      if constexpr (sizeof(Stored) == 1) {
        float* scales = values + kKeyBlock * value_width_ + j;
        scales[0] = p.scales.k[slot * p.scales.k_row + head] * static_cast<float>(p.scale * kUnit<Stored>);
        scales[kKeyBlock] = p.scales.v[slot * p.scales.v_row + head] * kUnit<Stored>;
      }
      for_vectors(value_width_, [&](int64_t d, auto lanes) { store(values + j * value_width_ + d, load(of_value + d, lanes), lanes); });
    }
    std::fill(values + count * value_width_, values + kKeyBlock * value_width_, 0.0f);
    for (int64_t d = 0; d < width_; ++d) {
      float* column = keys + d * kKeyBlock;
      for (int64_t j = 0; j < count; ++j) column[j] = to_float(of_keys[j][d]);
      std::fill(column + count, column + kKeyBlock, 0.0f);
    }
  }

  int64_t width_, value_width_, blocks_, block_size_;
  std::unique_ptr<float[]> data_;
};

// What attention of one row of the batch has come to, for all its query heads, behind the keys that were seen.
struct Progress {
  std::vector<float> sums, most, total;  // [Hkv, rows, V] [Hkv, rows] [Hkv, rows]; e^-most is taken out of both sums
};

// The rows [first, last) of one row of the batch and key head. Queries and results are of type T, keys were Stored.
template <typename T, typename Stored>
class RunTask {
  static constexpr bool kIsCoded = !std::is_same_v<T, Stored>;
  using Q = Query<T, Stored>;

 public:
  RunTask(const Attend& p, Progress& progress, int64_t b, int64_t head, int64_t first, int64_t last)
      : p_(p), b_(b), head_(head), first_(first), rows_(last - first), group_(p.query_heads / p.key_heads),
        width_(p.width), value_width_(p.value_width) {
    const int64_t at = head * p.queries * group_ + first;
    sums_ = progress.sums.data() + at * value_width_, most_ = progress.most.data() + at, total_ = progress.total.data() + at;
    for (int64_t r = 0; r < rows_; ++r) {
      const WindowedKeys::Range range = p.visible.seen_by(b, (first_ + r) / group_).text;
      begin_[r] = range.begin, end_[r] = range.end;
    }
  }

  // Attends to the gathered keys [begin, begin + count).
  void attend(const GatheredKeys& gathered, int64_t begin, int64_t count) {
    load_queries();
    for (int64_t at = 0; at < count; at += kKeyBlock) {
      const int64_t end = std::min(at + kKeyBlock, count);
      if (!any_sees(0, rows_, begin + at, begin + end)) continue;
      const int64_t block = at / kKeyBlock;
      score(gathered.keys(head_, block), begin + at, begin + end);
      if constexpr (kIsCoded)
        key_scales_ = gathered.key_scales(head_, block), value_scales_ = gathered.value_scales(head_, block);
      for (int64_t r = 0; r < rows_; ++r) soften(r, begin + at, end - at);
      add_values(gathered.values(head_, at / kKeyBlock), begin + at, begin + end);
    }
  }

  // Called last: writes the results.
  void finish() {
    for (int64_t r = 0; r < rows_; ++r) {
      const int64_t token = b_ * p_.queries + (first_ + r) / group_;
      const int64_t at = (head_ * group_ + (first_ + r) % group_) * value_width_;
      T* out = static_cast<T*>(p_.out) + token * p_.query_heads * value_width_ + at;
      const T* gate = p_.gate == nullptr ? nullptr : static_cast<const T*>(p_.gate) + token * p_.gate_query + at;
      const Vector total = broadcast(total_[r] == 0 ? 1.0f : total_[r]);  // 0: it sees no key
      for_vectors(value_width_, [&](int64_t d, auto lanes) {
        const Vector mean = load(sums_ + r * value_width_ + d, lanes) / total;
        store(out + d, gate == nullptr ? mean : mean * sigmoid(load(gate + d, lanes)), lanes);
      });
    }
  }

 private:
  void load_queries() {
    queries_.resize(rows_ * (width_ + kLanes));
    for (int64_t r = 0; r < rows_; ++r) {
      const int64_t token = b_ * p_.queries + (first_ + r) / group_, head = head_ * group_ + (first_ + r) % group_;
      const Q* q = static_cast<const Q*>(p_.q) + (token * p_.query_heads + head) * width_;
      float* row = queries_.data() + r * (width_ + kLanes);
      for_vectors(width_, [&](int64_t d, auto lanes) { store(row + d, load(q + d, lanes), lanes); });
    }
  }

  // Whether one of the rows [row, row + rows) sees one of the positions [first, last).
  bool any_sees(int64_t row, int64_t rows, int64_t first, int64_t last) const {
    for (int64_t r = row; r < row + rows; ++r)
      if (begin_[r] < last && first < end_[r]) return true;
    return false;
  }

  void score(const float* keys, int64_t first, int64_t last) {
    for_tiles(rows_, kKeyBlock, [&](auto& tile) __attribute__((always_inline)) {
      if (!any_sees(tile.row, tile.kRows, first, last)) return;
      tile.multiply({queries_.data(), width_ + kLanes}, {keys, kKeyBlock}, width_);
      tile.each([&](int i, int64_t at, Vector sum) __attribute__((always_inline)) {
        store(weights_ + (tile.row + i) * kKeyBlock + at, sum, tile.lanes);
      });
    });
  }

  // Scores of a row become weights e^(score - most), 0 where it sees no key; its sums so far are brought up to date.
  // Scales of codes go to the scores, and to the weights behind their sum.
  void soften(int64_t r, int64_t first, int64_t count) {
    float* weights = weights_ + r * kKeyBlock;
    const int64_t begin = std::clamp<int64_t>(begin_[r] - first, 0, count), end = std::min(end_[r] - first, count);
    if (begin >= end) {
      std::fill_n(weights, kKeyBlock, 0.0f);
      return;
    }
    const Vector scale = broadcast(static_cast<float>(p_.scale));
    Vector largest_of = broadcast(most_[r]);
    for_vectors(end - begin, [&](int64_t j, auto lanes) {
      Vector of_key = scale;
      if constexpr (kIsCoded) of_key = load(key_scales_ + begin + j, lanes);
      const Vector score = load(weights + begin + j, lanes) * of_key;
      largest_of = chosen(lanes, larger(score, largest_of), largest_of);
      store(weights + begin + j, score, lanes);
    });
    const float most = largest(largest_of);
    const Vector shift = broadcast(most);
    Vector total = zero();
    for_vectors(end - begin, [&](int64_t j, auto lanes) {
      const Vector weight = exp(load(weights + begin + j, lanes) - shift);
      total = total + chosen(lanes, weight, zero());
      Vector of_value = weight;
      if constexpr (kIsCoded) of_value = weight * load(value_scales_ + begin + j, lanes);
      store(weights + begin + j, of_value, lanes);
    });
    std::fill_n(weights, begin, 0.0f);
    std::fill(weights + end, weights + kKeyBlock, 0.0f);
    if (most != most_[r]) {
      const Vector left = exp(broadcast(most_[r]) - shift);
      float factor[kLanes];
      store(factor, left, All{});
      total_[r] *= factor[0];
      float* sums = sums_ + r * value_width_;
      for_vectors(value_width_, [&](int64_t d, auto lanes) { store(sums + d, left * load(sums + d, lanes), lanes); });
      most_[r] = most;
    }
    total_[r] += sum(total);
  }

  void add_values(const float* values, int64_t first, int64_t last) {
    for_tiles(rows_, value_width_, [&](auto& tile) __attribute__((always_inline)) {
      if (!any_sees(tile.row, tile.kRows, first, last)) return;
      tile.multiply({weights_, kKeyBlock}, {values, value_width_}, last - first);
      tile.each([&](int i, int64_t at, Vector sum) __attribute__((always_inline)) {
        float* so_far = sums_ + (tile.row + i) * value_width_ + at;
        store(so_far, load(so_far, tile.lanes) + sum, tile.lanes);
      });
    });
  }

  static std::vector<float>& queries() {
    static thread_local std::vector<float> of_thread;
    return of_thread;
  }

  const Attend& p_;
  const int64_t b_, head_, first_, rows_, group_, width_, value_width_;
  float *sums_, *most_, *total_;  // of these rows
  const float *key_scales_ = nullptr, *value_scales_ = nullptr;  // of the block of keys, where they are codes
  int64_t begin_[kQueryRows], end_[kQueryRows];  // the positions that each row sees
  std::vector<float>& queries_ = queries();      // [rows, D], a vector apart: see ScratchMatrix
  alignas(64) float weights_[kQueryRows * kKeyBlock];
};

// What the queries of a row see, from the first position to the last: other keys, which may hold anything, are not read.
inline WindowedKeys::Range seen_by_any(const Attend& p, int64_t b) {
  WindowedKeys::Range all{p.visible.num_keys, 0};
  for (int64_t query = 0; query < p.queries; ++query) {
    const WindowedKeys::Range range = p.visible.seen_by(b, query).text;
    if (range.begin < range.end) all = {std::min(all.begin, range.begin), std::max(all.end, range.end)};
  }
  all.begin = p.visible.begin_of_run(all.begin, kKeyBlock);
  return all;
}

// There is no tree.
template <typename T, typename Stored>
void attend_run(const Attend& p, int num_threads) {
  const int64_t rows = p.queries * (p.query_heads / p.key_heads), parts = (rows + kQueryRows - 1) / kQueryRows;
  GatheredKeys gathered(p, std::min(kKeysAtOnce, p.visible.num_keys));
  Progress progress;
  const auto for_tasks = [&](int64_t b, const auto& body) {
    parallel_for(p.key_heads * parts, 1, num_threads, [&](int64_t first, int64_t last) {
      for (int64_t t = first; t < last; ++t) {
        const int64_t begin = t % parts * kQueryRows;
        RunTask<T, Stored> task(p, progress, b, t / parts, begin, std::min(rows, begin + kQueryRows));
        body(task);
      }
    });
  };
  for (int64_t b = 0; b < p.batch; ++b) {
    progress.sums.assign(p.key_heads * rows * p.value_width, 0.0f);
    progress.most.assign(p.key_heads * rows, -std::numeric_limits<float>::infinity());
    progress.total.assign(p.key_heads * rows, 0.0f);
    const WindowedKeys::Range seen = seen_by_any(p, b);
    for (int64_t begin = seen.begin; begin < seen.end; begin += kKeysAtOnce) {
      const int64_t count = std::min(kKeysAtOnce, seen.end - begin);
      gathered.gather<Stored>(p, b, begin, count, num_threads);
      for_tasks(b, [&](RunTask<T, Stored>& task) { task.attend(gathered, begin, count); });
    }
    for_tasks(b, [&](RunTask<T, Stored>& task) { task.finish(); });
  }
}

}  // namespace specmamba
