// A gated delta net layer between its projections, over draft trees; see README.md and reference.py.
#include "causal_conv1d/taps.h"
#include "gated_delta_rule/tree.h"
#include "parallel.h"
#include "rowwise/heads.h"

namespace {

using namespace specmamba;

// Distances are in elements; what is not named is contiguous. Activations, and conv_inputs, are float32 or bfloat16.

// What the projections say of the nodes. Tokens of a tensor lie at one distance.
struct Inputs {
  const void *mixed, *gate, *b, *a;  // [B, N, C] [B, N, Hv, V] [B, N, Hv] [B, N, Hv]
  void* out;                         // [B, N, Hv, V]
  int64_t mixed_token, gate_token, b_token, a_token;
};

struct Weights {
  const float *conv, *negative_a, *dt_bias, *norm;  // [W, C] [Hv] [Hv] [V]
  int64_t width, key_heads, value_heads, key_dim, value_dim;
  double norm_eps, unit_eps;

  int64_t channels() const { return 2 * key_heads * key_dim + value_heads * value_dim; }
};

// Of one layer, all slots and all rows of the buffers.
struct Buffers {
  const float* states;  // [slots, Hv, K, V]
  void* conv_inputs;    // [rows, W - 1 + R, C]
  float *k, *u, *decay;  // [rows, R, Hk, K] [rows, R, Hv, V] [rows, R, Hv]
  int64_t states_slot, conv_inputs_row, k_row, u_row, decay_row;
};

struct Trees {
  const int64_t *rows, *slots;  // [B]
  const int64_t* conv_index;    // [B, N, W], entries of conv_inputs
  const int64_t* num_pending;   // [B], or null: node_offset everywhere
  const bool* ancestors;        // [B, N, N], true from each node's ancestors and itself
  int64_t batch, nodes, node_offset, ancestors_batch;
};

// All of one key head of one row: T is the type of activations.
template <typename T>
class KeyHead {
 public:
  KeyHead(const Inputs& inputs, const Weights& weights, const Buffers& buffers, const Trees& trees, int64_t b,
          int64_t h)
      : in_(inputs), w_(weights), buffers_(buffers), trees_(trees), b_(b), key_head_(h), N(trees.nodes), K(w_.key_dim),
        V(w_.value_dim) {
    const int64_t row = trees.rows[b];
    conv_inputs_ = static_cast<T*>(buffers.conv_inputs) + row * buffers.conv_inputs_row;
    k_ = buffers.k + row * buffers.k_row + h * K;
    u_ = buffers.u + row * buffers.u_row;
    decay_ = buffers.decay + row * buffers.decay_row;
    states_ = buffers.states + trees.slots[b] * buffers.states_slot;
    pending_ = trees.num_pending == nullptr ? trees.node_offset : trees.num_pending[b];
  }

  void run() {
    find_taps();
    tree_.begin(N, pending_, K, V);
    keys_and_queries();
    tree_.look(trees_.ancestors + b_ * trees_.ancestors_batch);
    const int64_t group = w_.value_heads / w_.key_heads;
    for (int64_t h = key_head_ * group; h < (key_head_ + 1) * group; ++h) value_head(h);
  }

 private:
  // The inputs under each node's convolution: nodes' where the projection left them, older ones where they are kept.
  void find_taps() {
    const int64_t first = w_.width - 1 + trees_.node_offset, *index = trees_.conv_index + b_ * N * w_.width;
    taps_.resize(N * w_.width);
    for (int64_t t = 0; t < N * w_.width; ++t)
      taps_[t] = index[t] >= first ? mixed(index[t] - first) : conv_inputs_ + index[t] * w_.channels();
  }

