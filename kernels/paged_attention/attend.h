// Attention of a few queries over keys and values that lie anywhere in a pool; see README.md and reference.py.
#pragma once

#include <algorithm>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#include "parallel.h"
#include "vector.h"

namespace specmamba {

// Which keys each query sees: operands.AttentionMetadata.
struct VisibleKeys {
  const int64_t *table, *rows;  // slots of positions, table_row from row to row; [B]
  const int64_t *last, *roots;  // [B, N], last_batch and last_query apart; [B], or null: no tree
  const bool* seen;             // [B, N, entries], seen_batch and seen_query apart; or null
  int64_t table_row, num_keys, first, sees_all, entries, last_batch, last_query, seen_batch, seen_query;

  struct Range {
    int64_t begin, end;
  };
  Range before_tree(int64_t b, int64_t query) const {
    if (sees_all) return {first, num_keys};
    const int64_t end = std::min(last[b * last_batch + query * last_query] + 1, num_keys);
    return {roots == nullptr && end <= first ? 0 : first, end};
  }
  bool sees_entry(int64_t b, int64_t query, int64_t position) const {
    const int64_t entry = roots == nullptr ? -1 : position - roots[b];
    return entry >= 0 && entry < entries && seen[b * seen_batch + query * seen_query + entry];
  }
  Range tree(int64_t b) const {
    if (roots == nullptr) return {num_keys, 0};
    return {roots[b], std::min(roots[b] + entries, num_keys)};
  }
  int64_t slot(int64_t b, int64_t position) const { return table[rows[b] * table_row + position]; }
};

// What a layer with a window shows of them: AttentionConfig.window.
struct WindowedKeys : VisibleKeys {
  int64_t window;  // 0: all

  // The keys before the tree that a query sees, and the first entry that it sees if it is shown that one.
  struct Seen {
    Range shown, text;  // before the tree, without the window and with it
    int64_t first_entry;
  };
  Seen seen_by(int64_t b, int64_t query) const {
    const Range text = before_tree(b, query);
    if (window == 0) return {text, text, 0};
    int64_t left = window, entry = std::max<int64_t>(tree(b).end - tree(b).begin, 0);
    for (; entry > 0 && left > 0; --entry) left -= seen[b * seen_batch + query * seen_query + entry - 1];
    return {text, {std::max(text.begin, text.end - left), text.end}, entry};
  }
  // Where a run of keys begins that has all that is seen from `begin` on, a whole number of `steps` behind the first key:
  // so that a key's place in the run, and with it the order of sums, does not depend on which queries there are.
  int64_t begin_of_run(int64_t begin, int64_t steps) const {
    return window == 0 || begin <= first ? begin : first + (begin - first) / steps * steps;
  }
};

// Scales of the codes in two pools: [T, Hkv], `row` from token to token.
struct Scales {
  float *k, *v;
  int64_t k_row, v_row;
};

// What products read queries as: codes are widened to float32, and so are the queries that meet them.
template <typename T, typename Stored>
using Query = std::conditional_t<std::is_same_v<T, Stored>, T, float>;

// Everything of one attention. Distances are in elements; what is not named is contiguous.
struct Attend {
  const void *q, *k, *v;  // [B, N, Hq, D] and pools [T, Hkv, D] and [T, Hkv, V]
  const void* gate;       // [B * N, Hq, V], gate_query from query to query; or null: the sums as they are
  void* out;              // [B, N, Hq, V]
  WindowedKeys visible;
  const int64_t *firsts, *counts;  // [B], of packed queries; or null: N each, row after row
  int64_t batch, queries, query_heads, key_heads, width, value_width, k_row, v_row, gate_query;
  double scale;
  Scales scales;  // of pools that hold codes

  int64_t token(int64_t b, int64_t query) const { return (firsts == nullptr ? b * queries : firsts[b]) + query; }
  int64_t count(int64_t b) const { return counts == nullptr ? queries : counts[b]; }
};

constexpr int64_t kTaskRows = 32;                               // of one key head: query heads, query after query
constexpr int kTile = 4, kTileRows = kRegisters / 8;            // keys and rows of a tile of scores
constexpr int kSumRows = 3 * kRegisters / 16, kSumVectors = 4;  // rows and vectors of values of a tile of sums
constexpr int64_t kSerialBelow = 1 << 17;  // products that one thread has done before a second one begins

// What one addition multiplies: kLanes float32, or twice as many bfloat16 in pairs.
template <typename T>
constexpr int64_t kOperand = kLanes * static_cast<int64_t>(sizeof(float) / sizeof(T));
inline Vector operand(const float* x, int64_t count) { return load(x, First(count)); }
inline Vector operand(const float* x) { return load(x, All{}); }
inline Pairs operand(const BFloat16* x, int64_t count) { return load_pairs(x, count); }
inline Pairs operand(const BFloat16* x) { return load_pairs(x); }
inline Vector operand(const int8_t* x, int64_t count) { return load(x, First(count)); }
inline Vector operand(const int8_t* x) { return load(x, All{}); }
inline Vector operand(const Float8* x, int64_t count) { return load(x, First(count)); }
inline Vector operand(const Float8* x) { return load(x, All{}); }
inline Vector add_products(Vector sum, Vector x, Vector y) { return fma(x, y, sum); }

// What a task keeps; each thread reuses its own from task to task.
template <typename Stored>
struct Scratch {
  std::vector<int64_t> seen;
  std::vector<const Stored*> keys, values;
  std::vector<float> key_scales, value_scales;  // of codes; those of keys with the scale of scores
  std::vector<uint8_t> is_seen, is_shown;  // by query; with a window it is shown more than it sees
  std::vector<float> weights, totals;
  std::vector<float> entries;  // weights of one row in the tree

