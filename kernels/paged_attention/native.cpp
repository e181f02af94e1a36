// Attention of a few queries over keys and values that lie anywhere in a pool; see README.md and reference.py.
#include <limits>
#include <vector>

#include "parallel.h"
#include "vector.h"

namespace {

using namespace specmamba;

// Everything of one call. Distances are in elements; what is not named is contiguous.
struct Attend {
  const void *q, *k, *v;   // [B, N, Hq, D] and pools [T, Hkv, D]
  const int64_t* indices;  // [B, L] rows of the pools
  const bool* mask;        // [B, N, L], or null: every query sees every key
  void* out;               // [B, N, Hq, D]
  int64_t batch, queries, query_heads, key_heads, width, length;
  int64_t q_batch, q_query, k_row, v_row, indices_batch, mask_batch, mask_query;
  double scale;
};

constexpr int64_t kTaskRows = 32;  // rows of a task: query heads of one key head, one query after the other
constexpr int kDotRows = 4, kSumRows = 6, kSumVectors = 4;

// The rows [first, last) of one batch entry and key head.
template <typename T>
class Task {
 public:
  Task(const Attend& p, int64_t b, int64_t head, int64_t first, int64_t last)
      : p_(p), b_(b), head_(head), first_(first), rows_(last - first), group_(p.query_heads / p.key_heads) {}

  void run() {
    see();
    load_queries();
    const auto count = static_cast<int64_t>(keys_.size());
    weights_.resize(rows_ * count);
    for (int64_t j = 0; j < count; ++j)
      for (int64_t r = 0; r < rows_; r += kDotRows) dots(j, count, r, std::min<int64_t>(kDotRows, rows_ - r));
    for (int64_t r = 0; r < rows_; ++r) softmax(r, &weights_[r * count], count);
    for (int64_t r = 0; r < rows_; r += kSumRows)
      for (int64_t column = 0; column < p_.width; column += kSumVectors * kLanes)
        sums(r, std::min<int64_t>(kSumRows, rows_ - r), column, count);
  }

 private:
  int64_t query(int64_t r) const { return (first_ + r) / group_; }
  int64_t query_head(int64_t r) const { return head_ * group_ + (first_ + r) % group_; }
  const bool* mask(int64_t r) const { return p_.mask + b_ * p_.mask_batch + query(r) * p_.mask_query; }

  // Keys that no row sees are not touched: whatever lies there is somebody else's.
  void see() {
    keys_.clear();
    const int64_t first = query(0), last = query(rows_ - 1);
    for (int64_t l = 0; l < p_.length; ++l) {
      bool is_seen = p_.mask == nullptr;
      for (int64_t n = first; n <= last && !is_seen; ++n) is_seen = p_.mask[b_ * p_.mask_batch + n * p_.mask_query + l];
      if (is_seen) keys_.push_back(l);
    }
  }

  void load_queries() {
    q_.resize(rows_ * p_.width);
    for (int64_t r = 0; r < rows_; ++r) {
      const T* q = static_cast<const T*>(p_.q) + b_ * p_.q_batch + query(r) * p_.q_query + query_head(r) * p_.width;
      for (int64_t d = 0; d < p_.width; ++d) q_[r * p_.width + d] = to_float(q[d]);
    }
  }

  const T* row_of(const void* pool, int64_t stride, int64_t j) const {
    const int64_t row = p_.indices[b_ * p_.indices_batch + keys_[j]];
    return static_cast<const T*>(pool) + row * stride + head_ * p_.width;
  }

