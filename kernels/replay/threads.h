// Threads of captured steps: they wait for regions of work without a system call while a step runs and for a moment
// after it, and then sleep until the next one.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace specmamba {

constexpr int64_t kSpins = 256;            // some microseconds
constexpr int64_t kChecks = kSpins << 16;  // about a second
constexpr std::chrono::microseconds kLinger{500};  // longer than the host needs between two steps of a small model

inline thread_local bool is_in_region = false;  // a region in a region has one thread

// Waits for a moment; where other programs want the processor, they get it.
inline void wait(int64_t* spins) {
  if (++*spins % kSpins == 0) std::this_thread::yield();
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Held by a thread for as long as it lives: the system releases it when the thread ends in any way.
class LifeSign {
 public:
  LifeSign() {
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&mutex_, &attributes);
    pthread_mutexattr_destroy(&attributes);
  }
  LifeSign(const LifeSign&) = delete;

  void begin() { pthread_mutex_lock(&mutex_); }
  void end() { pthread_mutex_unlock(&mutex_); }
  bool is_alive() { return pthread_mutex_trylock(&mutex_) == EBUSY; }

 private:
  pthread_mutex_t mutex_;
};

// Runs regions: a function that every thread may call once, as parallel_for's, whose threads claim parts. A thread that
// comes when all is claimed stays away, so the caller never waits for one that is still waking up.
class Threads {
 public:
  using Work = void (*)(void*);

  // num_threads: the caller's thread included.
  explicit Threads(int num_threads) {
    for (int i = 1; i < num_threads; ++i) {
      LifeSign& sign = signs_.emplace_back();
      workers_.emplace_back([this, &sign] { live(&sign); });
    }
    std::unique_lock lock(mutex_);
    started_.wait(lock, [&] { return num_started_ == workers_.size(); });
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
    check();
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
    for (int64_t spins = 0; left_.load(std::memory_order_acquire) != entered;) {
      wait(&spins);
      if (spins % kChecks == 0) check();
    }
  }

 private:
  // gate_: the region's number in the upper half; whether it is closed; how many workers entered.
  static constexpr uint64_t kClosed = uint64_t{1} << 31, kEntered = kClosed - 1;

  // The share of a worker that died would stay undone: the process must not go on.
  void check() {
    for (auto& sign : signs_)
      if (!sign.is_alive()) {
        std::fputs("specmamba: a worker thread of captured steps has died; the process ends\n", stderr);
        std::abort();
      }
  }

  void live(LifeSign* sign) noexcept {
    sign->begin();
    is_in_region = true;
    {
      const std::lock_guard lock(mutex_);
      ++num_started_;
    }
    started_.notify_all();
    uint64_t last = 0;
    for (int64_t spins = 0; !stops_.load(std::memory_order_relaxed);) {
      if (!is_running_.load(std::memory_order_relaxed)) {
        linger();
        continue;
      }
      uint64_t gate = gate_.load(std::memory_order_acquire);
      if (gate >> 32 == last || (gate & kClosed)) {
        wait(&spins);
        continue;
      }
      spins = 0;
      if (!gate_.compare_exchange_weak(gate, gate + 1, std::memory_order_acq_rel)) continue;
      last = gate >> 32;
      work_(data_);
      left_.fetch_add(1, std::memory_order_release);
    }
    sign->end();
  }

  // The next step usually follows soon, and a thread that sleeps misses its beginning.
  void linger() {
    const auto until = std::chrono::steady_clock::now() + kLinger;
    for (int64_t spins = 0; !is_running_.load(std::memory_order_relaxed) && !stops_.load(std::memory_order_relaxed);) {
      wait(&spins);
      if (spins % kSpins == 0 && std::chrono::steady_clock::now() >= until) return sleep();
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

  std::deque<std::thread> workers_;
  std::deque<LifeSign> signs_;
  std::mutex mutex_;
  std::condition_variable woken_, started_;
  std::size_t num_started_ = 0;
  Work work_ = nullptr;
  void* data_ = nullptr;
  alignas(64) std::atomic<uint64_t> gate_{kClosed};
  alignas(64) std::atomic<uint64_t> left_{0};
  alignas(64) std::atomic<bool> is_running_{false};
  std::atomic<bool> stops_{false};
};

}  // namespace specmamba
