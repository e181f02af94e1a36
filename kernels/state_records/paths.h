// The rows that nodes of a draft tree see, and their decay; README.md has the mathematics.
#pragma once

#include <cmath>
#include <limits>
#include <vector>

#include "vector.h"

namespace specmamba {

// Row j is pending record j, or node j - pending. Memory is kept from tree to tree.
class Paths {
 public:
  // `ancestors` [nodes, nodes], rows `distance` apart, is true from a node's ancestors and itself. A node sees the
  // pending records and its strict ancestors.
  void begin(int64_t nodes, int64_t pending, const bool* ancestors, int64_t distance) {
    pending_ = pending;
    seen_.clear();
    first_seen_.assign(1, 0);
    for (int64_t i = 0; i < nodes; ++i) {
      for (int64_t j = 0; j < pending + i; ++j)
        if (j < pending || ancestors[i * distance + j - pending]) seen_.push_back(j);
      first_seen_.push_back(static_cast<int64_t>(seen_.size()));
    }
    decays_.resize(pending + nodes), between_.resize(pending + nodes), log_decays_.resize(nodes);
  }

  // The rows that all nodes see, node after node: node i's part is [first(i), first(i) + count(i)).
  const std::vector<int64_t>& seen() const { return seen_; }
  int64_t first(int64_t node) const { return first_seen_[node]; }
  int64_t count(int64_t node) const { return first_seen_[node + 1] - first_seen_[node]; }

  float& decay(int64_t row) { return decays_[row]; }            // log decay from the checkpoint to a row
  float& log_decay(int64_t node) { return log_decays_[node]; }  // a node's own

  // Computes a node's decay, after those of its ancestors; returns the factor of the checkpoint. between()[j] is then
  // the factor of the j-th row that the node sees. A node continues the last of these rows (its parent or the last
  // pending record) or, without any, the checkpoint.
  float advance(int64_t node) {
    const int64_t first = first_seen_[node], n = count(node);
    const float before = n == 0 ? 0.0f : decays_[seen_[first + n - 1]];
    float decay = before + log_decays_[node];
    if (!std::isfinite(decay)) decay = std::numeric_limits<float>::quiet_NaN();  // a record cannot express it
    decays_[pending_ + node] = decay;
    for (int64_t j = 0; j < n; ++j) between_[j] = decays_[seen_[first + j]];
    for_vectors(n, [&](int64_t j, auto lanes) {
      store(&between_[j], exp(broadcast(decay) - load(&between_[j], lanes)), lanes);
    });
    return std::exp(decay);
  }
  const float* between() const { return between_.data(); }

 private:
  int64_t pending_;
  std::vector<int64_t> seen_, first_seen_;
  std::vector<float> decays_, log_decays_;
  std::vector<float> between_;  // of the current node
};

}  // namespace specmamba