  // Scores of up to four rows at the j-th key.
  void dots(int64_t j, int64_t count, int64_t r, int64_t num_rows) {
    const T* key = row_of(p_.k, p_.k_row, j);
    const float* q[kDotRows];
    for (int i = 0; i < kDotRows; ++i) q[i] = &q_[(r + std::min<int64_t>(i, num_rows - 1)) * p_.width];
    Vector sum_of[kDotRows];
    for (auto& s : sum_of) s = _mm512_setzero_ps();
    for_vectors(p_.width, [&](int64_t d, auto lanes) __attribute__((always_inline)) {
      const Vector k = load(key + d, lanes);
      for (int i = 0; i < kDotRows; ++i) sum_of[i] = _mm512_fmadd_ps(load(q[i] + d, lanes), k, sum_of[i]);
    });
    for (int64_t i = 0; i < num_rows; ++i) {
      const bool is_seen = p_.mask == nullptr || mask(r + i)[keys_[j]];
      const float hidden = -std::numeric_limits<float>::infinity();
      weights_[(r + i) * count + j] = is_seen ? sum(sum_of[i]) * static_cast<float>(p_.scale) : hidden;
    }
  }

  // Scores -> e^(score - largest); their sum goes to totals_.
  void softmax(int64_t r, float* scores, int64_t count) {
    totals_.resize(rows_);
    float largest = -std::numeric_limits<float>::infinity();
    for (int64_t j = 0; j < count; ++j) largest = std::max(largest, scores[j]);
    Vector total = _mm512_setzero_ps();
    for_vectors(count, [&](int64_t j, auto lanes) __attribute__((always_inline)) {
      store(scores + j, exp(_mm512_sub_ps(load(scores + j, lanes), _mm512_set1_ps(largest))), lanes);
      total = _mm512_add_ps(total, load(scores + j, lanes));
    });
    totals_[r] = sum(total);
  }

  // Weighted sums of up to six rows over 64 columns of the values.
  void sums(int64_t r, int64_t num_rows, int64_t column, int64_t count) {
    const int64_t end = std::min(p_.width, column + kSumVectors * kLanes);
    Vector sum_of[kSumRows][kSumVectors];
    for (auto& of_row : sum_of)
      for (auto& s : of_row) s = _mm512_setzero_ps();
    const float* weights[kSumRows];
    for (int i = 0; i < kSumRows; ++i) weights[i] = &weights_[(r + std::min<int64_t>(i, num_rows - 1)) * count];
    for (int64_t j = 0; j < count; ++j) {
      const T* value = row_of(p_.v, p_.v_row, j) + column;
      for_vectors(end - column, [&](int64_t d, auto lanes) __attribute__((always_inline)) {
        const Vector v = load(value + d, lanes);
        for (int i = 0; i < kSumRows; ++i)
          sum_of[i][d / kLanes] = _mm512_fmadd_ps(_mm512_set1_ps(weights[i][j]), v, sum_of[i][d / kLanes]);
      });
    }
    for (int64_t i = 0; i < num_rows; ++i) {
      const int64_t at = ((b_ * p_.queries + query(r + i)) * p_.query_heads + query_head(r + i)) * p_.width + column;
      const Vector total = _mm512_set1_ps(totals_[r + i]);
      for_vectors(end - column, [&](int64_t d, auto lanes) __attribute__((always_inline)) {
        store(static_cast<T*>(p_.out) + at + d, _mm512_div_ps(sum_of[i][d / kLanes], total), lanes);
      });
    }
  }

  const Attend& p_;
  const int64_t b_, head_, first_, rows_, group_;
  // kept by each thread from call to call
  static inline thread_local std::vector<int64_t> keys_;
  static inline thread_local std::vector<float> q_, weights_, totals_;
};

template <typename T>
void attend(const Attend& p, int num_threads) {
  const int64_t rows = p.queries * (p.query_heads / p.key_heads), parts = (rows + kTaskRows - 1) / kTaskRows;
  parallel_for(p.batch * p.key_heads * parts, 1, num_threads, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      const int64_t part = t % parts, head = t / parts % p.key_heads, b = t / parts / p.key_heads;
      Task<T>(p, b, head, part * kTaskRows, std::min(rows, (part + 1) * kTaskRows)).run();
    }
  });
}

}  // namespace

extern "C" void paged_attend(const Attend* p, int is_bfloat16, int num_threads) {
  if (is_bfloat16)
    attend<BFloat16>(*p, num_threads);
  else
    attend<float>(*p, num_threads);
}
