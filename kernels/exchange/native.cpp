// Exchanges between processes over memory that they share; see README.md.
#include <poll.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <new>

#include "exchange/half.h"
#include "exchange/waiting.h"
#include "live.h"
#include "parallel.h"
#include "replayable.h"
#include "vector.h"

using namespace specmamba;

namespace {

constexpr int64_t kMaxRanks = 64;
constexpr int64_t kSlotBytes = 256 << 10;  // longer operands go in pieces
constexpr int64_t kNumSlots = 2;           // of a rank
constexpr int64_t kHeadBytes = 16 << 10;   // of the memory, in front of the slots

// What a rank tells the others: the exchange whose slot it has written, and the one whose slots it has read.
struct alignas(128) Progress {
  Signal written, read;
};

// The memory. All bytes are 0 at first.
struct Region {
  alignas(128) std::atomic<uint32_t> has_ended;  // 1: a rank is lost
  Progress of_rank[kMaxRanks];
};
static_assert(sizeof(Region) <= kHeadBytes);

enum Kind { kSum, kGather, kBroadcast, kMessage, kNumKinds };
struct Count {
  int64_t calls, nbytes, nanoseconds;
};

template <typename T>
void add_up(const uint8_t* const* slots, int num_ranks, int64_t size, T* y) {
  if constexpr (std::is_same_v<T, Float16>) {
    for (int64_t i = 0; i < size; ++i) {
      float sum = to_float(reinterpret_cast<const T*>(slots[0])[i]);
      for (int rank = 1; rank < num_ranks; ++rank) sum += to_float(reinterpret_cast<const T*>(slots[rank])[i]);
      put(y + i, sum);
    }
  } else {
    for_vectors(size, [&](int64_t i, auto lanes) {
      Vector sum = load(reinterpret_cast<const T*>(slots[0]) + i, lanes);
      for (int rank = 1; rank < num_ranks; ++rank) sum = sum + load(reinterpret_cast<const T*>(slots[rank]) + i, lanes);
      store(y + i, sum, lanes);
    });
  }
}

// One rank's side. All ranks make the same calls in the same order, from one thread each.
class Exchange {
 public:
  Exchange(Region* region, int rank, int size, const int* links, int num_links)
      : region_(region), rank_(rank), size_(size), num_links_(num_links) {
    std::copy(links, links + num_links, links_.begin());
  }
  ~Exchange() { munmap(region_, num_bytes(size_)); }
  Exchange(const Exchange&) = delete;

  static int64_t num_bytes(int size) { return kHeadBytes + size * kNumSlots * kSlotBytes; }

  void end() { region_->has_ended.store(1, std::memory_order_relaxed); }

  template <typename T>
  bool sum(T* x, int64_t size) {
    constexpr int64_t kMost = kSlotBytes / sizeof(T);
    for (int64_t first = 0; first < size; first += kMost) {
      const int64_t count = std::min(kMost, size - first);
      if (!write(x + first, count * sizeof(T)) || !all_have_written()) return false;
      const uint8_t* slots[kMaxRanks];
      for (int rank = 0; rank < size_; ++rank) slots[rank] = slot(rank);
      add_up(slots, size_, count, x + first);
      progress(rank_).read.raise(number_);
    }
    return true;
  }

  // x: [rows, widths[rank]] bytes; y: [rows, all widths].
  bool gather(const uint8_t* x, uint8_t* y, int64_t rows, const int64_t* widths) {
    int64_t most = 0, row_bytes = 0;
    for (int rank = 0; rank < size_; ++rank) most = std::max(most, widths[rank]), row_bytes += widths[rank];
    const int64_t own = rows * widths[rank_];
    for (int64_t first = 0; first < rows * most; first += kSlotBytes) {
      const int64_t begin = std::min(first, own);
      if (!write(x + begin, std::min(kSlotBytes, own - begin)) || !all_have_written()) return false;
      uint8_t* to = y;
      for (int rank = 0; rank < size_; to += widths[rank++])
        copy_rows(slot(rank), to, first, std::min(first + kSlotBytes, rows * widths[rank]), widths[rank], row_bytes);
      progress(rank_).read.raise(number_);
    }
    return true;
  }

  // Rank 0 does not wait for the others, but where they are two pieces behind.
  bool broadcast(uint8_t* x, int64_t size) {
    for (int64_t first = 0; first < size; first += kSlotBytes) {
      const int64_t count = std::min(kSlotBytes, size - first);
      if (rank_ == 0 ? !write(x + first, count) : !next_has_come(Clock::time_point::max())) return false;
      if (rank_ != 0) {
        ++number_;
        std::memcpy(x + first, slot(0), count);
      }
      progress(rank_).read.raise(number_);
    }
    return true;
  }

  // A message is its length, in a piece of its own, and its bytes.
  bool tell(const uint8_t* message, int64_t length) {
    return broadcast(reinterpret_cast<uint8_t*>(&length), sizeof length) &&
           broadcast(const_cast<uint8_t*>(message), length);
  }

  // The length of the next message; -1: none has come in time, -2: a rank is lost.
  int64_t next_length(int64_t milliseconds) {
    if (!next_has_come(Clock::now() + std::chrono::milliseconds(milliseconds)))
      return region_->has_ended.load(std::memory_order_relaxed) ? -2 : -1;
    int64_t length = 0;
    return broadcast(reinterpret_cast<uint8_t*>(&length), sizeof length) ? length : -2;
  }

  Count counts[kNumKinds] = {};

 private:
  Progress& progress(int rank) { return region_->of_rank[rank]; }

  uint8_t* slot(int rank) {
    uint8_t* slots = reinterpret_cast<uint8_t*>(region_) + kHeadBytes;
    return slots + (rank * kNumSlots + number_ % kNumSlots) * kSlotBytes;
  }

