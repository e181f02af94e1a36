// Replay of captured steps, and the operations between their kernels; see README.md.
#include "parallel.h"
#include "replay/arrays.h"
#include "replay/threads.h"
#include "replayable.h"

using namespace specmamba;

namespace {

ParallelRegion openmp_region = nullptr;
thread_local Threads* current = nullptr;  // of the replay that this thread is in

}  // namespace

extern "C" {

void replay_use_runtime(void* entry) { openmp_region = reinterpret_cast<ParallelRegion>(entry); }

// GOMP_parallel on the threads of the replay that calls it, or else on those of OpenMP.
void replay_parallel(void (*work)(void*), void* data, unsigned num_threads, unsigned flags) {
  if (is_in_region) return work(data);
  if (current == nullptr) return openmp_region(work, data, num_threads, flags);
  num_threads <= 1 || current->count() == 1 ? work(data) : current->run(work, data);
}

Threads* replay_start_threads(int count) { return new Threads(count); }
void replay_stop_threads(Threads* threads) { delete threads; }

struct Entry {
  int (*call)(const uint64_t*);
  const uint64_t* words;
};

// Calls entries [first, count) in order; returns the first that failed, or count.
int64_t replay_run(const Entry* entries, int64_t first, int64_t count, Threads* threads) {
  current = threads;
  threads->begin();
  while (first < count && entries[first].call(entries[first].words)) ++first;
  threads->end();
  current = nullptr;
  return first;
}

void replay_map(const Map* p) { p->is_float ? map<float>(*p) : map<int64_t>(*p); }
int replay_move(const Move* p) { return move(*p); }
void replay_reduce(const Reduce* p) { reduce(*p); }
void replay_sort(const Sort* p) { p->is_float ? sort<float>(*p) : sort<int64_t>(*p); }

}  // extern "C"

SPECMAMBA_REPLAYABLE(replay_map)
SPECMAMBA_REPLAYABLE(replay_move)
SPECMAMBA_REPLAYABLE(replay_reduce)
SPECMAMBA_REPLAYABLE(replay_sort)
