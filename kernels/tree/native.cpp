// Draft trees; see README.md and reference.py.
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

// parents [batch, nodes], parents_batch apart -> index [batch, nodes, width].
void tree_conv_index(const int64_t* parents, int64_t* index, int64_t batch, int64_t nodes, int64_t width,
                     int64_t parents_batch) {
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t i = 0; i < nodes; ++i) {
      int64_t* out = index + (b * nodes + i) * width;
      int64_t at = i;
      for (int64_t w = width - 1; w >= 0; --w) {
        out[w] = at;
        if (at < 0) {
          --at;
        } else {
          const int64_t parent = parents[b * parents_batch + at];
          at = parent < at ? std::max<int64_t>(parent, -1) : -1;
        }
      }
    }
}

// path [batch, nodes] -> source, target [batch, nodes].
void tree_commit_moves(const int64_t* path, const int64_t* num_accepted, const int64_t* num_pending, int64_t* source,
                       int64_t* target, int64_t node_offset, int64_t batch, int64_t nodes) {
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t i = 0; i < nodes; ++i) {
      const int64_t taken = i <= num_accepted[b] ? i : 0;
      source[b * nodes + i] = node_offset + path[b * nodes + taken];
      target[b * nodes + i] = num_pending[b] + taken;
    }
}

// path, slots [batch, nodes] -> source, target [batch, nodes].
void tree_kv_moves(const int64_t* path, const int64_t* num_accepted, const int64_t* slots, int64_t* source,
                   int64_t* target, int64_t batch, int64_t nodes) {
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t i = 0; i < nodes; ++i) {
      const int64_t at = b * nodes + i, node = path[at];
      const bool is_accepted = i <= num_accepted[b];
      source[at] = is_accepted ? slots[b * nodes + (0 <= node && node < nodes ? node : 0)] : 0;
      target[at] = is_accepted ? slots[at] : 0;
    }
}

}  // extern "C"

SPECMAMBA_REPLAYABLE(tree_conv_index)
SPECMAMBA_REPLAYABLE(tree_commit_moves)
SPECMAMBA_REPLAYABLE(tree_kv_moves)
SPECMAMBA_REPLAYABLE(tree_accepted_path)
SPECMAMBA_REPLAYABLE(tree_ancestors)
