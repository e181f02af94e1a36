// Moves of entries inside rows of a buffer; see README.md and reference.py.
#include <cstdint>
#include <cstring>
#include <vector>

#include "parallel.h"
#include "replayable.h"

namespace {

// operands of native_ops
struct Moves {
  char* buffer;
  const int64_t *rows, *source, *target;  // rows [batch]; the others [batch, moves]
  int64_t layers, num_rows, num_entries, entry_bytes, batch, moves;
  int64_t layer_bytes, row_bytes, entry_stride;  // from one to the next, in bytes
};

bool is_inside(int64_t at, int64_t count) { return 0 <= at && at < count; }

}  // namespace

extern "C" {

// False where an index is outside: nothing is moved then.
int state_copy_move(const Moves* m, int num_threads) {
  std::vector<int64_t> needed;  // of each row, side by side: its moves that change something
  std::vector<int64_t> ends(m->batch);
  for (int64_t b = 0; b < m->batch; ++b) {
    if (!is_inside(m->rows[b], m->num_rows)) return 0;
    const int64_t first = b * m->moves;
    for (int64_t i = first; i < first + m->moves; ++i) {
      if (!is_inside(m->source[i], m->num_entries) || !is_inside(m->target[i], m->num_entries)) return 0;
      const bool repeats = i > first && m->target[i] == m->target[first];
      if (m->source[i] != m->target[i] && !repeats) needed.push_back(i);
    }
    ends[b] = static_cast<int64_t>(needed.size());
  }
  if (needed.empty()) return 1;
  const int64_t moved = static_cast<int64_t>(needed.size()) * m->entry_bytes * m->layers;
  specmamba::parallel_for(m->layers, 1, moved < (1 << 18) ? 1 : num_threads, [&](int64_t layer, int64_t last) {
    static thread_local std::vector<char> read;
    for (; layer < last; ++layer)
      for (int64_t b = 0, first = 0; b < m->batch; first = ends[b++]) {
        char* row = m->buffer + layer * m->layer_bytes + m->rows[b] * m->row_bytes;
        read.resize((ends[b] - first) * m->entry_bytes);
        for (int64_t i = first; i < ends[b]; ++i)
          std::memcpy(read.data() + (i - first) * m->entry_bytes, row + m->source[needed[i]] * m->entry_stride,
                      m->entry_bytes);
        for (int64_t i = first; i < ends[b]; ++i)
          std::memcpy(row + m->target[needed[i]] * m->entry_stride, read.data() + (i - first) * m->entry_bytes,
                      m->entry_bytes);
      }
  });
  return 1;
}

}  // extern "C"

SPECMAMBA_REPLAYABLE(state_copy_move)
