// Loops over tasks on the OpenMP threads that torch already runs.
//
// The entry point of the runtime is handed in (kernels/native/library.py finds it in the process), so nothing here is
// compiled with -fopenmp or linked against a runtime: a second one in the process would double the threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace specmamba {

// GOMP_parallel(function, data, num_threads, flags): part of libgomp's ABI, also offered by LLVM's and Intel's runtime.
using ParallelRegion = void (*)(void (*)(void*), void*, unsigned, unsigned);

inline ParallelRegion parallel_region = nullptr;

// Calls body(first, last) for consecutive parts of [0, count). Parts are claimed, not dealt out: a thread that lost its
// core for a while does not hold up the others for longer than one part.
template <typename Body>
void parallel_for(int64_t count, int64_t part, int num_threads, const Body& body) {
  if (num_threads <= 1 || count <= part || parallel_region == nullptr) {
    if (count > 0) body(int64_t{0}, count);
    return;
  }
  struct Shared {
    const Body& body;
    int64_t count, part;
    std::atomic<int64_t> next;
  } shared{body, count, part, {0}};
  auto work = [](void* data) {
    auto& s = *static_cast<Shared*>(data);
    for (int64_t first; (first = s.next.fetch_add(s.part, std::memory_order_relaxed)) < s.count;)
      s.body(first, first + s.part < s.count ? first + s.part : s.count);
  };
  const int64_t parts = (count + part - 1) / part;
  parallel_region(work, &shared, static_cast<unsigned>(parts < num_threads ? parts : num_threads), 0);
}

// The same where threads do best to go on behind their last part: each claims from a range of its own, whose parts follow
// each other, and from those of others when that is done. So parts can be small, and what a thread prefetches beyond
// its part is its own next one.
template <typename Body>
void parallel_for_ranges(int64_t count, int64_t part, int num_threads, const Body& body) {
  constexpr int kMaxRanges = 64;  // more threads share them
  struct alignas(64) Range {
    std::atomic<int64_t> next;
    int64_t end;
  };
  struct Shared {
    const Body& body;
    int64_t part;
    int num_ranges;
    std::atomic<int> entered;
    Range ranges[kMaxRanges];
  };
  const int64_t parts = (count + part - 1) / part;
  const int threads = static_cast<int>(std::min<int64_t>(parts, num_threads));
  if (threads <= 1 || parallel_region == nullptr) {
    if (count > 0) body(int64_t{0}, count);
    return;
  }
  Shared shared{body, part, std::min(threads, kMaxRanges), {0}, {}};
  for (int i = 0; i < shared.num_ranges; ++i) {
    shared.ranges[i].next.store(parts * i / shared.num_ranges * part, std::memory_order_relaxed);
    shared.ranges[i].end = std::min(parts * (i + 1) / shared.num_ranges * part, count);
  }
  auto work = [](void* data) {
    auto& s = *static_cast<Shared*>(data);
    const int own = s.entered.fetch_add(1, std::memory_order_relaxed);
    for (int i = 0; i < s.num_ranges; ++i) {
      Range& range = s.ranges[(own + i) % s.num_ranges];
      for (int64_t first; (first = range.next.fetch_add(s.part, std::memory_order_relaxed)) < range.end;)
        s.body(first, std::min(first + s.part, range.end));
    }
  };
  parallel_region(work, &shared, static_cast<unsigned>(threads), 0);
}

// Calls body(b, h) for all heads of all rows. Neighbours, which memory delivers in one stream, mostly meet in a thread.
template <typename Body>
void for_heads(int64_t batch, int64_t heads, int num_threads, const Body& body) {
  const int64_t count = batch * heads, part = std::max<int64_t>(1, count / (4 * std::max(num_threads, 1)));
  parallel_for(count, part, num_threads, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) body(t / heads, t % heads);
  });
}

}  // namespace specmamba

extern "C" inline __attribute__((used, visibility("default"))) void specmamba_use_runtime(void* entry) {
  specmamba::parallel_region = reinterpret_cast<specmamba::ParallelRegion>(entry);
}