  bool next_has_come(Clock::time_point end) {
    return progress(0).written.wait(number_ + 1, end, [this] { return is_over(); });
  }

  bool wait(Signal& signal, uint32_t number) {
    return signal.wait(number, Clock::time_point::max(), [this] { return is_over(); });
  }

  // Begins the next exchange. Its slot is free when all ranks have read what was in it before.
  bool write(const void* x, int64_t count) {
    ++number_;
    for (int rank = 0; rank < size_; ++rank)
      if (rank != rank_ && !wait(progress(rank).read, number_ - kNumSlots)) return false;
    std::memcpy(slot(rank_), x, count);
    progress(rank_).written.raise(number_);
    return true;
  }

  bool all_have_written() {
    for (int rank = 0; rank < size_; ++rank)
      if (!wait(progress(rank).written, number_)) return false;
    return true;
  }

  // Copies bytes [first, last) of an array [rows, width], which stand at `from`, into rows of row_bytes.
  static void copy_rows(const uint8_t* from, uint8_t* to, int64_t first, int64_t last, int64_t width,
                        int64_t row_bytes) {
    while (first < last) {
      const int64_t row = first / width, column = first % width, count = std::min(width - column, last - first);
      std::memcpy(to + row * row_bytes + column, from, count);
      first += count, from += count;
    }
  }

  // Whether a rank is lost: others say so, or a connection with it is closed.
  bool is_over() {
    if (region_->has_ended.load(std::memory_order_relaxed)) return true;
    pollfd asked[kMaxRanks];
    for (int i = 0; i < num_links_; ++i) asked[i] = {links_[i], POLLRDHUP, 0};
    if (poll(asked, num_links_, 0) <= 0) return false;
    end();
    return true;
  }

  Region* region_;
  const int rank_, size_, num_links_;
  std::array<int, kMaxRanks> links_{};
  uint32_t number_ = 0;  // of the newest exchange
};

// Counts a call and its time.
template <typename Call>
int counted(Exchange* exchange, Kind kind, int64_t nbytes, const Call& call) {
  const auto began = Clock::now();
  const bool is_done = call();
  Count& count = exchange->counts[kind];
  count.calls += 1;
  count.nbytes += nbytes;
  count.nanoseconds += std::chrono::nanoseconds(Clock::now() - began).count();
  return is_done;
}

template <typename T>
int sum(Exchange* exchange, void* x, int64_t size) {
  return counted(exchange, kSum, size * sizeof(T), [=] { return exchange->sum(static_cast<T*>(x), size); });
}

}  // namespace

extern "C" {

int64_t exchange_num_bytes(int num_ranks) { return num_ranks <= kMaxRanks ? Exchange::num_bytes(num_ranks) : 0; }

// Joins with the memory behind a file; null: it cannot be mapped.
void* exchange_open(int file, int rank, int num_ranks, const void* links, int num_links) {
  void* memory = mmap(nullptr, Exchange::num_bytes(num_ranks), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (memory == MAP_FAILED) return nullptr;
  return new (std::nothrow)
      Exchange(static_cast<Region*>(memory), rank, num_ranks, static_cast<const int*>(links), num_links);
}
void exchange_close(void* exchange) { delete static_cast<Exchange*>(exchange); }
void exchange_end(void* exchange) { static_cast<Exchange*>(exchange)->end(); }

void exchange_counts(void* exchange, void* counts) {
  std::memcpy(counts, static_cast<Exchange*>(exchange)->counts, sizeof(Exchange::counts));
}

// x: [rows, width], of float32 (0), bfloat16 (1) or float16 (2). 0: a rank is lost.
int exchange_sum(void* exchange, void* x, int64_t rows, int64_t width, const int64_t* live, int type) {
  auto* own = static_cast<Exchange*>(exchange);
  const int64_t size = live_rows(rows, live) * width;
  return type == 0 ? sum<float>(own, x, size) : type == 1 ? sum<BFloat16>(own, x, size) : sum<Float16>(own, x, size);
}

// x: [rows, widths[rank]] bytes; y: [rows, all widths]. 0: a rank is lost.
int exchange_gather(void* exchange, const void* x, void* y, int64_t rows, const void* widths, int64_t widest,
                    const int64_t* live) {
  auto* own = static_cast<Exchange*>(exchange);
  const int64_t count = live_rows(rows, live);
  return counted(own, kGather, count * widest, [=] {
    return own->gather(static_cast<const uint8_t*>(x), static_cast<uint8_t*>(y), count,
                       static_cast<const int64_t*>(widths));
  });
}

// x: size bytes, of rank 0. 0: a rank is lost.
int exchange_broadcast(void* exchange, void* x, int64_t size) {
  auto* own = static_cast<Exchange*>(exchange);
  return counted(own, kBroadcast, size, [=] { return own->broadcast(static_cast<uint8_t*>(x), size); });
}

int exchange_tell(void* exchange, const void* message, int64_t length) {
  auto* own = static_cast<Exchange*>(exchange);
  return counted(own, kMessage, length, [=] { return own->tell(static_cast<const uint8_t*>(message), length); });
}

int64_t exchange_next_length(void* exchange, int64_t milliseconds) {
  return static_cast<Exchange*>(exchange)->next_length(milliseconds);
}

int exchange_receive(void* exchange, void* message, int64_t length) {
  auto* own = static_cast<Exchange*>(exchange);
  return counted(own, kMessage, length, [=] { return own->broadcast(static_cast<uint8_t*>(message), length); });
}

}  // extern "C"

SPECMAMBA_REPLAYABLE(exchange_sum)
SPECMAMBA_REPLAYABLE(exchange_gather)
SPECMAMBA_REPLAYABLE(exchange_broadcast)
