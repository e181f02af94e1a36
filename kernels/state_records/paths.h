// The rows that nodes of a draft tree see, and their decay; README.md has the mathematics.
#pragma once

#include <cmath>
#include <limits>
#include <vector>

#include "vector.h"

namespace specmamba {

// The parent of a node, the last of its ancestors; -1: it has none. `ancestors` [nodes] is true from these and from itself.
inline int64_t parent_of(const bool* ancestors, int64_t node) {
  int64_t parent = node - 1;
  while (parent >= 0 && !ancestors[parent]) --parent;
  return parent;
}

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
    behind_.resize(pending), sums_.resize(seen_.size()), wholes_.resize(nodes);
  }

  // The rows that all nodes see, node after node: node i's part is [first(i), first(i) + count(i)).
  const std::vector<int64_t>& seen() const { return seen_; }
  int64_t first(int64_t node) const { return first_seen_[node]; }
  int64_t count(int64_t node) const { return first_seen_[node + 1] - first_seen_[node]; }

  float& decay(int64_t row) { return decays_[row]; }            // a row's own log decay
  float& log_decay(int64_t node) { return log_decays_[node]; }  // a node's own, as it is given

  // Called for each head after the decays of its pending rows are filled in.
  void start() {
    before_root_ = 0;
    for (int64_t j = pending_ - 1; j >= 0; --j) {
      behind_[j] = before_root_;
      before_root_ += decays_[j];
    }
  }

  // Computes the decays of a node's path, after those of its ancestors; returns the factor of the checkpoint.
  // between()[j] is then the factor of the j-th row that the node sees. A node continues the last of these rows (its
  // parent, which sees all the others, or the last pending record) or, without any, the checkpoint.
  //
  // What lies between two rows is summed up, and is no difference of sums from the checkpoint on: behind a strong decay
  // these have lost the digits of weak ones.
  float advance(int64_t node) {
    float own = log_decays_[node];
    if (!std::isfinite(own)) own = std::numeric_limits<float>::quiet_NaN();  // a record cannot express it
    decays_[pending_ + node] = own;
    const int64_t first = first_seen_[node], n = count(node);
    float* sums = sums_.data() + first;
    const float* before = behind_.data();
    int64_t num_before = n;
    float whole = before_root_;
    if (n > pending_) {
      const int64_t parent = seen_[first + n - 1] - pending_;
      before = sums_.data() + first_seen_[parent], num_before = n - 1;
      whole = wholes_[parent];
      sums[n - 1] = own;
    }
    for_vectors(num_before, [&](int64_t j, auto lanes) {
      store(sums + j, load(before + j, lanes) + broadcast(own), lanes);
    });
    for_vectors(n, [&](int64_t j, auto lanes) { store(&between_[j], exp(load(sums + j, lanes)), lanes); });
    return std::exp(wholes_[node] = whole + own);
  }
  const float* between() const { return between_.data(); }

 private:
  int64_t pending_;
  std::vector<int64_t> seen_, first_seen_;
  float before_root_;  // log decay from the checkpoint to the last pending record
  std::vector<float> decays_, log_decays_;
  std::vector<float> behind_, sums_, wholes_;  // log decays: behind pending records, as `seen_`, from the checkpoint
  std::vector<float> between_;                 // of the current node
};

}  // namespace specmamba
