// Calls native kernels for a Python process that cannot load them: those of another processor, in an emulator.
//
// Reads calls from standard input and writes results to standard output until the input ends; replay.py is the other
// side. All numbers are 64-bit, little-endian. A call is
//   the length of the function's name, the name, the number of arrays, the size of each in bytes, the number of words,
//   the number of those that are arguments, the words, the contents of the arrays.
// A word is a kind and a value: a number, the place of another word (a structure begins there), or an array and an
// offset. The answer is what the function returned, and for every array whether it changed, with its contents if so.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "replayable.h"

namespace {

constexpr int64_t kNumber = -1, kPlace = -2;  // any other kind is the index of an array
constexpr size_t kAlignment = 64;

template <auto function>
struct Caller;

template <typename Result, typename... Arguments, Result (*function)(Arguments...)>
struct Caller<function> {
  static uint64_t call(const uint64_t* words) { return call(words, std::index_sequence_for<Arguments...>{}); }

  template <size_t... I>
  static uint64_t call(const uint64_t* words, std::index_sequence<I...>) {
    if constexpr (std::is_void_v<Result>)
      return function(specmamba::argument<Arguments>(words[I])...), 0;
    else
      return static_cast<uint64_t>(function(specmamba::argument<Arguments>(words[I])...));
  }
};

struct Function {
  uint64_t (*call)(const uint64_t*);
  size_t num_arguments;
};

template <auto function, typename Result, typename... Arguments>
Function described(Result (*)(Arguments...)) {
  return {Caller<function>::call, sizeof...(Arguments)};
}

#define FUNCTION(name) {#name, described<name>(name)}

}  // namespace

// Declarations of the kernels, and kFunctions: their names with FUNCTION(name). Written by replay.py.
#include "functions.inc"

extern "C" void specmamba_use_runtime(void* entry);

namespace {

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "%s\n", what);
  std::exit(1);
}

// False where the input ends.
bool read_all(void* data, size_t size) { return std::fread(data, 1, size, stdin) == size; }

void write_all(const void* data, size_t size) {
  if (std::fwrite(data, 1, size, stdout) != size) fail("an answer cannot be written");
}

uint64_t read_word() {
  uint64_t word;
  if (!read_all(&word, sizeof word)) fail("a call ends in the middle");
  return word;
}

// An array of the caller. Behind it are bytes that are no number in any type, then a page that nothing can read.
class Array {
 public:
  explicit Array(size_t size) : size_(size) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE)), padded = (size + kAlignment - 1) & -kAlignment;
    num_mapped_ = (padded + page - 1) / page * page + page;
    void* mapped = mmap(nullptr, num_mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) fail("there is no memory for an array");
    memory_ = static_cast<char*>(mapped);
    data_ = memory_ + num_mapped_ - page - padded;
    std::memset(data_ + size, 0xFF, padded - size);
    mprotect(memory_ + num_mapped_ - page, page, PROT_NONE);
  }
  ~Array() { munmap(memory_, num_mapped_); }
  Array(const Array&) = delete;

  void read() {
    if (!read_all(data_, size_)) fail("an array ends in the middle");
    before_.assign(data_, data_ + size_);
  }

  void write_if_changed() const {
    const uint64_t has_changed = std::memcmp(data_, before_.data(), size_) != 0;
    write_all(&has_changed, sizeof has_changed);
    if (has_changed) write_all(data_, size_);
  }

  char* data() const { return data_; }

 private:
  size_t size_, num_mapped_;
  char *memory_, *data_;
  std::vector<char> before_;
};

// The words of a call, with addresses of this process.
std::vector<uint64_t> read_words(size_t count, const std::vector<Array*>& arrays) {
  std::vector<uint64_t> words(count);
  for (uint64_t& word : words) {
    const int64_t kind = static_cast<int64_t>(read_word());
    word = read_word();
    if (kind == kPlace)
      word = reinterpret_cast<uint64_t>(&words.at(word));
    else if (kind != kNumber)
      word += reinterpret_cast<uint64_t>(arrays.at(static_cast<size_t>(kind))->data());
  }
  return words;
}

void answer(const std::string& name) {
  static const std::map<std::string, Function> functions(std::begin(kFunctions), std::end(kFunctions));
  const auto found = functions.find(name);
  if (found == functions.end()) fail(("there is no function " + name).c_str());
  std::vector<Array*> arrays(read_word());
  for (Array*& array : arrays) array = new Array(read_word());
  const size_t num_words = read_word();
  if (read_word() != found->second.num_arguments) fail((name + " takes another number of arguments").c_str());
  const std::vector<uint64_t> words = read_words(num_words, arrays);
  for (Array* array : arrays) array->read();
  const uint64_t result = found->second.call(words.data());
  write_all(&result, sizeof result);
  for (const Array* array : arrays) {
    array->write_if_changed();
    delete array;
  }
  std::fflush(stdout);
}

// In place of an OpenMP runtime's: new threads for every region.
void parallel(void (*work)(void*), void* data, unsigned num_threads, unsigned) {
  std::vector<std::thread> others;
  for (unsigned i = 1; i < num_threads; ++i) others.emplace_back(work, data);
  work(data);
  for (std::thread& other : others) other.join();
}

}  // namespace

int main() {
  specmamba_use_runtime(reinterpret_cast<void*>(parallel));
  for (uint64_t length; read_all(&length, sizeof length);) {
    std::string name(length, '\0');
    if (!read_all(name.data(), length)) fail("a name ends in the middle");
    answer(name);
  }
}
