// A Mamba2 layer between its projections, over draft trees and over runs; README.md describes it, reference.py specifies
// it.
#include "mamba2/extend.h"
#include "mamba2/layer.h"
#include "parallel.h"
#include "replayable.h"
#include "ssd/exact.h"
#include "ssd/tree.h"
#include "state_records/row.h"

namespace {

using namespace specmamba;
using namespace specmamba::mamba2;

// Operands of a call; threads only read them.
struct Call {
  const Inputs& in;
  const Weights& w;
  const Buffers& buffers;
  const Trees& trees;
};

// Neighbouring heads, one after the other. The rows that a group shares are computed at the group's first head in the
// run. T is the type of activations, Tree that of the heads' recurrence.
template <typename T, typename Tree>
class HeadRun {
 public:
  explicit HeadRun(const Call& call)
      : in_(call.in), w_(call.w), call_(call), S(w_.heads.key_dim), P(w_.heads.value_dim) {}

  // Heads are numbered through all rows.
  void run(int64_t first, int64_t last) {
    const int64_t heads = w_.heads.value_heads;
    for (int64_t t = first; t < last; ++t) {
      const int64_t h = t % heads, place_in_group = h % w_.heads.group();
      if (t == first || h == 0) begin_row(t / heads);
      if (N == 0) continue;  // a row of padding
      if (t == first || place_in_group == 0) begin_group(h / w_.heads.group(), place_in_group == 0);
      head(h);
    }
  }

 private:
  void begin_row(int64_t b) {
    first_ = call_.trees.first(b), N = call_.trees.count(b);
    const Convolution convolution{w_.conv, w_.conv_bias, w_.width};
    row_.begin(call_.buffers, call_.trees, w_.heads, convolution, b, in_.mixed, in_.mixed_token);
  }

  // Several threads may have heads of a group; one of them writes the group's inputs and records.
  void begin_group(int64_t g, bool writes) {
    const int64_t b = w_.inner() + g * S, c = b + w_.heads.key_heads * S, pending = row_.pending();
    tree_.begin(N, pending, S, P, row_.ancestors(), row_.ancestors_node());
    for (int64_t j = 0; j < pending; ++j) std::copy_n(row_.key(j, g), S, tree_.b(j));
    for (int64_t i = 0; i < N; ++i) {
      row_.mix(i, b, S, tree_.b(pending + i));
      row_.mix(i, c, S, tree_.c(i));
      if (!writes) continue;
      row_.keep(i, b, S);
      row_.keep(i, c, S);
      row_.keep_key(i, g, tree_.b(pending + i));
    }
    tree_.look();
  }

  void head(int64_t h) {
    const int64_t pending = row_.pending();
    for (int64_t j = 0; j < pending; ++j) {
      std::copy_n(row_.update(j, h), P, tree_.update(j));
      tree_.decay(j) = row_.decay(j, h);
    }
    x_.resize(N * P);
    for (int64_t i = 0; i < N; ++i) {
      row_.mix(i, h * P, P, &x_[i * P]);
      row_.keep(i, h * P, P);
      const float dt = step_size(in_, w_, token(i), h, T{});
      tree_.log_decay(i) = dt * w_.negative_a[h];
      for (int64_t p = 0; p < P; ++p) tree_.update(pending + i)[p] = dt * x_[i * P + p];
    }
    tree_.verify({row_.state(h), S, P});
    for (int64_t i = 0; i < N; ++i) {
      row_.keep_update(i, h, tree_.update(pending + i), tree_.decay(pending + i));
      finish<T>(in_, w_, token(i), h, tree_.output(i), &x_[i * P]);
    }
  }

  int64_t token(int64_t node) const { return first_ + node; }

  static Tree& tree() {
    thread_local Tree of_thread;
    return of_thread;
  }
  static Row<T>& row() {
    thread_local Row<T> of_thread;
    return of_thread;
  }
  static std::vector<float>& x() {
    thread_local std::vector<float> of_thread;
    return of_thread;
  }

  const Inputs& in_;
  const Weights& w_;
  const Call& call_;
  const int64_t S, P;
  int64_t first_, N;
  Tree& tree_ = tree();
  Row<T>& row_ = row();
  std::vector<float>& x_ = x();  // [N, P], of the current head
};

template <typename T, typename Tree>
void run_trees(const Call& call, int num_threads) {
  const Inputs& in = call.in;
  const Weights& w = call.w;
  const int64_t tokens = call.trees.num_packed(), heads = call.trees.batch * w.heads.value_heads;
  parallel_for(heads, std::max<int64_t>(1, heads / (4 * std::max(num_threads, 1))), num_threads,
               [&](int64_t first, int64_t last) { HeadRun<T, Tree>(call).run(first, last); });
  for_norms(w, tokens, num_threads, [&](int64_t token, int64_t part) { norm_part<T>(in, w, token, part); });
  std::fill_n(static_cast<T*>(in.out) + tokens * w.inner(), (call.trees.tokens - tokens) * w.inner(), T{});
}

template <typename T>
void run(const Call& call, int num_threads) {
  call.buffers.is_exact ? run_trees<T, ExactGroupTree>(call, num_threads) : run_trees<T, GroupTree>(call, num_threads);
}

}  // namespace

extern "C" {

void mamba2_tree_verify(const Inputs* inputs, const Weights* weights, const Buffers* buffers, const Trees* trees,
                        int is_bfloat16, int num_threads) {
  const Call call{*inputs, *weights, *buffers, *trees};
  is_bfloat16 ? run<BFloat16>(call, num_threads) : run<float>(call, num_threads);
}

void mamba2_extend(const Inputs* inputs, const Weights* weights, const Runs* runs, int is_bfloat16, int num_threads) {
  is_bfloat16 ? extend<BFloat16>(*inputs, *weights, *runs, num_threads)
              : extend<float>(*inputs, *weights, *runs, num_threads);
}

}  // extern "C"

SPECMAMBA_REPLAYABLE(mamba2_tree_verify)
