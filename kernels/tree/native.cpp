// Ancestors and the accepted path of draft trees; see README.md and reference.py.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "parallel.h"
#include "replayable.h"

extern "C" {

// parents [batch, nodes], parents_batch apart -> mask [batch, nodes, nodes].
void tree_ancestors(const int64_t* parents, bool* mask, int64_t batch, int64_t nodes, int64_t parents_batch) {
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t i = 0; i < nodes; ++i) {
      const int64_t parent = parents[b * parents_batch + i];
      bool* row = mask + (b * nodes + i) * nodes;
      if (0 <= parent && parent < i) std::copy_n(mask + (b * nodes + parent) * nodes, nodes, row);
      else std::fill_n(row, nodes, false);
      row[i] = true;
    }
}

// parents [batch, nodes] lie parents_batch apart; the rest is contiguous.
void tree_accepted_path(const int64_t* tokens, const int64_t* parents, const int64_t* targets, int64_t* path,
                        int64_t* num_accepted, int64_t* path_tokens, int64_t* bonus, int64_t batch, int64_t nodes,
                        int64_t parents_batch) {
  std::vector<int64_t> depth(nodes);  // of accepted nodes; -1 for others
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t *token = tokens + b * nodes, *target = targets + b * nodes, *parent = parents + b * parents_batch;
    int64_t last = 0;
    depth[0] = 0;
    for (int64_t i = 1; i < nodes; ++i) {
      const bool has_parent = parent[i] >= 0 && parent[i] < i;
      const bool agrees = has_parent && depth[parent[i]] >= 0 && token[i] == target[parent[i]];
      depth[i] = agrees ? depth[parent[i]] + 1 : -1;
      if (depth[i] > depth[last]) last = i;
    }
    num_accepted[b] = depth[last];
    bonus[b] = target[last];
    int64_t *steps = path + b * nodes, *said = path_tokens + b * (nodes + 1), node = last;
    for (int64_t d = nodes; d >= 0; --d) {
      const bool is_draft = d < depth[last];  // said[d] is the token of step d + 1
      said[d] = is_draft ? token[steps[d + 1]] : bonus[b];
      if (d == nodes) continue;
      steps[d] = node;
      if (d <= depth[last]) node = parent[node];
    }
  }
}

}  // extern "C"

SPECMAMBA_REPLAYABLE(tree_accepted_path)
SPECMAMBA_REPLAYABLE(tree_ancestors)
