// A gated delta net layer between its projections, over draft trees and over runs; README.md describes it, reference.py
// specifies it.
#include "delta_net/extend.h"
#include "delta_net/layer.h"
#include "gated_delta_rule/channel_tree.h"
#include "gated_delta_rule/tree.h"
#include "parallel.h"
#include "replayable.h"
#include "state_records/exact.h"
#include "state_records/row.h"

namespace {

using namespace specmamba;
using namespace specmamba::delta_net;

// All work of one key head of one row. T is the type of activations, Tree that of the head's decays.
template <typename T, typename Tree>
class KeyHead {
 public:
  KeyHead(const Inputs& inputs, const Weights& weights, const Buffers& buffers, const Trees& trees, int64_t b,
          int64_t h)
      : in_(inputs), w_(weights), first_(trees.first(b)), key_head_(h), N(trees.count(b)), K(w_.heads.key_dim), V(w_.heads.value_dim) {
    row_.begin(buffers, trees, w_.heads, {w_.conv, nullptr, w_.width}, b, inputs.mixed, inputs.mixed_token);
  }

  void run() {
    tree_.begin(N, row_.pending(), K, V, row_.ancestors(), row_.ancestors_node());
    keys_and_queries();
    tree_.look();
    const int64_t group = w_.heads.group();
    for (int64_t h = key_head_ * group; h < (key_head_ + 1) * group; ++h) value_head(h);
  }

 private:
  void keys_and_queries() {
    const int64_t query = key_head_ * K, key = query + w_.heads.key_heads * K;
    const float eps = static_cast<float>(w_.unit_eps);
    for (int64_t j = 0; j < row_.pending(); ++j) std::copy_n(row_.key(j, key_head_), K, tree_.key(j));
    for (int64_t i = 0; i < N; ++i) {
      float *q_i = tree_.query(i), *k_i = tree_.key(row_.pending() + i);
      mix(i, query, K, q_i);
      mix(i, key, K, k_i);
      make_unit(q_i, K, eps, query_factor(K), q_i);
      make_unit(k_i, K, eps, 1.0f, k_i);
      row_.keep_key(i, key_head_, k_i);
    }
  }

  void value_head(int64_t h) {
    const int64_t channel = 2 * w_.heads.key_heads * K + h * V, pending = row_.pending();
    for (int64_t j = 0; j < pending; ++j) {
      std::copy_n(row_.update(j, h), V, tree_.update(j));
      std::copy_n(row_.decays(j, h), w_.heads.decay_dim, tree_.decays(j));
    }
    for (int64_t i = 0; i < N; ++i) {
      mix(i, channel, V, tree_.value(i));
      const float b = to_float(of_node(in_.b, in_.b_token, i)[h]);
      w_.put_log_decays(of_node(in_.a, in_.a_token, i) + h * w_.heads.decay_dim, h, tree_.log_decays(i));
      tree_.beta(i) = step_size_of(b, static_cast<float>(w_.step_scale));
    }
    tree_.verify({row_.state(h), K, V});
    for (int64_t i = 0; i < N; ++i) {
      row_.keep_update(i, h, tree_.update(pending + i), tree_.decays(pending + i));
      T* out = static_cast<T*>(in_.out) + ((first_ + i) * w_.heads.value_heads + h) * V;
      const T* gate = of_node(in_.gate, in_.gate_token, i) + h * V;
      w_.norm_and_gate(tree_.output(i), gate, out);
    }
  }

  void mix(int64_t node, int64_t channel, int64_t size, float* y) {
    row_.mix(node, channel, size, y);
    row_.keep(node, channel, size);
  }

  const T* of_node(const void* tensor, int64_t distance, int64_t node) const {
    return static_cast<const T*>(tensor) + (first_ + node) * distance;
  }

  static Tree& tree() {
    thread_local Tree of_thread;
    return of_thread;
  }
  static Row<T>& row() {
    thread_local Row<T> of_thread;
    return of_thread;
  }

  const Inputs& in_;
  const Weights& w_;
  const int64_t first_, key_head_, N, K, V;
  Tree& tree_ = tree();
  Row<T>& row_ = row();
};

template <typename T, typename Tree>
void run_trees(const Inputs& inputs, const Weights& weights, const Buffers& buffers, const Trees& trees, int num_threads) {
  for_heads(trees.batch, weights.heads.key_heads, num_threads,
            [&](int64_t b, int64_t h) {
              if (trees.count(b) > 0) KeyHead<T, Tree>(inputs, weights, buffers, trees, b, h).run();
            });
  const int64_t size = weights.heads.value_heads * weights.heads.value_dim, last = trees.num_packed();
  std::fill_n(static_cast<T*>(inputs.out) + last * size, (trees.tokens - last) * size, T{});
}

template <typename T>
void run(const Inputs& inputs, const Weights& weights, const Buffers& buffers, const Trees& trees, int num_threads) {
  const bool by_channel = weights.heads.decay_dim != 1;
  if (buffers.is_exact)
    by_channel ? run_trees<T, ExactTree<true, true>>(inputs, weights, buffers, trees, num_threads)
               : run_trees<T, ExactTree<true, false>>(inputs, weights, buffers, trees, num_threads);
  else
    by_channel ? run_trees<T, ChannelTree>(inputs, weights, buffers, trees, num_threads)
               : run_trees<T, HeadTree>(inputs, weights, buffers, trees, num_threads);
}

}  // namespace

extern "C" {

void delta_net_tree_verify(const Inputs* inputs, const Weights* weights, const Buffers* buffers, const Trees* trees,
                           int is_bfloat16, int num_threads) {
  is_bfloat16 ? run<BFloat16>(*inputs, *weights, *buffers, *trees, num_threads)
              : run<float>(*inputs, *weights, *buffers, *trees, num_threads);
}

void delta_net_extend(const Inputs* inputs, const Weights* weights, const Runs* runs, int is_bfloat16,
                      int num_threads) {
  is_bfloat16 ? extend<BFloat16>(*inputs, *weights, *runs, num_threads)
              : extend<float>(*inputs, *weights, *runs, num_threads);
}

}  // extern "C"

SPECMAMBA_REPLAYABLE(delta_net_tree_verify)
