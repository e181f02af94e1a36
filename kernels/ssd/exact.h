// The recurrence of Mamba2 in one fixed arithmetic: state_records/exact.h with the names of GroupTree and GroupChunk.
#pragma once

#include "state_records/exact.h"

namespace specmamba {

class ExactGroupTree : public ExactTree<false, false> {
 public:
  float* b(int64_t row) { return key(row); }
  float* c(int64_t node) { return query(node); }
  float& decay(int64_t row) { return *decays(row); }
  float& log_decay(int64_t node) { return *log_decays(node); }
};

class ExactGroupChunk : public ExactChunk<false, false> {
 public:
  float* b(int64_t token) { return key(token); }
  float* c(int64_t token) { return query(token); }
  float* update(int64_t token) { return value(token); }
  float& log_decay(int64_t token) { return *log_decays(token); }
};

}  // namespace specmamba