  static Scratch& mine() {
    static thread_local Scratch scratch;
    return scratch;
  }
};

// The rows [first, last) of one batch entry and key head. Queries and results are of type T, keys and values Stored.
template <typename T, typename Stored>
class Task {
  static constexpr bool kIsCoded = !std::is_same_v<T, Stored>;
  using Q = Query<T, Stored>;

 public:
  Task(const Attend& p, int64_t b, int64_t head, int64_t first, int64_t last)
      : p_(p), b_(b), head_(head), first_(first), rows_(last - first), group_(p.query_heads / p.key_heads),
        s_(Scratch<Stored>::mine()) {}

  void run() {
    see();
    for (int64_t r = 0; r < rows_ + kTileRows; ++r) {
      const int64_t row = std::min(r, rows_ - 1);  // a tile's last row stands in for rows that it lacks
      const int64_t head_of_query = p_.token(b_, query(row)) * p_.query_heads + query_head(row);
      q_[r] = static_cast<const Q*>(p_.q) + head_of_query * p_.width;
    }
    s_.weights.resize((rows_ + kTileRows) * stride_);
    for (int64_t j = 0; j < count_; j += kTile)
      for (int64_t r = 0; r < rows_; r += kTileRows) scores(j, r);
    s_.totals.resize(rows_);
    for (int64_t r = 0; r < rows_; ++r) softmax(r);
    const int64_t passes = (rows_ + kSumRows - 1) / kSumRows, step = (rows_ + passes - 1) / passes;
    for (int64_t r = 0; r < rows_; r += step)
      for (int64_t column = 0; column < p_.value_width; column += kSumVectors * kLanes)
        sums_of(std::make_integer_sequence<int, kSumRows>{}, *this, std::min(step, rows_ - r), r, column);
  }

 private:
  int64_t query(int64_t r) const { return (first_ + r) / group_; }
  int64_t query_head(int64_t r) const { return head_ * group_ + (first_ + r) % group_; }

  // Keys that no row sees are not touched: they belong to other requests.
  void see() {
    const int64_t first = query(0), num_queries = query(rows_ - 1) + 1 - first;
    const WindowedKeys& visible = p_.visible;
    WindowedKeys::Range any = visible.tree(b_), all{0, visible.num_keys};  // what some and what all queries see
    WindowedKeys::Seen of[kTaskRows];
    for (int64_t n = 0; n < num_queries; ++n) {
      of[n] = visible.seen_by(b_, first + n);
      const auto [begin, end] = of[n].text;
      if (begin < end) any = {std::min(any.begin, begin), std::max(any.end, end)};
      all = {std::max(all.begin, begin), std::min(all.end, end)};
    }
    const auto sees = [&](int64_t n, int64_t position) {
      if (all.begin <= position && position < all.end) return true;
      const auto [begin, end] = of[n].text;
      if (begin <= position && position < end) return true;
      return visible.sees_entry(b_, first + n, position) && position - visible.roots[b_] >= of[n].first_entry;
    };
    const auto is_shown = [&](int64_t n, int64_t position) {
      const auto [begin, end] = of[n].shown;
      return (begin <= position && position < end) || visible.sees_entry(b_, first + n, position);
    };
    s_.seen.clear();
    for (int64_t position = visible.begin_of_run(any.begin, kLanes); position < any.end; ++position)
      for (int64_t n = 0; n < num_queries; ++n)
        if (visible.window == 0 ? sees(n, position) : is_shown(n, position)) {
          s_.seen.push_back(position);
          break;
        }
    count_ = static_cast<int64_t>(s_.seen.size());
    stride_ = (count_ + kLanes - 1) / kLanes * kLanes;
    const int64_t root = visible.tree(b_).begin;
    const int64_t before = std::lower_bound(s_.seen.begin(), s_.seen.end(), root) - s_.seen.begin();
    alike_ = before == count_ ? count_ : before / kLanes * kLanes;
    s_.keys.resize(count_ + kTile);
    s_.values.resize(count_);
    for (int64_t j = 0; j < count_; ++j) {
      const int64_t row = visible.slot(b_, s_.seen[j]);
      s_.keys[j] = static_cast<const Stored*>(p_.k) + row * p_.k_row + head_ * p_.width;
      s_.values[j] = static_cast<const Stored*>(p_.v) + row * p_.v_row + head_ * p_.value_width;
    }
    if constexpr (kIsCoded) find_scales();
    for (int64_t j = count_; j < count_ + kTile && count_ > 0; ++j) s_.keys[j] = s_.keys[count_ - 1];
    s_.is_seen.assign(num_queries * stride_, 0);
    for (int64_t n = 0; n < num_queries; ++n)
      for (int64_t j = 0; j < count_; ++j) s_.is_seen[n * stride_ + j] = sees(n, s_.seen[j]);
    if (visible.window == 0) return;
    s_.is_shown.assign(num_queries * stride_, 0);
    for (int64_t n = 0; n < num_queries; ++n)
      for (int64_t j = 0; j < count_; ++j) s_.is_shown[n * stride_ + j] = is_shown(n, s_.seen[j]);
  }

