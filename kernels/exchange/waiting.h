// Numbers in memory that several processes share, and how one of them waits for a number of another: it looks for a part
// of a millisecond, and then sleeps; where both run on one processor, it sleeps at once.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>

namespace specmamba {

static_assert(std::atomic<uint32_t>::is_always_lock_free, "locks of one process do not hold for others");

constexpr int kLooks = 16;                               // between two looks at the clock, about a microsecond
constexpr auto kAwake = std::chrono::microseconds(300);  // before sleep
constexpr auto kAsleep = std::chrono::milliseconds(50);  // before a look at what wakes no sleeper

using Clock = std::chrono::steady_clock;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// A number that one process raises and others wait for. It may wrap around.
class Signal {
 public:
  // Everything written before is seen by who sees the number.
  void raise(uint32_t number) {
    processor_.store(sched_getcpu(), std::memory_order_relaxed);
    // in one order with a sleeper's count and its look at the number: one of the two sees the other
    number_.store(number, std::memory_order_seq_cst);
    if (num_sleepers_.load(std::memory_order_seq_cst) != 0)
      syscall(SYS_futex, &number_, FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0);
  }

  bool has(uint32_t number) const { return is_reached(number_.load(std::memory_order_acquire), number); }

  // Waits for a number, until a time or until `gives_up`, which is asked between sleeps. Whether it came.
  template <typename GivesUp>
  bool wait(uint32_t number, Clock::time_point end, const GivesUp& gives_up) {
    if (has(number)) return true;
    const auto last = std::min(end, Clock::now() + kAwake);
    while (processor_.load(std::memory_order_relaxed) != sched_getcpu() && Clock::now() < last)
      for (int i = 0; i < kLooks; ++i) {
        if (has(number)) return true;
        pause();
      }
    for (sleep(number); !has(number); sleep(number))
      if (gives_up() || Clock::now() >= end) return has(number);
    return true;
  }

 private:
  static bool is_reached(uint32_t now, uint32_t number) { return static_cast<int32_t>(now - number) >= 0; }

  void sleep(uint32_t number) {
    constexpr auto kNanoseconds = std::chrono::nanoseconds(kAsleep).count();
    const timespec most{kNanoseconds / 1000000000, kNanoseconds % 1000000000};
    num_sleepers_.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t seen = number_.load(std::memory_order_seq_cst);
    // the system sleeps only while the number is the one that was seen
    if (!is_reached(seen, number)) syscall(SYS_futex, &number_, FUTEX_WAIT, seen, &most, nullptr, 0);
    num_sleepers_.fetch_sub(1, std::memory_order_seq_cst);
  }

  std::atomic<uint32_t> number_, num_sleepers_;
  std::atomic<int> processor_;  // that raised it last
};

}  // namespace specmamba
