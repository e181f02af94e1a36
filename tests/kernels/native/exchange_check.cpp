// Exchanges between processes, checked against scalar sums: prints "0 differences". For processors that only an
// emulator has; test_exchange.py has the cases.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <vector>

#include "exchange/native.cpp"

namespace {

constexpr int kRanks = 3, kRounds = 40;

float given(int rank, int64_t i) { return static_cast<float>((i * 37 + rank * 101) % 256 - 128) / 16; }

template <typename T>
T made(float x) {
  T y;
  put(&y, x);
  return y;
}

template <typename T>
int64_t differences_of_sums(void* exchange, int rank, int type) {
  int64_t found = 0;
  for (const int64_t size : {int64_t{1}, int64_t{13}, int64_t{256}, 2 * kSlotBytes / int64_t{sizeof(T)} + 3}) {
    std::vector<T> x(size);
    for (int64_t i = 0; i < size; ++i) x[i] = made<T>(given(rank, i));
    if (!exchange_sum(exchange, x.data(), 1, size, nullptr, type)) return -1;
    for (int64_t i = 0; i < size; ++i) {
      float sum = 0;
      for (int other = 0; other < kRanks; ++other) sum += to_float(made<T>(given(other, i)));
      found += to_float(x[i]) != to_float(made<T>(sum));
    }
  }
  return found;
}

int64_t differences(void* exchange, int rank) {
  int64_t found = 0;
  for (int round = 0; round < kRounds; ++round) {
    if (round % 8 == rank) usleep(3000);  // others fall asleep
    int64_t told[2] = {rank == 0 ? round : -1, 7};
    if (!exchange_broadcast(exchange, told, sizeof told)) return -1;
    found += told[0] != round || told[1] != 7;
    float x = static_cast<float>(rank);
    if (!exchange_sum(exchange, &x, 1, 1, nullptr, 0)) return -1;
    found += x != kRanks * (kRanks - 1) / 2;
  }
  found += differences_of_sums<float>(exchange, rank, 0);
  found += differences_of_sums<BFloat16>(exchange, rank, 1);
  found += differences_of_sums<Float16>(exchange, rank, 2);
  const int64_t widths[kRanks] = {3, 1, 2};
  uint8_t joined[12], parts[2][3] = {};
  for (int i = 0; i < 2 * widths[rank]; ++i) parts[0][i] = static_cast<uint8_t>(10 * rank + i);
  if (!exchange_gather(exchange, parts, joined, 2, widths, 3, nullptr)) return -1;
  const uint8_t expected[12] = {0, 1, 2, 10, 20, 21, 3, 4, 5, 11, 22, 23};
  return found + (std::memcmp(joined, expected, sizeof joined) != 0);
}

}  // namespace

int main() {
  const int file = memfd_create("check", 0);
  if (file < 0 || ftruncate(file, exchange_num_bytes(kRanks)) != 0) return 2;
  for (int rank = 1; rank < kRanks; ++rank)
    if (fork() == 0) {
      void* exchange = exchange_open(file, rank, kRanks, nullptr, 0);
      _exit(exchange == nullptr || differences(exchange, rank) != 0);
    }
  void* exchange = exchange_open(file, 0, kRanks, nullptr, 0);
  int64_t found = exchange == nullptr ? -1 : differences(exchange, 0);
  for (int status, rank = 1; rank < kRanks; ++rank) found += wait(&status) < 0 || status != 0;
  std::printf("%lld differences\n", static_cast<long long>(found));
  return found != 0;
}