  void find_scales() {
    s_.key_scales.resize(count_);
    s_.value_scales.resize(count_);
    for (int64_t j = 0; j < count_; ++j) {
      const int64_t row = p_.visible.slot(b_, s_.seen[j]);
      s_.key_scales[j] = p_.scales.k[row * p_.scales.k_row + head_] * static_cast<float>(p_.scale * kUnit<Stored>);
      s_.value_scales[j] = p_.scales.v[row * p_.scales.v_row + head_] * kUnit<Stored>;
    }
  }

  // A tile of products of queries and keys.
  void scores(int64_t j, int64_t r) {
    Vector sum_of[kTileRows][kTile];
    for (auto& of_row : sum_of)
      for (auto& s : of_row) s = zero();
    const Q* const* q = &q_[r];
    const Stored* const* keys = &s_.keys[j];
    auto add = [&](int64_t d, auto... count) __attribute__((always_inline)) {
      decltype(operand(q[0], count...)) x[kTileRows];
      for (int i = 0; i < kTileRows; ++i) x[i] = operand(q[i] + d, count...);
      for (int k = 0; k < kTile; ++k) {
        const auto key = operand(keys[k] + d, count...);
        for (int i = 0; i < kTileRows; ++i) sum_of[i][k] = add_products(sum_of[i][k], x[i], key);
      }
    };
    int64_t d = 0;
    for (; d + kOperand<Q> <= p_.width; d += kOperand<Q>) add(d);
    if (d < p_.width) add(d, p_.width - d);
    for (int i = 0; i < kTileRows; ++i) store_sums(&s_.weights[(r + i) * stride_ + j], sum_of[i]);
  }

  // Products -> e^(score - largest score); their sum goes to s_.totals. Where nothing is seen: 0, and 1. Scales of codes
  // go to the scores, and to the weights behind their sum.
  //
  // The order of a sum is that of the keys that its row is shown, as if the row were alone: those of a tree move together.
  void softmax(int64_t r) {
    float* weights = &s_.weights[r * stride_];
    const int64_t of_query = (query(r) - query(0)) * stride_;
    const uint8_t* is_seen = &s_.is_seen[of_query];
    const uint8_t* is_shown = p_.visible.window == 0 ? is_seen : &s_.is_shown[of_query];
    const Vector scale = broadcast(static_cast<float>(p_.scale));
    const Vector hidden = broadcast(-std::numeric_limits<float>::infinity());
    Vector most = hidden, total = zero();
    Mask sees = none();
    for_vectors(count_, [&](int64_t j, auto lanes) __attribute__((always_inline)) {
      const Mask seen = flags(is_seen + j);
      sees = sees | seen;
      Vector of_key = scale;
      if constexpr (kIsCoded) of_key = load(&s_.key_scales[j], lanes);
      const Vector score = chosen(seen, load(weights + j, lanes) * of_key, hidden);
      store(weights + j, score, lanes);
      most = chosen(lanes, larger(score, most), most);
    });
    if (!any(sees)) {
      std::fill_n(weights, count_, 0.0f);
      s_.totals[r] = 1.0f;
      return;
    }
    const Vector shift = broadcast(largest(most));
    const auto soften = [&](int64_t j, auto lanes) __attribute__((always_inline)) {
      const Vector weight = exp(load(weights + j, lanes) - shift);
      Vector of_value = weight;
      if constexpr (kIsCoded) of_value = weight * load(&s_.value_scales[j], lanes);
      store(weights + j, of_value, lanes);
      return weight;
    };
    for_vectors(alike_, [&](int64_t j, auto lanes) __attribute__((always_inline)) {
      total = chosen(lanes, total + soften(j, lanes), total);
    });
    if (alike_ < count_) {
      s_.entries.resize(count_ - alike_);
      float* entries = s_.entries.data();
      for_vectors(count_ - alike_, [&](int64_t i, auto lanes) __attribute__((always_inline)) {
        store(entries + i, soften(alike_ + i, lanes), lanes);
      });
      int64_t num_shown = 0;
      for (int64_t i = 0; i < count_ - alike_; ++i)
        if (is_shown[alike_ + i]) entries[num_shown++] = entries[i];
      for_vectors(num_shown, [&](int64_t i, auto lanes) __attribute__((always_inline)) {
        total = chosen(lanes, total + load(entries + i, lanes), total);
      });
    }
    s_.totals[r] = sum(total);
  }

