// Threads of captured steps: they wait for regions of work without a system call while a step runs, and sleep between
// steps.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace specmamba {

inline thread_local bool is_in_region = false;  // a region in a region has one thread

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Runs regions: a function that every thread may call once, as parallel_for's, whose threads claim parts. A thread that
// comes when all is claimed stays away, so the caller never waits for one that is still waking up.
class Threads {
 public:
  using Work = void (*)(void*);

  // num_threads: the caller's thread included.
  explicit Threads(int num_threads) {
    for (int i = 1; i < num_threads; ++i) workers_.emplace_back([this] { live(); });
  }
  ~Threads() {
    stops_.store(true);
    wake();
    for (auto& worker : workers_) worker.join();
  }
  Threads(const Threads&) = delete;

  int count() const { return static_cast<int>(workers_.size()) + 1; }

  // Workers spin from begin() to end().
  void begin() {
    is_running_.store(true);
    wake();
  }
  void end() { is_running_.store(false, std::memory_order_relaxed); }

  void run(Work work, void* data) {
    work_ = work;
    data_ = data;
    left_.store(0, std::memory_order_relaxed);
    const uint64_t region = (gate_.load(std::memory_order_relaxed) & ~uint64_t{0xFFFFFFFF}) + (uint64_t{1} << 32);
    gate_.store(region, std::memory_order_release);
    is_in_region = true;
    work(data);
    is_in_region = false;
    const uint64_t entered = gate_.fetch_or(kClosed, std::memory_order_acq_rel) & kEntered;
    while (left_.load(std::memory_order_acquire) != entered) pause();
  }

 private:
  // gate_: the region's number in the upper half; whether it is closed; how many workers entered.
  static constexpr uint64_t kClosed = uint64_t{1} << 31, kEntered = kClosed - 1;

  // A worker that ends by anything but the destructor would leave its share undone: the process must not go on.
  struct Guard {
    const std::atomic<bool>& stops;
    ~Guard() {
      if (stops.load()) return;
      std::fputs("specmamba: a worker thread of captured steps has died; the process ends\n", stderr);
      std::abort();
    }
  };

  void live() noexcept {
    const Guard guard{stops_};
    is_in_region = true;
    uint64_t last = 0;
    while (!stops_.load(std::memory_order_relaxed)) {
      if (!is_running_.load(std::memory_order_relaxed)) {
        sleep();
        continue;
      }
      uint64_t gate = gate_.load(std::memory_order_acquire);
      if (gate >> 32 == last || (gate & kClosed)) {
        pause();
        continue;
      }
      if (!gate_.compare_exchange_weak(gate, gate + 1, std::memory_order_acq_rel)) continue;
      last = gate >> 32;
      work_(data_);
      left_.fetch_add(1, std::memory_order_release);
    }
  }

  void sleep() {
    std::unique_lock lock(mutex_);
    woken_.wait(lock, [this] { return is_running_.load() || stops_.load(); });
  }
  void wake() {
    { const std::lock_guard lock(mutex_); }  // a worker between its check and its wait would miss the notification
    woken_.notify_all();
  }

  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable woken_;
  Work work_ = nullptr;
  void* data_ = nullptr;
  alignas(64) std::atomic<uint64_t> gate_{kClosed};
  alignas(64) std::atomic<uint64_t> left_{0};
  alignas(64) std::atomic<bool> is_running_{false};
  std::atomic<bool> stops_{false};
};

}  // namespace specmamba
