// One row of a verify: its checkpoint, records and inputs, and the convolution of its nodes.
#pragma once

#include <cmath>
#include <vector>

#include "causal_conv1d/taps.h"
#include "state_records/operands.h"

namespace specmamba {

// T is the type of activations. A record's number counts from the first pending one; nodes' follow node_offset.
template <typename T>
class Row {
 public:
  // Inputs of the row's nodes, `mixed` [N, C], lie `distance` apart.
  void begin(const Buffers& buffers, const Trees& trees, const Heads& heads, const Convolution& convolution, int64_t b,
             const void* mixed, int64_t distance) {
    const int64_t row = trees.rows[b];
    heads_ = heads, convolution_ = convolution, nodes_ = trees.count(b), node_offset_ = trees.node_offset;
    mixed_ = static_cast<const T*>(mixed) + trees.first(b) * distance, distance_ = distance;
    conv_inputs_ = static_cast<T*>(buffers.conv_inputs) + row * buffers.conv_inputs_row;
    k_ = buffers.k + row * buffers.k_row;
    u_ = buffers.u + row * buffers.u_row;
    decay_ = buffers.decay + row * buffers.decay_row;
    states_ = buffers.states + trees.slots[b] * buffers.states_slot;
    ancestors_ = trees.ancestors + b * trees.ancestors_batch, ancestors_node_ = trees.nodes;
    pending_ = trees.num_pending == nullptr ? trees.node_offset : trees.num_pending[b];
    find_taps(trees.conv_index + b * trees.nodes * convolution.width);
  }

  int64_t pending() const { return pending_; }
  int64_t nodes() const { return nodes_; }
  const bool* ancestors() const { return ancestors_; }
  int64_t ancestors_node() const { return ancestors_node_; }
  const float* state(int64_t head) const { return states_ + head * heads_.key_dim * heads_.value_dim; }
  float* key(int64_t record, int64_t head) const {
    return k_ + (record * heads_.key_heads + head) * heads_.key_dim;
  }
  float* update(int64_t record, int64_t head) const {
    return u_ + (record * heads_.value_heads + head) * heads_.value_dim;
  }
  float* decays(int64_t record, int64_t head) const {
    return decay_ + (record * heads_.value_heads + head) * heads_.decay_dim;
  }
  float decay(int64_t record, int64_t head) const { return *decays(record, head); }
  int64_t record_of(int64_t node) const { return node_offset_ + node; }

  // y = channels [channel, channel + size) of a node, convolved over its ancestors.
  void mix(int64_t node, int64_t channel, int64_t size, float* y) const {
    convolve(&taps_[node * convolution_.width], convolution_, heads_.channels(), channel, size, y);
  }

  // Stores these channels of a node's input for later verifies.
  void keep(int64_t node, int64_t channel, int64_t size) const {
    T* kept = conv_inputs_ + (convolution_.width - 1 + record_of(node)) * heads_.channels() + channel;
    std::copy_n(mixed(node) + channel, size, kept);
  }

  // Store a node's record. Values that are not finite are stored as 0: README.md has the reason.
  void keep_key(int64_t node, int64_t head, const float* k) const {
    store_finite(k, key(record_of(node), head), heads_.key_dim);
  }
  void keep_update(int64_t node, int64_t head, const float* u, float decay) const {
    keep_update(node, head, u, &decay);
  }
  void keep_update(int64_t node, int64_t head, const float* u, const float* decays_of_head) const {
    const int64_t record = record_of(node);
    store_finite(u, update(record, head), heads_.value_dim);
    store_finite(decays_of_head, decays(record, head), heads_.decay_dim);
  }

 private:
  // The inputs under each node's convolution: nodes' in the projection's output, older ones in conv_inputs.
  void find_taps(const int64_t* index) {
    const int64_t first = convolution_.width - 1 + node_offset_;
    taps_.resize(nodes_ * convolution_.width);
    for (size_t t = 0; t < taps_.size(); ++t)
      taps_[t] = index[t] >= first ? mixed(index[t] - first) : conv_inputs_ + index[t] * heads_.channels();
  }

  const T* mixed(int64_t node) const { return mixed_ + node * distance_; }

  Heads heads_;
  Convolution convolution_;
  int64_t nodes_, node_offset_, pending_, distance_, ancestors_node_;
  const T* mixed_;
  T* conv_inputs_;
  float *k_, *u_, *decay_;
  const float* states_;
  const bool* ancestors_;
  std::vector<const T*> taps_;  // [N, W]
};

}  // namespace specmamba