  // Weighted sums of values: some rows, kSumVectors vectors of columns.
  template <int Rows>
  static void sums(Task& t, int64_t r, int64_t column) {
    const Attend& p = t.p_;
    const int64_t size = std::min(p.value_width - column, kSumVectors * kLanes);
    Vector sum_of[Rows][kSumVectors];
    for (auto& of_row : sum_of)
      for (auto& s : of_row) s = zero();
    const float* weights = &t.s_.weights[r * t.stride_];
    const Stored* const* values = t.s_.values.data();
    const int64_t stride = t.stride_;
    auto add = [&](int64_t j, int64_t d, auto lanes) __attribute__((always_inline)) {
      const Vector v = load(values[j] + column + d, lanes);
      for (int i = 0; i < Rows; ++i)
        sum_of[i][d / kLanes] = fma(broadcast(weights[i * stride + j]), v, sum_of[i][d / kLanes]);
    };
    for (int64_t j = 0; j < t.count_; ++j) {
      if (size == kSumVectors * kLanes)
        for (int64_t d = 0; d < kSumVectors; ++d) add(j, d * kLanes, All{});
      else
        for_vectors(size, [&](int64_t d, auto lanes) __attribute__((always_inline)) { add(j, d, lanes); });
    }
    for (int i = 0; i < Rows; ++i) {
      const int64_t token = p.token(t.b_, t.query(r + i)), at = t.query_head(r + i) * p.value_width + column;
      T* out = static_cast<T*>(p.out) + token * p.query_heads * p.value_width + at;
      const Vector total = broadcast(t.s_.totals[r + i]);
      const auto mean = [&](int64_t d) __attribute__((always_inline)) {
        return sum_of[i][d / kLanes] / total;
      };
      if (p.gate == nullptr) {
        const auto write = [&](int64_t d, auto lanes) __attribute__((always_inline)) {
          store(out + d, mean(d), lanes);
        };
        for_vectors(size, write);
        continue;
      }
      const T* gates = static_cast<const T*>(p.gate) + token * p.gate_query + at;
      for_vectors(size, [&](int64_t d, auto lanes) __attribute__((always_inline)) {
        store(out + d, mean(d) * sigmoid(load(gates + d, lanes)), lanes);
      });
    }
  }
  template <int... Rows>
  static void sums_of(std::integer_sequence<int, Rows...>, Task& t, int64_t rows, int64_t r, int64_t column) {
    ((rows == Rows + 1 ? sums<Rows + 1>(t, r, column) : void()), ...);
  }

  const Attend& p_;
  const int64_t b_, head_, first_, rows_, group_;
  int64_t count_, stride_;  // keys that are seen; from row to row of weights
  int64_t alike_;           // so many of them, whole vectors, come before the tree
  const Q* q_[kTaskRows + kTileRows];
  Scratch<Stored>& s_;
};

template <typename T, typename Stored>
void attend(const Attend& p, int num_threads) {
  const int64_t group = p.query_heads / p.key_heads;
  const int64_t most = p.queries * group, parts = (most + kTaskRows - 1) / kTaskRows;
  int64_t length = 0;  // of the longest row: num_keys is a bound
  for (int64_t b = 0; b < p.batch; ++b) {
    length = std::max(length, p.visible.tree(b).end);
    for (int64_t n = 0; n < p.queries; ++n) length = std::max(length, p.visible.before_tree(b, n).end);
  }
  if (p.visible.window > 0) length = std::min(length, p.visible.window + p.queries);
  if (p.batch * p.queries * p.query_heads * length * p.width < kSerialBelow) num_threads = 1;
  parallel_for(p.batch * p.key_heads * parts, 1, num_threads, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      const int64_t part = t % parts, head = t / parts % p.key_heads, b = t / parts / p.key_heads;
      const int64_t rows = p.count(b) * group, begin = part * kTaskRows;
      if (begin < rows) Task<T, Stored>(p, b, head, begin, std::min(rows, begin + kTaskRows)).run();
    }
  });
}

}  // namespace specmamba