  void keys_and_queries() {
    const int64_t query = key_head_ * K, key = query + w_.key_heads * K;
    const float eps = static_cast<float>(w_.unit_eps);
    for (int64_t j = 0; j < pending_; ++j) std::copy_n(k_ + j * w_.key_heads * K, K, tree_.key(j));
    for (int64_t i = 0; i < N; ++i) {
      float *q_i = tree_.query(i), *k_i = tree_.key(pending_ + i);
      mix(i, query, K, q_i);
      mix(i, key, K, k_i);
      make_unit(q_i, K, eps, query_factor(K), q_i);
      make_unit(k_i, K, eps, 1.0f, k_i);
      std::copy_n(k_i, K, k_ + (trees_.node_offset + i) * w_.key_heads * K);
    }
  }

  void value_head(int64_t h) {
    const int64_t channel = 2 * w_.key_heads * K + h * V;
    for (int64_t j = 0; j < pending_; ++j) {
      std::copy_n(u_ + (j * w_.value_heads + h) * V, V, tree_.update(j));
      tree_.decay(j) = decay_[j * w_.value_heads + h];
    }
    for (int64_t i = 0; i < N; ++i) {
      mix(i, channel, V, tree_.value(i));
      const float a = to_float(of_node(in_.a, in_.a_token, i)[h]), b = to_float(of_node(in_.b, in_.b_token, i)[h]);
      tree_.log_decay(i) = log_decay_of(a, w_.negative_a[h], w_.dt_bias[h]);
      tree_.beta(i) = step_size_of(b);
    }
    tree_.verify({states_ + h * K * V, K, V});
    for (int64_t i = 0; i < N; ++i) {
      const int64_t record = (trees_.node_offset + i) * w_.value_heads + h;
      std::copy_n(tree_.update(pending_ + i), V, u_ + record * V);
      decay_[record] = tree_.decay(pending_ + i);
      T* out = static_cast<T*>(in_.out) + ((b_ * N + i) * w_.value_heads + h) * V;
      const T* gate = of_node(in_.gate, in_.gate_token, i) + h * V;
      normalize<true>(tree_.output(i), gate, w_.norm, V, static_cast<float>(w_.norm_eps), out);
    }
  }

  // Convolves channels of a node, and keeps their inputs.
  void mix(int64_t node, int64_t channel, int64_t size, float* y) {
    convolve(&taps_[node * w_.width], w_.conv, w_.width, w_.channels(), channel, size, y);
    T* kept = conv_inputs_ + (w_.width - 1 + trees_.node_offset + node) * w_.channels() + channel;
    std::copy_n(mixed(node) + channel, size, kept);
  }

  const T* mixed(int64_t node) const { return of_node(in_.mixed, in_.mixed_token, node); }
  const T* of_node(const void* tensor, int64_t distance, int64_t node) const {
    return static_cast<const T*>(tensor) + (b_ * N + node) * distance;
  }

  static HeadTree& tree() {
    thread_local HeadTree of_thread;
    return of_thread;
  }
  static std::vector<const T*>& taps() {
    thread_local std::vector<const T*> of_thread;
    return of_thread;
  }

  const Inputs& in_;
  const Weights& w_;
  const Buffers& buffers_;
  const Trees& trees_;
  const int64_t b_, key_head_, N, K, V;
  int64_t pending_;
  T* conv_inputs_;             // of this row, and so are the next three
  float *k_, *u_, *decay_;     // keys of this head, updates and decays of all
  const float* states_;        // of all heads
  HeadTree& tree_ = tree();
  std::vector<const T*>& taps_ = taps();  // [N, W]
};

template <typename T>
void run(const Inputs& inputs, const Weights& weights, const Buffers& buffers, const Trees& trees, int num_threads) {
  for_heads(trees.batch, weights.key_heads, num_threads,
            [&](int64_t b, int64_t h) { KeyHead<T>(inputs, weights, buffers, trees, b, h).run(); });
}

}  // namespace

extern "C" void delta_net_tree_verify(const Inputs* inputs, const Weights* weights, const Buffers* buffers,
                                      const Trees* trees, int is_bfloat16, int num_threads) {
  is_bfloat16 ? run<BFloat16>(*inputs, *weights, *buffers, *trees, num_threads)
              : run<float>(*inputs, *weights, *buffers, *trees, num_threads);
}
