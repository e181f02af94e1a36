// parallel_for_ranges under runtimes that start as many threads as asked, or the caller's alone. Prints what is wrong.
#include <cstdio>
#include <mutex>
#include <thread>
#include <vector>

#include "parallel.h"

using namespace specmamba;

static void all_threads(void (*work)(void*), void* data, unsigned count, unsigned) {
  std::vector<std::thread> threads;
  for (unsigned i = 1; i < count; ++i) threads.emplace_back(work, data);
  work(data);
  for (auto& thread : threads) thread.join();
}
static void caller_alone(void (*work)(void*), void* data, unsigned, unsigned) { work(data); }

// Every index is in one part; parts have at most `part` indices unless a thread does all; they begin at multiples of it.
static bool is_right(int64_t count, int64_t part, int threads) {
  std::mutex mutex;
  std::vector<int> visits(count);
  bool are_parts = true;
  parallel_for_ranges(count, part, threads, [&](int64_t first, int64_t last) {
    const std::lock_guard lock(mutex);
    const bool is_all = first == 0 && last == count && (threads <= 1 || count <= part);
    are_parts &= first < last && last <= count && (is_all || (first % part == 0 && last - first <= part));
    for (int64_t i = first; i < last; ++i) ++visits[i];
  });
  for (int count_of : visits) are_parts &= count_of == 1;
  return are_parts;
}

int main() {
  int wrong = 0;
  for (ParallelRegion region : {&all_threads, &caller_alone}) {
    parallel_region = region;
    for (int64_t count : {0, 1, 2, 7, 40, 321})
      for (int64_t part : {1, 2, 3, 64})
        for (int threads : {1, 2, 5, 70})
          if (!is_right(count, part, threads)) {
            ++wrong;
            std::printf("%ld by %ld on %d threads\n", static_cast<long>(count), static_cast<long>(part), threads);
          }
  }
  std::printf("%d wrong\n", wrong);
}
